"""What memory was like after each request of a persistent process.

On CUDA the allocator was asked itself (table ``boundaries``); where it wasn't, on a CPU or in a
replayed run, the same follows from the events. Where both are there, :func:`differences` compares
the allocator's blocks with those rebuilt from the events.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from memtrace.allocator.requests import pools_are_named
from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.fragmentation import Fragmentation, fragmentation
from memtrace.analysis.process import ProcessMemory, process_memory
from memtrace.analysis.segments import layout_at
from memtrace.trace.reader import ProcessTrace, Trace
from memtrace.trace.schema import Action, State


@dataclass(frozen=True)
class Boundary:
    """One request, and its device right after it. Bytes where nothing else is said; None: unknown.

    ``allocated_peak``, ``reserved_peak`` and ``inactive_split_peak`` are the most up to then.
    """

    request: int  # row of the process's requests
    name: str | None
    prompt_tokens: int | None
    generated_tokens: int | None
    outcome: str | None
    start_us: int
    first_token_us: int | None
    end_us: int
    event: int | None  # the last event that it holds; None: nothing was booked
    snapshot: int | None
    allocated: int | None
    reserved: int | None
    process: int | None
    inactive_split: int | None
    largest_free: int | None
    segments: int | None  # how many
    allocated_peak: int | None
    reserved_peak: int | None
    inactive_split_peak: int | None
    retries: int | None  # so far
    ooms: int | None  # so far

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its start to its first token."""
        if self.first_token_us is None:
            return None
        return (self.first_token_us - self.start_us) / 1e6

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first one."""
        if self.first_token_us is None or not self.generated_tokens or self.generated_tokens < 2:
            return None
        elapsed = self.end_us - self.first_token_us
        return 1e6 * (self.generated_tokens - 1) / elapsed if elapsed > 0 else None


@dataclass(frozen=True)
class Served:
    """The requests of one process, and one device after each."""

    process: ProcessTrace
    device: str
    memory: ProcessMemory
    account: Account | None  # None: nothing was booked on the device
    boundaries: tuple[Boundary, ...]  # in order of their ends

    @cached_property
    def cycles(self) -> list[int]:
        """By request: which request of its prompt length it is, from 0."""
        seen: dict[int | None, int] = {}
        found = []
        for one in self.boundaries:
            found.append(seen.get(one.prompt_tokens, 0))
            seen[one.prompt_tokens] = found[-1] + 1
        return found

    def find(self, request: str) -> Boundary | None:
        """By name, or by number from 0."""
        for one in self.boundaries:
            if one.name == request:
                return one
        return next((one for one in self.boundaries if str(one.request) == request), None)


def served(trace: Trace) -> list[Served]:
    """Every process of a run that answered requests, the one that answered most first, with each
    of the GPUs that it used, the fullest first; without one, with the CPU.

    Raises:
        TraceError: its tables are damaged.
    """
    found = [one for process in trace.processes for one in _served(trace, process)]
    return sorted(found, key=lambda one: -len(one.boundaries))


def _served(trace: Trace, process: ProcessTrace) -> Iterator[Served]:
    if len(process.requests["name"]) == 0:
        return
    known = sorted(accounts(process), key=lambda one: one.rank)
    booked: dict[str, Account | None] = {
        one.device: one for one in known if one is known[0] or one.device.startswith("cuda")
    }
    for device, account in (booked or dict.fromkeys(_fullest(process))).items():
        yield served_on(process, device, process_memory(trace, process, device), account)


def served_on(
    process: ProcessTrace, device: str, memory: ProcessMemory, account: Account | None
) -> Served:
    """The requests of a process, and one of its devices after each.

    Args:
        memory: of the process on that device.
        account: of the device; None: nothing was booked on it.
    """
    rows = sorted(_rows(process, device, account, memory), key=lambda one: one.end_us)
    return Served(process, device, memory, account, tuple(rows))


def _fullest(process: ProcessTrace) -> list[str]:
    """The CUDA devices that reserved memory, the one that reserved most first; else the CPU."""
    table = process.boundaries
    peaks: dict[str, int] = {}
    for device, peak in zip(table["device"], _numbers(table["reserved_peak"]), strict=True):
        peaks[device] = max(peaks.get(device, 0), peak or 0)
    found = sorted(peaks, key=lambda device: -peaks[device])
    return [device for device in found if peaks[device]] or found[:1] or ["cpu"]


def _numbers(column: Any) -> list[int | None]:
    return list(np.asarray(column, dtype=object))


#: Columns of ``boundaries`` that a boundary has as they are.
_TOLD = (
    "snapshot",
    "allocated",
    "reserved",
    "inactive_split",
    "segments",
    "allocated_peak",
    "reserved_peak",
    "inactive_split_peak",
    "retries",
    "ooms",
)


def _rows(
    process: ProcessTrace, device: str, account: Account | None, memory: ProcessMemory
) -> Iterator[Boundary]:
    table = process.boundaries
    columns = {name: _numbers(column) for name, column in table.items() if name != "device"}
    told = {
        int(request): row
        for row, (request, where) in enumerate(zip(table["request"], table["device"], strict=True))
        if where == device
    }
    largest = _largest_free(process)
    derived = _Derived(account) if account is not None else None
    requests = [_numbers(column) for column in process.requests.values()]
    for number, values in enumerate(zip(*requests, strict=True)):
        name, prompt, generated, start, first, end, outcome = values
        if start is None or end is None:
            continue
        row = told.get(number)
        event = None if row is None else columns["event"][row]
        # The table says how many events came before.
        last = event - 1 if event else None if derived is None else derived.last(int(end))
        state = dict.fromkeys((*_TOLD, "largest_free"))
        if row is not None:
            state |= {one: columns[one][row] for one in _TOLD}
            state["largest_free"] = largest.get(state["snapshot"])
        elif derived is not None and last is not None:
            state |= derived.state(last)
        yield Boundary(
            request=number,
            name=name,
            prompt_tokens=prompt,
            generated_tokens=generated,
            outcome=outcome,
            start_us=start,
            first_token_us=first,
            end_us=end,
            event=last,
            process=memory.at(end),
            **state,
        )


def _largest_free(process: ProcessTrace) -> dict[int | None, int]:
    """By snapshot, its largest free block."""
    blocks = process.blocks
    found: dict[int | None, int] = dict.fromkeys(np.unique(blocks["snapshot"]).tolist(), 0)
    free = blocks["state"] == State.FREE
    for snapshot, size in zip(
        blocks["snapshot"][free].tolist(), blocks["bytes"][free].tolist(), strict=True
    ):
        found[snapshot] = max(found[snapshot], size)
    return found


class _Derived:
    """The state after any event, from the events."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._retries, self._ooms = self._at(Action.RETRY), self._at(Action.OOM)
        self._taken, self._returned = self._at(Action.SEGMENT_ALLOC), self._at(Action.SEGMENT_FREE)
        #: Mapped ranges grow and shrink: how many there are isn't counted here.
        self._expandable = len(self._at(Action.SEGMENT_MAP)) > 0

    @cached_property
    def _fragmentation(self) -> Fragmentation | None:
        return fragmentation(self._account)

    def _at(self, action: Action) -> np.ndarray:
        """The events with this action on the device."""
        process = self._account.process
        wanted = (process.contexts["action"] == action) & self._account.here
        return np.flatnonzero(wanted[process.events["context"]])

    def last(self, time_us: int) -> int | None:
        """The last event at that time or before."""
        found = int(self._account.event_at(np.array([time_us]))[0])
        return found if found >= 0 else None

    def state(self, event: int) -> dict[str, int | None]:
        """What a boundary has of it."""
        account, parts = self._account, self._fragmentation
        reserved = account.reserved
        found: dict[str, int | None] = {
            "allocated": account.allocated.read_one(event),
            "allocated_peak": account.allocated.peak_between(0, event),
            "reserved": None if reserved is None else reserved.read_one(event),
            "reserved_peak": None if reserved is None else reserved.peak_between(0, event),
        }
        if parts is not None:
            found |= {
                "largest_free": max(parts.at(event).largest.values(), default=0),
                "retries": _until(self._retries, event),
                "ooms": _until(self._ooms, event),
            }
            if not self._expandable:  # PyTorch counts no inactive split in expandable segments
                found |= {
                    "inactive_split": parts.hard.read_one(event),
                    "inactive_split_peak": parts.hard.peak_between(0, event),
                    "segments": _until(self._taken, event) - _until(self._returned, event),
                }
        return found


