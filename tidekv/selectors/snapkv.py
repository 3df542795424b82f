"""SnapKV (Li et al. 2024, arXiv 2404.14469) at KV-head granularity."""

from dataclasses import dataclass
from typing import Literal

import torch

from tidekv.errors import InfeasibleError, check_choice
from tidekv.scoring import Rule, best, scores_blockwise, scores_dense
from tidekv.selectors.base import LayerEnd


@dataclass(frozen=True)
class SnapKV:
    """Keep what the last ``window`` queries attend to.

    ``window=32``, ``kernel_size=7`` and max pooling are those of the authors' LongBench runs
    (``config/ablation_c1024_w32_k7_maxpool.json`` in FasterDecoding/SnapKV). Two things are ours:
    scores are aggregated over the query heads of a KV head before pooling (as Ada-KV and
    KVCache-Factory do; the authors store one cache per query head), and the first ``sinks`` rows
    are kept whatever their score (attention sinks, Xiao et al. 2023).

    Sinks and window are kept always and count as part of the budget.

    Attributes:
        window: rows of the observation window.
        kernel_size: width of the pooling over neighbouring keys; odd.
        pooling: over neighbouring keys.
        sinks: rows kept at the start of the prompt.
        aggregate: over the query heads of a KV head.
        block_size: keys that blockwise scoring reads at a time.
    """

    window: int = 32
    kernel_size: int = 7
    pooling: Literal["max", "avg"] = "max"
    sinks: int = 4
    aggregate: Literal["mean", "max"] = "mean"
    block_size: int = 2048

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0 or self.block_size < 1:
            raise InfeasibleError(
                "SnapKV needs window ≥ 1, sinks ≥ 0 and block_size ≥ 1, not "
                f"window={self.window}, sinks={self.sinks}, block_size={self.block_size}."
            )
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise InfeasibleError(
                f"SnapKV's kernel_size must be odd and positive, not {self.kernel_size}."
            )
        check_choice("pooling", self.pooling, ("max", "avg"))
        check_choice("aggregate", self.aggregate, ("mean", "max"))

    def check(self, prompt_tokens: int, rows: int) -> None:
        """See :meth:`tidekv.selectors.base.Selector.check`."""
        mandatory = self.sinks + self.window
        if mandatory > prompt_tokens:
            raise InfeasibleError(
                f"SnapKV's {self.sinks} sinks and window of {self.window} don't fit a prompt of "
                f"{prompt_tokens} tokens; use smaller ones, or selector=None."
            )
        if mandatory > rows:
            raise InfeasibleError(
                f"SnapKV keeps {self.sinks} sinks and a window of {self.window}, more than the "
                f"budget of {rows} rows; use a budget of at least {mandatory}."
            )

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        batch, kv_heads, length = layer.keys.shape[:3]
        if rows == length:
            return torch.arange(rows, device=layer.keys.device).repeat(batch, kv_heads, 1)
        rule = Rule(self.aggregate, self.pooling, self.kernel_size)
        count = rows - self.sinks - self.window
        if scoring == "dense":
            scores = scores_dense(layer.queries, layer.keys, scaling=layer.scaling, rule=rule)
        else:
            scores = scores_blockwise(
                layer.queries,
                layer.keys,
                scaling=layer.scaling,
                rule=rule,
                block_size=self.block_size,
            )
        top = best(scores, first=self.sinks, count=count)
        sinks = torch.arange(self.sinks, device=top.device)
        window = torch.arange(length - self.window, length, device=top.device)
        kept = torch.cat(
            (
                sinks.expand(batch, kv_heads, -1),
                top,
                window.expand(batch, kv_heads, -1),
            ),
            dim=-1,
        )
        return kept.sort(dim=-1).values
