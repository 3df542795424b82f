"""What sorts take, and searches for the largest."""

import math
from typing import Any

import torch

from memtrace.devices import Device
from memtrace.fake_gpu import cub
from memtrace.fake_gpu.steps import GIVE_BACK, NOTHING, Scratch, met

#: ``should_use_multiblock`` (TensorTopK.cu): up to so many slices, rows of at least so many.
_MULTIBLOCK = (
    (20, 20_000),
    (40, 10_000),
    (80, 8000),
    (199, 5000),
    (799, 3000),
    (4000, 800),
    (math.inf, 400),
)
#: Threads of a block of it, and registers of a processor.
_BLOCK, _REGISTERS = 256, 65_536
#: What CUB takes to scan the counts of up to so many blocks.
_SCAN, _SCANNED_AT_ONCE = 1279, 9000

#: The longest rows that :func:`_sort` sorts in place, and segments that are sorted at once.
_SMALL_SORT, _FEW_SEGMENTS, _LARGE_SORT = 4096, 128, 1_000_000


def sort(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``sort_stable_kernel`` (Sort.cpp) and ``launch_stable_sort_kernel`` (SortStable.cu)."""
    values = args[0]
    if not values.dim() or not values.numel():
        return NOTHING
    dim = kwargs.get("dim", next((one for one in args[1:] if type(one) is int), -1))
    rows, count, size = values.shape[dim], values.numel(), values.element_size()
    if rows <= _SMALL_SORT:
        return Scratch((0, 1, -8 * rows))  # the places 0, 1, …
    copies: tuple[int, ...] = ()
    if values.stride(dim) != 1 or not torch.ops.aten.is_non_overlapping_and_dense(values):
        copies = (-size * count,)
        if out is None or out[0].stride(dim) != 1:
            copies = (-size * count, -size * count, -8 * count)
    return Scratch((0, 1, *copies, *_sort_steps(count, rows, size, card)))


def _sort_steps(count: int, rows: int, size: int, card: Device) -> tuple[int | None, ...]:
    """``launch_stable_sort_kernel``, of ``count`` values of ``size`` bytes in rows."""
    segments = count // rows
    if segments == 1 or rows >= _LARGE_SORT:
        each = (-cub.radix_sort_pairs(rows, size, card), GIVE_BACK)
        return (-8 * rows, *each * segments, GIVE_BACK)
    if segments < _FEW_SEGMENTS:
        # Place and segment of each value twice, and the sorted values; then by segment.
        by_value = (-size * count, -cub.radix_sort_pairs(count, size, card), GIVE_BACK, GIVE_BACK)
        by_segment = (-cub.radix_sort_keys(count, card), GIVE_BACK)
        return (-8 * count, -8 * count, *by_value, *by_segment, GIVE_BACK, GIVE_BACK)
    return (-8 * count, -cub.segmented_sort_pairs(count, size), GIVE_BACK, GIVE_BACK)


def topk(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``topk_out_with_sort`` and ``launch_gather_topk_kernel`` (TensorTopK.cpp, TensorTopK.cu):
    several blocks look through a long row together."""
    values, k = args[:2]
    if not values.dim() or not values.numel():
        return NOTHING
    given = dict(zip(("dim", "largest", "sorted"), args[2:], strict=False)) | kwargs
    rows, size = values.shape[given.get("dim", -1)], values.element_size()
    slices = values.numel() // rows
    steps: list[int | None] = [0, 1]
    if not values.is_contiguous():
        steps.append(-size * values.numel())
    if rows >= next(least for most, least in _MULTIBLOCK if slices <= most):
        blocks = slices * -(-rows // (_BLOCK * _items_per_thread(values.numel(), card)))
        if blocks > _SCANNED_AT_ONCE:
            met["topk"] += 1
        # Each slice's answer so far, and how often each block met each digit.
        digits = 2 * max(size, 4)
        steps += (-size * slices, -8 * slices, -digits * slices, -512 * blocks, -1024 * slices)
        steps += (-4 * blocks, -4 * blocks, *(-_SCAN, GIVE_BACK) * 2, *(GIVE_BACK,) * 7)
    if k > _SMALL_SORT and given.get("sorted", True):
        taken = slices * k
        steps += (-8 * taken, -size * taken, *_sort_steps(taken, k, size, card), -8 * taken)
    return Scratch(tuple(steps))


def _items_per_thread(count: int, card: Device) -> int:
    """``get_items_per_thread`` (TensorTopK.cu), of a kernel that takes 40 registers a thread."""
    held = min(_REGISTERS // (40 * _BLOCK), card.blocks_per_processor)
    return max(4, min(-(-count // (card.processors * held * _BLOCK)), 64))
