"""Why a request failed, and which blocks stood in its way.

PyTorch looks for a free block of the request's pool and stream, asks the device for a segment,
waits for all streams, returns whole free segments and asks again. So when it gives up, one of these
holds, looked for in this order:

- *pending*: a block that fits waited for another stream. If it came free while the allocator waited
  for all streams it is free by now, and PyTorch doesn't look again (pytorch/pytorch#189504).
- *fraction-limited*: the device has room, and the process may not take it.
- *private pool* or *fragmented*, by which is more: enough is free, in private pools or in segments
  that hold live blocks.
- *exhausted*: what is free, wherever it is, is too little.

A verdict that no event shows and that only nothing else explains is not ``sure``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from memtrace.allocator.requests import pools_are_named
from memtrace.allocator.settings import SMALL_LIMIT, Settings
from memtrace.analysis.accounts import Account
from memtrace.analysis.fragmentation import Owner, Parts, parts
from memtrace.analysis.places import Place, place
from memtrace.analysis.segments import Layout
from memtrace.sizes import format_size
from memtrace.trace.schema import Action, State

#: What the allocator does between looking for a block and giving up, beside taking back blocks.
_ON_THE_WAY = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP, Action.SEGMENT_MAP, Action.RETRY)


class Kind(StrEnum):
    """Why there was no room."""

    PENDING = "pending"
    FRACTION = "fraction-limited"
    PRIVATE = "private pool"
    FRAGMENTED = "fragmented"
    EXHAUSTED = "exhausted"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Request:
    """A request that failed, and what the allocator met; sizes in bytes.

    Attributes:
        event: its number in the process.
        owner: whose free blocks serve it.
        bytes: the block that it needs.
        wanted: the segment that the device was asked for.
        free: on the device, by whomever it could be used.
        total: of the device; None: unknown.
        allowed: what the memory fraction lets the process reserve; None: no limit, or unknown.
    """

    event: int
    owner: Owner
    bytes: int
    wanted: int
    free: int
    total: int | None
    allowed: int | None
    settings: Settings

    @classmethod
    def at(
        cls,
        account: Account,
        event: int,
        settings: Settings,
        total: int | None,
        fraction: float | None,
    ) -> "Request":
        """The one that event ``event``, an OOM, tells of."""
        events, contexts = account.process.events, account.process.contexts
        context = events["context"][event]
        size = int(events["bytes"][event])
        limited = total is not None and fraction is not None and fraction < 1
        return cls(
            event=event,
            owner=Owner(contexts["pool"][context], int(contexts["stream"][context])),
            bytes=size,
            wanted=settings.segment(size),
            free=int(events["id"][event]),
            total=total,
            allowed=int(fraction * total) if limited else None,  # type: ignore[operator]
            settings=settings,
        )

    @property
    def small(self) -> bool:
        """Whether the small pool serves it."""
        return self.bytes <= SMALL_LIMIT

    def lack(self, reserved: int) -> int:
        """What has to be returned before the device, and the fraction, let the segment in."""
        over = 0 if self.allowed is None else reserved + self.wanted - self.allowed
        return max(self.wanted - self.free, over)

    def fits(self, size: int) -> bool:
        """Whether the allocator hands out a free block of ``size`` for it."""
        limit = self.settings.max_split_size
        if self.bytes < limit:
            return self.bytes <= size < limit
        return self.bytes <= size < self.bytes + self.settings.max_non_split_rounding


@dataclass(frozen=True)
class Diagnosis:
    """Why a request failed.

    Attributes:
        also: kinds of whose free memory there was enough, too.
        sure: the trace shows it; otherwise nothing else explains the failure.
        fit: bytes of the block that would have served (pending).
        words: the same in a sentence or two.
    """

    request: Request
    parts: Parts
    kind: Kind
    also: tuple[Kind, ...]
    sure: bool
    fit: int | None
    words: str


def diagnose(account: Account, request: Request, layout: Layout | None) -> Diagnosis:
    """``layout``: the segments and blocks after the request failed; None: there were none."""
    found = parts(layout) if layout is not None else Parts.none()
    own = found.free.get(request.owner, 0) if request.owner.pool is not None else 0
    private, default = found.private - own, found.hard + found.releasable + own
    lack = request.lack(found.reserved)
    enough = min(max(lack, 1), request.bytes)
    serving = [
        kind
        for kind, size in ((Kind.PRIVATE, private), (Kind.FRAGMENTED, default))
        if size >= enough
    ]
    larger = Kind.PRIVATE if private > default else Kind.FRAGMENTED
    sure, fit = True, None
    if layout is not None and (fit := _fit(layout, request, State.FREE)) is not None:
        kind, sure = _of_fit(account, request, layout)
    elif layout is not None and found.pending and _fits_synchronised(layout, request, lack):
        kind = Kind.PENDING
        fit = _fit(layout, request, State.FREE, State.PENDING)
    elif request.free >= request.wanted:
        sure = request.allowed is not None
        kind = Kind.FRACTION if lack > 0 or not sure else Kind.UNEXPLAINED
    elif found.releasable >= lack:  # it is returned first, but for a private pool or a capture
        kind, sure = Kind.PRIVATE, request.owner.pool is not None
    elif private + default >= enough:
        kind = larger if len(serving) != 1 else serving[0]
        if not serving:
            serving = [Kind.PRIVATE, Kind.FRAGMENTED]
    else:
        kind = Kind.EXHAUSTED
    also = () if kind is Kind.PENDING else tuple(one for one in serving if one is not kind)
    words = _words(account, request, found, kind, fit)
    return Diagnosis(request, found, kind, also, sure, fit, words)


# -- what would have served ------------------------------------------------------------------------


def _own(layout: Layout, request: Request) -> np.ndarray:
    """Which segments belong to the pool and stream that were asked: bool, one a segment."""
    segments = layout.segments
    return np.array(
        [
            Owner(pool, stream) == request.owner and small in (request.small, None)
            for pool, stream, small in zip(
                segments.pool, segments.stream.tolist(), segments.small, strict=True
            )
        ],
        dtype=bool,
    )


@dataclass(frozen=True)
class _Runs:
    """What lies side by side in some states (int64 arrays of one length)."""

    segment: np.ndarray
    address: np.ndarray
    bytes: np.ndarray

    @classmethod
    def of(cls, layout: Layout, *states: State) -> "_Runs":
        blocks = layout.blocks
        rows = np.flatnonzero(np.isin(blocks.state, states) & (blocks.segment >= 0))
        segment = blocks.segment[rows]
        begins = (np.diff(rows, prepend=-2) != 1) | (np.diff(segment, prepend=-1) != 0)
        sizes = np.zeros(int(begins.sum()), dtype=np.int64)
        np.add.at(sizes, np.cumsum(begins) - 1, blocks.bytes[rows])
        return cls(segment[begins], blocks.address[rows][begins], sizes)


def _fitting(layout: Layout, request: Request, *states: State) -> list[tuple[int, int]]:
    """Runs of blocks in those states that would serve the request: address and bytes."""
    runs = _Runs.of(layout, *states)
    own = _own(layout, request)[runs.segment]
    found = zip(runs.address[own].tolist(), runs.bytes[own].tolist(), strict=True)
    return [(address, size) for address, size in found if request.fits(size)]


def _fit(layout: Layout, request: Request, *states: State) -> int | None:
    """The smallest of them, in bytes."""
    return min((size for _, size in _fitting(layout, request, *states)), default=None)


def _of_fit(account: Account, request: Request, layout: Layout) -> tuple[Kind, bool]:
    """Why a free block that fits wasn't taken, and whether that is sure."""
    # Had it been free when the allocator looked, it would have been taken.
    freed, waited = _freed_before(account, request.event)
    runs = _fitting(layout, request, State.FREE)
    named = pools_are_named(account.process)
    if any(start <= address < start + size for address in freed for start, size in runs):
        return Kind.PENDING, waited or named
    return (Kind.UNEXPLAINED, True) if named else (Kind.PRIVATE, False)


