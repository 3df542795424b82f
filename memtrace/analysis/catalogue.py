"""All allocations of an account: found by what, where, how large and how long, a page at a time."""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.lifetimes import Lifetimes
from memtrace.analysis.peaks import Group
from memtrace.analysis.places import Place, place
from memtrace.components import among
from memtrace.trace.reader import Columns


class Order(StrEnum):
    """What a page is sorted by, the largest first; of equal ones the earlier first."""

    SIZE = "size"
    LIFETIME = "lifetime"
    PRODUCT = "size x lifetime"
    LATEST = "latest"


@dataclass(frozen=True)
class Query:
    """What is looked for; everything has to hold.

    Attributes:
        words: parts of the place or of frames of the stack, in whatever case, separated by commas;
            "layer 7" is not a part of "layer 71".
        components: any of these, with their details; empty: whichever.
        bytes: the least and the most; None: no limit.
        lifetime_us: the same.
        kept: only what wasn't freed in the recording.
    """

    words: str = ""
    components: tuple[str, ...] = ()
    bytes: tuple[int | None, int | None] = (None, None)
    lifetime_us: tuple[int | None, int | None] = (None, None)
    kept: bool = False


@dataclass(frozen=True)
class Allocation:
    """One of them; bytes and microseconds.

    Attributes:
        component: the one it had last.
        born_us: since the run began.
        lifetime_us: until it was freed, or else until the recording ends.
        freed: whether it was.
    """

    event: int
    component: str
    bytes: int
    requested: int
    born_us: int
    lifetime_us: int
    freed: bool
    place: Place
    stack: tuple[str, ...]


@dataclass(frozen=True)
class HotSpot:
    """What the same operator in the same kind of place made: a group of allocations, live or not.

    ``byte_seconds``: the sum of size x lifetime.
    """

    group: Group
    byte_seconds: float


