"""What of the allocator's memory serves nobody, at one instant and after every event.

Reserved memory is, byte for byte::

    reserved = allocated + pending + hard + releasable + private

*pending* blocks were freed and wait for a stream. Free memory of the default pool is *hard*
fragmentation where a block lives in the same segment, so that nobody else can have it, and
*releasable* where a whole segment is free: ``empty_cache()``, and the allocator itself before it
gives up, return it. What is free in a *private* pool (a CUDA graph's, a ``torch.cuda.MemPool``'s)
serves requests to that pool only. *Slack* is the part of allocated blocks beyond what was asked
for. A free block serves its own stream only, so ``elsewhere`` is what is free on other streams.

The fragmentation ratio is ``hard / reserved``: the share that is neither used nor returnable. Hard
fragmentation is a term of TorchRec's studies (meta-pytorch/torchrec#4584). Where nothing is
pending, releasable or private the ratio is the 1 - allocated / reserved of GMLake (arXiv
2401.08156).

In an expandable segment a contiguous mapped range counts as a segment, so ``hard`` there includes
whole free pages between live blocks, which can be unmapped, too.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from memtrace.analysis.accounts import Account, Series
from memtrace.analysis.segments import Layout
from memtrace.trace.schema import Action


class Owner(NamedTuple):
    """Whose a free block is: it serves requests of this stream to this pool."""

    pool: str | None  # id of a private pool; None: the default one
    stream: int


@dataclass(frozen=True)
class Parts:
    """Reserved memory by what it does, in bytes."""

    reserved: int
    allocated: int
    slack: int  # part of allocated
    pending: int
    hard: int
    releasable: int
    private: int
    free: Mapping[Owner, int]  # hard, releasable and private again
    largest: Mapping[Owner, int]  # of each, the largest free block

    @classmethod
    def none(cls) -> "Parts":
        """Nothing is reserved."""
        return cls(0, 0, 0, 0, 0, 0, 0, {}, {})

    @property
    def ratio(self) -> float:
        """hard / reserved; 0 where nothing is reserved."""
        return self.hard / self.reserved if self.reserved else 0.0

    def elsewhere(self, stream: int) -> int:
        """Free in the default pool, but on other streams than this one."""
        return sum(
            size for owner, size in self.free.items() if owner.pool is None and owner[1] != stream
        )


def parts(layout: Layout) -> Parts:
    """The parts of one instant."""
    totals = layout.totals
    by_owner = {
        Owner(pool, stream): one.totals
        for pool, inside in layout.by_private_pool().items()
        for stream, one in inside.by_stream().items()
    }
    default = [one for owner, one in by_owner.items() if owner.pool is None]
    releasable = sum(one.free_segments for one in default)
    hard = sum(one.free for one in default) - releasable
    return Parts(
        reserved=totals.reserved,
        allocated=totals.allocated,
        slack=totals.slack,
        pending=totals.active - totals.allocated,
        hard=hard,
        releasable=releasable,
        private=totals.free - hard - releasable,
        free={owner: one.free for owner, one in by_owner.items() if one.free},
        largest={owner: one.largest_free for owner, one in by_owner.items() if one.free},
    )


@dataclass(frozen=True)
class Fragmentation:
    """The parts after every event of an account.

    The arrays (int64, of one length) say what ``owners[owner]`` has free after ``event``: ``free``
    bytes, ``whole`` of them in segments without a block, ``largest`` in one block.
    """

    account: Account
    owners: tuple[Owner, ...]
    event: np.ndarray
    owner: np.ndarray
    free: np.ndarray
    whole: np.ndarray
    largest: np.ndarray

    @cached_property
    def slack(self) -> Series:
        """Allocated beyond what was asked for."""
        account, events = self.account, self.account.process.events
        signs = np.zeros(len(account.here), dtype=np.int8)
        action = account.process.contexts["action"]
        signs[account.here & (action == Action.ALLOC)] = 1
        freed = (action == Action.FREE) | (action == Action.FREE_REQUESTED)
        signs[account.here & freed] = -1
        moved = signs[events["context"]]
        at = np.flatnonzero(moved)
        return _series(at, ((events["bytes"] - events["requested"]) * moved)[at])

    @cached_property
    def pending(self) -> Series:
        """Freed, and waiting for a stream."""
        at, change = _changes(self.account.active, self.account.allocated)
        return _series(at, change)

    @cached_property
    def hard(self) -> Series:
        """Free in the default pool, in segments where a block lives."""
        return self._sum(self.free - self.whole, private=False)

    @cached_property
    def releasable(self) -> Series:
        """Free in the default pool, in segments of their own."""
        return self._sum(self.whole, private=False)

    @cached_property
    def private(self) -> Series:
        """Free in private pools."""
        return self._sum(self.free, private=True)

    @cached_property
    def free_of(self) -> Mapping[Owner, Series]:
        """What each pool and stream has free."""
        return self._by_owner(self.free)

    @cached_property
    def largest_of(self) -> Mapping[Owner, Series]:
        """The largest free block of each pool and stream."""
        return self._by_owner(self.largest)

    def at(self, event: int) -> Parts:
        """The parts after one event."""
        reserved = self.account.reserved
        free = {owner: one.read_one(event) for owner, one in self.free_of.items()}
        return Parts(
            reserved=reserved.read_one(event) if reserved is not None else 0,
            allocated=self.account.allocated.read_one(event),
            slack=self.slack.read_one(event),
            pending=self.pending.read_one(event),
            hard=self.hard.read_one(event),
            releasable=self.releasable.read_one(event),
            private=self.private.read_one(event),
            free={owner: size for owner, size in free.items() if size},
            largest={
                owner: self.largest_of[owner].read_one(event)
                for owner, size in free.items()
                if size
            },
        )

    def _by_owner(self, values: np.ndarray) -> dict[Owner, Series]:
        found = {}
        for number, owner in enumerate(self.owners):
            rows = np.flatnonzero(self.owner == number)
            found[owner] = Series(self.event[rows], np.concatenate(([0], values[rows])))
        return found

    def _sum(self, values: np.ndarray, *, private: bool) -> Series:
        """The sum over the private pools, or over the default one's streams."""
        among = np.array([(owner.pool is not None) == private for owner in self.owners], dtype=bool)
        change = np.zeros(len(values), dtype=np.int64)
        for number in np.flatnonzero(among):
            rows = np.flatnonzero(self.owner == number)
            change[rows] = np.diff(values[rows], prepend=0)
        rows = np.flatnonzero(change)
        return _series(self.event[rows], change[rows])


