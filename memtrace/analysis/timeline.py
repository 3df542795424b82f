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


def timeline(account: Account, memory: ProcessMemory, bins: int = 1000) -> Timeline:
    """At most ``2 * bins + 2`` events, and as many samples of process memory."""
    steps = account.allocated.at
    picked = _extremes(account.time_us[steps], account.allocated.levels[1:], bins)
    last = len(account.time_us) - 1
    events = np.unique(np.concatenate((steps[picked], [0, last])))
    sampled = _extremes(memory.time_us, memory.value, bins)
    return Timeline(
        events=events,
        time_us=account.time_us[events],
        allocated=account.allocated.read(events),
        components={name: series.read(events) for name, series in account.components.items()},
        process_time_us=memory.time_us[sampled],
        process=memory.value[sampled],
        total_events=len(account.time_us),
    )


def _extremes(time: np.ndarray, value: np.ndarray, bins: int) -> np.ndarray:
    """Positions of the smallest and largest value in each of ``bins`` equal spans of time."""
    if len(time) <= 2 * bins:
        return np.arange(len(time))
    edges = np.linspace(time[0], time[-1], bins + 1)[1:-1]
    borders = [0, *np.searchsorted(time, edges), len(time)]
    found: list[int] = []
    for start, stop in pairwise(borders):
        if stop > start:
            part = value[start:stop]
            found += (start + int(part.argmin()), start + int(part.argmax()))
    return np.unique(found)
