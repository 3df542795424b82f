"""The tables of one process of a run that is made from another tool's file."""

from pathlib import Path
from typing import Any

import numpy as np

from memtrace.allocator.history import FIELDS
from memtrace.errors import MemtraceError
from memtrace.trace.schema import TABLES, Action
from memtrace.trace.writer import TableWriter

#: Rows of a batch of events.
_BATCH = 1 << 16


class Tables:
    """Numbers scopes, stacks and contexts as the ledger of a recorder does, and writes them.

    Args:
        name: of the process, in the root of its scopes.
        texts: bytes that all texts together may take: a few that are shared can make for many rows.
    """

    def __init__(self, name: str, texts: int) -> None:
        self._left = texts
        self._scopes: dict[tuple[int, str, str], int] = {}
        self._stacks: dict[tuple[str, ...], int] = {}
        self._contexts: dict[tuple[Any, ...], int] = {}
        self.scope(-1, "process", name)

    def scope(self, parent: int, kind: str, name: str) -> int:
        """The number of a scope."""
        key = (parent, kind, name)
        if key not in self._scopes:
            self._count(len(name))
            self._scopes[key] = len(self._scopes)
        return self._scopes[key]

    def stack(self, frames: tuple[str, ...]) -> int:
        """The number of a call stack, innermost frame first."""
        found = self._stacks.get(frames)
        if found is None:
            self._count(sum(map(len, frames)))
            found = self._stacks[frames] = len(self._stacks)
        return found

    def context(
        self,
        action: Action,
        device: str,
        component: str | None,
        scope: int,
        previous: str | None = None,
        stack: int = -1,
        stream: int = 0,
        pool: str | None = None,
    ) -> int:
        """The number of a context."""
        key = (int(action), device, stream, pool, component, previous, scope, stack)
        return self._contexts.setdefault(key, len(self._contexts))

    def contexts_of(self, action: Action, device: str) -> list[int]:
        """The numbers of all contexts of an action on a device."""
        keys = self._contexts.items()
        return [number for key, number in keys if key[:2] == (int(action), device)]

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise MemtraceError("its texts would fill more than a file of its size explains")

    def write(self, folder: Path, events: np.ndarray) -> None:
        """Write these tables and ``events``, (n, 5) int64, into an existing folder.

        Raises:
            OSError: the disk is full.
        """
        with TableWriter(folder) as writer:
            for table, rows in (
                ("scopes", list(self._scopes)),
                ("stacks", [(frames,) for frames in self._stacks]),
                ("contexts", list(self._contexts)),
            ):
                writer.append_rows(table, rows)
            names = TABLES["events"].names
            for start in range(0, len(events), _BATCH):
                columns = events[start : start + _BATCH].reshape(-1, FIELDS).T
                writer.append("events", dict(zip(names, columns, strict=True)))


def clean(text: str) -> str:
    """``text`` as UTF-8 can hold it: a lone surrogate becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