@dataclass(frozen=True)
class Catalogue:
    """Allocations are rows of ``account.lives.born``; columns of them are made when asked for."""

    account: Account

    def find(self, query: Query) -> np.ndarray:
        """The rows that match, ascending (int64)."""
        rows = np.arange(len(self._lives.born))
        if query.words.strip():
            rows = rows[self._said(query.words)[self._context_of(self._lives.born[rows])]]
        if query.components:
            names = self._contexts["component"]
            chosen = np.array([bool(one) and among(one, query.components) for one in names], bool)
            rows = rows[chosen[self._context_of(self._labels[rows])]]
        if query.kept:
            rows = rows[~self._freed(rows)]
        if query.bytes != (None, None):
            rows = rows[_within(self._bytes(rows), query.bytes)]
        if query.lifetime_us != (None, None):
            rows = rows[_within(self._lifetime_us(rows), query.lifetime_us)]
        return rows

    def page(self, rows: np.ndarray, order: Order, start: int, count: int) -> np.ndarray:
        """``rows`` in that order, from ``start`` on."""
        values = {
            Order.SIZE: self._bytes,
            Order.LIFETIME: self._lifetime_us,
            Order.PRODUCT: self._byte_seconds,
            Order.LATEST: lambda rows: rows,
        }[order](rows)
        stop = min(start + count, len(rows))
        if start >= stop:
            return rows[:0]
        # Only what comes before the end of the page is sorted.
        least = -np.partition(-values, stop - 1)[stop - 1]
        candidates = np.flatnonzero(values >= least)
        sorted_ = candidates[np.argsort(-values[candidates], kind="stable")]
        return np.asarray(rows[sorted_[start:stop]])

    def read(self, rows: np.ndarray) -> list[Allocation]:
        """The rows themselves."""
        lives, events = self._lives, self.account.process.events
        born = lives.born[rows]
        contexts = self._context_of(born)
        columns = (
            born,
            self._context_of(self._labels[rows]),
            events["bytes"][born],
            events["requested"][born],
            self.account.time_us[born],
            self._lifetime_us(rows),
            self._freed(rows),
            self._contexts["scope"][contexts],
            self._contexts["stack"][contexts],
        )
        components = self._contexts["component"]
        return [
            Allocation(
                event,
                components[label],
                size,
                requested,
                born_us,
                lifetime_us,
                freed,
                self._places[scope],
                self._frames(stack),
            )
            for event, label, size, requested, born_us, lifetime_us, freed, scope, stack in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]

    def hot_spots(self, rows: np.ndarray, count: int) -> list[HotSpot]:
        """Groups of ``rows``, those with the largest size x lifetime first."""
        groups, of_context = self._groups
        component = self._components
        many = len(component[0])
        contexts = self._context_of(self._lives.born[rows])
        code = of_context[contexts] * many + component[1][self._context_of(self._labels[rows])]
        weight = np.bincount(code, self._byte_seconds(rows))
        chosen = np.argsort(-weight, kind="stable")[:count]
        chosen = chosen[np.bincount(code, minlength=len(weight))[chosen] > 0]
        return [
            HotSpot(
                self._group(groups[one // many], component[0][one % many], rows[code == one]),
                float(weight[one]),
            )
            for one in chosen.tolist()
        ]

    def _group(self, key: tuple[Place, int], component: str, rows: np.ndarray) -> Group:
        scopes = self._contexts["scope"][np.unique(self._context_of(self._lives.born[rows]))]
        layers = {self._places[scope].layer for scope in scopes.tolist()}
        return Group(
            component=component,
            place=key[0],
            layers=tuple(sorted(layer for layer in layers if layer is not None)),
            stack=self._frames(key[1]),
            count=len(rows),
            bytes=int(self._bytes(rows).sum()),
        )

    # -- columns -----------------------------------------------------------------------------------

    @property
    def _lives(self) -> Lifetimes:
        return self.account.lives

    @cached_property
    def _labels(self) -> np.ndarray:
        """Of each allocation the event that says which component it has in the end."""
        return self._lives.labels_at(len(self.account.process.events["id"]))

    def _context_of(self, events: np.ndarray) -> np.ndarray:
        return np.asarray(self.account.process.events["context"][events])

    @property
    def _contexts(self) -> Columns:
        return self.account.process.contexts

    def _bytes(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.account.process.events["bytes"][self._lives.born[rows]])

    def _freed(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self._lives.freed[rows] < len(self.account.time_us))

    def _lifetime_us(self, rows: np.ndarray) -> np.ndarray:
        time_us = self.account.time_us
        ends = np.minimum(self._lives.freed[rows], len(time_us) - 1)
        return np.asarray(time_us[ends] - time_us[self._lives.born[rows]])

    def _byte_seconds(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self._bytes(rows) * (self._lifetime_us(rows) / 1e6))

    # -- places ------------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> list[Place]:
        """By scope."""
        process = self.account.process
        return [place(process, scope) for scope in range(len(process.scopes["parent"]))]

    def _frames(self, stack: int) -> tuple[str, ...]:
        stacks = self.account.process.stacks["frames"]
        return tuple(stacks[stack] or ()) if stack >= 0 else ()

    @cached_property
    def _texts(self) -> tuple[list[str], np.ndarray]:
        """What is searched, in small letters; and by context which of it."""
        found: dict[tuple[int, int], int] = {}
        numbers = [found.setdefault(pair, len(found)) for pair in self._pairs]
        texts = [
            "\n".join((str(self._places[scope]), *self._frames(stack))).lower()
            for scope, stack in found
        ]
        return texts, np.array(numbers, dtype=np.int32)

    @cached_property
    def _groups(self) -> tuple[list[tuple[Place, int]], np.ndarray]:
        """Kinds of places, with a stack each; and by context which of them."""
        folded = [one.folded() for one in self._places]
        found: dict[tuple[Place, int], int] = {}
        numbers = [
            found.setdefault((folded[scope], stack), len(found)) for scope, stack in self._pairs
        ]
        return list(found), np.array(numbers, dtype=np.int64)

    @cached_property
    def _components(self) -> tuple[list[str], np.ndarray]:
        """Components with their details; and by context which of them."""
        found: dict[str, int] = {}
        names = self._contexts["component"]
        numbers = [found.setdefault(name or "", len(found)) for name in names]
        return list(found), np.array(numbers, dtype=np.int64)

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """Scope and stack of each context."""
        columns = (self._contexts[name].tolist() for name in ("scope", "stack"))
        return list(zip(*columns, strict=True))

    def _said(self, words: str) -> np.ndarray:
        """Which contexts' places or stacks have all the words (bool)."""
        texts, of_context = self._texts
        parts = [part.strip() for part in words.lower().split(",")]
        wanted = [re.compile(rf"{re.escape(part)}(?!(?<=\d)\d)") for part in parts]
        matches = np.array([all(one.search(text) for one in wanted) for text in texts], dtype=bool)
        return np.asarray(matches[of_context])


def _within(values: np.ndarray, limits: tuple[int | None, int | None]) -> np.ndarray:
    least, most = limits
    found = np.ones(len(values), dtype=bool)
    if least is not None:
        found &= values >= least
    if most is not None:
        found &= values <= most
    return found
