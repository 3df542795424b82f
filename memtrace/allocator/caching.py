"""The rules of the native allocator: which block serves a request, what is cut off and merged, when
the device is asked, and what is given back.

Each method is one of ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from bisect import bisect_left
from collections import deque
from typing import Literal

from memtrace.allocator.device import Device
from memtrace.allocator.log import Mark
from memtrace.allocator.oom import Failure, OutOfMemory
from memtrace.allocator.pools import Block, ExpandableSegment, Pool, PrivatePool, has_room, room
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


class CachingRules:
    """The state of an allocator, and how it changes; what programs call is in
    :class:`~memtrace.allocator.native.NativeAllocator`."""

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
        #: What happened since the log was drained: the values of its rows, one after the other. A
        #: tuple for each would be looked through for garbage.
        self.logged: list[int] = []

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
                    if room(following) >= room(block):
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
            self.logged += row
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
        start = self._with_room(pool, size, stream)
        if start is not None:
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

    def _with_room(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Where the segments that there are have that room."""
        for _, block in pool.unmapped.get(stream, ()):
            start = block
            if block.prev is not None and block.prev.is_free:
                start = block.prev
            if has_room(start, size):
                return start
        return None

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

    def complete(self, ticket: int) -> None:
        """What a block of :meth:`free_later` waited for has happened; again, nothing happens."""
        block = self._later.pop(ticket, None)
        if block is not None:
            block.events = 0
            self._finish(block)

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
        self.logged += (
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
        block.streams = frozenset()

    def _process_events(self) -> None:
        """Finish the frees whose streams got there; the start of every malloc."""
        if self._deferred and not self._scopes:
            self._end_deferral()
        if self._waiting and self.completion == "soon":
            self._finish_waiting()

    def _end_deferral(self) -> None:
        for block in self._deferred:
            block.streams -= block.captured
            block.captured = frozenset()
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
        self.logged += (self._op, action, 0, 0, 0, 0, 0, 0, 0)

    def _log_block(
        self, action: Action, block: Block, split_blocks: int = 0, split_bytes: int = 0
    ) -> None:
        self.logged += (
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

    def _log_segment(self, action: Action, address: int, size: int, block: Block) -> None:
        row = (self._op, action, address, size, size, block.stream, block.pool.number, 0, 0)
        self.logged += row
