"""ChunkKV (Liu et al. 2025, arXiv 2502.00299): whole chunks of neighbouring rows are kept."""

from dataclasses import dataclass
from typing import Literal

import torch

from tidekv.errors import InfeasibleError
from tidekv.scoring import Attention, Rule, best, window_sum
from tidekv.selectors.base import Choice, LayerEnd, Request, Selection, Selector


@dataclass(frozen=True)
class ChunkKV(Selector):
    """Keep the chunks of neighbouring rows that the last ``window`` queries attend to most.

    A chunk's score is the sum of the attention weights over its rows, the window's queries and the
    KV heads, for each of which the query heads are aggregated. Chunks are cut from row 0 on; the
    last before the window may be short. The window is always kept and counts as part of the budget;
    the rest is filled with chunks, best first, and then with the first rows of the next one, so
    that the budget is met exactly.

    The paper's algorithm is written for one head; the authors refer to the implementation in
    NVIDIA/kvpress, where all heads share the chunks, which is the default here. It differs in what
    it counts: a chunk's mean instead of its sum, and a window that competes like any other row.

    Attributes:
        window: rows of the observation window.
        chunk: rows of a chunk.
        shared: choose the same chunks for all heads; otherwise each KV head chooses its own.
        reuse: neighbouring layers that keep the same rows, of which only the first is scored (the
            paper's layer-wise index reuse, which it measures with 2 and more); 1 scores each.
        aggregate: over the query heads of a KV head; the mean orders chunks as the sum does.
        aggregate_first: aggregate the weights of each row, not the sums of chunks; the same for the
            mean.
        block_size: keys that blockwise scoring reads at a time, rounded to whole chunks.
    """

    window: int = 32
    chunk: int = 10
    shared: bool = True
    reuse: int = 1
    aggregate: Literal["mean", "max"] = "mean"
    aggregate_first: bool = True
    block_size: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.window, self.chunk, self.reuse, self.block_size) < 1:
            raise InfeasibleError(
                "ChunkKV needs window, chunk, reuse and block_size ≥ 1, not "
                f"window={self.window}, chunk={self.chunk}, reuse={self.reuse}, "
                f"block_size={self.block_size}."
            )
        self._rule()  # checks its part

    @property
    def mandatory(self) -> int:
        """The window."""
        return self.window

    def begin(self, request: Request) -> Choice:
        """See :meth:`tidekv.selectors.base.Selector.begin`."""
        return _ChunkChoice(self, request)

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        heads, length = layer.keys.shape[1:3]
        prefix, count = length - self.window, rows - self.window
        scores = self._chunk_scores(layer, scoring)[..., : -(-prefix // self.chunk)]
        # One more chunk than the count needs, since one may be short.
        chunks = best(scores, first=0, count=min(-(-count // self.chunk) + 1, scores.shape[-1]))
        inside = torch.arange(self.chunk, device=chunks.device)
        ordered = (chunks.unsqueeze(-1) * self.chunk + inside).flatten(2)
        # Rows that a short chunk doesn't have go last; the others stay in their order.
        there = (ordered >= prefix).sort(dim=-1, stable=True).indices[..., :count]
        kept = ordered.gather(-1, there).sort(dim=-1).values.expand(-1, heads, -1)
        window = torch.arange(prefix, length, device=kept.device).expand(*kept.shape[:2], -1)
        return torch.cat((kept, window), dim=-1)

    def _chunk_scores(self, layer: LayerEnd, scoring: str) -> torch.Tensor:
        """(B, Hkv or 1, chunks before the window)."""
        heads = 1 if self.shared else layer.keys.shape[1]
        attention = Attention(layer.queries, layer.keys, layer.scaling, layer.softcap)
        blocks = attention.weights(scoring, -(-self.block_size // self.chunk) * self.chunk)
        none = torch.empty(layer.keys.shape[0], heads, 0, device=layer.keys.device)
        return torch.cat((none, *map(self._chunk_sums, blocks)), dim=-1)

    def _chunk_sums(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights (B, Hkv, G, W, b) of whole chunks, or up to the window's first row."""
        rule, rows = self._rule(), window_sum(weights)
        sums = (
            self._by_chunk(rule.heads(rows))
            if rule.aggregate_first
            else rule.heads(self._by_chunk(rows))
        )
        return sums.sum(1, keepdim=True) if self.shared else sums

    def _by_chunk(self, rows: torch.Tensor) -> torch.Tensor:
        """Sums of whole chunks, the last perhaps short: (…, b) → (…, chunks)."""
        missing = -rows.shape[-1] % self.chunk
        return torch.nn.functional.pad(rows, (0, missing)).unflatten(-1, (-1, self.chunk)).sum(-1)

    def _rule(self) -> Rule:
        return Rule(self.aggregate, aggregate_first=self.aggregate_first)


class _ChunkChoice(Choice):
    """Remembers the rows of the layer that scored last."""

    def __init__(self, selector: ChunkKV, request: Request) -> None:
        super().__init__(selector, request)
        self._every = selector.reuse
        self._last: Selection | None = None

    def select(self, layer: LayerEnd) -> Selection:
        if self._last is None or layer.index % self._every == 0:
            self._last = super().select(layer)
        return self._last
