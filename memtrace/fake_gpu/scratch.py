"""What kernels allocate below the dispatcher, by operator: from PyTorch's own host code.

Each model names the function of ATen that takes the memory. Sizes are in bytes. Operators that are
known to take some, and not how much, are counted when they are met: :func:`unmodelled`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from memtrace.fake_gpu.cards import Card


class Scratch(NamedTuple):
    """What the kernel of one call takes.

    Attributes:
        steps: what it allocates, in order: i ≥ 0 the tensor that it returns at place i, -n scratch
            of n bytes; scratch is given back at its end. None: what it returns and nothing else.
        product: whether it is a matrix product, which has a workspace of cuBLAS.
    """

    steps: tuple[int, ...] | None = None
    product: bool = False


_NOTHING = Scratch()
_PRODUCT = Scratch(product=True)

_PRODUCTS = {
    *("mm", "bmm", "mv", "dot", "vdot", "addmm", "addbmm", "baddbmm", "addmv", "_addmm_activation"),
    *("_scaled_mm", "_grouped_mm", "_int_mm", "addmm_", "addmv_", "baddbmm_", "addbmm_"),
}
#: Take scratch memory whose size isn't known here, most of them by what CUB asks for.
_UNMODELLED = {
    *("topk", "kthvalue", "median", "mode", "multinomial", "nonzero", "nonzero_static", "unique"),
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

#: The longest rows that :func:`_sort` sorts in place, and segments that are sorted at once.
_SMALL_SORT, _FEW_SEGMENTS, _LARGE_SORT = 4096, 128, 1_000_000

_met: Counter[str] = Counter()


def has(func: Any) -> bool:
    """Whether an operator is known to take scratch memory."""
    name = _name(func)
    return name in _MODELS or name in _PRODUCTS or name in _UNMODELLED


def of(func: Any, args: Any, kwargs: Any, out: Any, card: Card | None) -> Scratch:
    """What an operator takes; ``out``: what it returns, as meta tensors; no card: the CPU, where
    scratch memory isn't booked."""
    if card is None:
        return _NOTHING
    name = _name(func)
    if name in _PRODUCTS:
        return _PRODUCT
    if name in _UNMODELLED:
        _met[name] += 1
        return _NOTHING
    model = _MODELS.get(name)
    return _NOTHING if model is None else model(args, kwargs, out, card)


def unmodelled() -> list[str]:
    """The operators that were met whose scratch memory isn't known."""
    return sorted(_met)


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


def _flash(args: Any, kwargs: Any, out: Any, card: Card) -> Scratch:
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


def _efficient(args: Any, kwargs: Any, out: Any, card: Card) -> Scratch:
    """``_efficient_attention_forward`` (attention.cu): seed and offset of the random numbers come
    first."""
    return Scratch((2, 3, 0, 1))


def _sort(args: Any, kwargs: Any, out: Any, card: Card) -> Scratch:
    """``sort_stable_kernel`` (Sort.cpp) and ``launch_stable_sort_kernel`` (SortStable.cu). CUB also
    keeps tables of some tens of KiB, which aren't known."""
    values = args[0]
    if not values.dim() or not values.numel():
        return _NOTHING
    dim = kwargs.get("dim", next((one for one in args[1:] if type(one) is int), -1))
    rows = values.shape[dim]
    segments, count, size = values.numel() // rows, values.numel(), values.element_size()
    if rows <= _SMALL_SORT:
        return Scratch((0, 1, -8 * rows))  # the places 0, 1, …
    if segments == 1 or rows >= _LARGE_SORT:
        return Scratch((0, 1, -8 * rows, -rows * (size + 8)))
    if segments < _FEW_SEGMENTS:
        # Place and segment of each value twice; the sorted values; CUB's copy of these and those.
        return Scratch((0, 1, -8 * count, -8 * count, -size * count, -(size + 8) * count))
    return Scratch((0, 1, -8 * count, -(size + 8) * count))


Model = Callable[[Any, Any, Any, Card], Scratch]
_MODELS: dict[str, Model] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "sort": _sort,
}
