"""What stretches of a recording added on one device, over all processes that took part.

Bytes that were there before the stretches, or came between them, don't count; freeing them does.
A forked child holds pages of its parent: what it inherited is the parent's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtrace.analysis.accounts import Account, Series, accounts
from memtrace.analysis.peaks import Group, top_allocations
from memtrace.analysis.places import Place, inside, place
from memtrace.components import TENSOR_COMPONENTS
from memtrace.trace.reader import ProcessTrace

#: What a block can be measured by, beside the components and their details: the peak of all
#: components, of those of equation (1), what is there at the end, and all that was ever allocated.
SUMS = ("peak", "live", "end", "total")


@dataclass(frozen=True)
class Moment:
    """A point of a recording: how many events of the recording process, and when."""

    event: int
    time_us: int


#: From a moment to another one.
Stretch = tuple[Moment, Moment]


@dataclass(frozen=True)
class Measure:
    """Bytes, and the row of the block where they were reached first; None: nowhere above 0."""

    bytes: int
    row: int | None


@dataclass(frozen=True)
class _Part:
    """The events of one process that count on the device (numbers, ascending)."""

    account: Account
    rows: np.ndarray


class Block:
    """The events that count on one device. A *row* is one of them, in the order of the program.

    Across processes that is the order of time.
    """

    def __init__(self, device: str, parts: Sequence[_Part]) -> None:
        self.device = device
        self._parts = parts
        self._part = np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts])
        self._event = np.concatenate([part.rows for part in parts])
        if len(parts) > 1:
            times = [np.maximum.accumulate(_times(part)) for part in parts]
            order = np.argsort(np.concatenate(times), kind="stable")
            self._part, self._event = self._part[order], self._event[order]

    def measure(self, metric: str, phase: str | None = None) -> Measure:
        """How much of ``metric``, a component or one of :data:`SUMS`.

        A phase's peak is the most after any allocation or change of component inside it.
        """
        steps = self._steps(metric)
        held = np.ones(len(steps), dtype=bool) if phase is None else self._inside(phase)
        if metric == "total":
            return Measure(int(steps[held & (steps > 0)].sum()), None)
        levels = np.cumsum(steps)
        if metric == "end":
            return Measure(int(levels[-1]) if len(levels) else 0, None)
        rows = np.flatnonzero(held)
        if len(rows) == 0 or int(levels[rows].max()) <= 0:
            return Measure(0, None)
        row = int(rows[levels[rows].argmax()])
        return Measure(int(levels[row]), row)

    @cached_property
    def values(self) -> Mapping[str, int]:
        """Every sum and every component's own peak."""
        return {name: self.measure(name).bytes for name in (*SUMS, *TENSOR_COMPONENTS)}

    @property
    def last(self) -> int | None:
        """The last row; None: there is none."""
        return len(self._event) - 1 if len(self._event) else None

    def components(self, row: int | None) -> Mapping[str, int]:
        """What each component had added after ``row``; negative where more was freed."""
        stop = 0 if row is None else row + 1
        return {name: int(self._steps(name)[:stop].sum()) for name in TENSOR_COMPONENTS}

    def place(self, row: int) -> Place:
        """Where in the program the event happened."""
        process = self._parts[self._part[row]].account.process
        context = process.events["context"][self._event[row]]
        return place(process, int(process.contexts["scope"][context]))

    def top(self, row: int) -> list[Group]:
        """What of the block was live after ``row``, the largest group first."""
        found: list[Group] = []
        for number, part in enumerate(self._parts):
            before = self._event[: row + 1][self._part[: row + 1] == number]
            if len(before):
                born = np.zeros(len(part.account.process.events["id"]), dtype=bool)
                born[part.rows] = True
                found += top_allocations(part.account, int(before[-1]), born)
        return sorted(found, key=lambda group: (-group.bytes, str(group)))

    def _steps(self, metric: str) -> np.ndarray:
        """By how many bytes each row changes the metric (int64)."""
        steps = np.zeros(len(self._event), dtype=np.int64)
        for number, part in enumerate(self._parts):
            series = _series(part.account, metric)
            if series is not None:
                here = self._part == number
                events = self._event[here]
                steps[here] = series.read(events) - series.read(events - 1)
        return steps

    def _inside(self, phase: str) -> np.ndarray:
        """Which rows happened in the phase (bool)."""
        found = np.zeros(len(self._event), dtype=bool)
        for number, part in enumerate(self._parts):
            process, here = part.account.process, self._part == number
            among = inside(process, "phase", phase)[process.contexts["scope"]]
            found[here] = among[process.events["context"][self._event[here]]]
        return found


def blocks(
    own: ProcessTrace, others: Sequence[ProcessTrace], stretches: Sequence[Stretch]
) -> list[Block]:
    """What the stretches added, by device; meta tensors hold no memory.

    Args:
        own: the process whose events the moments count.
        others: processes that it started.
        stretches: in order and apart.

    Raises:
        TraceError: the trace is damaged.
    """
    parts: dict[str, list[_Part]] = {}
    for process in (own, *others):
        counted = _counted(process, stretches, by_time=process is not own)
        for account in accounts(process):
            if account.device != "meta":
                here = account.here[process.events["context"]]
                rows = np.flatnonzero(counted & here)
                parts.setdefault(account.device, []).append(_Part(account, rows))
    return [Block(device, found) for device, found in parts.items()]


def phases(processes: Sequence[ProcessTrace]) -> set[str]:
    """The phases that any of the processes was in."""
    return {name for process in processes for name in _named(process, "phase")}


def _named(process: ProcessTrace, wanted: str) -> Iterator[str]:
    for kind, name in zip(process.scopes["kind"], process.scopes["name"], strict=True):
        if kind == wanted:
            yield name


def _counted(process: ProcessTrace, stretches: Sequence[Stretch], *, by_time: bool) -> np.ndarray:
    """Which events of the process count: bool, one an event."""
    events = process.events
    at = events["time_us"] if by_time else np.arange(len(events["id"]))
    found = np.zeros(len(at), dtype=bool)
    for start, end in stretches:
        first, stop = (start.time_us, end.time_us) if by_time else (start.event, end.event)
        found |= (at >= first) & (at < stop)
    inherited = [
        kind == "op" and name == "inherited by fork"
        for kind, name in zip(process.scopes["kind"], process.scopes["name"], strict=True)
    ]
    if any(inherited):
        born = np.array(inherited)[process.contexts["scope"]][events["context"]]
        found &= ~np.isin(events["id"], events["id"][born])
    return found


def _times(part: _Part) -> np.ndarray:
    return np.asarray(part.account.process.events["time_us"][part.rows])


def _series(account: Account, metric: str) -> Series | None:
    """The bytes behind a metric; None: a detail that the account doesn't have."""
    if metric == "live":
        return account.live
    if metric in SUMS:
        return account.allocated
    return account.components.get(metric) or account.details.get(metric)
