"""PyTorch's native CUDA caching allocator, deed by deed, in every version from 2.1 on.

Terms and rules are those of ``c10/cuda/CUDACachingAllocator.cpp``: a *segment* is what the device
gave, a *block* a piece of it, free blocks wait in a *pool*. This is the readable definition;
:mod:`memtrace.allocator.compiled` is the same for long streams.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from memtrace.allocator import invariants
from memtrace.allocator.device import Device
from memtrace.allocator.log import Log, Mark
from memtrace.allocator.oom import Failure, OutOfMemory
from memtrace.allocator.ops import Op, Ops
from memtrace.allocator.settings import (
    MIN_BLOCK,
    NEWEST,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    UNLIMITED,
    Settings,
    Version,
)
from memtrace.trace.schema import Action

#: When a block that another stream used can be used again: as soon as the allocator looks (the next
#: malloc); or not before it waits for all streams. A device lies in between.
Completion = Literal["soon", "late"]


#: A piece of a segment that is restored: address, size, requested bytes, state.
Piece = tuple[int, int, int, Literal["allocated", "free", "unmapped"]]


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
        self.streams: set[int] = set()  # others that used it
        self.captured: set[int] = set()  # those of them that did while a pool's scope was open
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


class NativeAllocator:
    """The allocator of one device.

    ``fraction``: as ``torch.cuda.set_per_process_memory_fraction`` sets it, else by the settings.
    Streams are numbers that compare as their handles do; the default one is 0.
    ``debug``: :meth:`run` checks the invariants after every operation.
    """

    def __init__(
        self,
        device: Device,
        settings: Settings | None = None,
        torch: Version = NEWEST,
        *,
        fraction: float | None = None,
        completion: Completion = "soon",
        debug: bool = False,
    ) -> None:
        self.device = device
        self.settings = settings or Settings()
        self.torch = torch
        self.completion = completion
        self.debug = debug
        self.fraction = self.settings.fraction if fraction is None else fraction
        # Without a fraction nothing but the device itself sets a limit. Before torch 2.10 all of
        # the memory was a fraction as well, where the program set it.
        limited = self.fraction < 1 or (fraction is not None and torch < (2, 10))
        self.allowed = int(self.fraction * device.total) if limited else UNLIMITED
        self.collects = limited and self.settings.gc_threshold > 0
        self.reserved = 0
        self.allocated = 0
        self._small, self._large = Pool(0, None), Pool(1, None)
        self._private: dict[int, PrivatePool] = {}
        self._freeable: dict[int, PrivatePool] = {}
        # Given up; PyTorch may lose memory of expandable segments with them.
        self._forgotten: list[PrivatePool] = []
        self._scopes: list[PrivatePool] = []
        self._live: dict[int, Block] = {}
        self._waiting: dict[int, deque[Block]] = {}  # freed blocks by the stream they wait for
        self._later: dict[int, Block] = {}  # freed blocks that somebody else completes
        self._tickets = 0
        self._deferred: list[Block] = []  # freed ones that shall wait once no scope is open
        self._numbered = 0
        self._named: dict[int, int] = {}  # addresses of the blocks of operations
        self._pending: dict[int, int] = {}  # tickets of those that were freed and wait
        self._op = 0
        self._rows: list[tuple[int, ...]] = []

    # -- what a program calls --------------------------------------------------------------------

    def malloc(self, requested: int, stream: int = 0, pool: int | None = None) -> int:
        """The address of a block; 0 for no bytes.

        ``pool``: the private pool whose scope is open; None: the innermost of
        :meth:`begin_pool` (before torch 2.10 the outermost).

        Raises:
            OutOfMemory: where PyTorch does.
        """
        if requested == 0:
            return 0
        owner = self._owner(pool)
        closed = owner is not None and self.torch <= (2, 12)
        if not closed:
            self._process_events()
        size = self.settings.round(requested)
        found = self._pool(owner, size)
        block = self._take_free(found, size, stream)
        if block is None:
            block = self._from_device(found, size, stream, requested, retries=not closed)
        return self._hand_out(block, size, requested)

    def free(self, address: int) -> None:
        """Give a block back; one that other streams used waits for them.

        Raises:
            KeyError: no block is allocated there.
        """
        if address == 0:
            return
        block = self._release(address)
        if not block.streams:
            self._finish(block)
        elif self._scopes and self.torch <= (2, 12):
            self._deferred.append(block)
        else:
            self._wait(block)

    def free_later(self, address: int) -> int:
        """Give a block back that waits for :meth:`complete`, or until all streams are waited for.

        Returns a ticket for :meth:`complete`.

        Raises:
            KeyError: no block is allocated there.
        """
        block = self._release(address)
        block.streams = set()
        block.events = 1
        self._tickets += 1
        self._later[self._tickets] = block
        return self._tickets

    def complete(self, ticket: int) -> None:
        """What a block of :meth:`free_later` waited for has happened; again, nothing happens."""
        block = self._later.pop(ticket, None)
        if block is not None:
            block.events = 0
            self._finish(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Another stream uses a block."""
        if address == 0:
            return
        block = self._live[address]
        if stream != block.stream:
            block.streams.add(stream)
            if self._scopes and self.torch <= (2, 12):
                block.captured.add(stream)

    def empty_cache(self, pool: int | None = None) -> None:
        """``torch.cuda.empty_cache()``; ``pool``: of that private pool only, as its end does."""
        if pool is None:
            self._release_cached()
        elif pool in self._freeable:
            self._synchronize(self._freeable[pool])
            self._release_private(pool)

    def begin_pool(self, number: int) -> None:
        """From here on blocks come from a private pool: ``torch.cuda.use_mem_pool``."""
        pool = self._private.get(number)
        if pool is None:
            pool = self._private[number] = PrivatePool(number)
        pool.uses += 1
        self._scopes.append(pool)

    def end_pool(self, number: int) -> None:
        """The pool's scope ends."""
        self._scopes.remove(self._private[number])

    def release_pool(self, number: int) -> None:
        """One user of the pool less; without any its free segments can be given back."""
        pool = self._private[number]
        pool.uses -= 1
        if pool.uses == 0:
            self._freeable[number] = pool

    def reset_peaks(self) -> None:
        """``torch.cuda.reset_peak_memory_stats()``."""
        self._log(Mark.RESET_PEAKS)

    def reset_accumulated(self) -> None:
        """``torch.cuda.reset_accumulated_memory_stats()``."""
        self._log(Mark.RESET_ACCUMULATED)

    def run(self, ops: Ops) -> Log:
        """Do a stream of operations; what failed is in the log too.

        Raises:
            KeyError: a block is used that isn't allocated.
        """
        named = self._named
        columns = (ops.kind, ops.block, ops.size, ops.stream, ops.pool)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for kind, block, size, stream, pool in rows:
            if kind == Op.ALLOC:
                named[block] = 0
                with suppress(OutOfMemory):
                    named[block] = self.malloc(size, stream, pool or None)
            elif kind == Op.FREE:
                self.free(named.pop(block))
            elif kind == Op.FREE_LATER:
                if address := named.pop(block):
                    self._pending[block] = self.free_later(address)
            elif kind == Op.COMPLETE:
                if ticket := self._pending.pop(block, None):
                    self.complete(ticket)
            elif kind == Op.RECORD_STREAM:
                self.record_stream(named[block], stream)
            else:
                self._manage(kind, pool)
            self._op += 1
            if self.debug:
                self.check()
        return self.drain()

    def _manage(self, kind: int, pool: int) -> None:
        if kind == Op.EMPTY_CACHE:
            self.empty_cache(pool or None)
        elif kind == Op.RESET_PEAKS:
            self.reset_peaks()
        elif kind == Op.RESET_ACCUMULATED:
            self.reset_accumulated()
        elif kind == Op.BEGIN_POOL:
            self.begin_pool(pool)
        elif kind == Op.END_POOL:
            self.end_pool(pool)
        elif kind == Op.RELEASE_POOL:
            self.release_pool(pool)

    def serves(self, requested: int, stream: int = 0, pool: int | None = None) -> bool:
        """Whether a free block would serve such a request now, without the device."""
        size = self.settings.round(requested)
        return self._best_fit(self._pool(self._owner(pool), size), size, stream) is not None

    def releasable(self) -> list[int]:
        """Addresses of the segments that :meth:`empty_cache` would give back now, in order."""
        blocks = (block for pool in (self._large, self._small) for block in pool)
        return [one.address for one in blocks if one.segment is None and not one.is_split]

    def holds(self, address: int) -> bool:
        """Whether a block is allocated there."""
        return address in self._live

    def restore(
        self, pieces: Iterable[Piece], stream: int, pool: int, small: bool, page: int
    ) -> None:
        """A segment that was there before: its pieces, in the order of their addresses.

        ``pool``: number of a private pool, or 0. ``page``: of an expandable segment, else 0.
        """
        owner = self._owner(pool or None)
        own = self._pool(owner, MIN_BLOCK if small else SMALL_LIMIT + 1)
        before: Block | None = None
        segment: ExpandableSegment | None = None
        for address, size, requested, state in pieces:
            block = Block(own, stream, address, size, self._order(before))
            if page:
                segment = segment or ExpandableSegment(address, page)
                block.segment = segment
            block.requested = requested
            block.prev = before
            if before is not None:
                before.next = block
            before = block
            if state == "unmapped":
                block.mapped = False
                own.put_unmapped(block)
                continue
            self.reserved += size
            if state == "free":
                own.put(block)
            else:
                block.allocated = True
                self._live[address] = block
                self.allocated += size
        if owner is not None and not page:
            owner.segments += 1

    def largest_free(self) -> int:
        """Bytes of the largest free block outside private pools."""
        lists = [*self._small.free.values(), *self._large.free.values()]
        return max((blocks[-1][0] for blocks in lists if blocks), default=0)

    def segments(self) -> list[list[Block]]:
        """All blocks by segment, in the order of addresses; unmapped ones too.

        Raises:
            InvariantError: they are no segments.
        """
        return invariants.segments_of(self._pools(), self._taken())

    def check(self) -> None:
        """That the invariants hold: blocks tile their segments, no two free ones are neighbours,
        pools are sorted and complete, counters are what the blocks say.

        Raises:
            InvariantError: one doesn't, in one sentence.
        """
        segments = self.segments()
        for pool in self._pools():
            invariants.check_pool(pool)
        for blocks in segments:
            invariants.check_segment(blocks)
        mapped = sum(block.size for blocks in segments for block in blocks if block.mapped)
        invariants.check_equal("reserved", self.reserved, mapped)
        live = sum(block.size for block in self._live.values())
        invariants.check_equal("allocated", self.allocated, live)

    def _taken(self) -> list[Block]:
        """The blocks that are in no pool: live ones, and freed ones that wait for a stream."""
        waiting = {id(block): block for blocks in self._waiting.values() for block in blocks}
        return [*self._live.values(), *waiting.values(), *self._later.values(), *self._deferred]

    def _pools(self) -> list[Pool]:
        """All pools, private ones that were given up too where blocks may still be theirs."""
        owners = [*self._private.values(), *self._forgotten]
        private = [pool for owner in owners for pool in (owner.small, owner.large)]
        return [self._small, self._large, *private]

    def drain(self) -> Log:
        """What happened since the last time."""
        rows, self._rows = self._rows, []
        return Log.of(rows)

    # -- malloc, from a free block -----------------------------------------------------------

    def _owner(self, pool: int | None) -> PrivatePool | None:
        if pool is not None:
            if pool not in self._private:
                self._private[pool] = PrivatePool(pool)
            return self._private[pool]
        if not self._scopes:
            return None
        return self._scopes[-1 if self.torch >= (2, 10) else 0]

    def _pool(self, owner: PrivatePool | None, size: int) -> Pool:
        small = size <= SMALL_LIMIT
        if owner is None:
            return self._small if small else self._large
        return owner.small if small else owner.large

    def _take_free(self, pool: Pool, size: int, stream: int) -> Block | None:
        """The best fit among the free blocks, taken out of the pool."""
        if self.collects:
            pool.calls += 1
        block = self._best_fit(pool, size, stream)
        if block is not None:
            pool.take(block)
        return block

    def _best_fit(self, pool: Pool, size: int, stream: int) -> Block | None:
        blocks = pool.free.get(stream)
        if not blocks:
            return None
        place = bisect_left(blocks, (size,))
        if place == len(blocks):
            return None
        block = blocks[place][3]
        if block.segment is not None:
            if self.settings.expandable:
                # The best fit by what a block could grow to, not by what it is.
                while place + 1 < len(blocks) and block.segment is not None:
                    following = blocks[place + 1][3]
                    if _room(following) >= _room(block):
                        break
                    place, block = place + 1, following
            else:  # it was switched off
                while block.segment is not None:
                    place += 1
                    if place == len(blocks):
                        return None
                    block = blocks[place][3]
        limit = self.settings.max_split_size
        if size < limit:
            if block.size >= limit:
                return None
        elif block.size >= size + self.settings.max_non_split_rounding:
            return None
        return block

    def _hand_out(self, block: Block, size: int, requested: int) -> int:
        """Allocate the front of a block that is in no pool."""
        pool = block.pool
        rest = block.size - size
        plain = block.segment is None
        split_blocks = split_bytes = 0
        was_split = plain and (block.prev is not None or block.next is not None)
        if pool.small or self.settings.expandable:
            splits = rest >= MIN_BLOCK
        else:
            splits = rest > SMALL_LIMIT and size < self.settings.max_split_size
        if splits:
            remaining = block
            block = Block(pool, block.stream, block.address, size, self._order(block))
            block.segment = remaining.segment
            block.prev = remaining.prev
            if block.prev is not None:
                block.prev.next = block
            block.next = remaining
            remaining.prev = block
            remaining.address += size
            remaining.size = rest
            pool.put(remaining)
            if was_split:
                split_bytes = -size
            elif plain:
                split_blocks, split_bytes = 1, rest
        elif was_split:
            split_blocks, split_bytes = -1, -block.size
        block.allocated = True
        block.requested = requested
        self._live[block.address] = block
        self.allocated += block.size
        self._log_block(Action.ALLOC, block, split_blocks, split_bytes)
        return block.address

    # -- malloc, from the device -------------------------------------------------------------

    def _from_device(
        self, pool: Pool, size: int, stream: int, requested: int, retries: bool
    ) -> Block:
        want = self.settings.segment(size)
        if self.collects:
            self._collect_garbage()
        block = self._new_block(pool, want, size, stream, requested)
        if block is None and self._release_available(pool, size, stream):
            block = self._new_block(pool, want, size, stream, requested)
        if block is None and retries:
            self._release_cached()
            self._log(Action.RETRY)
            block = self._new_block(pool, want, size, stream, requested)
        if block is None:
            row = (self._op, Action.OOM, self.device.free_bytes, size, want, stream, 0, 0, 0)
            self._rows.append(row)
            raise OutOfMemory(self._failure(requested, want))
        return block

    def _failure(self, requested: int, want: int, rejected: bool = False) -> Failure:
        owned = [one for pool in self._private.values() for one in (pool.small, pool.large)]
        return Failure(
            requested=requested,
            wanted=want,
            total=self.device.total,
            free=self.device.free_bytes,
            allowed=self.allowed if self.allowed < UNLIMITED else None,
            allocated=self.allocated,
            reserved=self.reserved,
            private=sum(block.size for pool in owned for block in pool),
            rejected=rejected,
            expandable=self.settings.expandable,
            reserve=None
            if self.settings.reserve is None
            else self.settings.reservation(self.device.total),
            torch=self.torch,
        )

    def _new_block(
        self, pool: Pool, want: int, size: int, stream: int, requested: int
    ) -> Block | None:
        """A segment of its own for a block, or more of one that can grow."""
        if self.reserved + want > self.allowed:
            return None
        # The fraction of the settings, even where the program set another one itself.
        if (
            self.settings.throw_on_oom
            and self.reserved + want > self.settings.fraction * self.device.total
        ):
            self._log(Mark.REJECTION)
            raise OutOfMemory(self._failure(requested, want, rejected=True))
        if self.settings.expandable:
            return self._grow(pool, size, stream)
        address = self.device.malloc(want)
        if address is None:
            return None
        self.reserved += want
        if pool.owner:
            pool.owner.segments += 1
        block = Block(pool, stream, address, want, self._order())
        self._log_segment(Action.SEGMENT_ALLOC, address, want, block)
        return block

    def _order(self, parent: Block | None = None) -> int:
        """What a new block is sorted by among free ones of its size, before its address."""
        if self.torch <= (2, 11):
            return 0
        if self.torch >= (2, 13) and parent is not None:
            return parent.order
        self._numbered += 1
        return self._numbered

    # -- expandable segments -----------------------------------------------------------------

    def _grow(self, pool: Pool, size: int, stream: int) -> Block | None:
        block = self._expandable_block(pool, size, stream)
        if block is None:
            return None
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None  # there is room, so unmapped addresses follow
            if not self._map(following, min(following.size, size - block.size)):
                return None
            block = following
        pool.take(block)
        if pool.owner:
            pool.owner.segments += 1
        return block

    def _expandable_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Where free and unmapped blocks of one stream have room in a row; None: not even a new
        segment has."""
        for _, block in pool.unmapped.get(stream, ()):
            start = block
            if block.prev is not None and block.prev.is_free:
                start = block.prev
            if _has_room(start, size):
                return start
        page = SMALL_SEGMENT if pool.small else self.settings.large_segment
        whole = -(-self.settings.reservation(self.device.total) // page) * page or page
        if whole < size:
            return None
        address = self.device.reserve(whole)
        block = Block(pool, stream, address, whole, self._order())
        block.segment = ExpandableSegment(address, page)
        block.mapped = False
        pool.put_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first ``size`` bytes of an unmapped block, in whole pages."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        size = (size + segment.page - 1) // segment.page * segment.page
        if not self.device.map(size, segment.page):
            return False
        address = block.address
        pool.take_unmapped(block)
        block.mapped = True
        if size < block.size:
            self._cut(block, size, mapped=False)
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.put(block)
        self.reserved += size
        self._log_segment(Action.SEGMENT_MAP, address, size, block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give the whole pages of a free block back."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        before = -(block.address - segment.address) % segment.page
        size = (block.size - before) // segment.page * segment.page
        if size <= 0:
            return
        pool.take(block)
        if before:
            head = Block(pool, block.stream, block.address, before, self._order(block))
            head.segment = segment
            head.prev, head.next = block.prev, block
            if head.prev is not None:
                head.prev.next = head
            block.prev = head
            block.address += before
            block.size -= before
            pool.put(head)
        if size < block.size:
            self._cut(block, size, mapped=True)
        address = block.address
        block.mapped = False
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.put_unmapped(block)
        self.reserved -= size
        self.device.unmap(size)
        if pool.owner:
            pool.owner.segments -= 1
        self._log_segment(Action.SEGMENT_UNMAP, address, size, block)
        if not block.is_split:
            pool.take_unmapped(block)
            self.device.unreserve(block.address, block.size)

    def _cut(self, block: Block, size: int, mapped: bool) -> None:
        """Cut the end of a block off, as a free or an unmapped block."""
        rest = Block(
            block.pool,
            block.stream,
            block.address + size,
            block.size - size,
            self._order(block),
        )
        rest.segment = block.segment
        rest.mapped = mapped
        rest.prev, rest.next = block, block.next
        if rest.next is not None:
            rest.next.prev = rest
        block.next = rest
        block.size = size
        if mapped:
            block.pool.put(rest)
        else:
            block.pool.put_unmapped(rest)

    # -- free --------------------------------------------------------------------------------

    def _release(self, address: int) -> Block:
        block = self._live.pop(address)
        block.allocated = False
        self.allocated -= block.size
        self._log_block(Action.FREE_REQUESTED, block)
        return block

    def _finish(self, block: Block) -> None:
        """A freed block becomes a free one, together with its free neighbours."""
        address, size = block.address, block.size
        split_blocks = split_bytes = 0
        for neighbour in (block.prev, block.next):
            merged = self._merge(block, neighbour)
            if merged:
                split_blocks -= 1
                split_bytes -= merged
        block.pool.put(block)
        if block.segment is not None:
            split_blocks = split_bytes = 0
        elif block.prev is not None or block.next is not None:
            split_blocks += 1
            split_bytes += block.size
        self._rows.append(
            (
                self._op,
                Action.FREE_COMPLETED,
                address,
                size,
                block.requested,
                block.stream,
                block.pool.number,
                split_blocks,
                split_bytes,
            )
        )

    def _merge(self, block: Block, other: Block | None) -> int:
        """Let ``block`` swallow a neighbour, where both are free or both unmapped; its bytes."""
        if other is None or not other.is_free or other.mapped != block.mapped:
            return 0
        if other.mapped:
            other.pool.take(other)
        else:
            other.pool.take_unmapped(other)
        if block.prev is other:
            block.address = other.address
            block.prev = other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size
        return other.size

    def _wait(self, block: Block) -> None:
        for stream in sorted(block.streams):
            self._waiting.setdefault(stream, deque()).append(block)
        block.events = len(block.streams)
        block.streams = set()

    def _process_events(self) -> None:
        """Finish the frees whose streams got there; the start of every malloc."""
        if self._deferred and not self._scopes:
            self._end_deferral()
        if self._waiting and self.completion == "soon":
            self._finish_waiting()

    def _end_deferral(self) -> None:
        for block in self._deferred:
            block.streams -= block.captured
            block.captured = set()
            if block.streams:
                self._wait(block)
            else:
                self._finish(block)
        self._deferred = []

    def _finish_waiting(self, owner: PrivatePool | None = None) -> None:
        """Free what waited for streams, which got there; ``owner``: only blocks of that pool."""
        waiting, self._waiting = self._waiting, {}
        for stream, blocks in waiting.items():
            for block in blocks:
                if owner is not None and block.pool.owner is not owner:
                    self._waiting.setdefault(stream, deque()).append(block)
                    continue
                block.events -= 1
                if block.events == 0:
                    self._finish(block)

    def _synchronize(self, owner: PrivatePool | None = None) -> None:
        """Wait for all streams, and free what waited; ``owner``: only blocks of that pool."""
        self._log(Mark.SYNC)
        self._end_deferral()
        self._finish_waiting(owner)
        for ticket, block in list(self._later.items()):
            if owner is None or block.pool.owner is owner:
                self.complete(ticket)

    # -- giving memory back ------------------------------------------------------------------

    def _release_available(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back blocks over ``max_split_size``: one that suffices, else the largest."""
        limit = self.settings.max_split_size
        if limit == UNLIMITED:
            return False
        need = max(size, limit)
        blocks = pool.free.get(stream, [])
        place = bisect_left(blocks, (need,))
        if place < len(blocks) and blocks[place][3].segment is None:
            self._give_back(blocks[place][3])
            return True
        released = 0
        while released < need and place > 0 and blocks[place - 1][0] >= limit:
            place -= 1
            block = blocks[place][3]
            if block.segment is None:
                released += block.size
                self._give_back(block)
        return released >= need

    def _release_cached(self) -> None:
        """Wait for all streams, then give back what is whole and free."""
        if not (self._scopes and self.torch <= (2, 12)):
            self._synchronize()
            self._release_free(self._large)
            self._release_free(self._small)
        for number in list(self._freeable):
            self._release_private(number)

    def _release_private(self, number: int) -> None:
        private = self._freeable[number]
        self._release_free(private.small)
        self._release_free(private.large)
        if private.segments == 0:
            del self._freeable[number]
            del self._private[number]
            if self.settings.expandable:
                self._forgotten.append(private)

    def _release_free(self, pool: Pool) -> None:
        growing = []
        for block in list(pool):
            if block.segment is not None:
                growing.append(block)
            elif not block.is_split:
                self._give_back(block)
        for block in growing:
            self._unmap(block)

    def _give_back(self, block: Block) -> None:
        """cudaFree a segment that is one free block."""
        pool = block.pool
        pool.take(block)
        self.reserved -= block.size
        self.device.free(block.address, block.size)
        if pool.owner:
            pool.owner.segments -= 1
        self._log_segment(Action.SEGMENT_FREE, block.address, block.size, block)

    def _collect_garbage(self) -> None:
        """Give back idle segments of the large pool, the oldest first, down to the threshold."""
        limit = int(self.settings.gc_threshold * self.allowed)
        if self.reserved <= limit:
            return
        target = self.reserved - limit
        pool = self._large
        ages = [pool.calls - block.gc_base for block in pool if not block.is_split]
        total, count = sum(ages), len(ages)
        reclaimed, freed = 0, True
        while reclaimed < target and freed and count > 0:
            threshold = total / count
            freed = False
            for block in list(pool):
                age = pool.calls - block.gc_base
                if not block.is_split and block.segment is None and age >= threshold:
                    freed = True
                    reclaimed += block.size
                    total -= age
                    count -= 1
                    self._give_back(block)

    # -- the log -----------------------------------------------------------------------------

    def _log(self, action: int) -> None:
        self._rows.append((self._op, action, 0, 0, 0, 0, 0, 0, 0))

    def _log_block(
        self, action: Action, block: Block, split_blocks: int = 0, split_bytes: int = 0
    ) -> None:
        self._rows.append(
            (
                self._op,
                action,
                block.address,
                block.size,
                block.requested,
                block.stream,
                block.pool.number,
                split_blocks,
                split_bytes,
            )
        )

    def _log_segment(self, action: Action, address: int, size: int, block: Block) -> None:
        row = (self._op, action, address, size, size, block.stream, block.pool.number, 0, 0)
        self._rows.append(row)


def _has_room(block: Block, size: int) -> bool:
    """Whether free and unmapped blocks from this one on have that many bytes in a row."""
    room = 0
    following: Block | None = block
    while following is not None and room < size and following.is_free:
        room += following.size
        following = following.next
    return room >= size


def _room(block: Block) -> int:
    """What a free block of an expandable segment could grow to."""
    following = block.next
    grows = following is not None and not following.mapped
    return block.size + (following.size if following is not None and grows else 0)