def _fits_synchronised(layout: Layout, request: Request, lack: int) -> bool:
    """Whether the request would be served once every stream has been waited for."""
    if _fit(layout, request, State.FREE, State.PENDING) is not None:
        return True
    runs = _Runs.of(layout, State.FREE, State.PENDING)
    whole = runs.bytes == layout.segments.bytes[runs.segment]
    default = np.array([pool is None for pool in layout.segments.pool], dtype=bool)[runs.segment]
    returned = int(runs.bytes[whole & default].sum())
    held = int(layout.totals.free_segments)
    return returned >= lack and returned > held


def _freed_before(account: Account, event: int) -> tuple[list[int], bool]:
    """Blocks that came free right before the failure, and whether they waited for a stream.

    One that was freed right before it waited, too, if it serves the request.
    """
    events, contexts = account.process.events, account.process.contexts
    freed: list[int] = []
    for row in range(event - 1, -1, -1):
        context = events["context"][row]
        action = contexts["action"][context]
        if not account.here[context] or action in _ON_THE_WAY:
            continue
        if action == Action.FREE_COMPLETED:
            freed.append(int(events["id"][row]))
        elif action == Action.FREE and not freed:
            return [int(events["id"][row])], False
        else:
            break
    return freed, True


# -- in words --------------------------------------------------------------------------------------


