"""Several runs on one axis: by time, by progress, or by what a request does."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.steps import Steps, common


@dataclass(frozen=True)
class Axis:
    """Where on an axis the times of one run stand: straight from each mark to the next.

    ``time_us`` ascends, ``at`` (float64, of the axis) strictly. What lies outside stands at the
    nearest end.
    """

    time_us: np.ndarray
    at: np.ndarray

    def places(self, time_us: np.ndarray) -> np.ndarray:
        """Where these times stand (float64)."""
        return np.interp(time_us, self.time_us, self.at)

    def times(self, at: np.ndarray) -> np.ndarray:
        """The microseconds that stand at these places (int64)."""
        return np.rint(np.interp(at, self.at, self.time_us)).astype(np.int64)


def by_time(begin_us: int, end_us: int, zero_us: int = 0) -> Axis:
    """Seconds since ``zero_us``, between two times."""
    ends = np.array([begin_us, max(end_us, begin_us + 1)], dtype=np.int64)
    return Axis(ends, (ends - zero_us) / 1e6)


def by_progress(
    ends_us: Sequence[tuple[int, int]], runs: Sequence[Steps]
) -> tuple[list[Axis], list[str]]:
    """The steps that all runs have in common, each as wide as any other.

    Step ``i`` begins at ``i``; what a run does before the first one stands between -1 and 0, and
    what it does after the last one between their number and the next.

    Args:
        ends_us: when each run begins and ends.
        runs: their steps, of one kind.

    Returns:
        An axis a run, and the steps' names; none where the runs have no step in common.
    """
    shared = common(runs)
    axes = []
    for (begin_us, end_us), one, numbers in zip(ends_us, runs, shared, strict=True):
        last = one.end_us[numbers[-1:]]
        marks = np.concatenate(([begin_us], one.start_us[numbers], last, [end_us]))
        at = np.concatenate(([-1], np.arange(len(numbers) + len(last)), [len(numbers) + 1]))
        axes.append(Axis(np.maximum.accumulate(marks), at.astype(np.float64)))
    names = runs[0].names()
    return axes, [names[number] for number in shared[0].tolist()]