def _until(events: np.ndarray, event: int) -> int:
    return int(np.searchsorted(events, event, side="right"))


@dataclass(frozen=True)
class Difference:
    """Where the allocator's own blocks aren't those that the events lead to."""

    boundary: Boundary
    what: str


def differences(
    one: Served, boundaries: Sequence[Boundary] | None = None
) -> tuple[int, list[Difference]]:
    """Compare snapshots, those of all boundaries if none are given, with the state rebuilt from
    the events, segment by segment and block by block: addresses, bytes, requested bytes, states,
    streams, pools (where the history names them) and components (which a run with other rules has
    from its events alone).

    Returns:
        How many boundaries could be compared, and the first difference of each that has one.
    """
    compared, found = 0, []
    for boundary in one.boundaries if boundaries is None else boundaries:
        if boundary.snapshot is None or boundary.event is None or one.account is None:
            continue
        compared += 1
        rebuilt = layout_at(one.account, boundary.event)
        if rebuilt is None:
            found.append(Difference(boundary, "the events have no segments"))
            continue
        segments, blocks = rebuilt.segments, rebuilt.blocks
        mine: dict[str, list[tuple[Any, ...]]] = {
            "segment": _zipped(
                segments.address, segments.bytes, segments.stream, segments.pool,
                segments.expandable.astype(int),
            ),
            "block": _zipped(
                blocks.address, blocks.bytes, blocks.requested, blocks.state, blocks.component
            ),
        }  # fmt: skip
        theirs = {
            "segment": _taken(
                one.process.segments, boundary.snapshot, "stream", "pool", "expandable"
            ),
            "block": _taken(
                one.process.blocks, boundary.snapshot, "requested", "state", "component"
            ),
        }
        if not pools_are_named(one.process):
            theirs["segment"] = [(*row[:3], None, row[4]) for row in theirs["segment"]]
        if not any(row[-1] for row in theirs["block"]):
            mine["block"] = [(*row[:-1], None) for row in mine["block"]]
        for kind, rows in mine.items():
            what = _first_difference(kind, rows, theirs[kind])
            if what is not None:
                found.append(Difference(boundary, what))
                break
    return compared, found


def _zipped(*columns: Any) -> list[tuple[Any, ...]]:
    lists = (np.asarray(column, dtype=object).tolist() for column in columns)
    return [tuple(row) for row in zip(*lists, strict=True)]


def _taken(table: Any, snapshot: int, *names: str) -> list[tuple[Any, ...]]:
    """Rows of one snapshot, by address."""
    rows = np.flatnonzero(table["snapshot"] == snapshot)
    columns = (np.asarray(table[name], dtype=object)[rows] for name in ("address", "bytes", *names))
    return sorted(_zipped(*columns), key=lambda row: row[0])


def _first_difference(
    kind: str, mine: Sequence[tuple[Any, ...]], theirs: Sequence[tuple[Any, ...]]
) -> str | None:
    ours, told = {row[0]: row[1:] for row in mine}, {row[0]: row[1:] for row in theirs}
    for address in sorted(ours.keys() | told.keys()):
        if ours.get(address) != told.get(address):
            rebuilt = ours.get(address, "none")
            return f"{kind} {address:#x}: rebuilt {rebuilt}, recorded {told.get(address, 'none')}"
    return None
