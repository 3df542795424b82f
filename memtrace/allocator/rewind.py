"""The allocator's state before a history, from its state after it.

A history seldom begins with an empty allocator, and a snapshot tells its segments at the end only.
So the entries are walked backwards: what one allocated wasn't there before it, what it freed was.
Of a block that was freed meanwhile the history says what was asked for, not how large it was: in
the large pool up to 1 MiB more than that may lie in it. Where the rest up to the next block is no
larger, all of it is taken as part of the block; an allocation that the forward walk then finds
without room tells better, and the walk begins anew with what it told.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memtrace.allocator.layout import Layout, LayoutError, Segment, pool_name
from memtrace.allocator.settings import MIN_BLOCK, SMALL_LIMIT, Settings

Data = Mapping[str, Any]

#: What a snapshot before torch 2.13 doesn't name in its entries.
_DEFAULT_POOL: Any = (0, 0)
#: Sizes that may be learnt from the forward walk, each by a walk of its own.
_MOST_LESSONS = 100


@dataclass(frozen=True)
class Start:
    """The state before a history."""

    #: As a snapshot has them: for :meth:`memtrace.allocator.layout.Layout.of_segments`.
    segments: Sequence[Data]
    #: Blocks of it whose size is known only up to 1 MiB that may follow them free.
    unsure: int


def before(entries: Sequence[Data], segments: Sequence[Data], settings: Settings) -> Start:
    """The state before ``entries`` of a device whose ``segments`` are its last state."""
    past = _Past.of(segments)
    for entry in reversed(entries):
        past.undo(entry)
    sizes: dict[int, int] = {}
    for _ in range(_MOST_LESSONS):
        built = _Built(past, settings, sizes)
        if not built.unsure:
            break
        layout = Layout.of_segments(built.segments, settings)
        lesson = _lesson(entries, layout, built.unsure)
        if lesson is None or lesson[0] in sizes:
            break
        sizes[lesson[0]] = lesson[1]
    return Start(built.segments, len(built.unsure.keys() - sizes.keys()))


class _Ranges:
    """Mapped ranges that don't overlap; side by side in one stream and pool they are one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self.by_start: dict[int, Segment] = {}

    def add(self, start: int, segment: Segment) -> None:
        end = start + segment.bytes
        self.remove(start, end)
        place = bisect_left(self._starts, start)
        owner = segment.stream, segment.pool
        after = self.by_start.get(end)
        if after is not None and (after.stream, after.pool) == owner:
            del self.by_start[self._starts.pop(place)]
            end += after.bytes
        if place:
            before = self.by_start[self._starts[place - 1]]
            first = self._starts[place - 1]
            if first + before.bytes == start and (before.stream, before.pool) == owner:
                del self.by_start[self._starts.pop(place - 1)]
                start = first
        self._put(start, end, segment)

    def remove(self, start: int, end: int) -> None:
        place = max(bisect_right(self._starts, start) - 1, 0)
        while place < len(self._starts) and self._starts[place] < end:
            low = self._starts[place]
            segment = self.by_start[low]
            high = low + segment.bytes
            if high <= start:
                place += 1
                continue
            del self.by_start[self._starts.pop(place)]
            for left, right in ((low, start), (end, high)):
                if left < right:
                    self._put(left, right, segment)
                    place += left == low

    def _put(self, start: int, end: int, segment: Segment) -> None:
        self._starts.insert(bisect_left(self._starts, start), start)
        self.by_start[start] = Segment(end - start, segment.stream, segment.pool, True)


