"""Operators that the device's own code takes apart into others, where no mode sees them.

What they hold on their way goes in the order in which C++ lets it go, the latest first.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from memtrace.fake_gpu.steps import met


def _count_nonzero(values: Tensor, dim: Any = None) -> Tensor:
    """``count_nonzero_cuda`` (SummaryOps.cu)"""
    return values.ne(0).sum(dim)


def _logsumexp(values: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """``logsumexp_out_impl`` (ReduceOps.cpp)"""
    largest = values.amax(dim, keepdim=True)
    flat = largest if keepdim else largest.squeeze(dim)
    magnitude = flat.abs()
    flat.masked_fill_(magnitude == float("inf"), 0)
    del magnitude
    return (values - largest).exp_().sum(dim, keepdim=keepdim).log_().add_(flat)


def _isin(
    values: Tensor, wanted: Tensor, *, assume_unique: bool = False, invert: bool = False
) -> Tensor:
    """``isin`` (TensorCompare.cpp): each value is compared with the wanted ones, if they are few;
    else all are sorted."""
    out = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    if not values.numel() or not wanted.numel():
        return out
    if wanted.numel() >= int(10 * values.numel() ** 0.145):
        met["isin"] += 1
        return out
    pairs = values.unsqueeze(-1), wanted.view([1] * values.dim() + [-1])
    compared = torch.ne(*pairs) if invert else torch.eq(*pairs)
    found = compared.all(-1) if invert else compared.any(-1)
    out.copy_(found)
    del found, compared
    return out


def _multinomial(
    weights: Tensor, count: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """``multinomial_out`` (Distributions.cpp)"""
    shape = (*weights.shape[:-1], count)
    out = torch.empty(shape, dtype=torch.int64, device=weights.device)
    if not out.numel():
        return out
    if replacement and count > 1:
        met["multinomial"] += 1
        return out
    least, most = weights.aminmax()
    valid = (most < float("inf")) & (least >= 0)
    torch._assert_async(valid)
    if weights.dim() == 1:
        none = weights.sum() == 0
    else:
        sums = weights.sum(1)
        empty = sums == 0
        none = empty.any()
        del empty, sums
    torch._assert_async(~none)
    drawn = torch.empty_like(weights).exponential_(1)
    if count == 1:
        torch.argmax(drawn, -1, True, out=out)
    else:
        best = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        torch.topk(drawn, count, out=(best, out))
        del best
    del drawn, none, valid, most, least
    return out


#: By name and overload.
PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "count_nonzero": _count_nonzero,
    "count_nonzero.dim_IntList": _count_nonzero,
    "isin.Tensor_Tensor": _isin,
    "logsumexp": _logsumexp,
    "multinomial": _multinomial,
}
