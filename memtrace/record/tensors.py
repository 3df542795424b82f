"""The tensor source: every storage that an operator allocates, on any device, meta and fake too.

A dispatch mode sees each operator below autograd. What it returns is an alias of something known
or a new storage, and a weak reference on the storage tells when that dies. Not seen: what a kernel
takes below the dispatcher (scratch buffers), and storages made without an operator (DLPack, files
mapped by safetensors) until they are adopted as a parameter, an input of a model or by a retag.

An exception here would surface in the user's program, or abort it where C++ called the operator. So
whatever is asked of an unknown operator or tensor may fail, and then counts as not seen.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor

from memtrace.components import among
from memtrace.record.ledger import Frame, Ledger
from memtrace.record.mode import Mode
from memtrace.trace.schema import Action

#: Codes in ``Frame.ops`` that are no contexts.
_ALIAS, _SPECIAL = -1, -2

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_function_mode_active = torch._C._is_torch_function_mode_enabled

#: Operators that put another storage, or another size of it, under a tensor that exists.
_RESIZING = {"aten::resize_", "aten::resize_as_", "aten::set_"}

#: Files whose frames say nothing about the user's program.
HIDDEN = (
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "virtual_gpu"),
    str(Path(__file__).parents[1] / "fake_gpu"),
    str(Path(torch.__file__).parent / "_ops.py"),
)

#: Operators by identity, and how to treat them. Holding on to them keeps the identities valid.
_codes: dict[int, tuple[Any, int | None]] = {}


def _code(operator: Any) -> int | None:
    """How the source treats an operator; None: what it returns may be new storages."""
    if not isinstance(operator, torch._ops.OpOverload):
        return _SPECIAL
    schema = operator._schema
    if schema.name in _RESIZING or any(argument.is_out for argument in schema.arguments):
        return _SPECIAL
    if _is_composite(operator):
        # A composite operator arrives whole under inference mode. Its temporaries show only when
        # it is taken apart, and one that is a view by its schema (reshape) may copy.
        return _SPECIAL
    if schema.name == "aten::lift_fresh":  # where torch.tensor() first meets the dispatcher
        return None
    if all(value.alias_info is not None for value in schema.returns):
        return _ALIAS  # a view, an in-place operator, or nothing returned
    return None


def _is_composite(operator: Any) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), _COMPOSITE))
    except RuntimeError:  # a prim:: operator, unknown to the dispatcher
        return False


class TensorSource(Mode):
    """Feeds a ledger with the storages of one thread: a mode belongs to the thread that enters it.

    Args:
        ledger: where the events go.
        place: holds the frame that the running code stands in; tasks of asyncio each have theirs.
        stacks: Python frames kept for each allocation; 0 keeps none.
    """

    def __init__(self, ledger: Ledger, place: ContextVar[Frame], stacks: int = 0) -> None:
        super().__init__()
        self.bind(ledger, place, stacks)

    def bind(self, ledger: Ledger, place: ContextVar[Frame], stacks: int) -> None:
        """Feed another ledger from now on."""
        self._ledger = ledger
        self._live = ledger.live
        self._allocate = ledger.allocate
        self._stacks = stacks
        self._frame = place.get  # a C function: this is on the path of every operator

    @property
    def ledger(self) -> Ledger:
        """Where the events go."""
        return self._ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The hot path: the usual operator, one new tensor on the CPU, is written out.
        frame = self._frame()
        context = frame.ops.get(id(func))
        if context is None:
            context = self._learn(frame, func)
        if context == _SPECIAL:
            return self._special(func, args, kwargs or {})
        # ``_op`` is what calling the overload ends in, without a Python call in between.
        out = func._op(*args, **kwargs) if kwargs else func._op(*args)
        if context != _ALIAS:
            if type(out) is Tensor and not _function_mode_active() and out.is_cpu:
                try:
                    storage = out.untyped_storage()
                except RuntimeError:  # sparse, or a wrapper of C++
                    self._ledger.without_storage += 1
                    return out
                key = storage._cdata
                if key not in self._live:
                    self._allocate(storage, key, context, frame.free)
                    return out
            self._returned(func, out)
        return out

    def _learn(self, frame: Frame, func: Any) -> int:
        """The code of an operator or its context in this frame, kept for the next call."""
        key = id(func)
        if key not in _codes:
            _codes[key] = func, _code(func)
        code = _codes[key][1]
        if code is None:
            code = self._context(func, "cpu")
            if self._stacks:
                return code  # another stack next time
        frame.ops[key] = code
        return code

    def _context(self, func: Any, device: str) -> int:
        ledger, frame = self._ledger, self._frame()
        scope = ledger.scope(frame.scope, "op", str(func))
        stack = ledger.stack(_stack(self._stacks)) if self._stacks else -1
        return ledger.context(Action.ALLOC, device, frame.component, scope, stack=stack)

    def _special(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, torch._ops.OpOverload) and _is_composite(func):
            with self:
                # PyTorch's own kernel: decompose() may prefer a Python one with other rounding.
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        out = func(*args, **kwargs)
        self._returned(func, out)
        return out

    def _returned(self, func: Any, out: Any) -> None:
        """Book what in ``out`` is new or has another size than it had."""
        if isinstance(out, Tensor):
            with torch._C.DisableTorchFunction():
                for device, storage in self.storages(out):
                    ref = self._ledger.find(storage)
                    elsewhere = self._ledger.cuda_threads
                    if elsewhere is not None and device.startswith("cuda"):
                        elsewhere.add(threading.current_thread())
                        continue
                    if ref is None:
                        free = self._ledger.context(Action.FREE, device, self._frame().component, 0)
                        context = self._context(func, device)
                        self._ledger.allocate(storage, storage._cdata, context, free)
                    elif ref.row[1] != storage.nbytes():
                        scope = self._ledger.scope(self._frame().scope, "op", str(func))
                        self._ledger.resize(ref, storage, scope)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._returned(func, item)

    def storages(self, tensor: Tensor) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Device and storage of a tensor; of each inner tensor where it only wraps others."""
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                yield from self.storages(getattr(tensor, name))
            return
        try:
            storage = tensor.untyped_storage()
            real = storage.device.type == "meta" or storage.data_ptr() or not storage.nbytes()
        except (RuntimeError, ValueError):  # sparse, opaque; lazy parameters raise the latter
            real = False
        if real:
            yield str(tensor.device), storage
        else:
            self._ledger.without_storage += 1

    def retag(self, tensor: Tensor, component: str, *, only: tuple[str, ...] | None = None) -> None:
        """As :class:`memtrace.record.source.Source` has it."""
        ledger = self._ledger
        with torch._C.DisableTorchFunction():
            for device, storage in self.storages(tensor):
                ref = ledger.find(storage)
                if ref is None:
                    self._adopt(device, storage, component)
                elif among(ledger.component_of(ref), only):
                    ledger.retag(ref, component, self._frame().scope)

    def adopt(self, tensor: Tensor, component: str) -> None:
        """As :class:`memtrace.record.source.Source` has it."""
        with torch._C.DisableTorchFunction():
            for device, storage in self.storages(tensor):
                if self._ledger.find(storage) is None:
                    self._adopt(device, storage, component)

    def _adopt(self, device: str, storage: torch.UntypedStorage, component: str) -> None:
        ledger = self._ledger
        scope = ledger.scope(self._frame().scope, "op", "adopted")
        ledger.allocate(
            storage,
            storage._cdata,
            ledger.context(Action.ALLOC, device, component, scope),
            ledger.context(Action.FREE, device, component, 0),
        )


class Within:
    """The running code stands in another frame for the length of a ``with`` block."""

    __slots__ = ("_inner", "_outer", "_place")
    #: Tells the CUDA allocator where the thread stands now; None: nobody records it.
    announce: ClassVar[Callable[[str], None] | None] = None

    def __init__(self, place: ContextVar[Frame], frame: Frame) -> None:
        self._place = place
        self._inner = frame

    def __enter__(self) -> None:
        self._outer = self._place.get()
        self._place.set(self._inner)
        if Within.announce is not None:
            Within.announce(self._inner.text)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._place.set(self._outer)
        if Within.announce is not None:
            Within.announce(self._outer.text)


def _stack(depth: int) -> tuple[str, ...]:
    """Up to ``depth`` Python frames that are the user's, innermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if not code.co_filename.startswith(HIDDEN):
            found.append(f"{code.co_filename}:{frame.f_lineno}:{code.co_qualname}")
        frame = frame.f_back
    return tuple(found)