def _words(account: Account, request: Request, found: Parts, kind: Kind, fit: int | None) -> str:
    asked = f"{format_size(request.bytes)} were asked for"
    free, reserved = format_size(request.free), format_size(found.reserved)
    device = account.device
    if kind is Kind.PENDING:
        return _of_pending(asked, found, fit)
    if kind is Kind.FRACTION:
        limit = (
            "only a memory fraction explains the refusal"
            if request.allowed is None
            else f"the memory fraction allows this process {format_size(request.allowed)}"
        )
        return f"{asked} and {device} has {free} free, but {limit}: {reserved} are reserved."
    if kind is Kind.UNEXPLAINED:
        largest = format_size(found.largest.get(request.owner, 0))
        return (
            f"{asked}, and there was room: {free} on the device, and a free block of {largest} in "
            "the pool that was asked. The trace doesn't show why it wasn't given."
        )
    if kind is Kind.PRIVATE:
        return _of_private(asked, request, found, fit)
    if request.total is not None and request.bytes > request.total:
        return f"{asked} and {device} has {format_size(request.total)} in all."
    inside = found.hard + found.releasable + found.private
    if kind is Kind.FRAGMENTED:
        largest = format_size(max(found.largest.values(), default=0))
        elsewhere = found.elsewhere(request.owner.stream)
        streams = f", {format_size(elsewhere)} of it on other streams" if elsewhere else ""
        return (
            f"{asked} and would fit in what is free, in pieces: {format_size(inside)} inside "
            f"reserved memory{streams}, the largest block {largest}, and {free} on the device."
        )
    return _of_exhaustion(account, asked, request, found, request.lack(found.reserved) - inside)


def _of_pending(asked: str, found: Parts, fit: int | None) -> str:
    if found.pending:
        return (
            f"{asked}, and {format_size(found.pending)} that were freed wait for another stream: "
            "once that is done there is room."
        )
    return (
        f"{asked}, and a free block of {format_size(fit or 0)} would have served. It waited for "
        "another stream when the allocator looked, came free only as it waited for all streams "
        "before giving up, and PyTorch doesn't look again: the same request succeeds right after."
    )


def _of_exhaustion(
    account: Account, asked: str, request: Request, found: Parts, missing: int
) -> str:
    held = f"{format_size(found.allocated)} are allocated"
    if found.pending:
        held += f", {format_size(found.pending)} wait for another stream"
    if request.total is not None:
        outside = request.total - request.free - found.reserved
        held += f", {format_size(outside)} are used outside the allocator"
    said = f"{asked} and {format_size(missing)} are missing however memory is arranged: {held}."
    components = {name: one.read_one(request.event) for name, one in account.components.items()}
    largest = max(components, key=lambda name: components[name])
    if components[largest]:
        said += f" The largest part is {largest} with {format_size(components[largest])}."
    return said


def _of_private(asked: str, request: Request, found: Parts, fit: int | None) -> str:
    free = format_size(request.free)
    if fit is not None:
        return (
            f"{asked}, and a free block of {format_size(fit)} wasn't taken: it must belong to a "
            "private pool (a CUDA graph's, a MemPool's), which this version's history doesn't name."
        )
    if found.releasable >= request.lack(found.reserved):
        return (
            f"{asked}, and whole free segments of {format_size(found.releasable)} weren't returned "
            "for it: while a graph is captured (up to torch 2.12, while any private pool is in "
            "use) the allocator doesn't."
        )
    return (
        f"{asked}; {format_size(found.private)} are free in private pools (a CUDA graph's, a "
        f"MemPool's), which serve nobody else, {format_size(found.hard)} in pieces between live "
        f"blocks, and {free} on the device."
    )


# -- what stood in the way -------------------------------------------------------------------------


@dataclass(frozen=True)
class Obstacle:
    """A live block in a place where the request could have gone."""

    address: int
    bytes: int
    requested: int
    component: str
    place: Place
    stack: tuple[str, ...]  # innermost frame first; empty: not recorded
    age_us: int  # since it was allocated
    pending: bool


@dataclass(frozen=True)
class Clearing:
    """The fewest live bytes whose going would have let the request in.

    Attributes:
        returned: how many segments would have gone back to the device; 0: the blocks are
            neighbours inside one segment of the request's own pool and stream.
        bytes: of the blocks.
        gained: what the request could use then.
        blocks: largest first.
    """

    returned: int
    bytes: int
    gained: int
    blocks: tuple[Obstacle, ...]


