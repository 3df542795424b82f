"""The device itself: what an operator on fake tensors returns and takes, instead of a kernel.

A dispatch mode below all others. An operator on the host runs as it does; one on the card makes the
tensors that it would return (:mod:`~memtrace.fake_gpu.outcomes`), among the scratch memory that its
kernel takes (:mod:`~memtrace.fake_gpu.scratch`). What is read from the card reads as zeros: known
values are followed by :mod:`memtrace.virtual_gpu.values`, above.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _pop_mode, _push_mode

from memtrace.fake_gpu import outcomes, tensors
from memtrace.fake_gpu import scratch as models
from memtrace.fake_gpu.programs import PROGRAMS
from memtrace.virtual_gpu.values import Device
from memtrace.virtual_gpu.values_rules import is_composite

_set = torch.ops.aten.set_.source_Storage_storage_offset._op
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_function_mode_active = torch._C._is_torch_function_mode_enabled
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_PIN = (torch.ops.aten.pin_memory.default, torch.ops.aten._pin_memory.default)
_DENSE = torch.ops.aten.is_non_overlapping_and_dense.default._op
#: Views, though their schemas don't say so.
_VIEWS = {"_unsafe_view", "_reshape_alias", "lift_fresh"}
#: Programs of others that the dispatcher takes for one operator on each device, and that hold more
#: on their way than they return.
_PROGRAMS = {"_euclidean_dist", "_safe_softmax", "embedding"}
#: Bytes of a copy on the host up to which it is written.
_HOST_ZEROS = 2 << 20
_MASKS = (torch.bool, torch.uint8)

#: (operator, arguments, named ones, the device of the call) → what it returns.
Handler = Callable[[Any, Any, Any, torch.device], Any]


def _nothing(size: int) -> None:
    """Values are followed, and so read above."""


#: Told of the bytes that a call is about to read on the host.
tell: Callable[[int], object] = _nothing


class FakeGpu(Device):
    """Answers every operator of one thread that has to do with a fake card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types or _function_mode_active():
            if not all(kind is Tensor or kind is torch.nn.Parameter for kind in types):
                return NotImplemented  # a wrapper: what it calls on its inner tensors comes back
            with torch._C.DisableTorchFunction():
                return self.answer(func, args, kwargs or {})
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator of plain tensors."""
        handler = _handlers.get(id(func)) or _handler(func)
        if handler is _same and args[0].is_cuda:  # the device of a call would be of no use
            return args[0]
        place = self._place(func, args, kwargs)
        if place is None:
            # There is no card to pin it for.
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            if func in _PIN:
                return args[0].clone()
            return func(*args, **kwargs)
        if handler in _WHOLE:
            _push_mode(self)
            try:
                return handler(func, args, kwargs, place)
            finally:
                _pop_mode()
        return handler(func, args, kwargs, place)

    def _place(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        """The device that a call has to do with; None: none that is ours."""
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_cuda and first.dim() and "device" not in kwargs:
            return first.device
        return outcomes.place_of(args, kwargs)


def returns_new(func: Any) -> bool:
    """Whether an operator returns new tensors and does nothing else."""
    return _handler(func) in (outcomes.returned, _cast)


#: By the identity of the operator, and the operator, which keeps it valid.
_handlers: dict[int, Handler] = {}
_known: list[Any] = []


def _handler(func: Any) -> Handler:
    """How to answer an operator."""
    found = _handlers.get(id(func))
    if found is None:
        found = _handlers[id(func)] = _handler_of(func)
        _known.append(func)
    return found


def _handler_of(func: Any) -> Handler:
    """How to answer one that was never seen before."""
    if not isinstance(func, torch._ops.OpOverload):
        return lambda func, args, kwargs, place: func(*args, **kwargs)
    if is_composite(func):
        return _taken_apart
    schema = func._schema
    name = schema.name.partition("::")[2]
    special = _SPECIAL.get(name)
    if special is not None:
        return special
    if name in _PROGRAMS:
        return _program
    if _full_name(func) in PROGRAMS:
        return _program_of_ours
    if torch.Tag.inplace_view in func.tags or name == "set_":
        return _regeometry
    written = [one for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    if written:
        if any(one.is_out for one in written):
            return _out
        in_place = len(written) == 1 and written[0] is schema.arguments[0] and schema.returns
        return _same if in_place and not models.has(func) else _written
    if torch.Tag.data_dependent_output in func.tags:
        return _read
    if torch.Tag.dynamic_output_shape in func.tags:
        return _shaped
    if name in _VIEWS or all(value.alias_info is not None for value in schema.returns):
        explicit = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _EXPLICIT)
        return _view if explicit else _view_by_device
    return outcomes.returned


def _taken_apart(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """A program of other operators, which arrives whole under inference mode."""
    return func._op_dk(_COMPOSITE, *args, **kwargs)


def _program(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """One that has its own gradient, and so arrives whole always."""
    return func._op_dk(_EXPLICIT, *args, **kwargs)


def _program_of_ours(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    return PROGRAMS[_full_name(func)](*args, **kwargs)


#: Answered by calling other operators, which come back here.
_WHOLE = (_taken_apart, _program, _program_of_ours)


def _full_name(func: Any) -> str:
    name: str = func.name().removeprefix("aten::")
    return name


def _view(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """A view that all devices make alike."""
    with tensors.below():
        return func._op_dk(_EXPLICIT, *args, **kwargs)


def _view_by_device(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    with tensors.below():
        return func._op(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """An operator that overwrites some of its arguments, and returns these."""
    outcomes.scratch(func, args, kwargs, place)
    return _aliased(func, args, kwargs)


def _out(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """``out=``: what is written to may have to grow first."""
    wanted = outcomes.computed(func, args, kwargs)
    out = _aliased(func, args, kwargs)
    single = isinstance(out, Tensor)
    pairs = zip((wanted,) if single else wanted, (out,) if single else out, strict=True)
    for one, target in pairs:
        if target.shape != one.shape:
            target.resize_(one.shape)
    outcomes.scratch(func, args, kwargs, place)
    return out


def _aliased(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns that returns nothing but arguments of its own."""
    schema = func._schema
    named: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            named[next(iter(argument.alias_info.before_set))] = value
    out = [named[next(iter(value.alias_info.before_set))] for value in schema.returns]
    return None if not out else out[0] if len(out) == 1 else tuple(out)


