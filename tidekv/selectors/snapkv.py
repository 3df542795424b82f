"""SnapKV (Li et al. 2024, arXiv 2404.14469) at KV-head granularity."""

from dataclasses import dataclass
from typing import Literal

import torch

from tidekv.errors import InfeasibleError
from tidekv.scoring import Attention, Rule, keep_best, key_scores
from tidekv.selectors.base import LayerEnd, Selector


@dataclass(frozen=True)
class SnapKV(Selector):
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
        aggregate_first: aggregate before pooling, not after it; the same for a mean of averages.
        block_size: keys that blockwise scoring reads at a time.
    """

    window: int = 32
    kernel_size: int = 7
    pooling: Literal["max", "avg"] = "max"
    sinks: int = 4
    aggregate: Literal["mean", "max"] = "mean"
    aggregate_first: bool = True
    block_size: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.sinks < 0 or self.block_size < 1:
            raise InfeasibleError(
                f"{type(self).__name__} needs window ≥ 1, sinks ≥ 0 and block_size ≥ 1, not "
                f"window={self.window}, sinks={self.sinks}, block_size={self.block_size}."
            )
        self._rule()  # checks its part

    @property
    def mandatory(self) -> int:
        """Sinks and window."""
        return self.sinks + self.window

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        scores = self.scores(layer, scoring)
        return keep_best(scores, rows=rows, length=layer.keys.shape[2], sinks=self.sinks)

    def scores(self, layer: LayerEnd, scoring: str) -> torch.Tensor:
        """Of every row before the window: (B, Hkv, S-W)."""
        scores = key_scores(
            Attention(layer.queries, layer.keys, layer.scaling, layer.softcap),
            self._rule(),
            scoring=scoring,
            block_size=self.block_size,
        )
        # A chunk shorter than the window has fewer queries, but the window is kept all the same.
        return scores[..., : layer.keys.shape[2] - self.window]

    def _rule(self) -> Rule:
        return Rule(self.aggregate, self.pooling, self.kernel_size, self.aggregate_first)