def _series(at: np.ndarray, change: np.ndarray) -> Series:
    return Series(at, np.concatenate(([0], np.cumsum(change))))


def _changes(more: Series, less: Series) -> tuple[np.ndarray, np.ndarray]:
    """Where ``more - less`` changes, ascending, and by how much."""
    at = np.concatenate((more.at, less.at))
    change = np.concatenate((np.diff(more.levels), -np.diff(less.levels)))
    order = np.argsort(at, kind="stable")
    return at[order], change[order]


def fragmentation(account: Account) -> Fragmentation | None:
    """Follow every event of ``account``; None: the trace has no segments.

    Events that contradict each other (a segment taken twice, a free of what isn't there) are
    followed as far as they go.
    """
    contexts = account.process.contexts
    taken = np.isin(contexts["action"], (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)) & account.here
    if not taken[np.unique(account.process.events["context"])].any():
        return None
    walk = _Walk(account)
    for one in _events(account):
        walk.follow(*one)
    columns = (walk.event, walk.owner, walk.free, walk.whole, walk.largest)
    arrays = (np.frombuffer(column, dtype=np.int64) for column in columns)
    return Fragmentation(account, tuple(walk.owners), *arrays)


#: Events that are in memory as Python's objects at a time.
_CHUNK = 1 << 16


