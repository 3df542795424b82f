"""TOVA (Oren et al. 2024, arXiv 2401.06104): what the last query attends to."""

from dataclasses import dataclass
from typing import Literal

import torch

from tidekv.errors import InfeasibleError
from tidekv.scoring import Attention, Rule, keep_best, key_scores
from tidekv.selectors.base import LayerEnd, Selector


@dataclass(frozen=True)
class TOVA(Selector):
    """Keep what the last query attends to, on average over all heads.

    The paper drops one row per new token; here the prompt is cut once, at the layer's end. The last
    row is kept whatever its score.

    Attributes:
        per_head: each KV head keeps its own rows, by its query heads alone; the paper's layers
            keep the same rows in all heads, by the mean over the KV heads.
        aggregate: over the query heads of a KV head; the paper's mean over all heads is one of
            such means.
        block_size: keys that blockwise scoring reads at a time.
    """

    per_head: bool = False
    aggregate: Literal["mean", "max"] = "mean"
    block_size: int = 2048

    window = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise InfeasibleError(f"TOVA needs block_size ≥ 1, not {self.block_size}.")
        self._rule()  # checks its part

    @property
    def mandatory(self) -> int:
        """The last row."""
        return 1

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        scores = key_scores(
            Attention(layer.queries, layer.keys, layer.scaling, layer.softcap),
            self._rule(),
            scoring=scoring,
            block_size=self.block_size,
        )
        if not self.per_head:
            scores = scores.mean(1, keepdim=True)
        kept = keep_best(scores, rows=rows, length=layer.keys.shape[2])
        return kept.expand(-1, layer.keys.shape[1], -1)

    def _rule(self) -> Rule:
        return Rule(self.aggregate)