def _regeometry(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """Another geometry or storage for a tensor that stays the same object."""
    with tensors.below():
        func._op(*args, **kwargs)
    tensors.memory.settle(args[0].untyped_storage(), place)
    return args[0]


def _resize(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """``resize_`` and ``resize_as_``: a storage that is too small grows."""
    tensor, size = args[:2]
    shape = size.shape if isinstance(size, Tensor) else size
    stride = torch.empty(shape, device="meta").stride()
    storage = tensor.untyped_storage()
    with tensors.below():
        _set(tensor, storage, tensor.storage_offset(), shape, stride)
    tensors.memory.settle(storage, place)
    return tensor


def _cast(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """``_to_copy``: to another type, layout or device."""
    device, later = kwargs.get("device"), kwargs.get("non_blocking", False)
    if device is None or device.type == place.type:
        out = outcomes.returned(func, args, kwargs, place)
        if out.device != args[0].device:
            _staged(out, args[0], later)
        return out
    made = outcomes.computed(func, args, kwargs)
    tell(made.numel() * made.element_size())
    _staged(made, args[0], later)
    return _host_zeros(made)


def _host_zeros(like: Tensor) -> Tensor:
    """A tensor on the host, of zeros; a large one holds what the memory held."""
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    return out.zero_() if out.untyped_storage().nbytes() <= _HOST_ZEROS else out


def _copy(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """``copy_``: between devices, or on one."""
    target, source = args[:2]
    if target.device != source.device:
        _staged(target, source, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if tensors.is_fake(target):
        return target
    size = target.numel() * target.element_size()
    tell(size)
    if size <= _HOST_ZEROS:
        target.zero_()
    return target


def _staged(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """``copy_kernel_cuda`` (Copy.cu): between devices what lies in pieces goes through memory of
    its own, on the side of the pieces, and what changes its type through memory of the side that
    converts: the host where it is waited for, else the card; between cards the target's."""
    alike = target.dtype == source.dtype and target.stride() == source.stride()
    if alike and all(map(_DENSE, (target, source))):
        return
    by_source = source.is_cuda == bool(non_blocking)
    passed = target.dtype if by_source else source.dtype
    taken, held = outcomes.memory(), []
    for one in (target, source):
        if not one.is_cuda or (one.is_contiguous() and one.dtype == passed):
            continue
        converted = 0
        if one is source and one.dtype != passed and not one.is_contiguous():
            converted = taken.hold(one.numel() * passed.itemsize, one.device)
        held.append((taken.hold(target.numel() * passed.itemsize, one.device), one.device))
        taken.let_go(converted, one.device)
    for address, device in reversed(held):
        taken.let_go(address, device)


def _read(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """A number for the host; the card holds zeros."""
    tell(args[0].element_size())
    if func._schema.returns[0].type.kind() == "BoolType":
        return False
    return torch.zeros((), dtype=args[0].dtype, device="cpu").item()


def _shaped(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """What returns as many elements as the values say: of zeros, as many as here."""
    tell(8)  # their number
    out = func._op(*outcomes.zeros(args), **kwargs)
    return outcomes.made(func, args, kwargs, out, place)


def _index(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """``index``: masks alone make what it returns depend on values."""
    if any(one is not None and one.dtype in _MASKS for one in args[1]):
        return _shaped(func, args, kwargs, place)
    return outcomes.returned(func, args, kwargs, place)


def _repeat_interleave(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    """Places that are repeated; how many there will be is either given or to be read."""
    size = kwargs.get("output_size")
    if size is None:
        return _shaped(func, args, kwargs, place)
    out = torch.empty(size, dtype=args[0].dtype, device="meta")
    return outcomes.made(func, args, {}, out, place)


def _nothing_said(func: Any, args: Any, kwargs: Any, place: torch.device) -> None:
    """Whether a decomposition failed is read, and zero is that it didn't."""
    tell(args[0].numel() * args[0].element_size())


def _same(func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
    return args[0]


_SPECIAL: dict[str, Handler] = {
    "_to_copy": _cast,
    "copy_": _copy,
    "_linalg_check_errors": _nothing_said,
    "index": _index,
    "repeat_interleave": _repeat_interleave,
    "resize_": _resize,
    "resize_as_": _resize,
}
