"""Known values on a virtual GPU: what the host told it, and what follows from that alone.

No kernel runs there, and its memory reads as zeros. But masks, positions, lengths and token ids
come from the host and decide what a program does next, and so what it allocates. A dispatch mode
below all others follows them on the host (:mod:`~memtrace.virtual_gpu.values_mirrors`), answers
reads from there, gives data-dependent results their size, states a placeholder for each token
chosen from unknown logits, and counts the reads of everything else with their place.

The values are those of PyTorch's kernels for the CPU. Random numbers of the device aren't known,
nor is what an operator of another library wrote. Nothing on the host allocates on the device, and
the device allocates as it would without.

Not followed: values within a higher-order operator, writes past the dispatcher (through DLPack or
storages resized by hand), threads that were started before or without :mod:`threading`, and what
``print`` shows of a tensor, for which PyTorch switches every mode off. One allocation isn't as
without: where gradients meet, autograd adds them into a new tensor as long as any mode is entered.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from memtrace.record.mode import Mode
from memtrace.virtual_gpu import values_graphs, values_unfollowed
from memtrace.virtual_gpu.values_choices import RULE, choose
from memtrace.virtual_gpu.values_known import PLACES, UNKNOWN, Known
from memtrace.virtual_gpu.values_mirrors import address
from memtrace.virtual_gpu.values_rules import Kind, Rule, rule_of
from memtrace.virtual_gpu.values_shapes import index, shaped

#: pytest shows the program's frames, not ours.
__tracebackhide__ = True

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_function_mode_active = torch._C._is_torch_function_mode_enabled

# What the arguments of a call are.
_ON_HOST, _MIRRORED, _UNKNOWN = 0, 1, 2

#: Rules by the identity of the operator.
_rules: dict[int, Rule] = {}


class Device(Mode):
    """What stands in for a device: answers operators that no mode above does."""

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator of plain tensors."""
        raise NotImplementedError


