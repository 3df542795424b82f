"""Observation-window scores of prompt keys, and the best of them.

The score of key i before the window, for one query head (Li et al. 2024, SnapKV, section 4):

    w[i] = Σ_{q in the last W rows} softmax_j(scaling · q·k_j)[i],   j over all S keys, causal

The query heads of a KV head are aggregated, then neighbours are pooled (stride 1, same padding;
padding counts as zero in an average and never wins a maximum). Scores are at least fp32. Equal
scores are won by the lower position, which ``torch.topk`` does not promise.

Shapes: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, W window rows, S prompt rows, D head
size, b a block of keys, K rows to choose.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

SCORINGS = ("blockwise", "dense")


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


def top_dense(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    scaling: float,
    rule: Rule,
    first: int,
    count: int,
) -> torch.Tensor:
    """The reference: all (W, S) weights at once. Arguments and result as :func:`top_blockwise`."""
    window, rows = queries.shape[2], keys.shape[2]
    folded = _fold(queries, keys.shape[1], scaling)
    logits = folded @ keys.to(folded.dtype).transpose(-1, -2)
    logits = logits.unflatten(2, (-1, window))  # (B, Hkv, G, W, S)
    logits[..., rows - window :].masked_fill_(_future(window, logits.device), float("-inf"))
    raw = rule.heads(logits.softmax(-1)[..., : rows - window].sum(3))
    scores = rule.pool(raw)[..., first:]
    _, positions = scores.sort(dim=-1, descending=True, stable=True)
    return positions[..., :count] + first


def top_blockwise(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    scaling: float,
    rule: Rule,
    first: int,
    count: int,
    block_size: int,
) -> torch.Tensor:
    """Positions of the ``count`` best keys in [first, S-W), best first.

    Two passes over blocks of keys: the softmax denominators, then the scores. Extra memory is
    O(B·Hq·(W·block_size + count)), whatever S is.

    Args:
        queries: (B, Hq, W, D), the last W rows, rotated.
        keys: (B, Hkv, S, D), rotated.
        scaling: the factor on the logits.

    Returns:
        (B, Hkv, count), int64.
    """
    window, prefix = queries.shape[2], keys.shape[2] - queries.shape[2]
    folded = _fold(queries, keys.shape[1], scaling)
    peak, total = _denominators(folded, keys, window, block_size)

    halo = rule.kernel_size // 2  # neighbours that pooling reads on either side
    position, base = first, max(first - halo, 0)  # the next to score; where raw begins
    raw = folded.new_empty(*keys.shape[:2], 0)
    best = torch.empty_like(raw)
    best_at = torch.empty_like(raw, dtype=torch.int64)
    for start in range(base, prefix, block_size):
        stop = min(start + block_size, prefix)
        weights = _logits(folded, keys[:, :, start:stop]).sub_(peak).exp_().div_(total)
        # Raw scores are computed once and carried over: a maximum that wins on both sides of a
        # block's border must be the same number on both.
        raw = torch.cat((raw, rule.heads(weights.unflatten(2, (-1, window)).sum(3))), dim=-1)
        del weights
        ready = stop if stop == prefix else stop - halo
        if ready <= position:
            continue
        scores = rule.pool(raw)[..., position - base : ready - base]
        at = torch.arange(position, ready, device=keys.device).expand_as(scores)
        position, behind = ready, max(ready - halo, 0)
        raw, base = raw[..., behind - base :].clone(), behind
        # Both parts are ordered by position within equal scores and these lie behind the best so
        # far, so a stable sort keeps lower positions in front.
        best, order = torch.cat((best, scores), -1).sort(dim=-1, descending=True, stable=True)
        best, order = best[..., :count].clone(), order[..., :count]
        best_at = torch.cat((best_at, at), -1).gather(-1, order)
    return best_at


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
