"""What attribution rules are made of: a frame that code runs in, and functions that are wrapped."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from memtrace.record.ledger import Frame, Ledger
from memtrace.record.source import Source
from memtrace.record.tensors import Within

Function = Callable[..., Any]


class Rule:
    """A component and scopes that a rule enters."""

    __slots__ = ("component", "scopes")

    def __init__(self, component: str, *scopes: tuple[str, str]) -> None:
        self.component = component
        self.scopes = scopes

    def run(
        self,
        place: ContextVar[Frame],
        ledger: Ledger,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What ``function`` returns, called in the rule's frame.

        Does as :class:`Within`, in a third of its time: this runs at every step of every layer.
        """
        outer = place.get()
        inner = outer.inner.get(self) or self._enter(outer, ledger)
        place.set(inner)
        if Within.announce is not None:
            Within.announce(inner.text)
        try:
            return function(*args, **kwargs)
        finally:
            place.set(outer)
            if Within.announce is not None:
                Within.announce(outer.text)

    def _enter(self, outer: Frame, ledger: Ledger) -> Frame:
        scope = outer.scope
        for kind, name in self.scopes:
            if kind != "phase" or "phase" not in outer.kinds:  # the user's own phase stands
                scope = ledger.scope(scope, kind, name)
        inner = outer.inner[self] = ledger.frame(self.component, scope, explicit=False)
        return inner


class Wrapping:
    """Puts functions of PyTorch and transformers inside rules, and takes them out again.

    Args:
        ledger: the books.
        place: holds the frame that the running code stands in.
        source: gives the calling thread's source.
    """

    def __init__(
        self, ledger: Ledger, place: ContextVar[Frame], source: Callable[[], Source]
    ) -> None:
        self.ledger = ledger
        self.place = place
        self.source = source
        #: Whether the rules hold: what modules imported of a wrapped function outlives it.
        self.active = True
        #: What :meth:`remove` calls, last first.
        self.undo: list[Callable[[], object]] = []

    def remove(self) -> None:
        """Put back what was there before."""
        self.active = False
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
        """Replace ``owner.name``, found in the owner itself, by ``wrapper`` of it."""
        plain = vars(owner)[name]
        is_classmethod = isinstance(plain, classmethod)
        wrapped: Any = classmethod(wrapper(plain.__func__)) if is_classmethod else wrapper(plain)
        try:
            setattr(owner, name, wrapped)
        except (AttributeError, TypeError):  # a class of the user's that can't be changed
            return

        def undo() -> None:
            if vars(owner).get(name) is wrapped:  # else somebody wrapped it in turn: leave theirs
                setattr(owner, name, plain)

        self.undo.append(undo)

    def in_rule(
        self, rule: Rule, then: Callable[..., None] | None = None
    ) -> Callable[[Function], Function]:
        """A wrapper that runs a function in a rule's frame, unless the component is explicit.

        Args:
            rule: the rule.
            then: called afterwards, outside the frame, with the function's arguments.
        """
        place, ledger = self.place, self.ledger

        def wrap(plain: Function) -> Function:
            @functools.wraps(plain)
            def ruled(*args: Any, **kwargs: Any) -> Any:
                if not self.active or place.get().explicit:
                    return plain(*args, **kwargs)
                self.source()  # this may be the first that the thread does under recording
                out = rule.run(place, ledger, plain, args, kwargs)
                if then is not None:
                    then(*args, **kwargs)
                return out

            return ruled

        return wrap
