"""Rows that many events name, each kept and written once."""

from collections.abc import Iterable
from typing import Any


class Interned:
    """Rows numbered from 0 in order of appearance, and which of them are not yet written.

    Args:
        forgotten: what a forked child, which writes all of them again, has for those that are gone.
    """

    def __init__(self, forgotten: tuple[Any, ...]) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.rows: dict[int, tuple[Any, ...]] = {}
        self._forgotten = forgotten
        self._next = 0
        self._new: list[tuple[Any, ...]] = []

    def number(self, row: tuple[Any, ...]) -> int:
        """The number of a row; the same row has the same one until it is forgotten."""
        found = self._numbers.get(row)
        if found is None:
            # The row stands before anyone can learn its number.
            found, self._next = self._next, self._next + 1
            self.rows[found] = row
            self._new.append(row)
            self._numbers[row] = found
        return found

    def take_new(self) -> list[tuple[Any, ...]]:
        """The rows that are to be written next."""
        new = self._new[:]
        del self._new[: len(new)]
        return new

    def forget(self, numbers: Iterable[int]) -> None:
        """Nobody will ask for these again, and they are written: an equal row gets a new number."""
        for number in numbers:
            del self._numbers[self.rows.pop(number)]

    def begin_again(self) -> None:
        """Write every row once more, those that are gone as one that stands for them."""
        self._new = [self.rows.get(number, self._forgotten) for number in range(self._next)]
