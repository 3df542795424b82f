"""What an operator on fake tensors returns, by PyTorch's rules for meta tensors.

Many of these rules are Python and take a tenth of a millisecond. A model's layers are alike, so the
outcome of a call is kept by the geometry of its arguments and whatever else was given.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from memtrace.fake_gpu import scratch as models
from memtrace.fake_gpu import streams, tensors
from memtrace.fake_gpu.memory import FakeMemory
from memtrace.fake_gpu.steps import GIVE_BACK, NOTHING, Scratch
from memtrace.virtual_gpu import values_rules

_META = torch.device("meta")
#: Calls whose outcome is kept.
_MOST = 1 << 16

#: A new tensor: shape, strides, type, bytes of its storage.
_Made = tuple[Any, Any, torch.dtype, int]


@dataclass(frozen=True, slots=True)
class Plain:
    """What is returned and no tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call makes.

    Attributes:
        made: in order.
        kind: list or tuple; None: one thing alone.
        scratch: what its kernel takes.
        alone: the tensor that is all that it makes and takes; None: there is more.
    """

    made: tuple[_Made | Plain, ...]
    kind: type | None
    scratch: Scratch
    alone: _Made | None = None


_outcomes: dict[Any, Outcome | None] = {}
_NEVER: Any = object()


def returned(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """Answer an operator that returns something new on ``place``."""
    outcome = _found(func, args, kwargs, place)
    if outcome is None:  # it shares a storage with an argument
        with tensors.below():
            return func._op(*args, **kwargs)
    if outcome.alone is not None:  # nearly all
        return tensors.new(*outcome.alone, place)
    return _make(outcome, place)


def bytes_of(func: Any, args: Any, kwargs: Any, place: torch.device) -> int:
    """Bytes of the new storages that an operator returns."""
    outcome = _found(func, args, kwargs, place)
    made = () if outcome is None else outcome.made
    return sum(one[3] for one in made if not isinstance(one, Plain))


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call overwrites."""
    return values_rules.written(values_rules.rule_of(func), args, kwargs)


def _found(func: Any, args: Any, kwargs: Any, place: torch.device) -> Outcome | None:
    key: Any = [id(func), place.index]
    try:
        _add_key(key, args)
        if kwargs:
            key += kwargs
            _add_key(key, kwargs.values())
        key = tuple(key)
        outcome = _outcomes.get(key, _NEVER)
    except TypeError:  # something that can't be hashed, a generator
        key, outcome = None, _NEVER
    if outcome is _NEVER:
        outcome = _outcome(func, args, kwargs, place)
        if key is not None and len(_outcomes) < _MOST:
            _outcomes[key] = outcome
    return outcome


def _add_key(key: list[Any], values: Iterable[Any]) -> None:
    """Add what tells these arguments from others: each begins with a type or a shape."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter or isinstance(value, Tensor):
            key += (value.shape, value.stride(), value.dtype, value.is_cuda)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            _add_key(key, value)
        else:
            key += (kind, value)


def _outcome(func: Any, args: Any, kwargs: Any, place: torch.device) -> Outcome | None:
    """None: what it returns isn't new."""
    values, named = on_meta(args), dict(zip(kwargs, on_meta(kwargs.values()), strict=True))
    out = _call(func, values, named)
    given = {one.untyped_storage()._cdata for one in _tensors((values, list(named.values())))}
    if any(one.untyped_storage()._cdata in given for one in _tensors((out,))):
        return None
    return _of(func, args, kwargs, out, place)


def _of(func: Any, args: Any, kwargs: Any, out: Any, place: torch.device) -> Outcome:
    """The outcome of a call that returns what has the geometry of ``out``."""
    made: list[_Made | Plain] = []
    for part in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(part, Tensor):
            size = part.untyped_storage().nbytes()
            made.append((part.shape, part.stride(), part.dtype, size))
        else:
            made.append(Plain(part))
    kind = type(out) if isinstance(out, (list, tuple)) else None
    scratch = models.of(func, args, kwargs, out, memory().card(place))
    first = made[0]
    more = kind is not None or isinstance(first, Plain) or scratch != NOTHING
    return Outcome(tuple(made), kind, scratch, None if more else first)  # type: ignore[arg-type]