class Values(Mode):
    """Follows the values in one thread."""

    def __init__(self, known: Known, device: "Device | None") -> None:
        super().__init__()
        self._known = known
        self._mirrors = known.mirrors.of
        self._device = device
        #: Modes that are entered below: what fakes and traces stands there too.
        self._below = int(device is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The hot path: an operator on something unknown, which returns something unknown.
        rule = _rules.get(id(func))
        if rule is None:
            rule = _rules[id(func)] = rule_of(func)
        if types or _function_mode_active():
            return self._shielded(func, types, args, kwargs)
        device = self._device  # asked past the dispatcher, which would take longer than it does
        if rule.kind is Kind.PASS:
            if device is not None:
                return device.answer(func, args, kwargs or {})
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        given = self._scan(args)
        if kwargs and given != _UNKNOWN:
            given = max(given, self._scan(kwargs.values()))
        if values_graphs.recording is None and self._is_plain(rule, given, args, kwargs):
            if device is not None:
                return device.answer(func, args, kwargs or {})
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        return self._follow(rule, func, given, args, kwargs or {})

    def _is_plain(self, rule: Rule, given: int, args: Any, kwargs: Any) -> bool:
        """Whether a call needs nothing from us: no value is known before or after it."""
        kind = rule.kind
        if given == _UNKNOWN:
            if kind is Kind.PURE or rule.harmless:
                return True
            if kind is Kind.CAST:
                return not (kwargs and _to_host(kwargs))
            if kind is Kind.COPY:
                return self._is_unknown(args[0]) and self._scan(args[1:2]) == _UNKNOWN
            return rule.in_place and self._is_unknown(args[0])
        return given == _ON_HOST and not rule.has_device and kind is not Kind.OPAQUE

    def _is_unknown(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and self._scan((tensor,)) == _UNKNOWN

    def _shielded(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Calls with tensors of other kinds, or where asking a tensor anything is seen."""
        if all(kind is Tensor or kind is Parameter for kind in types):
            with torch._C.DisableTorchFunction():
                return self.__torch_dispatch__(func, (), args, kwargs)
        below = torch._C._len_torch_dispatch_stack()  # what fakes and traces stands below all modes
        if below > self._below or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        return NotImplemented  # a wrapper: what it calls on its inner tensors comes back here

    def _scan(self, arguments: Iterable[Any]) -> int:
        """What a call's arguments are, by a look at their storages only."""
        found = _ON_HOST
        mirrors = self._mirrors
        for argument in arguments:
            kind = type(argument)
            if kind is Tensor or kind is Parameter or isinstance(argument, Tensor):
                if argument.is_cuda:
                    try:
                        if address(argument) not in mirrors and argument.numel():
                            return _UNKNOWN
                    except RuntimeError:  # sparse
                        return _UNKNOWN
                    found = _MIRRORED
            elif (kind is list or kind is tuple) and argument and type(argument[0]) is not int:
                inner = self._scan(argument)
                if inner == _UNKNOWN:
                    return _UNKNOWN
                found = max(found, inner)
        return found

    def _follow(self, rule: Rule, func: Any, given: int, args: Any, kwargs: Any) -> Any:
        kind = rule.kind
        if torch._C._len_torch_dispatch_stack() > self._below:  # as in _shielded()
            return func(*args, **kwargs)
        if kind is Kind.COMPOSITE:
            # It arrives whole under inference mode.
            _push_mode(self)
            try:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
            finally:
                _pop_mode()
        if kind is Kind.OPAQUE:
            return func(*args, **kwargs)
        if given == _ON_HOST and _to_host(kwargs):
            return func._op(*args, **kwargs)
        # To wake other threads for so little takes longer than to do without them.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction():
                return self._call(rule, func, given, args, kwargs)
        finally:
            torch.set_num_threads(threads)

    def _call(self, rule: Rule, func: Any, given: int, args: Any, kwargs: Any) -> Any:
        known = self._known
        if values_graphs.recording is not None:
            return values_graphs.recording.call(known, rule, func, args, kwargs)
        match rule.kind:
            case Kind.CAST if args[0].is_cuda and _to_host(kwargs):
                return _read_copy(known, rule, func, args, kwargs)
            case Kind.COPY if not args[0].is_cuda:
                return _copy_to_host(known, rule, func, args, kwargs)
            case Kind.READ:
                return _read(known, rule, func, args, kwargs)
            case Kind.SHAPE:
                return shaped(known, rule, func, args, kwargs)
            case Kind.INDEX:
                return index(known, rule, func, args, kwargs)
            case Kind.CHOICE:
                return choose(known, rule, func, args, kwargs)
            case Kind.FILL:
                return _fill(known, rule, func, args, kwargs)
        out = func._op(*args, **kwargs)
        if rule.writes:
            known.overwritten(rule, func, args, kwargs, out)
        elif given != _UNKNOWN:
            known.returned(rule, func, args, kwargs, out)
        return out


def _to_host(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and device.type == "cpu"


def _read_copy(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    out = func._op(*args, **kwargs)
    value = known.value(args[0])
    if value is UNKNOWN:
        known.read_unknown(rule, out)
    else:
        out.copy_(value)
    return out


def _copy_to_host(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    out = func._op(*args, **kwargs)
    value = known.value(args[1])
    if value is UNKNOWN:
        known.read_unknown(rule, args[0])
    else:
        args[0].copy_(value)
    return out


def _read(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    out = func._op(*args, **kwargs)  # waits for the device, as a real one makes it wait
    value = known.compute(rule, func, args, kwargs)
    if value is not UNKNOWN:
        return value
    answer = known.read_unknown(rule)
    return out if answer is None else answer


def _fill(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    out = func._op(*args, **kwargs)
    if isinstance(out, Tensor) and out.is_cuda and out.layout == torch.strided:
        if rule.name in ("full_like", "new_full"):
            place = 1 if rule.name == "full_like" else 2
            value = args[place] if len(args) > place else kwargs["fill_value"]
        else:
            value = int("ones" in rule.name)
        known.mirrors.fill(out, value)
    return out


# -- the process -----------------------------------------------------------------------------------

_known = Known()
_thread = threading.local()
_started = False
_follow = True
#: Makes what stands below in each thread; None: PyTorch itself.
_make_device: "Callable[[], Device] | None" = None


def start(*, follow: bool = True, device: "Callable[[], Device] | None" = None) -> None:
    """Follow values in this thread, and in every one that starts from now on.

    Args:
        follow: else only see to it that the program needs none; :mod:`values_unfollowed` says how.
        device: makes the mode that answers operators in place of a device, for each thread. It
            tells :func:`told` of reads if values aren't followed.
    """
    global _started, _follow, _make_device
    if not follow and device is None:
        values_unfollowed.watch(_known)
        return
    _follow, _make_device = follow, device
    _enter()
    if _started:
        return
    _started = True
    # torch.tensor(…, device="cuda") copies to the device where no mode sees it, unless told to
    # show the copy, as fake tensors need it too.
    torch._C._set_only_lift_cpu_tensors(True)
    values_graphs.follow(_known)
    # As a context, torch.device knows makers by identity: those that ours call.
    _device_constructors()
    for maker in ("tensor", "as_tensor", "asarray"):
        setattr(torch, maker, _of_host_values(getattr(torch, maker)))
    plain = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    @functools.wraps(plain)
    def bootstrap(thread: threading.Thread) -> None:
        _enter()
        try:
            plain(thread)
        finally:
            _leave()  # PyTorch must not find it in a thread that Python has let go

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]


def _of_host_values(plain: Any) -> Any:
    """A maker of tensors that reads tensors inside its data where the mode sees it.

    PyTorch reads the elements of a sequence with every mode switched off.
    """

    @functools.wraps(plain)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(_on_host(data), *args, **kwargs)

    return make


def _on_host(data: Any) -> Any:
    if type(data) not in (list, tuple):
        return data
    return [one.cpu() if isinstance(one, Tensor) and one.is_cuda else _on_host(one) for one in data]


def _enter() -> None:
    """Enter this thread's mode below those that are there already."""
    if getattr(_thread, "modes", None):
        return
    above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
    device = None if _make_device is None else _make_device()
    _thread.modes = [] if device is None else [device]
    if _follow:
        _thread.modes.append(Values(_known, device))
    for mode in _thread.modes:
        mode.__enter__()
    for mode in reversed(above):
        _push_mode(mode)


def _leave() -> None:
    """Take the modes out of this thread, from below those that were entered over them."""
    modes, _thread.modes = _thread.modes, []
    stack = _get_current_dispatch_mode_stack()
    if not modes or modes[-1] not in stack:
        return
    above = [_pop_mode() for _ in stack[stack.index(modes[-1]) + 1 :]]
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)


def told(size: int) -> None:
    """``size`` bytes of a device are read on the host, while values aren't followed."""
    values_unfollowed.told(_known, size)


def count_read(op: str) -> None:
    """A host tensor of unknown contents is read, as where a plan's large tensors are fake."""
    _known.count_read(op)


def summary() -> dict[str, Any]:
    """What was read without being known, where, and what was chosen in place of a choice.

    Returns:
        ``places`` are the innermost frames outside torch and memtrace, most frequent first; None
        where there was none, as in a thread of autograd.
    """
    places = [
        {"where": where, "op": op, "count": count}
        for (where, op), count in _known.unread.most_common(PLACES)
    ]
    return {
        "unknown_reads": _known.unread.total(),
        "places": places,
        "placeholder": {
            "token choices": _known.choices["token choices"],
            "draft confidences": _known.choices["draft confidences"],
            "rule": RULE,
        },
        "mirror_bytes_peak": _known.mirrors.peak_bytes,
    }
