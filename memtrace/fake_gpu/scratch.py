"""What kernels allocate below the dispatcher, by operator: from PyTorch's own host code.

Each model names the function of ATen that takes the memory. Sizes are in bytes. Operators that are
known to take some, and not how much, are counted when they are met: :func:`unmodelled`.
"""

from collections.abc import Callable
from typing import Any

import torch

from memtrace.devices import Device
from memtrace.fake_gpu import places, reductions, sorting
from memtrace.fake_gpu.steps import HALVES, NOTHING, Scratch, met

_PRODUCT = Scratch(product=True)

_PRODUCTS = {"dot", "vdot", "addbmm", "addbmm_", "_scaled_mm", "_grouped_mm", "_int_mm"}
#: Take scratch memory whose size isn't known here, most of them by what CUB asks for.
_UNMODELLED = {
    *("kthvalue", "median", "mode", "cummax", "cummin", "bincount", "histc", "searchsorted"),
    *("_unique2", "unique_dim", "unique_consecutive", "masked_scatter", "randperm"),
    *("index_put", "index_put_", "_index_put_impl_", "embedding_dense_backward"),
    *("convolution", "convolution_backward", "_thnn_fused_lstm_cell", "_cudnn_rnn", "ctc_loss"),
    *("_transformer_encoder_layer_fwd", "_native_multi_head_attention"),
    *("_flash_attention_backward", "_efficient_attention_backward", "native_layer_norm_backward"),
    *("_scaled_dot_product_flash_attention_backward", "_cdist_forward"),
    *("_scaled_dot_product_efficient_attention_backward", "native_batch_norm", "grid_sampler_2d"),
}
#: How the names of more of these begin: what cuSOLVER and cuFFT work in.
_UNMODELLED_KINDS = ("linalg_", "_linalg_", "cholesky", "geqrf", "lu_", "ormqr", "_fft_")


def has(func: Any) -> bool:
    """Whether an operator is known to take scratch memory."""
    name = _name(func)
    return name in _MODELS or name in _PRODUCTS or _is_unmodelled(name)


def of(func: Any, args: Any, kwargs: Any, out: Any, card: Device | None) -> Scratch:
    """What an operator takes; ``out``: what it returns, as meta tensors; no card: the CPU, where
    scratch memory isn't booked."""
    if card is None:
        return NOTHING
    name = _name(func)
    if name in _PRODUCTS:
        return _PRODUCT
    if model := _MODELS.get(name):
        return model(args, kwargs, out, card)
    if _is_unmodelled(name):
        met[name] += 1
    return NOTHING


def _is_unmodelled(name: str) -> bool:
    return name in _UNMODELLED or (name.startswith(_UNMODELLED_KINDS) and name not in _MODELS)


def unmodelled() -> list[str]:
    """The operators that were met whose scratch memory isn't known."""
    return sorted(met)


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


def _product(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``cublasCommonArgs`` and ``prepare_batch_matrix_for_cublas`` (Blas.cpp): matrices whose rows
    or columns don't lie one after the other are copied, the second first, since cuBLAS computes the
    transposed product."""
    matrices = [one for one in args[-2:] if one.dim() > 1]
    copies = [-one.numel() * one.element_size() for one in reversed(matrices) if _in_pieces(one)]
    return Scratch((0, *copies), product=True) if copies else _PRODUCT


def _in_pieces(matrix: torch.Tensor) -> bool:
    *_, rows, columns = matrix.shape
    *_, row, column = matrix.stride()
    if matrix.dim() == 2 and torch.ops.aten.is_non_overlapping_and_dense(matrix):
        return False
    return not (
        (row == 1 and column >= max(1, rows))
        or (column == 1 and row >= max(1, columns))
        or (matrix.is_contiguous() and row and column)
    )


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
    first. Heads above 128 are summed up in memory, in fp32 (``kNeedsOutputAccumulatorBuffer``)."""
    query, size = args[0], args[2].shape[-1]
    if query.dtype not in HALVES or max(query.shape[-1], size) <= 128:
        return Scratch((2, 3, 0, 1))
    return Scratch((2, 3, 0, 1, -4 * query.numel() // query.shape[-1] * size))


def _summed(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``gpu_reduce_kernel`` (Reduce.cuh) of sums, products and means; ``make_reduction``
    (ReduceOpsUtils.h) first converts what isn't of the result's type, but for 16 bits to 32."""
    values, result = args[0], kwargs["out"] if out is None else out
    size = result.element_size()
    halves = values.dtype in HALVES and result.dtype == torch.float32
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
        met["reductions of 2 GiB and more"] += 1
        return NOTHING
    reduced = {dim % values.dim() for dim in dims}
    taken = reductions.scratch(values, reduced, partial, vector, card)
    if taken is None:
        return NOTHING
    return Scratch((*range(outputs), -taken[0], -taken[1]))


def _dropout(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``dropout_cuda`` (Dropout.cu): the mask comes first."""
    return Scratch((1, 0))


def _group_norm(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``GroupNormKernelImplInternal`` (group_norm_kernel.cu): factor and term of each channel."""
    values, weight, bias, batch, channels, positions = args[:6]
    if positions == 1 or (weight is None and bias is None) or not values.numel():
        return NOTHING
    if values.dtype in HALVES:  # it takes some more
        met["native_group_norm"] += 1
    each = -batch * channels * max(values.element_size(), 4)
    return Scratch((0, 1, 2, each, each))


def _bag(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """``_embedding_bag_cuda`` (EmbeddingBag.cu): sizes and numbers of the bags come first."""
    return Scratch((2, 1, 0, 3))


def _min_and_max(args: Any, kwargs: Any, out: Any, card: Device) -> Scratch:
    """The same of both extremes at once."""
    return _reduction(args, kwargs, card, 2 * args[0].element_size(), outputs=2)


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
    "norm": _norm,
    "_embedding_bag": _bag,
    "_embedding_bag_forward_only": _bag,
    "aminmax": _min_and_max,
    "index": places.index,
    "linalg_vector_norm": _norm,
    **dict.fromkeys(("cumprod", "cumsum", "logcumsumexp"), places.cumulated),
    "masked_select": places.masked_select,
    "nonzero": places.nonzero,
    "repeat_interleave": places.repeat_interleave,
    "nonzero_static": places.nonzero_static,
    "native_dropout": _dropout,
    "native_group_norm": _group_norm,
    "pow": _pow,
    "sort": sorting.sort,
    "std": _spread,
    "var": _spread,
    **dict.fromkeys(("amax", "amin", "max", "min"), _extreme),
    **dict.fromkeys(("mm", "bmm", "mv", "addmm", "baddbmm", "addmv"), _product),
    **dict.fromkeys(("addmm_", "addmv_", "baddbmm_", "_addmm_activation"), _product),
    **dict.fromkeys(("mean", "nansum", "prod", "sum"), _summed),
    "topk": sorting.topk,
}
