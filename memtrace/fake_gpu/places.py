"""What it takes to find the places of values, to take those, and to add up from the first on."""

from typing import Any

import torch

from memtrace.devices import Device
from memtrace.fake_gpu import cub
from memtrace.fake_gpu.steps import GIVE_BACK, HALVES, NOTHING, Scratch, met

#: Elements that a block of ``nonzero_static`` looks at at once, and that CUB scans at once.
_FLAGGED, _SCANNED = 512 * 16, 1 << 30


def index(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``make_info`` (TensorAdvancedIndexing.cpp): places that don't lie alike are copied; masks
    become places, by ``nonzero``."""
    places = [one for one in args[1] if one is not None]
    masks = [one for one in places if one.dtype in (torch.bool, torch.uint8)]
    if masks:
        return Scratch((*(step for one in masks for step in _places(one, card)), 0))
    wide: list[torch.Tensor] = list(torch.broadcast_tensors(*places)) if len(places) > 1 else []
    if all(one.stride() == wide[0].stride() for one in wide):
        return NOTHING
    copies = (-one.numel() * one.element_size() for one in wide if not one.is_contiguous())
    return Scratch((*copies, 0))


def masked_select(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``masked_select_out_cuda_impl`` (Indexing.cu): the same of one mask, as large as all."""
    values, mask = args[:2]
    if mask.shape != torch.broadcast_shapes(values.shape, mask.shape):
        met["masked_select"] += 1
        return NOTHING
    return Scratch((*_places(mask, card), 0))


def nonzero(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``nonzero_cuda_out_impl`` (Nonzero.cu)"""
    return Scratch(tuple(_places(args[0], card, found=0)))


def _places(values: torch.Tensor, card: Device, *, found: int | None = None) -> list[int | None]:
    """Its steps; ``found``: the step that makes what it returns."""
    count = values.numel()
    if card.capability >= (10, 0) or count >= 1 << 31:  # other tiles; in several parts
        met["nonzero"] += 1
        return [] if found is None else [found]
    copied = [] if values.is_contiguous() else [-count * values.element_size()]
    steps = [*copied, -4, -cub.count_flags(count, card), GIVE_BACK]
    if found is not None:
        steps.append(found)
    if values.dim():
        steps += (-cub.select(count, card), GIVE_BACK)
    return steps if found is not None else [*steps, *[GIVE_BACK] * (1 + len(copied))]


def nonzero_static(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``nonzero_static_cuda_out_impl`` (Nonzero.cu): what each block found, and all before it."""
    values = args[0]
    copied = () if values.is_contiguous() else (-values.numel() * values.element_size(),)
    if out is None or not out.numel() or not values.numel():
        return NOTHING
    blocks = -(-values.numel() // _FLAGGED)
    rounds = -(-blocks // (card.processors * (2 if values.element_size() == 1 else 1)))
    blocks = -(-values.numel() // (rounds * _FLAGGED))
    return Scratch((0, *copied, -4 * blocks, -8 * blocks))


def cumulated(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``impl_func_cum_ops`` (ReduceOps.cpp) converts what isn't of the result's type; ``scan_dim``
    (ScanUtils.cuh) leaves what is one row to CUB."""
    values, result = args[0], kwargs["out"] if out is None else out
    if not values.dim() or not values.numel():
        return NOTHING
    steps: list[int | None] = [0]
    if values.dtype != result.dtype or not values.is_contiguous():
        steps.append(-result.element_size() * values.numel())
    if values.dtype != result.dtype and not values.is_contiguous():
        met["cumulative operators"] += 1
    if values.numel() == values.shape[args[1]]:
        if values.numel() > _SCANNED:
            met["cumulative operators"] += 1
        size, halves = result.element_size(), result.dtype in HALVES
        steps.append(-cub.scan(values.numel(), size, primitive=not halves))
    return Scratch(tuple(steps))


def repeat_interleave(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``repeat_interleave_common`` (Repeat.h): where the repeats of each place begin."""
    repeats = args[0]
    if not repeats.numel():
        return NOTHING
    if repeats.dtype != torch.int64 or not repeats.is_contiguous():
        met["repeat_interleave"] += 1
        return NOTHING
    size, count = repeats.element_size(), repeats.numel()
    return Scratch((-size * count, -cub.scan(count, size, primitive=True), GIVE_BACK, 0))
