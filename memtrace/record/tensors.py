"""The tensor source: every storage that an operator allocates, on any device, meta and fake too.

A dispatch mode sees each operator below autograd. What it returns is an alias of something known
or a new storage, and a weak reference on the storage tells when that dies. Not seen: what a kernel
takes below the dispatcher (scratch buffers), and storages made without an operator (DLPack, files
mapped by safetensors) until they are adopted as a parameter, an input of a model or by a retag.
"""

import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memtrace.record.ledger import Frame, Ledger
from memtrace.trace.schema import Action

#: Codes in ``Frame.ops`` that are no contexts.
_ALIAS, _SPECIAL = -1, -2

_STRIDED = torch.strided

#: Operators that put another storage, or another size of it, under a tensor that exists.
_RESIZING = {"aten::resize_", "aten::resize_as_", "aten::set_"}

#: Files whose frames say nothing about the user's program.
_HIDDEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent / "_ops.py"))

#: Operators, by identity, that do not simply return new storages. Operators live for ever.
_codes: dict[int, int | None] = {}


def _code(operator: Any) -> int | None:
    """How the source treats an operator; None: what it returns may be new storages."""
    if not isinstance(operator, torch._ops.OpOverload):
        return _SPECIAL
    schema = operator._schema
    if schema.name in _RESIZING or any(argument.is_out for argument in schema.arguments):
        return _SPECIAL
    if operator._can_decompose():
        # A composite operator arrives whole under inference mode. Its temporaries show only when
        # it is taken apart, and one that is a view by its schema (reshape) may copy.
        return _SPECIAL
    if schema.name == "aten::lift_fresh":  # where torch.tensor() first meets the dispatcher
        return None
    if all(value.alias_info is not None for value in schema.returns):
        return _ALIAS  # a view, an in-place operator, or nothing returned
    return None


class TensorSource(TorchDispatchMode):
    """Feeds a ledger with the storages of one thread: a mode belongs to the thread that enters it.

    Args:
        ledger: where the events go.
        stacks: Python frames kept for each allocation; 0 keeps none.
    """

    supports_higher_order_operators = True

    def __init__(self, ledger: Ledger, stacks: int = 0) -> None:
        super().__init__()
        self.frame: Frame = ledger.frame("other", 0, explicit=False)
        self._ledger = ledger
        self._live = ledger.live
        self._stacks = stacks

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that True puts around each call costs more than our own work

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The hot path: the usual operator, one new tensor on the CPU, is written out.
        frame = self.frame
        context = frame.ops.get(id(func))
        if context is None:
            context = self._learn(frame, func)
        if context == _SPECIAL:
            return self._special(func, args, kwargs or {})
        # ``_op`` is what calling the overload ends in, without a Python call in between.
        out = func._op(*args, **kwargs) if kwargs else func._op(*args)
        if context != _ALIAS:
            if type(out) is Tensor and out.is_cpu and out.layout is _STRIDED:
                storage = out.untyped_storage()
                if storage._cdata not in self._live:
                    self._ledger.allocate(storage, context, frame.free)
                    return out
            self._returned(func, out)
        return out

    def _learn(self, frame: Frame, func: Any) -> int:
        """The code of an operator or its context in this frame, kept for the next call."""
        key = id(func)
        if key not in _codes:
            _codes[key] = _code(func)
        code = _codes[key]
        if code is None:
            code = self._context(func, "cpu")
            if self._stacks:
                return code  # another stack next time
        frame.ops[key] = code
        return code

    def _context(self, func: Any, device: str) -> int:
        ledger, frame = self._ledger, self.frame
        scope = ledger.scope(frame.scope, "op", str(func))
        stack = ledger.stack(_stack(self._stacks)) if self._stacks else -1
        return ledger.context(Action.ALLOC, device, frame.component, scope, stack=stack)

    def _special(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._returned(func, out)
        return out

    def _returned(self, func: Any, out: Any) -> None:
        """Book what in ``out`` is new or has another size than it had."""
        if isinstance(out, Tensor):
            storage = self._storage(out)
            if storage is None:
                return
            ref = self._ledger.find(storage)
            if ref is None:
                device = str(out.device)
                free = self._ledger.context(Action.FREE, device, self.frame.component, 0)
                self._ledger.allocate(storage, self._context(func, device), free)
            elif ref.row[1] != storage.nbytes():
                scope = self._ledger.scope(self.frame.scope, "op", str(func))
                self._ledger.resize(ref, storage, scope)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._returned(func, item)

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            self._ledger.without_storage += 1
            return None

    def component_of(self, tensor: Tensor) -> str | None:
        """The component of a tensor's storage; None when it isn't booked."""
        storage = self._storage(tensor)
        ref = storage and self._ledger.find(storage)
        return self._ledger.component_of(ref) if ref else None

    def retag(self, tensor: Tensor, component: str) -> None:
        """The storage of ``tensor`` belongs to ``component``; one that wasn't booked is adopted."""
        storage = self._storage(tensor)
        if storage is None:
            return
        ledger = self._ledger
        ref = ledger.find(storage)
        if ref is not None:
            ledger.retag(ref, component, self.frame.scope)
            return
        device = str(tensor.device)
        scope = ledger.scope(self.frame.scope, "op", "adopted")
        ledger.allocate(
            storage,
            ledger.context(Action.ALLOC, device, component, scope),
            ledger.context(Action.FREE, device, component, 0),
        )


class Within:
    """A source stands in another frame for the length of a ``with`` block."""

    __slots__ = ("_inner", "_outer", "_source")

    def __init__(self, source: TensorSource, frame: Frame) -> None:
        self._source = source
        self._inner = frame

    def __enter__(self) -> None:
        self._outer = self._source.frame
        self._source.frame = self._inner

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._source.frame = self._outer


def _stack(depth: int) -> tuple[str, ...]:
    """Up to ``depth`` Python frames that are the user's, innermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if not code.co_filename.startswith(_HIDDEN):
            found.append(f"{code.co_filename}:{frame.f_lineno}:{code.co_qualname}")
        frame = frame.f_back
    return tuple(found)
