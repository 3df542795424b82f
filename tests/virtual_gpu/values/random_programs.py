"""Random programs do on the virtual GPU what they do on the CPU, as far as that can be known.

The tests run within a process on a virtual GPU; see ``test_values.py``.
"""

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.virtual_gpu.values import unread

_DTYPES = (torch.int64, torch.float32, torch.int32, torch.bool, torch.float16)

#: A step takes some tensors, a number and the device, and returns new tensors.
Step = Callable[[Tensor, Tensor, int, str], Tensor | None]


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """``other`` in the shape and type of ``tensor``."""
    flat = other.reshape(-1).to(tensor.dtype)
    if not flat.numel():
        return torch.zeros_like(tensor)
    times = tensor.numel() // flat.numel() + 1
    return flat.repeat(times)[: tensor.numel()].reshape(tensor.shape)


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.int() if tensor.dtype == torch.bool else tensor


def _place(tensor: Tensor, n: int) -> Tensor:
    """An element, or the row that it starts."""
    return tensor[n % len(tensor)] if tensor.dim() and len(tensor) else tensor


def _overwrite(change: Callable[[Tensor, Tensor, int], object]) -> Step:
    def step(tensor: Tensor, other: Tensor, n: int, device: str) -> None:
        if tensor.numel() and not torch._debug_has_internal_overlap(tensor):
            change(tensor, other, n)

    return step


def _assign_masked(tensor: Tensor, other: Tensor, n: int) -> None:
    mask = _like(tensor, other) > n
    tensor[mask] = _like(tensor, other)[mask]


def _row(tensor: Tensor, n: int) -> Tensor:
    return torch.arange(n % 3 + 1, device=tensor.device)


