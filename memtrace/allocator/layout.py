"""The blocks of the caching allocator's segments, followed from one event of its history to the
next.

The history gives addresses and *requested* bytes; what ``memory_allocated()`` counts is the block.
Its size follows from the request and from the free block that it was cut from, so the free blocks
have to be known too. Rules: allocator.cpp of PyTorch (``should_split``, ``try_merge_blocks``),
equal in every version from 2.1 to 2.15.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from memtrace.allocator.settings import MIN_BLOCK, SMALL_LIMIT, Settings


class LayoutError(ValueError):
    """An event that can't have happened to these segments: events are missing, or none are real."""


@dataclass(slots=True)
class Block:
    """A block that was handed out; ``tag`` is whatever its owner likes to keep with it."""

    bytes: int
    requested: int
    expandable: bool  # lies in an expandable segment
    tag: Any = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A range that was taken from the device; of an expandable segment, one mapped piece."""

    bytes: int
    stream: int
    pool: str | None
    expandable: bool

    def continues(self, before: "Segment") -> bool:
        """Whether it is one with a piece that ends where it begins; those of cudaMalloc never."""
        return (
            self.expandable
            and before.expandable
            and (self.stream, self.pool) == (before.stream, before.pool)
        )


class Layout:
    """The segments and blocks of one device.

    ``live``: blocks that are allocated, by address. ``pending``: freed ones that wait for a stream.
    ``segments``: by address.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.segments: dict[int, Segment] = {}
        self._starts: list[int] = []  # their addresses, sorted
        self.live: dict[int, Block] = {}
        self.pending: dict[int, Block] = {}
        self._free: dict[int, int] = {}  # address → bytes
        self._free_until: dict[int, int] = {}  # end → address
        self._rounded: dict[int, int] = {}  # sizes of blocks by what was asked for
        self._growing: set[int] = set()  # addresses of free blocks in expandable segments

    @classmethod
    def of_segments(cls, segments: Iterable[Mapping[str, Any]], settings: Settings) -> Self:
        """The state in a snapshot: its ``segments`` of one device.

        The tag of each block is its (stream, pool).
        """
        layout = cls(settings)
        for found in segments:
            address, stream = found["address"], found["stream"]
            pool = pool_name(found.get("segment_pool_id"))
            growing = found.get("is_expandable", False)
            segment = Segment(found["total_size"], stream, pool, growing)
            layout._enter(address, segment)
            for part in found["blocks"]:
                address, size = part.get("address", address), part["size"]
                block = Block(
                    size, part.get("requested_size", size), growing, (segment.stream, pool)
                )
                if part["state"] == "active_allocated":
                    layout.live[address] = block
                elif part["state"] == "inactive":
                    layout._put(address, size, growing)
                else:  # active_pending_free; PyTorch's documentation calls it active_awaiting_free
                    layout.pending[address] = block
                address += size
        return layout

    # -- segments ----------------------------------------------------------------------------

    def take(self, address: int, segment: Segment) -> None:
        """A segment was allocated or mapped.

        Raises:
            LayoutError: some of it was taken before, or it is empty.
        """
        if segment.bytes == 0 or self._within(address, address + segment.bytes):
            raise LayoutError(f"the segment at {address:#x} is taken while it is in use")
        self._enter(address, segment)
        if segment.expandable:
            self._join(address, segment.bytes, True)
        else:
            self._put(address, segment.bytes, False)

    def give_back(self, address: int, size: int) -> Segment:
        """A whole segment was returned to the device.

        Raises:
            LayoutError: something in it is alive, or it isn't there.
        """
        segment = self.segments.get(address)
        whole = segment is not None and not segment.expandable and segment.bytes == size
        if segment is None or not whole or self._free.get(address) != size:
            raise LayoutError(f"the segment at {address:#x} is returned while it is in use")
        self._leave(address)
        self._drop(address, size)
        return segment

    def unmap(self, address: int, size: int) -> None:
        """Pages of an expandable segment were returned to the device.

        Raises:
            LayoutError: something in them is alive, or they aren't there.
        """
        start = address if address in self._free else self._free_around(address)
        bytes_free = self._free.get(start, 0)
        end = address + size
        if start > address or end > start + bytes_free or start not in self._growing:
            raise LayoutError(f"pages at {address:#x} are returned while they are in use")
        self._drop(start, bytes_free)
        if start < address:
            self._put(start, address - start, True)
        if end < start + bytes_free:
            self._put(end, start + bytes_free - end, True)
        self._cut_pieces(address, end)

    def _cut_pieces(self, address: int, end: int) -> None:
        for start in self._within(address, end):
            segment = self.segments[start]
            stop = start + segment.bytes
            self._leave(start)
            for low, high in ((start, min(stop, address)), (max(start, end), stop)):
                if low < high:
                    self._enter(low, Segment(high - low, segment.stream, segment.pool, True))

    def _enter(self, address: int, segment: Segment) -> None:
        self.segments[address] = segment
        insort(self._starts, address)

    def _leave(self, address: int) -> None:
        del self.segments[address]
        self._starts.pop(bisect_left(self._starts, address))

    def _within(self, address: int, end: int) -> list[int]:
        """Addresses of the segments that have bytes in a range."""
        first = bisect_right(self._starts, address) - 1
        if first < 0 or self._starts[first] + self.segments[self._starts[first]].bytes <= address:
            first += 1
        return self._starts[first : bisect_left(self._starts, end)]

    def _free_around(self, address: int) -> int:
        """Start of the free block that contains an address, or the address itself."""
        for start, size in self._free.items():
            if start < address < start + size:
                return start
        return address

    # -- blocks ------------------------------------------------------------------------------

    def alloc(self, address: int, requested: int, tag: Any = None) -> Block:
        """A block was handed out.

        Raises:
            LayoutError: no free block begins there, or it is too small.
        """
        room = self._free.get(address)
        size = self._rounded.get(requested)
        if size is None:
            size = self._rounded[requested] = self.settings.round(requested)
        if room is None or room < size:
            raise LayoutError(f"{requested} bytes at {address:#x} are handed out without room")
        growing = address in self._growing
        self._drop(address, room)
        rest = room - size
        if self._splits(size, rest, growing):
            self._put(address + size, rest, growing)
        else:
            size = room
        block = self.live[address] = Block(size, requested, growing, tag)
        return block

    def _splits(self, size: int, rest: int, growing: bool) -> bool:
        if size <= SMALL_LIMIT or growing:
            return rest >= MIN_BLOCK
        return size < self.settings.max_split_size and rest > SMALL_LIMIT

    def free_requested(self, address: int) -> Block:
        """A block was freed; it is pending until :meth:`free_completed`.

        Raises:
            LayoutError: no block lives there.
        """
        block = self.live.pop(address, None)
        if block is None:
            raise LayoutError(f"a block at {address:#x} is freed that isn't live")
        self.pending[address] = block
        return block

    def free_completed(self, address: int) -> Block:
        """A freed block can be used again.

        Raises:
            LayoutError: no such block waits there.
        """
        block = self.pending.pop(address, None)
        if block is None:
            raise LayoutError(f"a block at {address:#x} is free that wasn't freed")
        self._join(address, block.bytes, block.expandable)
        return block

    # -- the whole state -----------------------------------------------------------------------

    def ranges(self) -> dict[int, Segment]:
        """The segments, with mapped pieces that lie side by side as one."""
        found: dict[int, Segment] = {}
        last, end = 0, -1
        for start, segment in sorted(self.segments.items()):
            if start == end and segment.continues(found[last]):
                joined = found[last].bytes + segment.bytes
                found[last] = Segment(joined, segment.stream, found[last].pool, True)
            else:
                last, found[start] = start, segment
            end = start + segment.bytes
        return found

    def same_as(self, other: Self) -> bool:
        """Whether both hold the same blocks in segments of the same size."""
        mine, theirs = self.ranges(), other.ranges()
        return (
            {start: one.bytes for start, one in mine.items()}
            == {start: one.bytes for start, one in theirs.items()}
            and _sizes(self.live) == _sizes(other.live)
            and _sizes(self.pending) == _sizes(other.pending)
        )

    # -- free blocks -------------------------------------------------------------------------

    def _put(self, address: int, size: int, growing: bool) -> None:
        self._free[address] = size
        self._free_until[address + size] = address
        if growing:
            self._growing.add(address)

    def _drop(self, address: int, size: int) -> None:
        del self._free[address]
        del self._free_until[address + size]
        if self._growing:
            self._growing.discard(address)

    def _join(self, address: int, size: int, growing: bool) -> None:
        """A free block appears, and merges with free neighbours in its segment."""
        end = address + size
        after = self._free.get(end)
        if after is not None and not self._border(end):
            self._drop(end, after)
            size += after
        before = self._free_until.get(address)
        if before is not None and not self._border(address):
            size += address - before
            self._drop(before, address - before)
            address = before
        self._put(address, size, growing)

    def _border(self, address: int) -> bool:
        """Whether a segment begins here that isn't one with what lies before it."""
        segment = self.segments.get(address)
        if segment is None:
            return False
        place = bisect_left(self._starts, address)
        return place == 0 or not segment.continues(self.segments[self._starts[place - 1]])


def _sizes(blocks: Mapping[int, Block]) -> dict[int, tuple[int, int]]:
    return {address: (block.bytes, block.requested) for address, block in blocks.items()}


def pool_name(pool: Sequence[int] | None) -> str | None:
    """``(0, 1)`` → ``"0.1"``; the default pool (0, 0), and one that isn't known, have no name."""
    return None if not pool or tuple(pool) == (0, 0) else ".".join(map(str, pool))
