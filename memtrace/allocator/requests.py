"""What a recorded device was asked for: the operations in a trace, for another allocator to do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrace.allocator.history import BEFORE
from memtrace.allocator.ops import Op, Ops
from memtrace.allocator.settings import (
    NEWEST,
    OLDEST,
    SMALL_SEGMENT,
    UNLIMITED,
    Settings,
    Version,
    parse_version,
)
from memtrace.errors import MemtraceError, TraceError
from memtrace.trace.reader import ProcessTrace
from memtrace.trace.schema import Action

# Plain integers: NumPy asks the member of an enumeration for attributes, in Python up to 3.11, and
# ignores a Ctrl-C that comes to light there.
_ALLOC, _RETAG, _RETRY, _OOM = map(int, (Action.ALLOC, Action.RETAG, Action.RETRY, Action.OOM))
_FREED = tuple(map(int, (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED)))
_UNMAP = int(Action.SEGMENT_UNMAP)
_RETURNED = (int(Action.SEGMENT_FREE), _UNMAP)
_TAKEN = (int(Action.SEGMENT_ALLOC), int(Action.SEGMENT_MAP))
_KINDS = {
    Action.ALLOC: Op.ALLOC,
    Action.FREE: Op.FREE,
    Action.FREE_REQUESTED: Op.FREE_LATER,
    Action.FREE_COMPLETED: Op.COMPLETE,
    Action.OOM: Op.ALLOC,
}
#: Where an operation stands that is added to those of the events: before all at that place, …
_FIRST, _BEFORE, _AFTER = range(3)


@dataclass(frozen=True)
class Requests:
    """The operations of one device of one process.

    A request that failed is among them, and given back at once: the program never had it.

    Attributes:
        process, device: whose.
        ops: the operations; blocks are numbered in the order of their allocation.
        event: of each operation, the event of the process that it stands for (int64).
        streams: handles of the streams, ascending.
        pools: names of the private pools; the first has number 1.
        warm: how many blocks were there before the recording: their allocations come first, by
            address, since their order isn't known.
        retags: (event, block) of each change of component, in order (int64, n × 2).
        strange: events that free what nobody has; they are left out.
    """

    process: ProcessTrace
    device: str
    ops: Ops
    event: np.ndarray
    streams: tuple[int, ...]
    pools: tuple[str, ...]
    warm: int
    retags: np.ndarray
    strange: int


def requests_of(process: ProcessTrace, device: str) -> Requests:
    """The operations that a trace holds of ``device``.

    Raises:
        TraceError: the trace is damaged.
    """
    events, contexts = process.events, process.contexts
    actions = np.where(process.contexts_on(device), contexts["action"], -1)
    rows = np.flatnonzero(actions[events["context"]] >= 0)
    context = events["context"][rows]
    action = actions[context]
    number, strange = _numbered(action, events["id"][rows])
    names, pool = pools_of(process, context)
    kinds = np.full(max(Action) + 1, -1, dtype=np.int8)
    kinds[list(_KINDS)] = list(_KINDS.values())
    asked = np.flatnonzero((kinds[action] >= 0) & (number >= 0))
    extras = [
        *_emptied(action, events["bytes"][rows], pool[context], process),
        *((place, _AFTER, Op.FREE, number[place], 0) for place in np.flatnonzero(action == _OOM)),
        *_pools(action, pool[context]),
    ]
    extras.sort(key=lambda extra: extra[:2])
    added = np.array(extras, dtype=np.int64).reshape(-1, 5)
    # Which of the others each stands before: those of its own place come first only after them.
    at = np.searchsorted(asked, added[:, 0] + (added[:, 1] == _AFTER))
    place = np.insert(asked, at, added[:, 0])
    kind = np.insert(kinds[action[asked]], at, added[:, 2])
    alloc = kind == Op.ALLOC
    own = context[place]
    ops = Ops(
        kind=kind,
        block=np.insert(number[asked], at, added[:, 3]),
        size=np.where(alloc, _bytes_asked(process, rows, action)[place], 0),
        stream=np.where(alloc, np.asarray(contexts["stream"])[own], 0),
        pool=np.where(alloc, pool[own], np.insert(np.zeros(len(asked), np.int16), at, added[:, 4])),
    )
    warm = np.count_nonzero((action == _ALLOC) & before_of(process)[context])
    streams = tuple(np.unique(ops.stream).tolist())
    tagged = np.flatnonzero((action == _RETAG) & (number >= 0))
    return Requests(
        process=process,
        device=device,
        ops=ops,
        event=rows[place],
        streams=streams,
        pools=names,
        warm=int(warm),
        retags=np.stack((rows[tagged], number[tagged]), axis=1),
        strange=strange,
    )


def pools_of(process: ProcessTrace, used: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """Names of the private pools that the contexts ``used`` are of, and by context the number of
    its pool: 0 for the default one, 1 for the first name (int16)."""
    pools = process.contexts["pool"]
    names = tuple(sorted({pools[one] for one in np.unique(used)} - {None}))
    numbers = [names.index(one) + 1 if one in names else 0 for one in pools]
    return names, np.array(numbers, dtype=np.int16)


def _numbered(action: np.ndarray, address: np.ndarray) -> tuple[np.ndarray, int]:
    """The number of the block that each event is about, -1 for none; how many know none."""
    born = (action == _ALLOC) | (action == _OOM)
    numbers = np.cumsum(born) - 1
    number = np.where(born, numbers, -1)
    about = np.flatnonzero(np.isin(action, (_ALLOC, _RETAG, *_FREED)))
    order = about[np.argsort(address[about], kind="stable")]
    allocs = born[order]  # no failure is among them
    last = np.maximum.accumulate(np.where(allocs, np.arange(len(order)), -1))
    known = last >= 0
    known[known] = address[order[last[known]]] == address[order[known]]
    freed = np.isin(action[order], _FREED[:2])
    frees = np.cumsum(freed)
    known &= ~freed | (frees - frees[last] == 1)  # what was freed already is nobody's
    number[order[known]] = numbers[order[last[known]]]
    return number, int(np.count_nonzero(~known & (action[order] != _RETAG)))


def _bytes_asked(process: ProcessTrace, rows: np.ndarray, action: np.ndarray) -> np.ndarray:
    """What each event asked for; of a failure only the rounded size is known."""
    events = process.events
    if not isinstance(events["requested"], np.ndarray):
        raise TraceError(f"{process.folder} is damaged: events has rows without requested")
    asked = np.where(action == _OOM, events["bytes"][rows], events["requested"][rows])
    if asked.min(initial=0) < 0:
        raise TraceError(
            f"{process.folder} is damaged: events has rows that ask for negative bytes"
        )
    return asked


def _emptied(
    action: np.ndarray, size: np.ndarray, pool: np.ndarray, process: ProcessTrace
) -> Iterator[tuple[int, int, int, int, int]]:
    """Operations where ``empty_cache()`` was called, or a private pool ended: segments went back
    that no allocation asked for."""
    moves = np.flatnonzero(action != _RETAG)
    back = np.isin(action[moves], _RETURNED)
    begins = np.flatnonzero(back & ~np.append(False, back[:-1]))
    ends = np.flatnonzero(back & ~np.append(back[1:], False)) + 1
    following = np.append(action[moves], -1)[ends]
    settings = settings_of(process)
    inside = following == _RETRY
    # These give segments back by themselves, right before they take one: large ones, or those over
    # the limit. Small ones and pages go back at a retry only, which is recorded.
    limit = SMALL_SEGMENT + 1 if settings.gc_threshold > 0 else settings.max_split_size
    if limit < UNLIMITED and len(begins):
        size = np.where(action[moves] == _UNMAP, 0, size[moves])
        least = np.minimum.reduceat(np.where(back, size, np.iinfo(np.int64).max), begins)
        inside |= np.isin(following, _TAKEN) & (least >= limit)
    for begin, end in zip(begins[~inside].tolist(), ends[~inside].tolist(), strict=True):
        for start, number in emptied_pools(pool[moves[begin:end]].tolist()):
            yield int(moves[begin + start]), _BEFORE, Op.EMPTY_CACHE, 0, number


def emptied_pools(pools: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Whose caches were emptied, from the pools of the segments that went back: where in them, and
    the number of a private pool or 0 for all.

    A private pool that ends gives back its own segments only; ``empty_cache()`` gives back those of
    the default pool before any of a private one.
    """
    before = 0
    for place, number in enumerate(pools):
        if number != before or place == 0:
            yield place, number
        if number == 0:
            return
        before = number


