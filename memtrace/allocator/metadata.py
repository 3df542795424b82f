"""The texts that the allocator's history carries for us: what a block is when it is born, and what
it becomes.

``memtrace:Act|phase=prefill|layer=3`` is set as the memory metadata of a thread (torch ≥ 2.10) and
says component and scope of what is allocated. ``memtrace>Hidden?Act|phase=prefill`` annotates a
tensor (torch ≥ 2.14): its block joins ``Hidden`` if it belongs to ``Act``. ``memtrace<Act|…`` says
that it was born there, whatever its metadata says. PyTorch's own viewer shows them as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, unquote

from memtrace.components import among, base

BIRTH, RETAG, BORN = "memtrace:", "memtrace>", "memtrace<"
#: Left as they are in names; ``|``, ``=``, ``?``, ``%`` and control characters are not.
_READABLE = " !\"#$&'()*+,/:;<>@[\\]^`{}"

#: From the outermost scope: (kind, name).
Path = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Retag:
    """What an annotation of a tensor means: its block joins ``component``, or stays where it is.

    Only if it belongs to one of ``only`` (with or without detail), where that is given.
    """

    component: str | None
    scope: int
    only: tuple[str, ...] | None = None
    born: bool = False  # it has always been there

    def applies(self, component: str) -> bool:
        """Whether a block of ``component`` changes to ours."""
        return component != self.component and among(component, self.only)


class Books(Protocol):
    """What numbers scopes and stacks: the ledger of a recorder, or that of an import."""

    def scope(self, parent: int, kind: str, name: str) -> int: ...

    def stack(self, frames: tuple[str, ...]) -> int: ...


def birth_text(component: str, path: Path) -> str:
    """The memory metadata under which bytes of ``component`` are allocated in ``path``."""
    return BIRTH + "|".join([_quote(component), *_scopes(path)])


def retag_text(component: str | None, path: Path, only: Sequence[str] | None) -> str:
    """The annotation that makes a block join ``component``; None: that only says where it was."""
    condition = "" if only is None else "?" + ",".join(map(_quote, only))
    return RETAG + "|".join([_quote(component or "") + condition, *_scopes(path)])


def born_text(component: str, path: Path) -> str:
    """The annotation that says that a block was allocated as ``component`` in ``path``."""
    return BORN + "|".join([_quote(component), *_scopes(path)])


def _scopes(path: Path) -> list[str]:
    return [f"{_quote(kind)}={_quote(name)}" for kind, name in path]


def _quote(text: str) -> str:
    return quote(text, safe=_READABLE)


class Names:
    """Reads the texts and frames of history entries; texts of others become scopes of theirs.

    Args:
        books: number scopes and stacks.
        hidden: files whose Python frames say nothing about the user's program.
        depth: frames of a stack that are kept.
    """

    def __init__(self, books: Books, hidden: tuple[str, ...] = (), depth: int = 1 << 30) -> None:
        self._books = books
        self._hidden = hidden
        self._depth = depth
        self._births: dict[str, tuple[str, int]] = {}
        self._retags: dict[str, Retag | None] = {}

    def forget(self) -> None:
        """Read every text anew from now on."""
        self._births.clear()
        self._retags.clear()

    def birth(self, metadata: str) -> tuple[str, int]:
        """Component and scope of what is allocated under a memory metadata."""
        found = self._births.get(metadata)
        if found is None:
            found = self._births[metadata] = self._parse_birth(metadata)
        return found

    def _parse_birth(self, metadata: str) -> tuple[str, int]:
        component, *scopes = metadata.removeprefix(BIRTH).split("|")
        if metadata.startswith(BIRTH) and is_component(unquote(component)):
            return unquote(component), self._scope(scopes)
        # Somebody else's text is kept, as a scope that rules can match.
        return "other", self._books.scope(0, "tag", metadata) if metadata else 0

    def retag(self, text: str) -> Retag | None:
        """The meaning of an annotation; None: somebody else's."""
        if text not in self._retags:
            self._retags[text] = self._parse_retag(text)
        return self._retags[text]

    def _parse_retag(self, text: str) -> Retag | None:
        if not text.startswith((RETAG, BORN)):
            return None
        head, *scopes = text[len(RETAG) :].split("|")
        component, conditional, only = head.partition("?")
        born = text.startswith(BORN)
        if (component or born) and not is_component(unquote(component)):
            return None
        among = tuple(unquote(one) for one in only.split(",") if one) if conditional else None
        return Retag(unquote(component) or None, self._scope(scopes), among, born)

    def _scope(self, scopes: Sequence[str]) -> int:
        number = 0
        for text in scopes:
            kind, _, name = text.partition("=")
            number = self._books.scope(number, unquote(kind), unquote(name))
        return number

    def stack(self, frames: Sequence[Mapping[str, Any]]) -> int:
        """The number of a call stack, innermost frame first, without those that are hidden."""
        shown = (frame for frame in frames if not str(frame["filename"]).startswith(self._hidden))
        lines = [f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in shown]
        return self._books.stack(tuple(lines[: self._depth]))


def is_component(text: str) -> bool:
    """Whether a text names a tensor component, with or without detail."""
    try:
        base(text)
    except ValueError:
        return False
    return True
