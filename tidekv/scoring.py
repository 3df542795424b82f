"""Observation-window scores of prompt keys, and the best of them.

The score of key i before the window, for one query head (Li et al. 2024, SnapKV, section 4):

    w[i] = Σ_{q in the last W rows} softmax_j(scaling · q·k_j)[i],   j over all S keys, causal

The query heads of a KV head are aggregated, then neighbours are pooled (stride 1, same padding;
padding counts as zero in an average and never wins a maximum). Scores are at least fp32. Equal
scores are won by the lower position, which ``torch.topk`` does not promise.

Shapes: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, W window rows, S prompt rows, D head
size, b a block of keys, K rows to choose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

SCORINGS = ("blockwise", "dense")

#: Scores that are merged into the best so far at a time, if that is more than there are of those.
_MERGED = 1024


@dataclass(frozen=True)
class Rule:
    """How attention weights become one score per key and KV head."""

    aggregate: Literal["mean", "max"]
    pooling: Literal["max", "avg"]
    kernel_size: int

    def heads(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights (B, Hkv, G, n) summed over the window → one per KV head, (B, Hkv, n)."""
        return weights.mean(2) if self.aggregate == "mean" else weights.amax(2)

    def pool(self, raw: torch.Tensor) -> torch.Tensor:
        """Pool neighbouring keys: (B, Hkv, n) → (B, Hkv, n)."""
        pool = F.max_pool1d if self.pooling == "max" else F.avg_pool1d
        return pool(raw, self.kernel_size, stride=1, padding=self.kernel_size // 2)


def scores_dense(
    queries: torch.Tensor, keys: torch.Tensor, *, scaling: float, rule: Rule
) -> torch.Tensor:
    """The reference: all (W, S) weights at once. Arguments and result as those blockwise."""
    window, rows = queries.shape[2], keys.shape[2]
    folded = _fold(queries, keys.shape[1], scaling)
    logits = _logits(folded, keys).unflatten(2, (-1, window))  # (B, Hkv, G, W, S)
    logits[..., rows - window :].masked_fill_(_future(window, logits.device), float("-inf"))
    return rule.pool(rule.heads(logits.softmax(-1)[..., : rows - window].sum(3)))


def scores_blockwise(
    queries: torch.Tensor, keys: torch.Tensor, *, scaling: float, rule: Rule, block_size: int
) -> torch.Tensor:
    """Scores of the keys before the window, (B, Hkv, S-W).

    Two passes over blocks of keys: the softmax denominators, then the scores. Extra memory is the
    result and O(B·Hq·W·block_size), whatever S is.

    Args:
        queries: (B, Hq, W, D), the last W rows, rotated.
        keys: (B, Hkv, S, D), rotated.
        scaling: the factor on the logits.
    """
    prefix = keys.shape[2] - queries.shape[2]
    halo = rule.kernel_size // 2  # neighbours that pooling reads on either side
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = torch.empty(*keys.shape[:2], prefix, dtype=dtype, device=keys.device)
    raw = scores.new_empty(*keys.shape[:2], 0)
    done = base = 0  # scores so far; where raw begins
    for weights in _weights(queries, keys, scaling, block_size):
        # Raw scores are computed once and carried over: a maximum that wins on both sides of a
        # block's border must be the same number on both.
        raw = torch.cat((raw, rule.heads(weights.sum(3))), dim=-1)
        del weights
        seen = base + raw.shape[2]
        ready = seen if seen == prefix else seen - halo
        if ready > done:
            scores[..., done:ready] = rule.pool(raw)[..., done - base : ready - base]
            done, behind = ready, max(ready - halo, 0)
            raw, base = raw[..., behind - base :].clone(), behind
    return scores


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


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, block_size: int
) -> Iterator[torch.Tensor]:
    """Attention of the window to the keys before it, block by block: (B, Hkv, G, W, b).

    A block must be let go before the next is asked for: one is alive at a time.
    """
    window, prefix = queries.shape[2], keys.shape[2] - queries.shape[2]
    folded = _fold(queries, keys.shape[1], scaling)
    peak, total = _denominators(folded, keys, window, block_size)
    for start in range(0, prefix, block_size):
        block = keys[:, :, start : min(start + block_size, prefix)]
        yield (_logits(folded, block).sub_(peak).exp_().div_(total).unflatten(2, (-1, window)))


def _denominators(
    folded: torch.Tensor, keys: torch.Tensor, window: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running maximum and exp-sum of every query's logits, each (B, Hkv, G·W, 1).

    The window's own keys come first: they are the only masked block, and every query sees itself.
    """
    rows = keys.shape[2]
    logits = _logits(folded, keys[:, :, rows - window :])
    logits.unflatten(2, (-1, window)).masked_fill_(_future(window, keys.device), float("-inf"))
    peak = logits.amax(-1, keepdim=True)
    total = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    for start in range(0, rows - window, block_size):
        logits = _logits(folded, keys[:, :, start : min(start + block_size, rows - window)])
        higher = torch.maximum(peak, logits.amax(-1, keepdim=True))
        total.mul_(peak.sub_(higher).exp_())
        total.add_(logits.sub_(higher).exp_().sum(-1, keepdim=True))
        peak = higher
        del logits
    return peak, total


def _fold(queries: torch.Tensor, kv_heads: int, scaling: float) -> torch.Tensor:
    """Scaled queries with the heads of a group as rows: (B, Hq, W, D) → (B, Hkv, G·W, D)."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    return (queries.to(dtype) * scaling).reshape(queries.shape[0], kv_heads, -1, queries.shape[-1])


def _logits(folded: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(B, Hkv, G·W, D) and a block of keys (B, Hkv, b, D) → (B, Hkv, G·W, b)

    One product of stacked matrices: of four dimensions ``@`` makes nine operators.
    """
    stacked = torch.bmm(folded.flatten(0, 1), keys.to(folded.dtype).flatten(0, 1).mT)
    return stacked.unflatten(0, folded.shape[:2])


def _future(window: int, device: torch.device) -> torch.Tensor:
    """(W, W), true where a window row must not see a window key."""
    return torch.ones(window, window, dtype=torch.bool, device=device).triu_(1)