def clearing(account: Account, request: Request, layout: Layout) -> Clearing | None:
    """What had to go, at least; None: nothing that goes lets it in.

    Inside one segment that is exact. Among sets of segments it is the best single one, or those
    with the fewest live bytes for what they return, taken until it is enough.
    """
    inside, whole = _window(layout, request), _returned(layout, request)
    if inside is None and whole is None:
        return None
    if whole is None or (inside is not None and _live(layout, inside) <= _live(layout, whole[0])):
        assert inside is not None
        rows, returned = inside, 0
        gained = int(layout.blocks.bytes[rows].sum())
    else:
        rows, segments = whole
        returned, gained = len(segments), int(layout.segments.bytes[segments].sum())
    live = rows[layout.blocks.state[rows] != State.FREE]
    live = live[np.argsort(-layout.blocks.bytes[live], kind="stable")]
    blocks = tuple(_obstacles(account, request.event, layout, live))
    return Clearing(returned, sum(block.bytes for block in blocks), gained, blocks)


def _live(layout: Layout, rows: np.ndarray) -> int:
    return int(layout.blocks.bytes[rows[layout.blocks.state[rows] != State.FREE]].sum())


def _window(layout: Layout, request: Request) -> np.ndarray | None:
    """Rows of neighbouring blocks, in a segment that serves the request, with enough bytes."""
    blocks = layout.blocks
    own = _own(layout, request) & (layout.segments.bytes >= request.bytes)
    best: tuple[int, int, int] | None = None
    for segment in np.flatnonzero(own):
        rows = np.flatnonzero(blocks.segment == segment)
        size = blocks.bytes[rows]
        ends = np.cumsum(size)
        starts = ends - size
        held = np.concatenate(([0], np.cumsum(size * (blocks.state[rows] != State.FREE))))
        # For each last block the latest first one that leaves room enough.
        first = np.searchsorted(starts, ends - request.bytes, side="right") - 1
        last = np.flatnonzero(first >= 0)
        if len(last) == 0:
            continue
        live = held[last + 1] - held[first[last]]
        place = int(live.argmin())
        found = int(live[place]), int(rows[first[last[place]]]), int(rows[last[place]])
        best = found if best is None else min(best, found)
    return None if best is None else np.arange(best[1], best[2] + 1)


def _returned(layout: Layout, request: Request) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows of the blocks in segments that would have to be empty, and these segments."""
    segments, blocks = layout.segments, layout.blocks
    lack = request.lack(int(segments.bytes.sum()))
    used = (blocks.segment >= 0) & (blocks.state != State.FREE)
    live = np.zeros(len(segments.bytes), dtype=np.int64)
    np.add.at(live, blocks.segment[used], blocks.bytes[used])
    default = np.flatnonzero([pool is None for pool in segments.pool])
    single = default[segments.bytes[default] >= lack]
    chosen = single[live[single].argmin()][None] if len(single) else None
    order = default[
        np.argsort(live[default] / np.maximum(segments.bytes[default], 1), kind="stable")
    ]
    count = int(np.searchsorted(np.cumsum(segments.bytes[order]), lack)) + 1
    if count <= len(order):
        several = order[:count]
        for one in sorted(several.tolist(), key=lambda one: -live[one]):  # what isn't needed
            rest = several[several != one]
            if segments.bytes[rest].sum() >= lack:
                several = rest
        if chosen is None or live[several].sum() < live[chosen].sum():
            chosen = several
    if chosen is None:
        return None
    return np.flatnonzero(np.isin(blocks.segment, chosen)), chosen


def _obstacles(
    account: Account, event: int, layout: Layout, rows: np.ndarray
) -> Iterator[Obstacle]:
    blocks, process = layout.blocks, account.process
    born = _born(account, event, blocks.address[rows])
    now = int(account.time_us[event])
    for row, birth in zip(rows.tolist(), born.tolist(), strict=True):
        stack = int(blocks.stack[row])
        yield Obstacle(
            address=int(blocks.address[row]),
            bytes=int(blocks.bytes[row]),
            requested=int(blocks.requested[row]),
            component=blocks.component[row] or "other",
            place=place(process, int(blocks.scope[row])),
            stack=process.frames(stack),
            age_us=now - int(account.time_us[birth]),
            pending=bool(blocks.state[row] == State.PENDING),
        )


def _born(account: Account, event: int, addresses: np.ndarray) -> np.ndarray:
    """The last allocation at each address up to an event."""
    events, contexts = account.process.events, account.process.contexts
    alloc = (contexts["action"] == Action.ALLOC) & account.here
    rows = np.flatnonzero(alloc[events["context"][: event + 1]])
    found, from_end = np.unique(events["id"][rows[::-1]], return_index=True)
    return rows[::-1][from_end[np.searchsorted(found, addresses)]]
