"""The allocator's segments and blocks at one instant, read from the trace alone.

What PyTorch calls them: a *segment* is a range that the allocator took from the device; it is cut
into *blocks*; a block is allocated, or pending (freed, but another stream may still use it), or
free. Two free blocks are never neighbours, so each gap between blocks is one free block. In an
expandable segment every contiguous mapped range counts as a segment, as in PyTorch's snapshots.

Definitions of the counters: ``c10/cuda/CUDACachingAllocator.cpp``; equal to
``torch.cuda.memory_stats()`` where that has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.trace.schema import Action, State

#: A segment of the small pool: cudaMalloc'ed in this size only, expandable ones in pages of it.
SMALL_SEGMENT = 2 << 20
#: Pages of expandable segments in the large pool are larger than this.
LARGE_PAGE = 10 << 20
#: Larger blocks lie in the large pool.
SMALL_BLOCK = 1 << 20


@dataclass(frozen=True)
class Segments:
    """Segments, ascending by address (arrays of one length; addresses and bytes int64)."""

    address: np.ndarray
    bytes: np.ndarray
    stream: np.ndarray
    expandable: np.ndarray  # bool
    pool: tuple[str | None, ...]  # of a private pool its id, else None
    small: tuple[bool | None, ...]  # small or large pool; None: unknown, see :func:`layout_at`


@dataclass(frozen=True)
class Blocks:
    """Blocks, free ones too, ascending by address (int64 arrays of one length)."""

    address: np.ndarray
    bytes: np.ndarray
    requested: np.ndarray  # 0 where free
    state: np.ndarray  # a State each
    segment: np.ndarray  # row of the segments; -1: in none that was recorded
    context: np.ndarray  # context of the event that made it what it is; -1 where free
    component: tuple[str | None, ...]  # of a pending block, the one that it left
    scope: np.ndarray  # where it was allocated; -1 where free
    stack: np.ndarray  # -1 where free, or not recorded


@dataclass(frozen=True)
class Layout:
    """One device of one process after one event."""

    segments: Segments
    blocks: Blocks

    @classmethod
    def none(cls) -> "Layout":
        """Nothing is reserved."""
        no, not_any = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
        return cls(
            Segments(no, no, no, not_any, (), ()), Blocks(no, no, no, no, no, no, (), no, no)
        )

    def of(self, chosen: np.ndarray) -> "Layout":
        """Only the segments in ``chosen`` (bool, one a segment), with their blocks."""
        segments, blocks = self.segments, self.blocks
        kept = np.flatnonzero(chosen)
        number = np.full(len(chosen) + 1, -1)
        number[kept] = np.arange(len(kept))
        inside = np.flatnonzero(number[blocks.segment] >= 0)  # -1 reads the last, which is -1
        return Layout(
            Segments(**_pick(vars(segments), kept)),
            Blocks(**(_pick(vars(blocks), inside) | {"segment": number[blocks.segment[inside]]})),
        )

    def by_pool(self) -> Mapping[bool | None, "Layout"]:
        """By small (True) and large pool; None: which of them isn't known."""
        return self._split(lambda segments: segments.small)

    def by_stream(self) -> Mapping[int, "Layout"]:
        """By the stream that the segments belong to."""
        return self._split(lambda segments: segments.stream.tolist())

    def by_private_pool(self) -> Mapping[str | None, "Layout"]:
        """By private pool; None: the default one."""
        return self._split(lambda segments: segments.pool)

    def _split(self, key: Callable[[Segments], Any]) -> dict[Any, "Layout"]:
        keys = list(key(self.segments))
        found = dict.fromkeys(keys)
        return {one: self.of(np.array([other == one for other in keys])) for one in found}

    @property
    def totals(self) -> "Totals":
        """The counters over all of it."""
        segments, blocks = self.segments, self.blocks
        size, state = blocks.bytes, blocks.state
        allocated, pending, free = (
            state == one for one in (State.ALLOCATED, State.PENDING, State.FREE)
        )
        whole = np.zeros(len(size), dtype=bool)
        whole[free] = size[free] == segments.bytes[blocks.segment[free]]
        split = np.zeros(len(size), dtype=bool)
        split[free] = ~whole[free] & ~segments.expandable[blocks.segment[free]]
        used = allocated | pending
        return Totals(
            reserved=int(segments.bytes.sum()),
            allocated=int(size[allocated].sum()),
            active=int(size[used].sum()),
            requested=int(blocks.requested[used].sum()),
            slack=int((size - blocks.requested)[allocated].sum()),
            free=int(size[free].sum()),
            largest_free=int(size[free].max(initial=0)),
            free_segments=int(size[whole].sum()),
            inactive_split=int(size[split].sum()),
            inactive_split_blocks=int(split.sum()),
            segments=len(segments.bytes),
            blocks=int(used.sum()),
        )


