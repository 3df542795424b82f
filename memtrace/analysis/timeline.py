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
    process_time_us: np.ndarray
    process: np.ndarray  # bytes, at ``process_time_us``; empty: unknown
    #: How many events were reduced to these.
    total_events: int


def timeline(
    account: Account,
    memory: ProcessMemory,
    *,
    span_us: tuple[int, int] | None = None,
    bins: int = 1000,
) -> Timeline:
    """At most ``2 * bins + 2`` events, and as many samples of process memory.

    Args:
        span_us: only these microseconds, both ends included; what was held when they begin is in
            the last event before them, where there is one. None: the whole account.
    """
    time_us, steps = account.time_us, account.allocated.at
    first, last = 0, len(time_us) - 1
    sampled = slice(0, len(memory.time_us))
    if span_us is not None:
        first, last = np.maximum(account.event_at(np.array([span_us[0] - 1, span_us[1]])), 0)
        sampled = slice(*np.searchsorted(memory.time_us, [span_us[0], span_us[1] + 1]))
    borders = np.searchsorted(steps, first + _borders(time_us[first : last + 1], bins))
    picked = _extremes(account.allocated.levels[1:], borders)
    events = np.unique(np.concatenate((steps[picked], [first, last])))
    sample_us, value = memory.time_us[sampled], memory.value[sampled]
    chosen = _extremes(value, _borders(sample_us, bins))
    return Timeline(
        events=events,
        time_us=time_us[events],
        allocated=account.allocated.read(events),
        components={name: series.read(events) for name, series in account.components.items()},
        process_time_us=sample_us[chosen],
        process=value[chosen],
        total_events=int(last - first) + 1,
    )


def _borders(time: np.ndarray, bins: int) -> np.ndarray:
    """Where in ``time`` each of ``bins`` equal spans of it begins, and where the last one ends."""
    if len(time) <= 2 * bins:
        return np.arange(len(time) + 1)
    edges = np.linspace(time[0], time[-1], bins + 1)[1:-1]
    return np.array([0, *np.searchsorted(time, edges), len(time)])


def _extremes(value: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Positions of the smallest and the largest value between each border and the next."""
    found: list[int] = []
    for start, stop in pairwise(borders.tolist()):
        if stop > start:
            part = value[start:stop]
            found += (start + int(part.argmin()), start + int(part.argmax()))
    return np.unique(np.array(found, dtype=np.int64))
