"""Attention of the last queries to the keys, scores of the keys, and the best of them.

The weight that query q of the last W rows gives key i, for one query head:

    a[q, i] = softmax_j(logits[q, ·])[i],   j over all S keys, causal
    logits[q, j] = scaling · q·k_j,         c·tanh(logits / c) where the model caps them at c

A key's score is some reduction of its W weights (their sum in SnapKV, Li et al. 2024, section 4),
pooled over neighbouring keys (stride 1, same padding; padding counts as zero in an average and
never wins a maximum) and aggregated over the query heads of a KV head. Scores are at least fp32.
Equal scores are won by the lower position, which ``torch.topk`` does not promise.

Shapes: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, W window rows, S rows, D head size, b a
block of keys, K rows to choose.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from tidekv.errors import InfeasibleError, check_choice

#: Scores that are merged into the best so far at a time, if that is more than there are of those.
_MERGED = 1024


@dataclass(frozen=True)
class Attention:
    """Softmax attention of the last W of S rows.

    Attributes:
        queries: (B, Hq, W, D), rotated.
        keys: (B, Hkv, S, D), rotated.
        scaling: the factor on the logits.
        softcap: c of logits ← c·tanh(logits / c); None without one.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scaling: float
    softcap: float | None = None

    def weights(
        self, scoring: str, block_size: int, *, own: bool = False
    ) -> Iterator[torch.Tensor]:
        """The weights of the keys before the window, block by block: (B, Hkv, G, W, b).

        "dense" is the reference: all (W, S) at once, in one block. "blockwise" goes over the keys
        twice, for the softmax denominators and for the weights; extra memory is
        O(B·Hq·W·block_size), whatever S is. A block must be let go before the next is asked for:
        one is alive at a time.

        Args:
            own: the window's own keys too, as the last block (dense: in the one block).
        """
        window, rows = self.queries.shape[2], self.keys.shape[2]
        prefix, folded = rows - window, self._folded()
        if scoring == "dense":
            seen = rows if own else prefix
            if seen == 0:
                return
            whole = self._masked(self._logits(folded, self.keys)).softmax(-1)[..., :seen]
            yield whole.unflatten(2, (-1, window))
            return
        peak, total = self._denominators(folded, block_size)
        for start in range(0, prefix, block_size):
            block = self.keys[:, :, start : min(start + block_size, prefix)]
            # Bound to no name, which would keep it alive until the next is asked for.
            yield _softmax(self._logits(folded, block), peak, total).unflatten(2, (-1, window))
        if own:
            logits = self._masked(self._logits(folded, self.keys[:, :, prefix:]))
            yield _softmax(logits, peak, total).unflatten(2, (-1, window))

    def _denominators(
        self, folded: torch.Tensor, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Running maximum and exp-sum of every query's logits, each (B, Hkv, G·W, 1).

        The window's own keys come first: they are the only masked block, and every query sees
        itself.
        """
        prefix = self.keys.shape[2] - self.queries.shape[2]
        logits = self._masked(self._logits(folded, self.keys[:, :, prefix:]))
        peak = logits.amax(-1, keepdim=True)
        total = logits.sub_(peak).exp_().sum(-1, keepdim=True)
        for start in range(0, prefix, block_size):
            logits = self._logits(folded, self.keys[:, :, start : min(start + block_size, prefix)])
            higher = torch.maximum(peak, logits.amax(-1, keepdim=True))
            total.mul_(peak.sub_(higher).exp_())
            total.add_(logits.sub_(higher).exp_().sum(-1, keepdim=True))
            peak = higher
            del logits
        return peak, total

    def _folded(self) -> torch.Tensor:
        """Scaled queries with the heads of a group as rows: (B, Hkv, G·W, D)."""
        dtype = torch.promote_types(self.queries.dtype, torch.float32)
        batch, kv_heads, size = self.queries.shape[0], self.keys.shape[1], self.queries.shape[-1]
        return (self.queries.to(dtype) * self.scaling).reshape(batch, kv_heads, -1, size)

    def _logits(self, folded: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """(B, Hkv, G·W, D) and a block of keys (B, Hkv, b, D) → (B, Hkv, G·W, b)

        One product of stacked matrices: of four dimensions ``@`` makes nine operators.
        """
        stacked = torch.bmm(folded.flatten(0, 1), keys.to(folded.dtype).flatten(0, 1).mT)
        if self.softcap is not None:
            stacked.div_(self.softcap).tanh_().mul_(self.softcap)
        return stacked.unflatten(0, folded.shape[:2])

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Hide later keys, in place, in logits (B, Hkv, G·W, n) whose last W keys are the window's.

        Every query sees all keys before the window.
        """
        window = self.queries.shape[2]
        future = torch.ones(window, window, dtype=torch.bool, device=logits.device).triu_(1)
        logits.unflatten(2, (-1, window))[..., -window:].masked_fill_(future, float("-inf"))
        return logits


def _softmax(logits: torch.Tensor, peak: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """In place, of known maximum and exp-sum."""
    return logits.sub_(peak).exp_().div_(total)


@dataclass(frozen=True)
class Rule:
    """How weights become one score per key and KV head.

    Attributes:
        aggregate: over the query heads of a KV head.
        pooling: over neighbouring keys.
        kernel_size: width of the pooling; odd.
        aggregate_first: aggregate before pooling. A mean after average pooling is the same; where
            either is a maximum the order matters.
    """

    aggregate: Literal["mean", "max"] = "mean"
    pooling: Literal["max", "avg"] = "avg"
    kernel_size: int = 1
    aggregate_first: bool = True

    def __post_init__(self) -> None:
        check_choice("aggregate", self.aggregate, ("mean", "max"))
        check_choice("pooling", self.pooling, ("max", "avg"))
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise InfeasibleError(f"kernel_size must be odd and positive, not {self.kernel_size}.")

    def heads(self, weights: torch.Tensor) -> torch.Tensor:
        """(B, Hkv, G, n) → one per KV head, (B, Hkv, n)."""
        return weights.mean(2) if self.aggregate == "mean" else weights.amax(2)

    def pool(self, raw: torch.Tensor) -> torch.Tensor:
        """Pool neighbouring keys: (…, n) → (…, n)."""
        if self.kernel_size == 1:
            return raw
        pool = F.max_pool1d if self.pooling == "max" else F.avg_pool1d
        pooled = pool(raw.flatten(0, -2), self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return pooled.unflatten(0, raw.shape[:-1])


def window_sum(weights: torch.Tensor) -> torch.Tensor:
    """SnapKV's reduction: (B, Hkv, G, W, b) → (B, Hkv, G, b)."""
    return weights.sum(3)


def key_scores(
    attention: Attention,
    rule: Rule,
    *,
    scoring: str,
    block_size: int,
    reduce: Callable[[torch.Tensor], torch.Tensor] = window_sum,
) -> torch.Tensor:
    """Scores of the keys before the window, (B, Hkv, S-W), at least fp32.

    Extra memory is the result and that of :meth:`Attention.weights`.

    Args:
        reduce: what becomes of the weights of a key, (B, Hkv, G, W, b) → (B, Hkv, G, b).
    """
    keys = attention.keys
    dtype = torch.promote_types(attention.queries.dtype, torch.float32)
    prefix = keys.shape[2] - attention.queries.shape[2]
    scores = torch.empty(*keys.shape[:2], prefix, dtype=dtype, device=keys.device)
    # map holds no block while it asks for the next one, as a loop's variable would.
    raw = map(reduce, attention.weights(scoring, block_size))
    if rule.aggregate_first:
        parts = pooled(map(rule.heads, raw), rule)
    else:
        parts = map(rule.heads, pooled(raw, rule))
    done = 0
    for part in parts:
        scores[..., done : done + part.shape[-1]] = part
        done += part.shape[-1]
        del part
    return scores


def pooled(blocks: Iterable[torch.Tensor], rule: Rule) -> Iterator[torch.Tensor]:
    """Pool values that come in blocks (…, b) as if they came at once; yields (…, n) in order.

    Raw values are carried over a border, never computed again: a maximum that wins on both sides
    of a border must be the same number on both.
    """
    halo = rule.kernel_size // 2  # neighbours that pooling reads on either side
    raw: torch.Tensor | None = None
    done = 0  # of raw, values that were yielded and stay as neighbours
    for block in blocks:
        raw = block if raw is None else torch.cat((raw, block), dim=-1)
        del block
        ready = raw.shape[-1] - halo
        if ready > done:
            yield rule.pool(raw)[..., done:ready]
            behind = max(ready - halo, 0)
            raw, done = raw[..., behind:].clone(), ready - behind
    if raw is not None and raw.shape[-1] > done:
        yield rule.pool(raw)[..., done:]


def best(scores: torch.Tensor, *, first: int, count: int) -> torch.Tensor:
    """Positions of the ``count`` best of (…, n) scores from ``first`` on, best first: (…, count).

    Extra memory is O(count) per row, whatever n is.
    """
    top = scores[..., :0]
    top_at = torch.empty_like(top, dtype=torch.int64)
    step = max(count, _MERGED)
    for start in range(first, scores.shape[-1], step):
        block = scores[..., start : start + step]
        at = torch.arange(start, start + block.shape[-1], device=scores.device).expand_as(block)
        # Both parts are ordered by position within equal scores and these lie behind the best so
        # far, so a stable sort keeps lower positions in front.
        top, order = torch.cat((top, block), -1).sort(dim=-1, descending=True, stable=True)
        top, order = top[..., :count].clone(), order[..., :count]
        top_at = torch.cat((top_at, at), -1).gather(-1, order)
    return top_at


def best_of_each(scores: torch.Tensor, counts: torch.Tensor, *, total: int) -> torch.Tensor:
    """The best of each head where heads keep unequal numbers: (B, total), head after head.

    Extra memory is O(total) per prompt, whatever n and the largest count are.

    Args:
        scores: (B, H, n).
        counts: (B, H), at most n each; those of a prompt sum up to ``total``.

    Returns:
        h·n + position, int64; of a head in no order.
    """
    batch, heads, n = scores.shape
    device = scores.device
    every_head = torch.arange(batch * heads, device=device)
    head = every_head.repeat_interleave(counts.flatten(), output_size=batch * total)
    head = head.view(batch, total) % heads
    top = torch.full((batch, total), float("-inf"), dtype=scores.dtype, device=device)
    top_at = torch.full_like(head, -1)  # places that are not taken yet
    step = max(total // heads, _MERGED)
    for start in range(0, n, step):
        block = scores[..., start : start + step]
        width = block.shape[-1]
        at = torch.arange(start, start + width, device=device).repeat(batch, heads)
        both = torch.arange(heads, device=device).repeat_interleave(width).expand(batch, -1)
        both, at = torch.cat((head, both), -1), torch.cat((top_at, at), -1)
        values = torch.cat((top, block.flatten(1)), -1)
        # By score, a place not taken last of all; then by head: stable, so that within a head the
        # order by score stands, and among equal scores that by position.
        order = (at < 0).to(torch.uint8).argsort(dim=-1, stable=True)
        order = order.gather(
            -1, values.gather(-1, order).argsort(dim=-1, descending=True, stable=True)
        )
        order = order.gather(-1, both.gather(-1, order).argsort(dim=-1, stable=True))
        begins = (counts + width).cumsum(-1) - (counts + width)
        sorted_head = both.gather(-1, order)
        rank = torch.arange(order.shape[1], device=device) - begins.gather(-1, sorted_head)
        first = torch.nonzero_static(
            (rank < counts.gather(-1, sorted_head)).flatten(), size=batch * total
        ).squeeze(1)
        order = order.flatten()[first].view(batch, total)
        top, top_at = values.gather(-1, order), at.gather(-1, order)
    return head * n + top_at


def keep_best(scores: torch.Tensor, *, rows: int, length: int, sinks: int = 0) -> torch.Tensor:
    """``rows`` of ``length`` positions, ascending: (B, Hkv, rows), int64.

    They are the first ``sinks``, all from the end of ``scores`` (B, Hkv, n) on, and the best of
    what lies between.
    """
    candidates = scores.shape[-1]
    top = best(scores, first=sinks, count=rows - sinks - (length - candidates))
    start = torch.arange(sinks, device=top.device).expand(*top.shape[:2], -1)
    end = torch.arange(candidates, length, device=top.device).expand(*top.shape[:2], -1)
    return torch.cat((start, top.sort(dim=-1).values, end), dim=-1)
