"""How reserved memory is used over the time of an account, thin enough to draw.

Time is cut into spans of equal length. Of each span one event is looked at (:class:`Course`); how
much of which addresses was used is the mean over the whole span (:class:`Occupancy`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.fragmentation import Parts, parts
from memtrace.analysis.segments import Totals, layout_at
from memtrace.trace.schema import Action

#: Allocations that are summed up at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Stop:
    """What the allocator's memory was after one event."""

    event: int
    time_us: int
    parts: Parts
    totals: Totals


@dataclass(frozen=True)
class Course:
    """One stop a span of time.

    Attributes:
        edges_us: where the spans begin, and where the last one ends (float64, one more than spans).
        stops: of each span the event at which most was reserved and not allocated; rather than
            that, the peak of allocated and the first failure where they lie in it. Of a span
            without events, the last event before it.
        retries, ooms: events at which the allocator tried again, or failed.
    """

    edges_us: np.ndarray
    stops: tuple[Stop, ...]
    retries: np.ndarray
    ooms: np.ndarray

    def span_of(self, time_us: int) -> int:
        """The number of the span in which a time lies."""
        return int(np.clip(_before(self.edges_us, time_us), 0, len(self.stops) - 1))


def course(account: Account, spans: int) -> Course | None:
    """Look at the account once a span; None: the trace has no segments."""
    reserved, allocated, time_us = account.reserved, account.allocated, account.time_us
    if layout_at(account, len(time_us) - 1) is None or reserved is None:
        return None
    edges = np.linspace(time_us[0], time_us[-1], spans + 1)
    borders = [0, *np.searchsorted(time_us, edges[1:-1]), len(time_us)]
    steps = np.searchsorted(allocated.at, borders)
    ooms = _events_of(account, Action.OOM)
    kept = np.array([allocated.peak_event or 0, *ooms[::-1]])
    events: list[int] = []
    for number in range(spans):
        first, stop = borders[number : number + 2]
        own = kept[(kept >= first) & (kept < stop)]
        at = allocated.at[steps[number] : steps[number + 1]]
        if len(own):
            events.append(int(own[-1]))
        elif len(at):
            idle = reserved.read(at) - allocated.levels[steps[number] + 1 : steps[number + 1] + 1]
            events.append(int(at[idle.argmax()]))
        else:
            events.append(max(int(stop) - 1, 0))
    stops = {event: _stop(account, event) for event in set(events)}
    retries = _events_of(account, Action.RETRY)
    return Course(edges, tuple(stops[event] for event in events), retries, ooms)


def _stop(account: Account, event: int) -> Stop:
    time_us = int(account.time_us[event])
    layout = layout_at(account, event)
    if layout is None:
        return Stop(event, time_us, Parts.none(), Totals.none())
    return Stop(event, time_us, parts(layout), layout.totals)


def _events_of(account: Account, action: Action) -> np.ndarray:
    process = account.process
    chosen = account.here & (process.contexts["action"] == action)
    return np.flatnonzero(chosen[process.events["context"]])


def _before(edges: np.ndarray, value: int) -> int:
    return int(np.searchsorted(edges, value, side="right")) - 1


@dataclass(frozen=True)
class Occupancy:
    """The addresses that were ever reserved, cut into rows of equal size, over spans of time.

    Attributes:
        edges: where rows begin and the last one ends, in bytes from the lowest address, without
            the gaps between segments (float64).
        reserved, used: mean over a span of the share of a row that was reserved, or allocated or
            pending (float64, rows × spans).
    """

    edges: np.ndarray
    reserved: np.ndarray
    used: np.ndarray


