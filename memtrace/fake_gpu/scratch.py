"""What kernels allocate below the dispatcher, by operator: from PyTorch's own host code.

Each model names the function of ATen that takes the memory. Sizes are in bytes. Operators that are
known to take some, and not how much, are counted when they are met: :func:`unmodelled`.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memtrace.devices import Device
from memtrace.fake_gpu import cub, reductions

#: A step of a :class:`Scratch`.
GIVE_BACK = None


class Scratch(NamedTuple):
    """What the kernel of one call takes.

    Attributes:
        steps: what it allocates, in order: i ≥ 0 the tensor that it returns at place i, -n scratch
            of n bytes, :data:`GIVE_BACK` the latest scratch goes; what is left of that goes at the
            end. None: what it returns and nothing else.
        product: whether it is a matrix product, which has a workspace of cuBLAS.
    """

    steps: tuple[int | None, ...] | None = None
    product: bool = False


#: Nothing but what it returns.
NOTHING = Scratch()
_PRODUCT = Scratch(product=True)

_PRODUCTS = {
    *("mm", "bmm", "mv", "dot", "vdot", "addmm", "addbmm", "baddbmm", "addmv", "_addmm_activation"),
    *("_scaled_mm", "_grouped_mm", "_int_mm", "addmm_", "addmv_", "baddbmm_", "addbmm_"),
}
#: Take scratch memory whose size isn't known here, most of them by what CUB asks for.
_UNMODELLED = {
    *("kthvalue", "median", "mode", "multinomial", "nonzero", "nonzero_static", "unique"),
    *("_unique2", "unique_dim", "unique_consecutive", "masked_select", "masked_scatter", "cumsum"),
    *(
        "cumprod",
        "logcumsumexp",
        "cummax",
        "cummin",
        "bincount",
        "histc",
        "searchsorted",
        "randperm",
    ),
    *(
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "repeat_interleave",
        "embedding_dense_backward",
    ),
    *("convolution", "convolution_backward", "_thnn_fused_lstm_cell", "_cudnn_rnn", "ctc_loss"),
    *("_flash_attention_backward", "_efficient_attention_backward", "native_layer_norm_backward"),
    *("_scaled_dot_product_flash_attention_backward", "_cdist_forward", "_embedding_bag"),
    *("_scaled_dot_product_efficient_attention_backward", "native_batch_norm", "grid_sampler_2d"),
}

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

_HALVES = (torch.float16, torch.bfloat16)

_met: Counter[str] = Counter()


def has(func: Any) -> bool:
    """Whether an operator is known to take scratch memory."""
    name = _name(func)
    return name in _MODELS or name in _PRODUCTS or name in _UNMODELLED


def of(func: Any, args: Any, kwargs: Any, out: Any, card: Device | None) -> Scratch:
    """What an operator takes; ``out``: what it returns, as meta tensors; no card: the CPU, where
    scratch memory isn't booked."""
    if card is None:
        return NOTHING
    name = _name(func)
    if name in _PRODUCTS:
        return _PRODUCT
    if name in _UNMODELLED:
        _met[name] += 1
        return NOTHING
    model = _MODELS.get(name)
    return NOTHING if model is None else model(args, kwargs, out, card)


def unmodelled() -> list[str]:
    """The operators that were met whose scratch memory isn't known."""
    return sorted(_met)


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