@dataclass(frozen=True)
class Totals:
    """Counters of a layout, in bytes where nothing else is said."""

    reserved: int
    allocated: int
    active: int  # allocated or pending
    requested: int  # of active blocks, what was asked for
    slack: int  # of allocated blocks, what they have beyond that
    free: int
    largest_free: int
    free_segments: int  # segments without a block: empty_cache() returns them
    inactive_split: int  # free, with a block in the segment; expandable segments don't count
    inactive_split_blocks: int  # how many free blocks that are
    segments: int
    blocks: int  # active ones

    @classmethod
    def none(cls) -> "Totals":
        """Nothing is reserved."""
        return cls(*(0 for _ in fields(cls)))


def layout_at(account: Account, event: int) -> Layout | None:
    """The segments and blocks of ``account``'s device after ``event``; None: not recorded.

    ``small`` is exact for segments of cudaMalloc, which takes 2 MiB for the small pool and more for
    the large one, and for mapped ranges that hold a block. Of one that is all free only the size is
    known: up to 10 MiB, less than a page of the large pool, it is small; above that it is None.
    """
    events, contexts = account.process.events, account.process.contexts
    chosen = account.lives.events(event)
    context = events["context"][chosen]
    action = np.where(account.here, contexts["action"], -1)[context]
    rows = _Rows(
        action,
        events["id"][chosen],
        events["bytes"][chosen],
        context,
        contexts["stream"],
        contexts["pool"],
    )
    taken = _segments(rows)
    if taken is None:
        return None
    used = _used(rows, events["requested"][chosen], contexts)
    blocks = _with_free(taken, used)
    return Layout(_with_pools(taken, blocks), blocks)


@dataclass(frozen=True)
class _Rows:
    """The events of one device that matter; ``action`` is -1 for those of another."""

    action: np.ndarray
    address: np.ndarray
    bytes: np.ndarray
    context: np.ndarray
    streams: np.ndarray  # by context
    pools: list[str | None]  # by context

    def of(self, *actions: Action) -> np.ndarray:
        return np.flatnonzero(np.isin(self.action, actions))


def _last(rows: np.ndarray, address: np.ndarray) -> np.ndarray:
    """Of each address the last of ``rows``, ascending by address."""
    _, from_end = np.unique(address[rows[::-1]], return_index=True)
    return np.asarray(rows[::-1][from_end])