def _events(account: Account) -> Iterator[tuple[int, int, int, int]]:
    """Number, address, bytes and context of each event of the account that has bytes."""
    events = account.process.events
    for start in range(0, len(events["context"]), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        here = account.here[events["context"][chunk]] & (events["bytes"][chunk] > 0)
        rows = start + np.flatnonzero(here)
        columns = (events[name][rows].tolist() for name in ("id", "bytes", "context"))
        yield from zip(rows.tolist(), *columns, strict=True)


class _Free:
    """The free blocks of one owner, as start → end."""

    __slots__ = ("_heap", "_ranges", "blocks", "number", "starts", "total", "whole")

    def __init__(self, number: int, ranges: dict[int, int]) -> None:
        self.number = number
        self.blocks: dict[int, int] = {}
        self.starts: dict[int, int] = {}  # the other way round
        self.total = 0
        self.whole = 0
        self._ranges = ranges
        self._heap: list[tuple[int, int]] = []  # (-bytes, start), of blocks that went away too

    def put(self, start: int, end: int) -> None:
        self.blocks[start] = end
        self.starts[end] = start
        size = end - start
        self.total += size
        if self._ranges.get(start) == end:
            self.whole += size
        heappush(self._heap, (-size, start))

    def drop(self, start: int, end: int) -> None:
        del self.blocks[start]
        del self.starts[end]
        self.total -= end - start
        if self._ranges.get(start) == end:
            self.whole -= end - start

    @property
    def largest(self) -> int:
        heap, blocks = self._heap, self.blocks
        if len(heap) > 2 * len(blocks) + 1000:
            heap[:] = [(start - end, start) for start, end in blocks.items()]
            heapify(heap)
        while heap:
            size, start = heap[0]
            if blocks.get(start) == start - size:
                return -size
            heappop(heap)
        return 0

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """The blocks that have bytes between two addresses."""
        return [(a, b) for a, b in self.blocks.items() if a < end and b > start]


class _Walk:
    """Segments and blocks, from one event to the next; and what was free after each, as columns."""

    def __init__(self, account: Account) -> None:
        contexts = account.process.contexts
        self.owners: dict[Owner, _Free] = {}
        self.event, self.owner = array("q"), array("q")
        self.free, self.whole, self.largest = array("q"), array("q"), array("q")
        self._where = list(map(Owner, contexts["pool"], contexts["stream"].tolist()))
        deeds: dict[int, Callable[[int, int, int], _Free | None]] = {
            Action.ALLOC: self._alloc,
            Action.FREE: self._release,
            Action.FREE_COMPLETED: self._release,
            Action.SEGMENT_ALLOC: self._take,
            Action.SEGMENT_FREE: self._give_back,
            Action.SEGMENT_MAP: self._map,
            Action.SEGMENT_UNMAP: self._unmap,
        }
        self._deeds = [deeds.get(action, _nothing) for action in contexts["action"].tolist()]
        self._ranges: dict[int, int] = {}  # segments and contiguous mapped ranges, start → end
        self._range_ends: dict[int, int] = {}  # the other way round
        self._starts: list[int] = []  # sorted
        self._kinds: dict[int, tuple[_Free, bool]] = {}  # by start: whose, and whether expandable
        self._used: dict[int, tuple[int, _Free | None]] = {}  # start → end, whose; None: outside
        self._outside: set[int] = set()  # blocks in no segment

    def follow(self, event: int, address: int, size: int, context: int) -> None:
        changed = self._deeds[context](address, address + size, context)
        if changed is not None:
            self.event.append(event)
            self.owner.append(changed.number)
            self.free.append(changed.total)
            self.whole.append(changed.whole)
            self.largest.append(changed.largest)

    def _owner(self, context: int) -> _Free:
        where = self._where[context]
        found = self.owners.get(where)
        if found is None:
            found = self.owners[where] = _Free(len(self.owners), self._ranges)
        return found

    # -- blocks ----------------------------------------------------------------------------------

    def _alloc(self, address: int, end: int, context: int) -> _Free | None:
        owner = self._owner(context)
        if address in self._used:  # its free isn't in the trace
            self._release(address, end, context)
        start, stop = address, owner.blocks.get(address)
        if stop is None:
            found = self._around(address)
            if found is None:
                self._used[address] = end, None
                self._outside.add(address)
                return None
            owner, start, stop = found
        owner.drop(start, stop)
        if start < address:
            owner.put(start, address)
        if end < stop:
            owner.put(end, stop)
        self._used[address] = min(end, stop), owner
        return owner

    def _around(self, address: int) -> tuple[_Free, int, int] | None:
        """The free block that an address lies in: rarely asked for, so all are looked through."""
        for owner in self.owners.values():
            for start, stop in owner.within(address, address + 1):
                return owner, start, stop
        return None

    def _release(self, start: int, end: int, context: int) -> _Free | None:
        end, owner = self._used.pop(start, (end, None))
        if owner is None:
            self._outside.discard(start)
            return None
        after = owner.blocks.get(end)
        if after is not None and end not in self._ranges:
            owner.drop(end, after)
            end = after
        before = owner.starts.get(start)
        if before is not None and start not in self._ranges:
            owner.drop(before, start)
            start = before
        owner.put(start, end)
        return owner

    # -- segments --------------------------------------------------------------------------------

    def _take(self, start: int, end: int, context: int) -> _Free:
        owner = self._owner(context)
        pieces = self._between(start, end, owner)
        self._enter(start, end, (owner, False))
        for piece in pieces:
            owner.put(*piece)
        return owner

    def _map(self, start: int, end: int, context: int) -> _Free:
        owner = self._owner(context)
        kind = owner, True
        pieces = self._between(start, end, owner)
        left, right = self._range_ends.get(start), self._ranges.get(end)
        if left is not None and self._kinds[left] == kind:
            before = owner.starts.get(start)
            if before is not None:
                owner.drop(before, start)
                pieces = _joined([(before, start)], pieces)
            self._leave(left)
            start = left
        if right is not None and self._kinds[end] == kind:
            after = owner.blocks.get(end)
            if after is not None:
                owner.drop(end, after)
                pieces = _joined(pieces, [(end, after)])
            self._leave(end)
            end = right
        self._enter(start, end, kind)
        for piece in pieces:
            owner.put(*piece)
        return owner

    def _between(self, start: int, end: int, owner: _Free) -> list[tuple[int, int]]:
        """What is free of a new segment: all, but for blocks that were in none until now."""
        for low in self._overlapping(start, end):  # its return isn't in the trace
            self._give_back(low, end, -1)
        pieces, low = [], start
        for address in sorted(one for one in self._outside if start <= one < end):
            if address < low:
                continue
            if low < address:
                pieces.append((low, address))
            low = min(self._used[address][0], end)
            self._used[address] = low, owner
            self._outside.discard(address)
        if low < end:
            pieces.append((low, end))
        return pieces

    def _overlapping(self, start: int, end: int) -> list[int]:
        """Where the segments begin that have bytes between two addresses."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[self._starts[first]] <= start:
            first += 1
        return self._starts[first : bisect_left(self._starts, end)]

    def _give_back(self, start: int, end: int, context: int) -> _Free | None:
        if start not in self._ranges:
            return None
        owner, end = self._kinds[start][0], self._ranges[start]
        if owner.blocks.get(start) == end:
            owner.drop(start, end)
        else:
            for piece in owner.within(start, end):
                owner.drop(*piece)
            self._lose(start, end)
        self._leave(start)
        return owner

    def _unmap(self, start: int, end: int, context: int) -> _Free | None:
        owner = None
        for low in self._overlapping(start, end):
            high, kind = self._ranges[low], self._kinds[low]
            if not kind[1]:
                continue
            owner = kind[0]
            pieces = owner.within(low, high)
            for piece in pieces:
                owner.drop(*piece)
            self._leave(low)
            for a, b in ((low, min(high, start)), (max(low, end), high)):
                if a < b:
                    self._enter(a, b, kind)
            for a, b in pieces:
                for piece in ((a, min(b, start)), (max(a, end), b)):
                    if piece[0] < piece[1]:
                        owner.put(*piece)
            if not any(a <= max(low, start) and min(high, end) <= b for a, b in pieces):
                self._lose(max(low, start), min(high, end))
        return owner

    def _lose(self, start: int, end: int) -> None:
        """What blocks have between two addresses is in no segment any more."""
        for address, (stop, owner) in self._used.items():
            if start <= address < end:
                self._used[address] = stop, None
                self._outside.add(address)
            elif address < start < stop:
                self._used[address] = start, owner

    def _enter(self, start: int, end: int, kind: tuple[_Free, bool]) -> None:
        self._ranges[start] = end
        self._range_ends[end] = start
        self._kinds[start] = kind
        insort(self._starts, start)

    def _leave(self, start: int) -> None:
        del self._range_ends[self._ranges.pop(start)]
        del self._kinds[start]
        del self._starts[bisect_left(self._starts, start)]


def _nothing(start: int, end: int, context: int) -> None:
    """For events that move no free memory."""


def _joined(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Two lists of free pieces in order, as one; pieces that touch become one."""
    if first and second and first[-1][1] == second[0][0]:
        return [*first[:-1], (first[-1][0], second[0][1]), *second[1:]]
    return [*first, *second]
