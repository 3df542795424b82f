"""What a device held at an instant that the reader chose: a time, an event, or a request."""

import re
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.boundaries import Boundary, Difference, Served, differences, served
from memtrace.analysis.peaks import Balance, Group, balance, top_allocations
from memtrace.analysis.places import Place, place
from memtrace.analysis.process import ProcessMemory
from memtrace.errors import MemtraceError
from memtrace.trace.reader import Trace

#: More digits than any run has events or microseconds aren't read.
_EVENT = re.compile(r"event\s*[:#]?\s*([0-9]{1,18})")
_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]*)?|\.[0-9]+)\s*(s|ms|us)?")
_MICROSECONDS = {None: 10**6, "s": 10**6, "ms": 10**3, "us": 1}


@dataclass(frozen=True)
class Instant:
    """Both equations after one event, where that happened, and what was alive."""

    account: Account
    balance: Balance
    place: Place
    top: tuple[Group, ...]


def instant(account: Account, memory: ProcessMemory, event: int) -> Instant:
    """The state of ``account`` after ``event``."""
    process = account.process
    scope = int(process.contexts["scope"][process.events["context"][event]])
    found = balance(account, memory, event)
    return Instant(account, found, place(process, scope), tuple(top_allocations(account, event)))


def event_of(account: Account, text: str) -> int:
    """The event that ``text`` means: ``event:4711``, or the last one at ``1.25 s``, ``1250 ms``.

    Raises:
        MemtraceError: it means neither, or the run hasn't got that far.
    """
    events = len(account.process.events["id"])
    if match := _EVENT.fullmatch(text.strip()):
        event = int(match[1])
        if event >= events:
            raise MemtraceError(f"--at {text}: the events are numbered from 0 to {events - 1:,}")
        return event
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise MemtraceError(f"--at {text}: write it as 1.25s, 1250ms or event:4711")
    time_us = round(float(match[1]) * _MICROSECONDS[match[2]])
    event = int(account.event_at(np.array([time_us]))[0])
    if event < 0:
        first = account.time_us[0] / 1e6
        raise MemtraceError(f"--at {text}: the first event is {first:.3f} s after the run began")
    return event


@dataclass(frozen=True)
class Answered:
    """One request: its boundary, and the account at its own peak and right after it.

    ``peak`` and ``after`` are None where no event was booked. ``compared``: whether the allocator's
    own snapshot could be compared with the events, ``difference`` where they disagree.
    """

    served: Served
    boundary: Boundary
    peak: Instant | None
    after: Instant | None
    compared: bool
    difference: Difference | None


def answered(trace: Trace, request: str) -> Answered:
    """A request by name or by number from 0, of the process that answered most.

    Raises:
        MemtraceError: there is no such request.
    """
    processes = served(trace)
    if not processes:
        raise MemtraceError(f"{trace.folder} has no requests")
    found = ((one, one.find(request)) for one in processes)
    one, boundary = next(((one, row) for one, row in found if row is not None), (None, None))
    if one is None or boundary is None:
        rows = processes[0].boundaries
        raise MemtraceError(
            f"--request {request}: no request has that name, and they are numbered from 0 to "
            f"{len(rows) - 1:,}"
        )
    return look_at(one, boundary)


def look_at(one: Served, boundary: Boundary) -> Answered:
    """One of the requests that a process answered."""
    peak = after = None
    if one.account is not None and boundary.event is not None:
        start = int(one.account.event_at(np.array([boundary.start_us]))[0])
        peak = instant(one.account, one.memory, _peak(one.account, start + 1, boundary.event))
        after = instant(one.account, one.memory, boundary.event)
    compared, different = differences(one, [boundary])
    return Answered(one, boundary, peak, after, compared > 0, next(iter(different), None))


def _peak(account: Account, first: int, last: int) -> int:
    """The event from ``first`` to ``last`` after which most is allocated."""
    at, levels = account.allocated.at, account.allocated.levels
    start, stop = np.searchsorted(at, [first, last + 1])
    if start == stop:
        return last
    return int(at[start + int(levels[start + 1 : stop + 1].argmax())])