def _segments(rows: _Rows) -> Segments | None:
    plain = rows.of(Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)
    mapped = rows.of(Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
    if len(plain) + len(mapped) == 0:
        return None
    last = _last(plain, rows.address)
    last = last[rows.action[last] == Action.SEGMENT_ALLOC]
    address, size = rows.address[last], rows.bytes[last]
    stream = rows.streams[rows.context[last]]
    pools = [rows.pools[number] for number in rows.context[last]]
    expandable = np.zeros(len(last), dtype=bool)
    start, end, context = _mapped(rows, mapped)
    address = np.concatenate((address, start))
    size = np.concatenate((size, end - start))
    stream = np.concatenate((stream, rows.streams[context]))
    pools += [rows.pools[number] for number in context]
    expandable = np.concatenate((expandable, np.ones(len(start), dtype=bool)))
    order = np.argsort(address, kind="stable")
    return Segments(
        address[order],
        size[order],
        stream[order],
        expandable[order],
        tuple(pools[row] for row in order),
        (None,) * len(order),
    )


def _mapped(rows: _Rows, mapped: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, end and context of every range that is mapped: of one stream and pool each."""
    address, end = rows.address[mapped], rows.address[mapped] + rows.bytes[mapped]
    borders = np.unique(np.concatenate((address, end)))
    context = np.full(len(borders), -1)  # of the bytes from one border to the next; -1: unmapped
    first, stop = np.searchsorted(borders, address), np.searchsorted(borders, end)
    taken = rows.action[mapped] == Action.SEGMENT_MAP
    contexts = np.where(taken, rows.context[mapped], -1)
    for low, high, number in zip(first.tolist(), stop.tolist(), contexts.tolist(), strict=True):
        context[low:high] = number
    owners: dict[tuple[int, str | None], int] = {}
    owner = np.array(
        [
            -1
            if number < 0
            else owners.setdefault((int(rows.streams[number]), rows.pools[number]), number)
            for number in context.tolist()
        ],
        dtype=np.int64,
    )
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    begins = begins[owner[begins] >= 0]
    changes = np.append(np.flatnonzero(np.diff(owner, prepend=-1)), len(borders) - 1)
    ends = changes[np.searchsorted(changes, begins, side="right")]
    return borders[begins], borders[ends], owner[begins]


def _used(rows: _Rows, requested: np.ndarray, contexts: Mapping[str, Any]) -> Blocks:
    """The blocks that are allocated or pending."""
    moved = rows.of(
        Action.ALLOC, Action.RETAG, Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED
    )
    last = _last(moved, rows.address)
    action = rows.action[last]
    last = last[(action != Action.FREE) & (action != Action.FREE_COMPLETED)]
    births = rows.of(Action.ALLOC)
    born = _last(births, rows.address)  # of every address that was ever handed out
    born = born[np.searchsorted(rows.address[born], rows.address[last])]
    context, birth = rows.context[last], rows.context[born]
    pending = rows.action[last] == Action.FREE_REQUESTED
    return Blocks(
        rows.address[last],
        rows.bytes[last],
        requested[last],
        np.where(pending, State.PENDING, State.ALLOCATED),
        np.full(len(last), -1),
        context,
        tuple(contexts["component"][number] for number in context),
        contexts["scope"][birth],
        contexts["stack"][birth],
    )


def _with_free(segments: Segments, used: Blocks) -> Blocks:
    """``used`` with the free blocks between them."""
    ends = segments.address + segments.bytes
    row = np.searchsorted(segments.address, used.address, side="right") - 1
    inside = (row >= 0) & (used.address < np.append(ends, 0)[row])
    segment = np.where(inside, row, -1)
    # Each segment and block leaves off where the next block or the segment's end begins.
    count = len(segments.bytes)
    kept = np.flatnonzero(inside)
    start = np.concatenate((segments.address, used.address[kept] + used.bytes[kept]))
    owner = np.concatenate((np.arange(count), segment[kept]))
    begin = np.concatenate((segments.address, used.address[kept]))
    order = np.lexsort((np.arange(len(start)), begin, owner))
    start, owner = start[order], owner[order]
    stop = ends[owner]
    follows = np.flatnonzero(owner[1:] == owner[:-1])
    stop[follows] = begin[order][follows + 1]
    free = np.flatnonzero(stop > start)
    return _sorted(used, segment, start[free], stop[free] - start[free], owner[free])


def _sorted(
    used: Blocks, segment: np.ndarray, start: np.ndarray, size: np.ndarray, owner: np.ndarray
) -> Blocks:
    none = np.full(len(start), -1)
    nothing = np.zeros(len(start), dtype=np.int64)
    joined: dict[str, Any] = {
        "address": np.concatenate((used.address, start)),
        "bytes": np.concatenate((used.bytes, size)),
        "requested": np.concatenate((used.requested, nothing)),
        "state": np.concatenate((used.state, nothing)),
        "segment": np.concatenate((segment, owner)),
        "context": np.concatenate((used.context, none)),
        "component": used.component + (None,) * len(start),
        "scope": np.concatenate((used.scope, none)),
        "stack": np.concatenate((used.stack, none)),
    }
    return Blocks(**_pick(joined, np.argsort(joined["address"], kind="stable")))


def _with_pools(segments: Segments, blocks: Blocks) -> Segments:
    """``segments`` with whether each belongs to the small pool."""
    inside = blocks.segment >= 0
    active = inside & (blocks.state != State.FREE)
    held = np.bincount(blocks.segment[active], minlength=len(segments.bytes)) > 0
    large = active & (blocks.bytes > SMALL_BLOCK)
    holds_large = np.bincount(blocks.segment[large], minlength=len(segments.bytes)) > 0
    small: list[bool | None] = []
    for size, expandable, used, big in zip(
        segments.bytes.tolist(), segments.expandable, held, holds_large, strict=True
    ):
        if not expandable or size == SMALL_SEGMENT:
            small.append(size == SMALL_SEGMENT)
        elif used:
            small.append(not big)
        else:
            small.append(True if size <= LARGE_PAGE else None)
    return Segments(**(vars(segments) | {"small": tuple(small)}))


def _pick(columns: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    return {
        name: column[rows]
        if isinstance(column, np.ndarray)
        else tuple(column[row] for row in rows.tolist())
        for name, column in columns.items()
    }