def made(func: Any, args: Any, kwargs: Any, out: Any, place: torch.device) -> Any:
    """Answer an operator whose result has the geometry of ``out``."""
    return _make(_of(func, args, kwargs, out, place), place)


def _make(outcome: Outcome, place: torch.device) -> Any:
    steps, product = outcome.scratch
    taken = memory()
    held: list[int] = []
    made: dict[int, Any] = {}
    for step in range(len(outcome.made)) if steps is None else steps:
        if step is GIVE_BACK:
            taken.let_go(held.pop(), place)
        elif step < 0:
            held.append(taken.hold(-step, place))
        else:
            made[step] = _made(outcome.made[step], place)
    if product:
        taken.workspace(place)
    for address in reversed(held):
        taken.let_go(address, place)
    out = [
        made[number] if number in made else _made(one, place)
        for number, one in enumerate(outcome.made)
    ]
    return out[0] if outcome.kind is None else outcome.kind(out)


def _made(one: _Made | Plain, place: torch.device) -> Any:
    if isinstance(one, Plain):
        return one.value
    return tensors.new(*one, place)


def scratch(func: Any, args: Any, kwargs: Any, place: torch.device) -> None:
    """Take what the kernel of an operator takes that returns nothing new."""
    if models.has(func):
        taken = models.of(func, args, kwargs, None, memory().card(place))
        steps = tuple(step for step in taken.steps or () if step is GIVE_BACK or step < 0)
        _make(Outcome((), tuple, taken._replace(steps=steps)), place)


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns, as meta tensors."""
    return _call(func, on_meta(args), dict(zip(kwargs, on_meta(kwargs.values()), strict=True)))


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """
    Raises:
        NotImplementedError: nothing says what this operator returns.
    """
    named = {name: one for name, one in kwargs.items() if name not in ("pin_memory", "generator")}
    overload = func._overloadname
    if overload.endswith("generator"):  # the same without one has the same result
        name = overload.removesuffix("generator").rstrip("_") or "default"
        func = getattr(func.overloadpacket, name)
    try:
        return func._op(*args, **named)
    except NotImplementedError:
        return _guessed(func, args, named)


def _guessed(func: Any, args: Any, kwargs: Any) -> Any:
    """What PyTorch's fake tensors know of an operator that has no rule for meta tensors."""
    with FakeTensorMode():

        def fake(one: Tensor) -> Tensor:
            return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda")

        out = func(*_map(list(args), fake), **{n: _map(one, fake) for n, one in kwargs.items()})
    return _map(out, _meta)


def on_meta(values: Iterable[Any]) -> list[Any]:
    """Arguments of an operator on meta tensors, each on a storage of its own."""
    return [_META if isinstance(one, torch.device) else _map(one, _meta) for one in values]


def _meta(one: Tensor) -> Tensor:
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=_META)


def zeros(values: Any) -> list[Any]:
    """Arguments of an operator as tensors on the host, of zeros."""
    found: list[Any] = _map(
        list(values), lambda one: torch.zeros(one.shape, dtype=one.dtype, device="cpu")
    )
    return found


def _map(value: Any, what: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return what(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map(one, what) for one in value])
    return value


def place_of(args: Any, kwargs: Any) -> torch.device | None:
    """The device of a call: the one that is named, else that of the first tensor there; None: it
    has to do with the host only."""
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        if device.index is None:
            return torch.device("cuda", streams.current_device())
        return torch.device(device)
    found: torch.device | None = None
    for one in _tensors((args, tuple(kwargs.values())) if kwargs else args):
        if one.is_cuda:
            if one.dim():  # a number may lie elsewhere than the rest
                return one.device
            found = found or one.device
    return found


def memory() -> FakeMemory:
    """The memory of this process's cards."""
    return tensors.memory  # type: ignore[return-value]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
