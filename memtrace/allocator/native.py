"""PyTorch's native CUDA caching allocator, deed by deed, in every version from 2.1 on.

Terms and rules are those of ``c10/cuda/CUDACachingAllocator.cpp``: a *segment* is what the device
gave, a *block* a piece of it, free blocks wait in a *pool*. This is the readable definition;
:mod:`memtrace.allocator.compiled` is the same for long streams.
"""

from collections.abc import Iterable
from contextlib import suppress

from memtrace.allocator import invariants
from memtrace.allocator.caching import CachingRules
from memtrace.allocator.log import Log, Mark
from memtrace.allocator.oom import OutOfMemory
from memtrace.allocator.ops import Op, Ops
from memtrace.allocator.pools import Block, ExpandableSegment, Piece, Pool, PrivatePool
from memtrace.allocator.settings import MIN_BLOCK, SMALL_LIMIT


class NativeAllocator(CachingRules):
    """The allocator of one device.

    ``fraction``: as ``torch.cuda.set_per_process_memory_fraction`` sets it, else by the settings.
    Streams are numbers that compare as their handles do; the default one is 0.
    ``debug``: :meth:`run` checks the invariants after every operation.
    """

    # -- what a program calls --------------------------------------------------------------------

    def malloc(self, requested: int, stream: int = 0, pool: int | None = None) -> int:
        """The address of a block; 0 for no bytes.

        ``pool``: the private pool whose scope is open; None: the innermost of
        :meth:`begin_pool` (before torch 2.10 the outermost).

        Raises:
            OutOfMemory: where PyTorch does.
            ValueError: the size is negative.
        """
        if requested < 0:
            raise ValueError(f"{requested} bytes are no size of a block")
        if requested == 0:
            return 0
        owner = self._owner(pool) if self._scopes or pool is not None else None
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
        block.streams = frozenset()
        block.events = 1
        self._tickets += 1
        self._later[self._tickets] = block
        return self._tickets

    def record_stream(self, address: int, stream: int) -> None:
        """Another stream uses a block."""
        if address == 0:
            return
        block = self._live[address]
        if stream != block.stream:
            block.streams |= {stream}
            if self._scopes and self.torch <= (2, 12):
                block.captured |= {stream}

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
        """The pool's scope ends.

        Raises:
            KeyError: it isn't open.
        """
        if self._private[number] not in self._scopes:
            raise KeyError(number)
        self._scopes.remove(self._private[number])

    def release_pool(self, number: int) -> None:
        """One user of the pool less; without any its free segments can be given back.

        Raises:
            KeyError: it has no user.
        """
        pool = self._private[number]
        if pool.uses == 0:
            raise KeyError(number)
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
        found = self._pool(self._owner(pool), size)
        if self._best_fit(found, size, stream) is not None:
            return True
        # An expandable segment begins to grow at a free block, which may be large enough: one that
        # ``max_split_size_mb`` keeps from being the best fit.
        if (
            not self.settings.expandable
            or self.reserved + self.settings.segment(size) > self.allowed
        ):
            return False
        start = self._with_room(found, size, stream)
        return start is not None and start.mapped and start.size >= size

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
        return Log.of(self.drain_values())

    def drain_values(self) -> list[int]:
        """The same as the values of all rows, one row after the other."""
        logged, self.logged = self.logged, []
        return logged
