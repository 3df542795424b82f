"""A timeline thin enough to draw: the same events for every component, so that a stack adds up.

Per bin of time the events at which the *allocated* bytes are smallest and largest are taken, and
every component is read at those. A spike of a single event stays, the peak is exact, and at each
drawn point the components sum to the total, which reducing each of them alone would break.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.process import ProcessMemory


@dataclass(frozen=True)
class Timeline:
    """Chosen events of an account, ascending (int64 arrays of one length each)."""

    events: np.ndarray
    time_us: np.ndarray
    allocated: np.ndarray  # bytes
    components: Mapping[str, np.ndarray]  # bytes, in display order
    reserved_time_us: np.ndarray
    reserved: np.ndarray  # bytes, at ``reserved_time_us``; empty: unknown, or no other than those
    process_time_us: np.ndarray
    process: np.ndarray  # bytes, at ``process_time_us``; empty: unknown
    #: How many events were reduced to these.
    total_events: int


def timeline(
    account: Account,
    memory: ProcessMemory,
    *,
    span_us: tuple[int, int] | None = None,
    bins: int | np.ndarray = 1000,
) -> Timeline:
    """At most two events a bin and the two ends, and as much of reserved and process memory.

    Args:
        span_us: only these microseconds, both ends included; what was held when they begin is in
            the last event before them, where there is one. None: the whole account.
        bins: how many equal ones, or the microseconds at which they begin and the last one ends.
    """
    time_us = account.time_us
    first, last = 0, len(time_us) - 1
    if span_us is not None:
        before = np.array([span_us[0] - 1, span_us[1]])
        first, last = np.maximum(account.event_at(before), 0).tolist()
    steps = account.allocated.at
    borders = np.searchsorted(steps, first + _borders(time_us[first : last + 1], bins))
    picked = _extremes(account.allocated.levels[1:], borders)
    events = np.unique(np.concatenate((steps[picked], [first, last])))
    sampled = slice(0, len(memory.time_us))
    if span_us is not None:
        sampled = slice(*np.searchsorted(memory.time_us, [span_us[0], span_us[1] + 1]))
    sample_us, value = memory.time_us[sampled], memory.value[sampled]
    chosen = _extremes(value, _borders(sample_us, bins))
    reserved_us, reserved = _reserved(account, first, last, bins)
    return Timeline(
        events=events,
        time_us=time_us[events],
        allocated=account.allocated.read(events),
        components={name: series.read(events) for name, series in account.components.items()},
        reserved_time_us=reserved_us,
        reserved=reserved,
        process_time_us=sample_us[chosen],
        process=value[chosen],
        total_events=last - first + 1,
    )


def _reserved(
    account: Account, first: int, last: int, bins: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Times and bytes between two events; nothing where no allocator holds more than tensors."""
    series = account.reserved
    if series is None or series is account.allocated:
        nothing = np.array([], dtype=np.int64)
        return nothing, nothing
    start, stop = np.searchsorted(series.at, [first, last], side="right")
    steps = series.at[start:stop]
    picked = steps[
        _extremes(series.levels[start + 1 : stop + 1], _borders(account.time_us[steps], bins))
    ]
    events = np.unique(np.concatenate((picked, [first, last])))
    return account.time_us[events], series.read(events)


def _borders(time: np.ndarray, bins: int | np.ndarray) -> np.ndarray:
    """Where in ``time`` each of the bins begins, and where the last one ends."""
    many = bins if isinstance(bins, int) else len(bins) - 1
    if len(time) <= 2 * many:
        return np.arange(len(time) + 1)
    edges = np.linspace(time[0], time[-1], bins + 1) if isinstance(bins, int) else bins
    return np.array([0, *np.searchsorted(time, edges[1:-1]), len(time)])


def _extremes(value: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Positions of the smallest and the largest value between each border and the next."""
    found: list[int] = []
    for start, stop in pairwise(borders.tolist()):
        if stop > start:
            part = value[start:stop]
            found += (start + int(part.argmin()), start + int(part.argmax()))
    return np.unique(np.array(found, dtype=np.int64))
