"""What an allocator held when a recording began, from the events that a trace begins with then."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

from memtrace.allocator.pools import Piece
from memtrace.allocator.settings import MIN_LARGE, SMALL_LIMIT, SMALL_SEGMENT
from memtrace.trace.schema import Action

#: Action, address, bytes, requested bytes, stream, number of the private pool.
Event = tuple[int, int, int, int, int, int]
#: Pieces, stream, private pool, whether it is of the small pool, page: as
#: :meth:`memtrace.allocator.native.NativeAllocator.restore` takes it.
Warm = tuple[list[Piece], int, int, bool, int]

#: Addresses that follow what is mapped of an expandable segment: more than any maps.
_ROOM = 1 << 40


def warm_segments(
    events: Sequence[Event], later: Sequence[Event], large_segment: int, reach: int
) -> list[Warm]:
    """The segments that these events take and fill with blocks, by address.

    ``later``: what is mapped afterwards; it tells of an expandable segment whose first pages were
    given back where it begins. ``large_segment``: bytes of a page in the large pool. ``reach``:
    addresses of an expandable segment.
    """
    blocks = {event[1]: event for event in events if event[0] == Action.ALLOC}
    addresses = sorted(blocks)

    def fill(start: int, end: int) -> list[Piece]:
        inside = addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]
        return list(_filled(start, end, [blocks[one] for one in inside]))

    found: list[Warm] = []
    ranges: list[tuple[tuple[int, int, bool], list[Piece]]] = []
    for action, address, size, _, stream, pool in sorted(events, key=lambda event: event[1]):
        if action == Action.SEGMENT_ALLOC:
            small = size == SMALL_SEGMENT
            found.append((fill(address, address + size), stream, pool, small, 0))
        elif action == Action.SEGMENT_MAP:
            pieces = fill(address, address + size)
            ranges.append(((stream, pool, _is_small(pieces)), pieces))
    ranges.sort(key=lambda one: one[0])
    for (stream, pool, small), members in groupby(ranges, key=lambda one: one[0]):
        page = SMALL_SEGMENT if small else large_segment
        mapped = [
            address
            for _, address, size, _, *owner in later
            if owner == [stream, pool] and (size == SMALL_SEGMENT) == small
        ]
        before = 0
        for pieces in _joined((pieces for _, pieces in members), page):
            start = pieces[0][0]
            lower = [one for one in mapped if max(before, start - reach) < one < start]
            first = min((one for one in lower if (start - one) % page == 0), default=start)
            before = _end(pieces[:-1])
            if first < start:
                pieces = [(first, start - first, 0, "unmapped"), *pieces]
            found.append((pieces, stream, pool, small, page))
    return sorted(found, key=lambda one: one[0][0][0])


class WarmOrder:
    """Which segments are older than others, as far as anything tells."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # of the segments, by address
        self._older: dict[int, set[int]] = {}  # by segment, those that are older

    @property
    def learnt(self) -> int:
        return sum(map(len, self._older.values()))

    def sort(self, segments: Sequence[Warm]) -> list[Warm]:
        """The oldest first; by address where nothing tells."""
        by_start = {segment[0][0][0]: segment for segment in segments}
        self._ranges = sorted((start, _end(found[0])) for start, found in by_start.items())
        graph = {start: self._older.get(start, set()) for start, _ in self._ranges}
        return [by_start[start] for start in TopologicalSorter(graph).static_order()]

    def learn(self, older: int, younger: int) -> bool:
        """The segment of one address is older than that of another; False: that's no news, or
        can't be."""
        first, second = self._segment(older), self._segment(younger)
        if first is None or second is None or first == second:
            return False
        known = self._older.setdefault(second, set())
        if first in known:
            return False
        known.add(first)
        try:
            TopologicalSorter(self._older).prepare()
        except CycleError:
            return False
        return True

    def _segment(self, address: int) -> int | None:
        """Where the segment begins that has an address."""
        place = bisect_right(self._ranges, (address, _ROOM << 10)) - 1
        if place < 0 or address >= self._ranges[place][1]:
            return None
        return self._ranges[place][0]


def _filled(start: int, end: int, blocks: Iterable[Event]) -> Iterator[Piece]:
    """Blocks, and what is free between them."""
    for _, address, size, requested, *_ in blocks:
        if start < address:
            yield start, address - start, 0, "free"
        yield address, size, requested, "allocated"
        start = address + size
    if start < end:
        yield start, end - start, 0, "free"


def _is_small(pieces: Sequence[Piece]) -> bool:
    """Whether a mapped range is of the small pool: by its blocks, without any by its size."""
    sizes = [size for _, size, _, state in pieces if state != "free"]
    if sizes:
        return max(sizes) <= SMALL_LIMIT
    return pieces[0][1] <= MIN_LARGE


def _joined(ranges: Iterable[list[Piece]], page: int) -> Iterator[list[Piece]]:
    """Mapped ranges as expandable segments, with what is unmapped between and after them."""
    segment: list[Piece] = []
    for pieces in ranges:
        start = pieces[0][0]
        if segment:
            gap = start - _end(segment)
            if gap % page or gap > _ROOM:
                yield _with_room(segment)
                segment = []
            elif gap:
                segment.append((_end(segment), gap, 0, "unmapped"))
            elif segment[-1][3] == pieces[0][3] == "free":
                address, size, *_ = segment.pop()
                pieces = [(address, size + pieces[0][1], 0, "free"), *pieces[1:]]
        segment += pieces
    if segment:
        yield _with_room(segment)


def _end(pieces: Sequence[Piece]) -> int:
    return pieces[-1][0] + pieces[-1][1]


def _with_room(pieces: list[Piece]) -> list[Piece]:
    return [*pieces, (_end(pieces), _ROOM, 0, "unmapped")]
