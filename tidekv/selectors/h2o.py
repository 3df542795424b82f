"""H2O (Zhang et al. 2023, arXiv 2306.14048): what all queries together attend to most."""

from dataclasses import dataclass
from typing import Literal

import torch

from tidekv.errors import InfeasibleError
from tidekv.scoring import Attention, Rule, keep_best, window_sum
from tidekv.selectors.base import Choice, LayerEnd, Request, Selection, Selector, all_rows

#: Queries that are read at a time.
_QUERIES = 32


@dataclass(frozen=True)
class H2O(Selector):
    """Keep heavy hitters, the rows that all queries attend to most, and the last rows.

    A row's score is the sum of the weights that it got from every query of the prompt, aggregated
    over the query heads of a KV head; as in the paper it isn't divided by the number of queries
    that could see the row, which favours early ones. No S × S tensor is made: queries are read a
    few at a time against blocks of keys, which costs the products q·k of the whole prompt twice.

    The paper drops a row per step while it generates. Here a prompt is cut once, at the layer's
    end.

    Attributes:
        recent_share: of the budget that is the last rows, the rest being heavy hitters; the paper
            splits it in halves.
        aggregate: over the query heads of a KV head, of the sums over all queries. A mean is summed
            up as such; the maximum needs the sums of every query head until the layer's end.
        block_size: keys that are read at a time.
    """

    recent_share: float = 0.5
    aggregate: Literal["mean", "max"] = "mean"
    block_size: int = 2048

    every_query = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent_share <= 1 or self.block_size < 1:
            raise InfeasibleError(
                "H2O needs recent_share in 0..1 and block_size ≥ 1, not "
                f"recent_share={self.recent_share}, block_size={self.block_size}."
            )
        self._rule()  # checks its part

    def begin(self, request: Request) -> Choice:
        """See :meth:`tidekv.selectors.base.Selector.begin`."""
        return _HeavyChoice(self, request)

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """As :meth:`tidekv.selectors.base.Selector.select`, by the queries that the layer has."""
        sums = self.no_sums(layer.queries, layer.keys, layer.keys.shape[2])
        attention = Attention(layer.queries, layer.keys, layer.scaling, layer.softcap)
        self.add(sums, attention, scoring)
        return self.keep(sums, rows)

    def no_sums(self, queries: torch.Tensor, keys: torch.Tensor, rows: int) -> torch.Tensor:
        """Zeros (B, Hkv, 1 or G, ``rows``) for what keys get: by a group's mean or each head."""
        dtype = torch.promote_types(queries.dtype, torch.float32)
        group = 1 if self.aggregate == "mean" else queries.shape[1] // keys.shape[1]
        return torch.zeros(*keys.shape[:2], group, rows, dtype=dtype, device=keys.device)

    def add(self, sums: torch.Tensor, attention: Attention, scoring: str) -> None:
        """Add the weights that the queries give every key to ``sums``, (B, Hkv, 1 or G, S)."""
        queries, keys = attention.queries, attention.keys
        new, rows = queries.shape[2], keys.shape[2]
        step = new if scoring == "dense" else _QUERIES
        for start in range(0, new, step):
            some = queries[:, :, start : start + step]
            seen = keys[:, :, : rows - new + start + some.shape[2]]
            part = Attention(some, seen, attention.scaling, attention.softcap)
            done = 0
            for columns in map(self._columns, part.weights(scoring, self.block_size, own=True)):
                sums[..., done : done + columns.shape[3]] += columns
                done += columns.shape[3]

    def keep(self, sums: torch.Tensor, rows: int) -> torch.Tensor:
        """Heavy hitters by ``sums`` (B, Hkv, 1 or G, S) and the last rows: (B, Hkv, rows)."""
        length = sums.shape[3]
        # 0.29 of 100 is 29, although the product in binary lies just below it.
        recent = int(round(rows * self.recent_share, 6))
        free = sums[..., : length - recent]
        scores = free.squeeze(2) if free.shape[2] == 1 else self._rule().heads(free)
        return keep_best(scores, rows=rows, length=length)

    def _columns(self, weights: torch.Tensor) -> torch.Tensor:
        """(B, Hkv, G, W, b) → (B, Hkv, 1 or G, b)"""
        columns = window_sum(weights)
        return self._rule().heads(columns).unsqueeze(2) if self.aggregate == "mean" else columns

    def _rule(self) -> Rule:
        return Rule(self.aggregate)


class _HeavyChoice(Choice):
    """Remembers what each row of a layer got from all queries."""

    selector: H2O

    def __init__(self, selector: H2O, request: Request) -> None:
        super().__init__(selector, request)
        self._sums: dict[int, torch.Tensor] = {}  # (B, Hkv, 1 or G, S)

    def observe(
        self,
        index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> None:
        if index not in self._sums:  # for the whole prompt at once, since to grow is to copy
            self._sums[index] = self.selector.no_sums(queries, keys, self.request.prompt_tokens)
        sums = self._sums[index][..., : keys.shape[2]]
        attention = Attention(queries, keys, scaling, softcap)
        self.selector.add(sums, attention, self.request.scoring)

    def select(self, layer: LayerEnd) -> Selection:
        sums, rows = self._sums.pop(layer.index), self.rows(layer.index)
        if rows >= layer.keys.shape[2]:
            return Selection(all_rows(layer.keys))
        return Selection(self.selector.keep(sums, rows))