def _pools(action: np.ndarray, pool: np.ndarray) -> Iterator[tuple[int, int, int, int, int]]:
    """Operations that open each private pool, and release it where its segments went back."""
    for number in range(1, int(pool.max(initial=0)) + 1):
        own = pool == number
        used = np.flatnonzero(own & (action == _ALLOC))
        back = np.flatnonzero(own & np.isin(action, _RETURNED))
        if not len(used):
            continue
        for kind in (Op.BEGIN_POOL, Op.END_POOL):
            yield int(used[0]), _BEFORE, kind, 0, number
        if len(back) and back[0] > used[-1]:
            yield int(back[0]), _FIRST, Op.RELEASE_POOL, 0, number


def before_of(process: ProcessTrace) -> np.ndarray:
    """Which contexts are of what was there before the recording: bool, one a row.

    A replay begins with an empty allocator, and asks for it again.
    """
    scopes = process.scopes
    rows = zip(scopes["kind"], scopes["name"], strict=True)
    began = process.manifest.get("replayed") is None
    before = np.array([began and (kind, name) == ("op", BEFORE) for kind, name in rows], bool)
    scope = process.contexts["scope"]
    found = np.zeros(len(scope), dtype=bool)
    found[scope >= 0] = before[scope[scope >= 0]]
    return found


def settings_of(process: ProcessTrace) -> Settings:
    """The allocator settings that a process ran under; the default ones if it doesn't say.

    Raises:
        TraceError: what it says are no settings.
    """
    found = process.manifest.get("allocator_settings")
    found = (process.manifest.get("cuda") or {}).get("allocator_settings", found)
    try:
        return Settings.of_snapshot(found or {}, version_of(process) or NEWEST)
    except (AttributeError, TypeError, ValueError):
        raise TraceError(f"{process.folder} is damaged: its allocator_settings are none") from None


def fraction_of(device: Mapping[str, Any]) -> float | None:
    """The memory fraction that a program set, from its device's manifest; None: none.

    PyTorch says 1.0 as well where none was set.
    """
    fraction = device.get("memory_fraction")
    return float(fraction) if fraction is not None and fraction < 1 else None


def version_of(process: ProcessTrace) -> Version | None:
    """The version of torch that a process ran; None: unknown, or older than any that is known."""
    try:
        return parse_version(process.manifest.get("torch") or "")
    except MemtraceError:
        return None


def pools_are_named(process: ProcessTrace) -> bool:
    """Whether a process's history names the pool of each block, as from torch 2.13 on."""
    return (version_of(process) or OLDEST) >= (2, 13)
