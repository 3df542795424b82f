"""Blocks, and the pools in which free ones wait."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

#: A piece of a segment that is restored: address, size, requested bytes, state.
Piece = tuple[int, int, int, Literal["allocated", "free", "unmapped"]]

_NONE: frozenset[int] = frozenset()


class Block:
    """A piece of a segment, between ``prev`` and ``next`` in it."""

    __slots__ = (
        "address",
        "allocated",
        "captured",
        "events",
        "gc_base",
        "mapped",
        "next",
        "order",
        "pool",
        "prev",
        "requested",
        "segment",
        "size",
        "stream",
        "streams",
    )

    def __init__(self, pool: "Pool", stream: int, address: int, size: int, order: int) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.order = order  # breaks ties between free blocks of one size
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.segment: ExpandableSegment | None = None  # None: of a cudaMalloc
        self.prev: Block | None = None
        self.next: Block | None = None
        self.streams: frozenset[int] = _NONE  # others that used it
        self.captured: frozenset[int] = _NONE  # of these, while a pool was open
        self.events = 0  # how many of these it still waits for
        self.gc_base = 0

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def is_free(self) -> bool:
        return not self.allocated and not self.events and not self.streams


@dataclass(frozen=True, slots=True)
class ExpandableSegment:
    """A range of addresses that is mapped page by page."""

    address: int
    page: int


class Pool:
    """The blocks of one size class that nobody has, by stream.

    ``free``: as (size, order, address, block). ``unmapped``: those without memory, by address.
    """

    __slots__ = ("calls", "free", "number", "owner", "small", "unmapped")

    def __init__(self, number: int, owner: "PrivatePool | None") -> None:
        self.number = number
        self.small = number % 2 == 0
        self.owner = owner
        self.free: dict[int, list[tuple[int, int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.calls = 0  # searches, counted where garbage is collected

    def put(self, block: Block) -> None:
        block.gc_base = self.calls
        entry = (block.size, block.order, block.address, block)
        insort(self.free.setdefault(block.stream, []), entry)

    def take(self, block: Block) -> None:
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.order, block.address))]

    def put_unmapped(self, block: Block) -> None:
        insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def take_unmapped(self, block: Block) -> None:
        blocks = self.unmapped[block.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def __iter__(self) -> Iterator[Block]:
        """The free blocks, in the order of the search."""
        for stream in sorted(self.free):
            for entry in self.free[stream]:
                yield entry[3]


class PrivatePool:
    """Two pools of their own: of a CUDA graph, or a ``torch.cuda.MemPool``."""

    __slots__ = ("large", "segments", "small", "uses")

    def __init__(self, number: int) -> None:
        self.small = Pool(2 * number, self)
        self.large = Pool(2 * number + 1, self)
        self.uses = 0
        self.segments = 0  # requests to the device, less what was given back to it


def has_room(block: Block, size: int) -> bool:
    """Whether free and unmapped blocks from this one on have that many bytes in a row."""
    room = 0
    following: Block | None = block
    while following is not None and room < size and following.is_free:
        room += following.size
        following = following.next
    return room >= size


def room(block: Block) -> int:
    """What a free block of an expandable segment could grow to."""
    following = block.next
    grows = following is not None and not following.mapped
    return block.size + (following.size if following is not None and grows else 0)