@dataclass
class _Past:
    """The state before an entry, on the way back. Blocks are (requested, bytes or None)."""

    plain: dict[int, Segment] = field(default_factory=dict)
    mapped: _Ranges = field(default_factory=_Ranges)
    live: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    pending: dict[int, tuple[int, int | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Sequence[Data]) -> "_Past":
        past = cls()
        for found in segments:
            segment = Segment(
                found["total_size"],
                found["stream"],
                found["segment_pool_id"] or _DEFAULT_POOL,
                found["is_expandable"],
            )
            if segment.expandable:
                past.mapped.add(found["address"], segment)
            else:
                past.plain[found["address"]] = segment
            for block in found["blocks"]:
                if block["state"] != "inactive":
                    alive = block["state"] == "active_allocated"
                    kept = past.live if alive else past.pending
                    kept[block["address"]] = block["requested_size"], block["size"]
        return past

    def undo(self, entry: Data) -> None:
        """Go back over one entry. It is right even where what follows contradicts it."""
        action, address, size = entry["action"], entry.get("addr", 0), entry["size"]
        if action == "alloc":
            self.live.pop(address, None)
            self.pending.pop(address, None)
        elif action == "free_requested":
            block = self.pending.pop(address) if address in self.pending else (size, None)
            self.live[address] = block
        elif action == "free_completed":
            self.live.pop(address, None)
            self.pending[address] = size, None
        elif action == "segment_alloc":
            self.plain.pop(address, None)
        elif action == "segment_map":
            self.mapped.remove(address, address + size)
        elif action in ("segment_free", "segment_unmap"):
            expandable = action == "segment_unmap"
            pool = entry.get("pool_id") or _DEFAULT_POOL
            segment = Segment(size, entry["stream"], pool, expandable)
            if expandable:
                self.mapped.add(address, segment)
            else:
                self.plain[address] = segment


class _Built:
    """The start state as segments that are full of blocks; ``sizes``: those learnt of blocks."""

    def __init__(self, past: _Past, settings: Settings, sizes: Mapping[int, int]) -> None:
        self.segments: list[Data] = []
        #: Blocks of unknown size: the least that they have.
        self.unsure: dict[int, int] = {}
        self._settings = settings
        self._sizes = sizes
        blocks = {a: (*block, "active_allocated") for a, block in past.live.items()}
        blocks |= {a: (*block, "active_pending_free") for a, block in past.pending.items()}
        addresses = sorted(blocks)
        end = 0
        for start, segment in sorted((past.plain | past.mapped.by_start).items()):
            if start < end:  # one of them isn't real
                continue
            end = start + segment.bytes
            inside = addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]
            self._fill(start, segment, inside, blocks)

    def _fill(
        self,
        start: int,
        segment: Segment,
        inside: Sequence[int],
        found: Mapping[int, tuple[int, int | None, str]],
    ) -> None:
        """Add a segment with those of its blocks that have room: others contradict each other."""
        end, at, blocks = start + segment.bytes, start, list[Data]()

        def add(size: int, requested: int, state: str) -> None:
            nonlocal at
            row = {"address": at, "size": size, "requested_size": requested, "state": state}
            blocks.append(row)
            at += size

        for address, following in zip(inside, [*inside[1:], end], strict=False):
            requested, size, state = found[address]
            if size is None:
                size = self._size(address, requested, following - address, segment.expandable)
            if address < at or not size or address + size > end:
                continue
            if at < address:
                add(address - at, 0, "inactive")
            add(size, requested, state)
        if at < end:
            add(end - at, 0, "inactive")
        self.segments.append(
            {
                "address": start,
                "total_size": segment.bytes,
                "stream": segment.stream,
                "segment_pool_id": segment.pool,
                "is_expandable": segment.expandable,
                "blocks": blocks,
            }
        )

    def _size(self, address: int, requested: int, room: int, expandable: bool) -> int | None:
        """The bytes of a block with ``room`` up to the next one; None: it doesn't fit there."""
        least = self._settings.round(requested)
        rest = room - least
        if rest < 0:
            return None
        if least <= SMALL_LIMIT or expandable:
            return room if rest < MIN_BLOCK else least
        if least >= self._settings.max_split_size or rest == 0:
            return room
        self.unsure[address] = least
        return self._sizes.get(address, room if rest <= SMALL_LIMIT else least)


def _lesson(
    entries: Sequence[Data], layout: Layout, unsure: Mapping[int, int]
) -> tuple[int, int] | None:
    """The size of a block of unknown size, from the first allocation that finds no room."""
    addresses = sorted(unsure)
    for entry in entries:
        action = entry["action"]
        try:
            if action == "alloc":
                layout.alloc(entry["addr"], entry["size"])
            elif action == "free_requested":
                layout.free_requested(entry["addr"])
            elif action == "free_completed":
                layout.free_completed(entry["addr"])
            elif action == "segment_free":
                layout.give_back(entry["addr"], entry["size"])
            elif action == "segment_unmap":
                layout.unmap(entry["addr"], entry["size"])
            elif action in ("segment_alloc", "segment_map"):
                pool = pool_name(entry.get("pool_id"))
                expandable = action == "segment_map"
                segment = Segment(entry["size"], entry["stream"], pool, expandable)
                layout.take(entry["addr"], segment)
        except LayoutError:
            if action == "alloc":
                place = bisect_left(addresses, entry["addr"]) - 1
                block = addresses[place] if place >= 0 else 0
                size = entry["addr"] - block
                if place >= 0 and 0 <= size - unsure[block] <= SMALL_LIMIT:
                    return block, size
    return None
