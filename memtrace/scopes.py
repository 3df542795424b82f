"""What instrumented code calls. Nearly free while nothing records.

    with scopes.request("q1", prompt_tokens=4096) as request:
        with scopes.phase("prefill"), scopes.layer(3), scopes.chunk(0):
            with scopes.component("Act"):
                ...                                  # storages born here are Act
            scopes.retag(keys, "KV_res/full")        # this one is resident KV from now on

Scopes nest and form a tree (request → phase → layer → chunk); a component holds until an inner
:func:`component` overrides it and wins over every automatic rule. Scopes belong to the thread
that entered them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Request:
    """One request while it runs. Assign ``generated_tokens``; call :meth:`first_token` once."""

    generated_tokens: int | None = None
    #: "ok", "oom" or "error"; None = decided by how the scope is left.
    outcome: str | None = None

    def first_token(self) -> None:
        """Mark the moment at which the first token is known."""


class Sink(Protocol):
    """What a recorder provides to these functions."""

    def component(self, component: str) -> AbstractContextManager[None]: ...

    def scope(self, kind: str, name: str) -> AbstractContextManager[None]: ...

    def request(self, name: str, prompt_tokens: int | None) -> AbstractContextManager[Request]: ...

    def retag(self, tensor: Any, component: str) -> None: ...


_sink: Sink | None = None
_NOTHING: AbstractContextManager[None] = nullcontext()


def attach(sink: Sink | None) -> None:
    """Send scopes to ``sink`` from now on; None detaches. Called by the recorder only."""
    global _sink
    _sink = sink


def recording() -> bool:
    """Whether a recorder listens."""
    return _sink is not None


def component(component: str) -> AbstractContextManager[None]:
    """Storages allocated inside belong to ``component``, e.g. ``"Act"`` or ``"KV_res/full"``.

    Raises:
        ValueError: not a tensor component (only while something records).
    """
    return _NOTHING if _sink is None else _sink.component(component)


def retag(tensor: Any, component: str) -> None:
    """The storage of ``tensor`` belongs to ``component`` from now on.

    Raises:
        ValueError: not a tensor component (only while something records).
    """
    if _sink is not None:
        _sink.retag(tensor, component)


def request(name: str, prompt_tokens: int | None = None) -> AbstractContextManager[Request]:
    """One request of a workload; leaving it by an exception records ``oom`` or ``error``."""
    if _sink is None:
        return nullcontext(Request())
    return _sink.request(name, prompt_tokens)


def phase(name: str) -> AbstractContextManager[None]:
    """``"prefill"``, ``"score"``, ``"compress"``, ``"decode"``, …"""
    return _NOTHING if _sink is None else _sink.scope("phase", name)


def layer(index: int) -> AbstractContextManager[None]:
    """The decoder layer that runs, from 0."""
    return _NOTHING if _sink is None else _sink.scope("layer", str(index))


def chunk(index: int) -> AbstractContextManager[None]:
    """The prompt chunk that runs, from 0."""
    return _NOTHING if _sink is None else _sink.scope("chunk", str(index))
