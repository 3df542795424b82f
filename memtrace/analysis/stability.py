"""Whether memory stays where it is: a robust slope over requests, and what it says.

The slope is Theil and Sen's, the median over the slopes of all pairs: up to 29 % of the points may
be anything. Its confidence interval is Sen's (1968), from the variance of Kendall's S with ties.
It takes points as independent: where neighbours resemble each other, it is too narrow.

Requests of different lengths may end at different levels, which would hide a slope. Points of one
*group* (a prompt length, a place in a cycle) are then compared with each other alone, as the
seasonal estimator of Hirsch, Slack and Smith (1982) does with months.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, sqrt
from statistics import NormalDist

import numpy as np

#: Points below which a slope says nothing: even the widest interval of Sen's would be too narrow.
FEWEST = 5


class Stability(StrEnum):
    """What a slope says of a limit on it."""

    PLATEAU = "plateau"  # surely within the limit
    GROWING = "growing"  # surely above it
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Slope:
    """Bytes a request; the true slope lies in [``low``, ``high``] with the confidence asked for."""

    value: float
    low: float
    high: float
    points: int

    def judge(self, limit: float) -> Stability:
        """Whether the slope is within ``limit`` bytes a request."""
        if self.points < FEWEST:
            return Stability.UNDECIDED
        if self.high <= limit:
            return Stability.PLATEAU
        return Stability.GROWING if self.low > limit else Stability.UNDECIDED

    def wanting(self, limit: float) -> int | None:
        """About how many more points would decide, if they go on like these; None: no number would.

        The interval narrows as n^-1.5.
        """
        if self.points < FEWEST:
            return FEWEST - self.points
        if self.judge(limit) is not Stability.UNDECIDED:
            return 0
        apart = self.high - self.value if self.value <= limit else self.value - self.low
        if self.value == limit or apart == inf:
            return None
        needed = self.points * (apart / abs(limit - self.value)) ** (2 / 3)
        return max(1, ceil(needed) - self.points)


def comparable(lengths: Sequence[int | None]) -> Sequence[int | None]:
    """Prompts of one length are compared with each other, unless hardly two are alike."""
    return lengths if 2 * len(set(lengths)) <= len(lengths) else [None] * len(lengths)


def slope(
    values: Sequence[int] | np.ndarray,
    confidence: float = 0.95,
    groups: Sequence[Hashable] | None = None,
) -> Slope:
    """The Theil–Sen slope of ``values`` over their positions 0, 1, 2, ….

    Args:
        values: bytes after each request; n of one group take n² / 2 numbers of memory.
        confidence: of the interval.
        groups: one a value; only values of one group are compared. None: all with all.
    """
    y = np.asarray(values, dtype=np.float64)
    numbers: dict[Hashable, int] = {}
    group = np.array(
        [numbers.setdefault(name, len(numbers)) for name in groups or [None] * len(y)], dtype=int
    )
    places = [np.flatnonzero(group == number) for number in numbers.values()]
    pairs = sum(len(at) * (len(at) - 1) // 2 for at in places)
    if pairs == 0:
        return Slope(0.0, -inf, inf, 0)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * sqrt(sum(_variance(y[at]) for at in places))
    # Sen: the M1-th smallest slope and the (M2 + 1)-th, with M = (pairs ∓ half) / 2.
    low = round((pairs - half) / 2) - 1
    high = round((pairs + half) / 2)
    middle = (pairs - 1) // 2, pairs // 2
    slopes = _slopes(y, places, pairs)
    slopes.partition([*middle, max(low, 0), min(high, pairs - 1)])
    return Slope(
        value=float(slopes[list(middle)].mean()),
        low=float(slopes[low]) if low >= 0 else -inf,
        high=float(slopes[high]) if high < pairs else inf,
        points=len(y),
    )


def _slopes(y: np.ndarray, places: Sequence[np.ndarray], pairs: int) -> np.ndarray:
    """Of all pairs of places of one group; row by row, since pairs are many."""
    found = np.empty(pairs)
    start = 0
    for at in places:
        for row in range(1, len(at)):
            stop = start + len(at) - row
            found[start:stop] = (y[at[row:]] - y[at[row - 1]]) / (at[row:] - at[row - 1])
            start = stop
    return found


def judged_slope(
    values: Sequence[int] | np.ndarray, limit: float, groups: Sequence[Hashable]
) -> tuple[Slope, int]:
    """The slope that judges whether ``values`` grow by more than ``limit`` a request.

    Over all of them a leak that begins late is among what a robust slope leaves out, so the later
    half must not grow by itself either.

    Returns:
        The slope, and the position since which it is.
    """
    found, half = slope(values, groups=groups), len(values) // 2
    if found.judge(limit) is not Stability.GROWING:
        late = slope(values[half:], groups=groups[half:])
        if late.judge(limit) is Stability.GROWING:
            return late, half
    return found, 0


def _variance(y: np.ndarray) -> float:
    """Of Kendall's S over these points; equal ones take from it."""
    _, ties = np.unique(y, return_counts=True)
    sizes = np.array([len(y), *ties], dtype=np.float64)
    spread = sizes * (sizes - 1) * (2 * sizes + 5) / 18
    return float(spread[0] - spread[1:].sum())
