"""What grows from one request to the next: which allocations stay, by what made them."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.lifetimes import Lifetimes
from memtrace.analysis.places import OUTSIDE, place
from memtrace.analysis.stability import Slope, slope
from memtrace.sizes import format_size
from memtrace.trace.reader import ProcessTrace
from memtrace.trace.schema import Action, State


@dataclass(frozen=True)
class Growing:
    """Memory of one kind that is alive after requests, in bytes.

    ``first`` and ``last``: after the first and the last request that count, ``count`` how many
    pieces it was after the last.
    """

    component: str | None  # None: not recorded; "allocator": a segment
    where: str  # the place that made it; without one, what it is
    stack: tuple[str, ...]  # innermost frame first; empty: not recorded
    slope: Slope
    first: int
    last: int
    count: int


def growing_allocations(
    account: Account, events: Sequence[int], groups: Sequence[Hashable]
) -> list[Growing]:
    """The allocations that more bytes survive of with each request, what grows most first.

    Args:
        events: the last event of each request, ascending.
        groups: one a request, as :func:`memtrace.analysis.stability.slope` takes them.
    """
    process, ends = account.process, np.asarray(events)
    contexts, context = process.contexts, process.events["context"]
    start, stop, birth = _held(account.lives, ends)
    held = _Held(
        start,
        stop,
        process.events["bytes"][birth],
        np.stack([context[start], context[birth]], axis=1),
    )
    levels = held.levels(ends)
    found: dict[tuple[str | None, str, tuple[str, ...]], _Levels] = {}
    for (now, made), level in levels.items():
        where = place(process, int(contexts["scope"][made]))
        only = where.request is not None and str(where.folded()) == OUTSIDE
        key = (
            contexts["component"][now],
            "in a request, outside every other scope" if only else str(where.folded()),
            process.frames(int(contexts["stack"][made])),
        )
        found[key] = found[key] + level if key in found else level
    return _growing(
        ((component, where, stack, level) for (component, where, stack), level in found.items()),
        groups,
    )


def _held(lives: Lifetimes, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From which event until which one bytes are of one component, and which event made them.

    Only of allocations that are there after one of ``ends``.
    """
    first, last = np.searchsorted(ends, lives.born), np.searchsorted(ends, lives.freed)
    stays = first < last
    kept, moved = np.flatnonzero(stays), np.flatnonzero(stays[lives.retagged])
    row = np.concatenate((kept, lives.retagged[moved]))
    start = np.concatenate((lives.born[kept], lives.retags[moved]))
    order = np.lexsort((start, row))
    row, start = row[order], start[order]
    final = np.append(row[1:] != row[:-1], True)[: len(row)]
    stop = np.where(final, lives.freed[row], np.roll(start, -1))
    return start, stop, lives.born[row]


def growing_segments(
    account: Account, events: Sequence[int], groups: Sequence[Hashable]
) -> list[Growing]:
    """The same for what the allocator took from the device: segments by place."""
    process = account.process
    contexts = process.contexts
    action = np.where(account.here, contexts["action"], -1)[process.events["context"]]
    plain = np.flatnonzero(np.isin(action, (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)))
    order = plain[np.argsort(process.events["id"][plain], kind="stable")]
    address, size = process.events["id"][order], process.events["bytes"][order]
    until = np.append(np.where(address[1:] == address[:-1], order[1:], _NEVER), _NEVER)
    taken = action[order] == Action.SEGMENT_ALLOC
    context = process.events["context"][order][taken, np.newaxis]
    held = _Held(order[taken], until[: len(order)][taken], size[taken], context)
    levels = held.levels(np.asarray(events))
    found: dict[str, _Levels] = {}
    for (number,), level in levels.items():
        where = place(process, int(contexts["scope"][number])).folded()
        found[where.within] = found[where.within] + level if where.within in found else level
    rows = [("allocator", f"segments taken {where}", (), level) for where, level in found.items()]
    mapped = np.isin(action, (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP))
    if mapped.any():
        signs = np.where(action == Action.SEGMENT_MAP, 1, -1) * mapped
        pages = np.cumsum(process.events["bytes"] * signs)[np.asarray(events)]
        rows.append(("allocator", "mapped pages", (), _Levels(pages, np.zeros_like(pages))))
    return _growing(rows, groups)


def growing_blocks(
    process: ProcessTrace, snapshots: Sequence[int], groups: Sequence[Hashable]
) -> list[Growing]:
    """The same where no event was booked: the blocks in the snapshots, by stack or else by size.

    Args:
        snapshots: one a request.
    """
    blocks = process.blocks
    used = np.flatnonzero(blocks["state"] != State.FREE)
    size, stack = blocks["bytes"][used], blocks["stack"][used].astype(np.int64)
    kinds, kind = np.unique(
        np.stack([stack, np.where(stack < 0, size, 0)], axis=1), axis=0, return_inverse=True
    )
    rows = int(blocks["snapshot"].max(initial=-1)) + 1
    held = np.zeros((rows, len(kinds)), dtype=np.int64)
    count = np.zeros_like(held)
    np.add.at(held, (blocks["snapshot"][used], kind.ravel()), size)
    np.add.at(count, (blocks["snapshot"][used], kind.ravel()), 1)
    wanted = np.asarray(snapshots)
    return _growing(
        (
            (
                None,
                f"blocks of {format_size(one)}" if number < 0 else "blocks of any size",
                process.frames(number),
                _Levels(held[wanted, row], count[wanted, row]),
            )
            for row, (number, one) in enumerate(kinds.tolist())
        ),
        groups,
    )


_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class _Levels:
    """Bytes and pieces after each request."""

    bytes: np.ndarray
    count: np.ndarray

    def __add__(self, other: "_Levels") -> "_Levels":
        return _Levels(self.bytes + other.bytes, self.count + other.count)


@dataclass(frozen=True)
class _Held:
    """From which event until which one bytes are held, and of what kind (a row of numbers)."""

    start: np.ndarray
    stop: np.ndarray
    bytes: np.ndarray
    kind: np.ndarray

    def levels(self, events: np.ndarray) -> dict[tuple[int, ...], _Levels]:
        """By kind, what is held after each of ``events``; kinds that never are stay out."""
        first, last = np.searchsorted(events, self.start), np.searchsorted(events, self.stop)
        kept = np.flatnonzero(first < last)
        kinds, kind = np.unique(self.kind[kept], axis=0, return_inverse=True)
        change = np.zeros((2, len(kinds), len(events) + 1), dtype=np.int64)
        for at, sign in ((first, 1), (last, -1)):
            np.add.at(change[0], (kind.ravel(), at[kept]), sign * self.bytes[kept])
            np.add.at(change[1], (kind.ravel(), at[kept]), sign)
        held, count = np.cumsum(change, axis=2)[:, :, :-1]
        return {
            tuple(row): _Levels(held[number], count[number])
            for number, row in enumerate(kinds.tolist())
        }


def _growing(
    found: Iterable[tuple[str | None, str, tuple[str, ...], _Levels]], groups: Sequence[Hashable]
) -> list[Growing]:
    """Those whose slope is above 0, the steepest first."""
    rows = []
    for component, where, stack, level in found:
        if level.bytes[-1] <= level.bytes.min():
            continue  # it ends where it was lowest
        one = slope(level.bytes, groups=groups)
        if one.value > 0:
            first, last = int(level.bytes[0]), int(level.bytes[-1])
            rows.append(Growing(component, where, stack, one, first, last, int(level.count[-1])))
    return sorted(rows, key=lambda one: (-one.slope.value, one.where, one.stack))
