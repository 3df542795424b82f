"""Operators that return as many elements as the values say.

On the device they find nothing, since its memory reads as zeros. So what they return is allocated
once more in its true size, after the kernels' scratch memory was released. That scratch is what a
real kernel takes before it knows the count (for ``nonzero``, and for boolean indices through it);
the part that it takes afterwards, which depends on the count, isn't seen.
"""

from typing import Any

import torch
from torch import Tensor

from memtrace.virtual_gpu.values_known import UNKNOWN, Known
from memtrace.virtual_gpu.values_rules import Rule

_aten = torch.ops.aten


def shaped(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator whose result has a size that depends on values."""
    if rule.name == "masked_select":
        return _masked_select(known, rule, func, args, kwargs)
    if rule.name == "repeat_interleave":
        return _repeat_interleave(known, rule, func, args, kwargs)
    out = func._op(*args, **kwargs)
    if rule.name in ("_unique2", "_unique"):
        args = (args[0], True, *args[2:])  # a device sorts, whether it was asked to or not
    value = known.compute(rule, func, args, kwargs)
    if value is UNKNOWN or rule.name.startswith("_to_sparse"):
        known.read_unknown(rule)
        return out
    if rule.name == "nonzero":
        out = _somewhere(out.device, value.shape)
        known.bind(out, value)
        return out
    if isinstance(value, Tensor):
        return _allocate(known, out, value)
    return tuple(_allocate(known, *pair) for pair in zip(out, value, strict=True))


def _allocate(known: Known, out: Tensor | None, value: Tensor) -> Tensor | None:
    """``value`` on the device of ``out``; None: it was not asked for."""
    if out is None:
        return None
    if out.shape != value.shape:
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=out.device)
    known.bind(out, value)
    return out


def _repeat_interleave(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("output_size") is None:
        repeats = known.value(args[0])
        if repeats is UNKNOWN:
            known.read_unknown(rule)
        else:
            kwargs = {**kwargs, "output_size": int(repeats.sum())}
    out = func._op(*args, **kwargs)
    known.returned(rule, func, args, kwargs, out)
    return out


def _masked_select(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = torch.atleast_1d(*torch.broadcast_tensors(*args))
    value = known.value(mask)
    if value is UNKNOWN:
        known.read_unknown(rule)
        return func._op(*args, **kwargs)
    out = _aten.index.Tensor._op(tensor, _places(known, mask, value))
    known.returned(rule, func, args, kwargs, out)
    return out


def index(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator that takes indices, boolean ones among them.

    PyTorch turns those into the places that they select. An assignment to places that aren't known
    goes to as many as there are values for, as it must on a real device unless they are broadcast.
    """
    tensor, indices, *values = args
    masks = [item for item in indices if item is not None and _is_mask(item) and item.is_cuda]
    if not masks or (values and values[0].numel() == 1 and len(masks) == len(indices)):
        # The second case is a masked_fill_ in PyTorch, which reads nothing.
        return _finish(known, rule, func, args, kwargs, args)
    found: list[Tensor | None] = []
    for item in indices:
        if item is None or not any(item is mask for mask in masks):
            found.append(item)
            continue
        value = known.value(item)
        if value is not UNKNOWN:
            found += _places(known, item, value)
        elif (
            values
            and len(indices) == 1
            and values[0].dim() == tensor.dim() - item.dim() + 1
            and values[0].shape[0] != 1
        ):
            shape = torch.Size((values[0].shape[0], item.dim()))
            found += _somewhere(item.device, shape).unbind(1)
        else:
            known.read_unknown(rule)
            found.append(item)
    return _finish(known, rule, func, (tensor, found, *values), kwargs, args)


def _finish(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any, given: Any) -> Any:
    """Call on the device with places for masks, on the host with what was given."""
    out = func._op(*args, **kwargs)
    if rule.writes:
        known.overwritten(rule, func, given, kwargs, out)
    else:
        known.returned(rule, func, given, kwargs, out)
    return out


def _is_mask(item: Tensor) -> bool:
    return item.dtype in (torch.bool, torch.uint8)


def _places(known: Known, mask: Tensor, value: Tensor) -> list[Tensor]:
    """What ``nonzero`` finds in a mask, one tensor for each dimension."""
    _aten.nonzero.default._op(mask)  # for its scratch memory
    found = value.nonzero()
    places = _somewhere(mask.device, found.shape)
    known.bind(places, found)
    return list(places.unbind(1))


def _somewhere(device: torch.device, shape: torch.Size) -> Tensor:
    """Room for places [count, dimensions], laid out as ``nonzero`` lays them out."""
    strides = (1, max(shape[0], 1))
    return torch.empty_strided(shape, strides, dtype=torch.int64, device=device)