FACTORIES: list[Step] = [
    lambda a, b, n, device: torch.arange(n, device=device),
    lambda a, b, n, device: torch.full((n, 2), n, device=device),
    lambda a, b, n, device: torch.eye(n % 4 + 1, device=device),
    lambda a, b, n, device: torch.tensor([[n, 0, n + 1]], device=device, dtype=torch.int32),
    lambda a, b, n, device: torch.ones(2, n, device=device).tril(),
    lambda a, b, n, device: torch.scalar_tensor(n, device=device, dtype=torch.float16),
    lambda a, b, n, device: torch.zeros_like(a),
    lambda a, b, n, device: torch.full_like(a, n % 2),
    lambda a, b, n, device: a.new_ones(3),
    lambda a, b, n, device: torch.tensor(a.tolist(), dtype=a.dtype, device=device),
]
VIEWS: list[Step] = [
    lambda a, b, n, device: _place(a, n),
    lambda a, b, n, device: a[..., n % 3 :] if a.dim() else a,
    lambda a, b, n, device: a[:: n % 2 + 1] if a.dim() else a,
    lambda a, b, n, device: a.t() if a.dim() == 2 else a.unsqueeze(0),
    lambda a, b, n, device: a.reshape(-1),
    lambda a, b, n, device: a.unsqueeze(0).expand(2, *a.shape),
    lambda a, b, n, device: a.diagonal() if a.dim() == 2 else a.detach(),
    lambda a, b, n, device: a.as_strided((1,), (1,), a.storage_offset()) if a.numel() else a,
    lambda a, b, n, device: a.view(torch.uint8) if a.dim() and a.stride()[-1] == 1 else a,
]
WRITES: list[Step] = [
    _overwrite(lambda a, b, n: a.fill_(n % 2)),
    _overwrite(lambda a, b, n: a.zero_()),
    _overwrite(lambda a, b, n: a.copy_(_like(a, b))),
    _overwrite(lambda a, b, n: a.logical_or_(b.sum() > n)),
    _overwrite(lambda a, b, n: a.masked_fill_(_like(a, b) > n, n % 2)),
    _overwrite(lambda a, b, n: _place(a, n).copy_(_place(a, n + 1))),
    _overwrite(lambda a, b, n: a.__setitem__(a > n, n % 2)),
    _overwrite(_assign_masked),
    _overwrite(lambda a, b, n: torch.eq(a, n, out=a) if a.dtype == torch.bool else a.add_(n)),
    _overwrite(lambda a, b, n: a.scatter_(0, torch.zeros_like(a, dtype=torch.int64), n % 2)),
]
RESULTS: list[Step] = [
    lambda a, b, n, device: _numbers(a) + n,
    lambda a, b, n, device: _numbers(a) * _like(_numbers(a), b),
    lambda a, b, n, device: a > n,
    lambda a, b, n, device: _numbers(a).sum(-1) if a.numel() else a,
    lambda a, b, n, device: _numbers(a).reshape(-1).cumsum(0),
    lambda a, b, n, device: torch.where(a > n, a, _like(a, b)),
    lambda a, b, n, device: torch.cat((a.reshape(-1), b.reshape(-1))),
    lambda a, b, n, device: a.to(_DTYPES[n % len(_DTYPES)]),
    lambda a, b, n, device: a.clone(),
    lambda a, b, n, device: a.reshape(-1).flip(0),
    lambda a, b, n, device: a.reshape(-1).sort(stable=True).values,
    lambda a, b, n, device: a.index_select(0, _row(a, n)) if a.dim() and len(a) > 2 else a,
    lambda a, b, n, device: a[_row(a, n)] if a.dim() and len(a) > 2 else a,
    lambda a, b, n, device: a.reshape(-1).gather(0, _row(a, n)) if a.numel() > 2 else a,
]
SHAPES: list[Step] = [
    lambda a, b, n, device: a[a > n],
    lambda a, b, n, device: a[a.sum() > n],
    lambda a, b, n, device: a.nonzero(),
    lambda a, b, n, device: a.unique(),
    lambda a, b, n, device: torch.masked_select(a, a != n),
    lambda a, b, n, device: torch.repeat_interleave((a.reshape(-1) > n).long()),
    lambda a, b, n, device: torch.arange(int(a.count_nonzero()), device=device),
]
#: What only the CPU knows.
UNKNOWN: list[Step] = [
    lambda a, b, n, device: torch.rand(n, device=device),
    _overwrite(lambda a, b, n: _place(a, n).random_(0, 2)),
    _overwrite(lambda a, b, n: _place(a, n).random_(0, 2)),
]


def _programs(*kinds: list[Step]) -> st.SearchStrategy:
    """Lists of step, two places to take tensors from, and a number."""
    steps = [step for kind in kinds for step in kind]
    places = st.integers(0, 7)
    return st.lists(
        st.tuples(st.sampled_from(steps), places, places, st.integers(0, 6)),
        min_size=1,
        max_size=14,
    )


def _run(program: list[tuple[Step, int, int, int]], device: str) -> list[Tensor]:
    made = [torch.arange(6, device=device).view(2, 3)]
    for step, first, second, number in program:
        result = step(made[first % len(made)], made[second % len(made)], number, device)
        if result is not None and result.numel() <= 4096:
            made.append(result)
    return made


_settings = settings(
    max_examples=150,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@_settings
@given(program=_programs(FACTORIES, VIEWS, WRITES, RESULTS, SHAPES), inference=st.booleans())
def test_known_programs_give_the_values_of_the_cpu(program, inference):
    before = unread()
    with torch.inference_mode(inference):
        for expected, actual in zip(_run(program, "cpu"), _run(program, "cuda"), strict=True):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            assert torch.equal(actual.cpu(), expected)
    assert unread() == before


@_settings
@given(program=_programs(UNKNOWN, FACTORIES[:6], VIEWS, WRITES, RESULTS), inference=st.booleans())
def test_what_is_called_known_is_what_the_cpu_has(program, inference):
    with torch.inference_mode(inference):
        on_cpu = _run(program, "cpu")
        for expected, actual in zip(on_cpu, _run(program, "cuda"), strict=True):
            before = unread()
            value = actual.cpu()
            if unread() == before:
                assert torch.equal(value, expected)