def _flash(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``_flash_attention_forward`` → ``mha_fwd`` and ``set_params_splitkv`` (flash_api.cpp): with
    few rows the keys are split, and each part's output and log-sum-exp are kept in float32."""
    query, key = args[:2]
    batch, heads, rows, size = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    if dropout:
        return Scratch((0, 1, 6, 7))
    if rows == 1 and heads > kv_heads and size % 8 == 0:  # the heads of a group become rows
        rows, heads = heads // kv_heads, kv_heads
    block = 256 if size <= 64 else 128 if size <= 128 else 64
    work = batch * heads * -(-rows // 64)
    splits = _splits(work, 2 * card.processors, -(-keys // block))
    if splits <= 1:
        return Scratch((0, 1, 6, 7))
    rounded = -(-size // 32) * 32 if size <= 192 else 256
    part = 4 * splits * batch * heads * rows
    return Scratch((0, 1, -part, -part * rounded, 6, 7))


def _splits(work: int, processors: int, blocks: int) -> int:
    """``num_splits_heuristic`` (flash_api.cpp): the fewest parts that keep the processors at least
    85 % as busy as the best number of them."""
    if work >= 0.8 * processors:
        return 1
    busy: dict[int, float] = {}
    for splits in range(1, min(128, processors, blocks) + 1):
        if splits == 1 or -(-blocks // splits) != -(-blocks // (splits - 1)):
            waves = work * splits / processors
            busy[splits] = waves / -(-work * splits // processors)
    best = max(busy.values(), default=0.0)
    return next((splits for splits, share in busy.items() if share >= 0.85 * best), 1)


def _efficient(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``_efficient_attention_forward`` (attention.cu): seed and offset of the random numbers come
    first."""
    return Scratch((2, 3, 0, 1))


def _sort(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
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


def _topk(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
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
            _met["topk"] += 1
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


def _summed(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``gpu_reduce_kernel`` (Reduce.cuh) of sums, products and means; ``make_reduction``
    (ReduceOpsUtils.h) first converts what isn't of the result's type, but for 16 bits to 32."""
    values, result = args[0], kwargs["out"] if out is None else out
    size = result.element_size()
    halves = values.dtype in _HALVES and result.dtype == torch.float32
    plain = halves or values.dtype == result.dtype
    found = _reduction(args, kwargs, card, max(size, 4))
    if plain or not values.numel():
        return found
    return Scratch((0, -size * values.numel(), *(found.steps or (0,))[1:]))


def _extreme(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """The same of extremes, which with their places are a value and 8 bytes, aligned."""
    if isinstance(out, (list, tuple)):
        return _reduction(args, kwargs, card, 16, outputs=2)
    return _reduction(args, kwargs, card, args[0].element_size())


def _norm(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """The same of norms, whose first option is no dimension."""
    return _reduction((args[0], *args[2:]), kwargs, card, max(args[0].element_size(), 4))


def _decided(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """The same of ``any`` and ``all``."""
    return _reduction(args, kwargs, card, 1)


def _placed(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """The same of places of extremes."""
    return _reduction(args, kwargs, card, 16)


def _spread(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """The same of variances: a mean, a sum of squares and two counts (SharedReduceOps.h)."""
    return _reduction(args, kwargs, card, 32 if args[0].element_size() == 8 else 16, vector=2)


def _reduction(
    args: Any, kwargs: Any, card: Device, partial: int, *, vector: int = 4, outputs: int = 1
) -> Scratch:
    values: torch.Tensor = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = (dims,) if type(dims) is int else tuple(dims or range(values.dim()))
    if not values.dim() or not values.numel():
        return NOTHING
    if values.numel() * values.element_size() >= 1 << 31:  # in parts that 32 bits count
        _met["reductions of 2 GiB and more"] += 1
        return NOTHING
    reduced = {dim % values.dim() for dim in dims}
    taken = reductions.scratch(values, reduced, partial, vector, card)
    if taken is None:
        return NOTHING
    return Scratch((*range(outputs), -taken[0], -taken[1]))


def _pow(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``pow_Scalar_out`` (Pow.cpp): a base that is a number becomes a tensor of 8 bytes."""
    if isinstance(args[0], torch.Tensor) or args[0] == 1:
        return NOTHING
    return Scratch((0, -8))


Model = Callable[[Any, Any, Any, Device], Scratch]
_MODELS: dict[str, Model] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "all": _decided,
    "any": _decided,
    "argmax": _placed,
    "argmin": _placed,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "pow": _pow,
    "sort": _sort,
    "std": _spread,
    "var": _spread,
    **dict.fromkeys(("amax", "amin", "max", "min"), _extreme),
    **dict.fromkeys(("mean", "nansum", "prod", "sum"), _summed),
    "topk": _topk,
}
