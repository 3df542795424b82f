"""What is known of the values on a virtual device, and what was read there that isn't."""

import sys
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import memtrace
from memtrace.virtual_gpu.values_mirrors import Mirrors, fits
from memtrace.virtual_gpu.values_rules import Rule, written

#: Stands for an argument whose values aren't known.
UNKNOWN = object()

#: Reads of an unknown value that are a choice themselves, and the stated answer: by module and
#: function. The draft of assisted decoding is always sure of itself; it is always accepted too,
#: since drafting and verifying choose the same placeholder.
_ANSWERS = {
    ("transformers.generation.stopping_criteria", "ConfidenceCriteria.__call__"): 1.0,
}

#: How the user would say it, where that isn't the operator's name.
_READS = {"_local_scalar_dense": "item", "_to_copy": "copy to host", "copy_": "copy to host"}

_OURS = tuple(f"{Path(module.__file__).parent}/" for module in (torch, memtrace) if module.__file__)

#: Places of unknown reads kept apart in a summary.
PLACES = 50


class Known:
    """Everything known of this process's device tensors, shared by its threads."""

    def __init__(self) -> None:
        self.mirrors = Mirrors()
        self.unread: Counter[tuple[str | None, str]] = Counter()
        self.choices: Counter[str] = Counter()
        self._unread_copies: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    # -- computing on the host -----------------------------------------------------------------

    def value(self, argument: Any) -> Any:
        """An argument as the host needs it to compute the same, or ``UNKNOWN``."""
        if isinstance(argument, Tensor):
            if argument.is_cuda:
                value = self.mirrors.value(argument)
                return UNKNOWN if value is None else value
            if argument.device.type != "cpu" or argument.layout != torch.strided:
                return UNKNOWN
            if self._unread_copies and argument.untyped_storage() in self._unread_copies:
                return UNKNOWN  # it came from the device, and goes back there
            return argument
        if isinstance(argument, (list, tuple)):
            values = [self.value(item) for item in argument]
            return UNKNOWN if any(item is UNKNOWN for item in values) else values
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        return UNKNOWN if isinstance(argument, torch.Generator) else argument

    def compute(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator that overwrites nothing returns on the host, or ``UNKNOWN``."""
        if not rule.computable:
            return UNKNOWN
        values = [self.value(argument) for argument in args]
        named = {name: self.value(argument) for name, argument in kwargs.items()}
        if any(value is UNKNOWN for value in (*values, *named.values())):
            return UNKNOWN
        if rule.has_device:
            named["device"] = torch.device("cpu")
            named.pop("pin_memory", None)
        try:
            return func._op(*values, **named)
        except Exception:  # no such operator on the host, or the device would have asserted
            return UNKNOWN

    def bind(self, out: Any, value: Any) -> None:
        """The new tensors in ``out`` hold what ``value`` holds; nothing if that is ``UNKNOWN``."""
        if isinstance(out, Tensor):
            if isinstance(value, Tensor) and out.is_cuda:
                self.mirrors.bind(out, value)
        elif isinstance(out, (list, tuple)) and isinstance(value, (list, tuple)):
            for item, part in zip(out, value, strict=False):
                self.bind(item, part)

    def returned(self, rule: Rule, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute what is in ``out``, as far as it is small enough to be kept."""
        if _any_fits(out):
            self.bind(out, self.compute(rule, func, args, kwargs))

    def overwritten(self, rule: Rule, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The same for an operator that has just written to some of its arguments."""
        value = self._write(rule, func, args, kwargs)
        for target in written(rule, args, kwargs):
            if target.is_cuda:
                self.mirrors.wrote(target, known=value is not UNKNOWN)
        self.bind(out, value)

    def _write(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """Repeat a writing operator on the mirrors."""
        if not rule.computable:
            return UNKNOWN
        blind = {name for _, name, read in rule.writes if not read}
        places = {place: name for place, name, _ in rule.writes}
        values = list(args)
        named = dict(kwargs)
        for place, argument in enumerate(args):
            if places.get(place) not in blind:
                values[place] = self.value(argument)
        for name, argument in kwargs.items():
            if name not in blind:
                named[name] = self.value(argument)
        if any(value is UNKNOWN for value in (*values, *named.values())):
            return UNKNOWN
        for place, argument in enumerate(args):
            if places.get(place) in blind:
                values[place] = self._target(argument)
        for name in blind & kwargs.keys():
            named[name] = self._target(kwargs[name])
        if any(value is UNKNOWN for value in (*values, *named.values())):
            return UNKNOWN
        try:
            return func._op(*values, **named)
        except Exception:  # as in compute()
            return UNKNOWN

    def _target(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        value = self.mirrors.target(argument) if argument.is_cuda else None
        return UNKNOWN if value is None else value

    # -- reads ---------------------------------------------------------------------------------

    def read_unknown(self, rule: Rule, copy: Tensor | None = None) -> Any:
        """Count a read of something unknown, into the host tensor ``copy`` perhaps.

        Returns:
            The stated answer where the read is a choice in itself, else None.
        """
        if copy is not None:
            self._unread_copies.add(copy.untyped_storage())
        frame = _user_frame()
        if frame is None:
            where = None
        else:
            code = frame.f_code
            answer = _ANSWERS.get((frame.f_globals.get("__name__", ""), code.co_qualname))
            if answer is not None and rule.name == "_local_scalar_dense":
                self.choices["draft confidences"] += 1
                return answer
            where = f"{code.co_filename}:{frame.f_lineno}:{code.co_qualname}"
        self.unread[where, _READS.get(rule.name, rule.name)] += 1
        return None

    def count_read(self, op: str) -> None:
        """Count a read of something unknown."""
        frame = _user_frame()
        where = None
        if frame is not None:
            code = frame.f_code
            where = f"{code.co_filename}:{frame.f_lineno}:{code.co_qualname}"
        self.unread[where, op] += 1


def _user_frame() -> FrameType | None:
    """The innermost frame outside torch and memtrace; a library's counts as the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def _any_fits(out: Any) -> bool:
    if isinstance(out, Tensor):
        if not out.is_cuda or out.layout != torch.strided:
            return False
        try:
            return fits(out, out.untyped_storage().nbytes())
        except RuntimeError:  # a C++ wrapper
            return False
    return isinstance(out, (list, tuple)) and any(_any_fits(item) for item in out)
