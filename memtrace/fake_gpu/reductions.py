"""What reductions take where several blocks work at one output: ``setReduceConfig`` and
``gpu_reduce_kernel`` (``aten/src/ATen/native/cuda/Reduce.cuh``)."""

from collections.abc import Collection, Iterable

from torch import Tensor

from memtrace.devices import Device

_WARP, _THREADS = 32, 512
#: What a thread reads at least and at most before blocks share an output.
_FEW, _MANY = 16, 256


def scratch(
    values: Tensor, reduced: Collection[int], partial: int, vector: int, card: Device
) -> tuple[int, int] | None:
    """Bytes of partial results and of counters of finished blocks; None: a block is enough.

    Args:
        reduced: the dimensions that go, not negative.
        partial: bytes of a partial result.
        vector: neighbours that a thread reads at once.
    """
    sizes, strides = values.shape, values.stride()
    dims = sorted((dim for dim in range(values.dim()) if sizes[dim] > 1), key=strides.__getitem__)
    inputs, outputs = 1, 1
    for dim in dims:
        if dim in reduced:
            inputs *= sizes[dim]
        else:
            outputs *= sizes[dim]
    if inputs < _MANY:
        return None
    inner = dims[0] in reduced
    across, along = (inputs, outputs) if inner else (outputs, inputs)
    lanes = 1
    if strides[dims[0]] == 1:
        if inner and across >= 128 and len(_joined(values, dims, reduced, True)) == 1:
            across //= vector
        elif not inner:
            lanes = _output_vector(values, dims, reduced)
            across //= lanes
    threads = _THREADS // lanes
    across, along = (_power(min(one, threads)) for one in (across, along))
    width = min(across, _WARP)
    height = min(along, threads // width)
    width = min(across, threads // height)
    rest = -(-inputs // width) if inner else inputs
    if rest < min(height * _FEW, _MANY):
        return None
    rest = -(-inputs // ((width if inner else 1) * height))
    grid = outputs if inner else -(-outputs // (width * lanes))
    wanted = card.processors * (card.threads_per_processor // (width * height))
    if rest < _MANY or grid > wanted:
        return None
    blocks = max(min(-(-wanted // grid), -(-rest // _FEW)), -(-rest // _MANY))
    if blocks <= 1:
        return None
    return partial * outputs * blocks * (1 if inner else width * lanes), 4 * grid


def _power(number: int) -> int:
    """The largest power of 2 up to a number of at least 1."""
    return 1 << max(number, 1).bit_length() - 1


def _joined(
    values: Tensor, dims: Iterable[int], reduced: Collection[int], which: bool
) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions that go, or stay, those that follow each other as one."""
    found: list[tuple[int, int]] = []
    for dim in dims:
        if (dim in reduced) is not which:
            continue
        size, stride = values.shape[dim], values.stride(dim)
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return found


def _output_vector(values: Tensor, dims: Iterable[int], reduced: Collection[int]) -> int:
    """``get_output_vec_size``; tensors begin where all alignments are met, views where they say."""
    dims = list(dims)
    (size, _), *others = _joined(values, dims, reduced, False)
    strides = [stride for _, stride in (*others, *_joined(values, dims, reduced, True))]
    lanes = 4
    for number in (int(values.storage_offset()), size, *strides):
        while number % lanes:
            lanes //= 2
    return lanes