def occupancy(account: Account, rows: int, edges_us: np.ndarray) -> Occupancy:
    """Follow all allocations of an account that has segments; see :class:`Course` for the spans.

    Ten million events take some three seconds.
    """
    events, time_us = account.process.events, account.time_us
    signs = {
        Action.SEGMENT_ALLOC: 1,
        Action.SEGMENT_MAP: 1,
        Action.SEGMENT_FREE: -1,
        Action.SEGMENT_UNMAP: -1,
    }
    moves = [(_events_of(account, action), sign) for action, sign in signs.items()]
    segments = np.concatenate([at for at, _ in moves])
    sign = np.repeat([sign for _, sign in moves], [len(at) for at, _ in moves])
    axis = _Axis(events["id"][segments], events["bytes"][segments], rows)
    grid = _Grid(rows, edges_us)
    reserved = grid.summed(
        [(axis.ends(events, segments), time_us[segments], sign.astype(np.float64))]
    )
    used = grid.summed(_moves(axis, account))
    return Occupancy(axis.edges, reserved, np.minimum(used, reserved))


_Ends = tuple[np.ndarray, np.ndarray]  # where ranges of addresses begin and end, in rows (float64)
_Moves = tuple[_Ends, np.ndarray, np.ndarray]  # ranges, times, and by what the shares change then


def _moves(axis: "_Axis", account: Account) -> Iterator[_Moves]:
    events, time_us, lives = account.process.events, account.time_us, account.lives
    for start in range(0, len(lives.born), _CHUNK):
        born, gone = lives.born[start : start + _CHUNK], lives.gone[start : start + _CHUNK]
        low, high = axis.ends(events, born)
        yield (low, high), time_us[born], np.ones(len(born))
        ends = gone < len(time_us)
        yield (low[ends], high[ends]), time_us[gone[ends]], np.full(np.count_nonzero(ends), -1.0)


class _Axis:
    """Addresses that were ever reserved, one after the other."""

    def __init__(self, address: np.ndarray, size: np.ndarray, rows: int) -> None:
        order = np.argsort(address)
        start, end = address[order], np.maximum.accumulate((address + size)[order])
        begins = np.append(True, start[1:] > end[:-1])
        self._start = start[begins]
        self._end = end[np.append(begins[1:], True)]
        sizes = self._end - self._start
        self._offset = np.cumsum(sizes) - sizes
        self._row = sizes.sum() / rows
        self.edges = np.arange(rows + 1) * self._row

    def ends(self, events: dict[str, np.ndarray], chosen: np.ndarray) -> _Ends:
        """Where the ranges begin and end that events are about, in rows."""
        address = events["id"][chosen]
        return self._place(address), self._place(address + events["bytes"][chosen])

    def _place(self, address: np.ndarray) -> np.ndarray:
        part = np.maximum(np.searchsorted(self._start, address, side="right") - 1, 0)
        inside = np.clip(address - self._start[part], 0, self._end[part] - self._start[part])
        return np.asarray((self._offset[part] + inside) / self._row)


class _Grid:
    """Means over the cells of a grid of rows and spans."""

    def __init__(self, rows: int, edges_us: np.ndarray) -> None:
        self._shape = (rows + 2, len(edges_us) + 1)  # what lies beyond the last cell goes there
        self._begin = edges_us[0]
        self._span = max(edges_us[1] - edges_us[0], 1e-9)

    def summed(self, moves: Iterator[_Moves] | list[_Moves]) -> np.ndarray:
        """The share of each cell that is covered.

        A change from a time on and an address up is 1 in all cells beyond, a part in the cell in
        which it begins: so each adds to four cells, and running sums do the rest.
        """
        rows, spans = self._shape
        cells = np.zeros(rows * spans)
        for (low, high), time_us, change in moves:
            span, late = self._parted((time_us - self._begin) / self._span, spans - 2)
            for place, sign in ((low, change), (high, -change)):
                row, above = self._parted(place, rows - 2)
                cell = row * spans + span
                for step, weight in (
                    (0, (1 - above) * (1 - late)),
                    (1, (1 - above) * late),
                    (spans, above * (1 - late)),
                    (spans + 1, above * late),
                ):
                    cells += np.bincount(cell + step, sign * weight, minlength=len(cells))
        covered = cells.reshape(rows, spans).cumsum(axis=0).cumsum(axis=1)
        return np.asarray(np.clip(covered[:-2, :-2], 0, 1))

    @staticmethod
    def _parted(place: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The cell of each place, and how far into the cell it lies."""
        cell = np.minimum(place.astype(np.int64), last)
        return cell, np.minimum(place - cell, 1)
