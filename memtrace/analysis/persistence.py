"""Whether a process that answers request after request keeps its memory where it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from memtrace.analysis.boundaries import Boundary, Served
from memtrace.analysis.growth import (
    Growing,
    growing_allocations,
    growing_blocks,
    growing_segments,
)
from memtrace.analysis.stability import FEWEST, Slope, Stability, comparable, judged_slope

#: What is judged, the first that grows being the cause of the others.
MEASURES = ("allocated", "reserved", "process")


@dataclass(frozen=True)
class Measure:
    """One kind of memory over the requests that count, in bytes."""

    name: str
    slope: Slope
    verdict: Stability
    first: int
    last: int
    highest: int
    change: int  # from its first cycle to its last, of the prompt length that changed most
    wanting: int | None  # requests that would decide; None: no number would
    since: int  # the first of the requests that count that the slope is over


@dataclass(frozen=True)
class Persistence:
    """The verdict on one process.

    Attributes:
        limit: bytes a request up to which memory stays put.
        warmup: requests that came before those that count.
        counted: those that count: after the warm-up, and answered.
        grouped: whether only prompts of one length are compared with each other.
        rss: whether a process's resident set is judged too. It moves by itself, by what malloc
            keeps and libraries load, and is sampled; what NVML says of a GPU isn't and is judged.
    """

    served: Served
    limit: float
    warmup: int
    counted: tuple[Boundary, ...]
    grouped: bool
    rss: bool

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """Those that are known after every request that counts."""
        return tuple(one for name in MEASURES if (one := self._measure(name)) is not None)

    @property
    def judged(self) -> tuple[Measure, ...]:
        """The measures that decide."""
        told = self.rss or self.served.memory.source != "rss"
        return tuple(one for one in self.measures if told or one.name != "process")

    @property
    def verdict(self) -> Stability:
        """Growing if anything surely grows, undecided if anything may or nothing is known."""
        verdicts = {one.verdict for one in self.judged}
        if Stability.GROWING in verdicts:
            return Stability.GROWING
        if len(self.counted) < FEWEST or verdicts != {Stability.PLATEAU}:
            return Stability.UNDECIDED
        return Stability.PLATEAU

    @property
    def cause(self) -> Measure | None:
        """What grows; None: nothing surely does."""
        growing = (one for one in self.judged if one.verdict is Stability.GROWING)
        return next(growing, None)

    @cached_property
    def growing(self) -> tuple[Growing, ...]:
        """What makes the cause grow, what grows most first; empty where that isn't known."""
        cause = self.cause
        if cause is None or cause.name == "process":
            return ()
        account = self.served.account
        rows, groups = self.counted[cause.since :], self._groups[cause.since :]
        events = [one.event for one in rows if one.event is not None]
        if account is not None and len(events) == len(rows):
            name = growing_allocations if cause.name == "allocated" else growing_segments
            return tuple(name(account, events, groups))
        snapshots = [one.snapshot for one in rows if one.snapshot is not None]
        if cause.name == "allocated" and len(snapshots) == len(rows):
            return tuple(growing_blocks(self.served.process, snapshots, groups))
        return ()

    @property
    def wanting(self) -> int | None:
        """Requests that would decide what is undecided; None: no number would."""
        if len(self.counted) < FEWEST:
            return FEWEST - len(self.counted)
        if not self.judged:
            return None
        undecided = [one.wanting for one in self.judged if one.verdict is Stability.UNDECIDED]
        return None if None in undecided else max((one or 0 for one in undecided), default=0)

    @property
    def answered(self) -> int:
        """Requests that were answered, those of the warm-up too."""
        return sum(one.outcome == "ok" for one in self.served.boundaries)

    def highest(self, name: str) -> int | None:
        """The most of a counter after any request that counts; None: unknown."""
        values = [getattr(one, name) for one in self.counted]
        return max((value for value in values if value is not None), default=None)

    def gained(self, name: str) -> int | None:
        """By how much a running count grew over the requests that count; None: unknown."""
        before = self.served.boundaries[self.warmup - 1] if self.warmup else None
        start = 0 if before is None else getattr(before, name)
        end = getattr(self.counted[-1], name) if self.counted else None
        return None if start is None or end is None else end - start

    @cached_property
    def _groups(self) -> Sequence[int | None]:
        return [one.prompt_tokens if self.grouped else None for one in self.counted]

    def _measure(self, name: str) -> Measure | None:
        values = [value for one in self.counted if (value := getattr(one, name)) is not None]
        if not values or len(values) < len(self.counted):
            return None
        found, since = judged_slope(values, self.limit, self._groups)
        ends: dict[int | None, tuple[int, int]] = {}
        for group, value in zip(self._groups, values, strict=True):
            ends[group] = ends.get(group, (value, value))[0], value
        changes = (last - first for first, last in ends.values())
        return Measure(
            name=name,
            slope=found,
            verdict=found.judge(self.limit),
            first=values[0],
            last=values[-1],
            highest=max(values),
            change=max(changes, key=abs),
            wanting=found.wanting(self.limit),
            since=since,
        )


def persistence(
    one: Served, *, limit: float, warmup_cycles: int = 1, rss: bool = False
) -> Persistence:
    """Judge a process by its requests after the warm-up.

    The warm-up is over when every prompt length that comes more often than ``warmup_cycles`` times
    came as often, and the longest prompt came: until then the allocator has reason to grow. Where
    hardly two prompts are of one length a tenth of the requests counts as a cycle.

    Args:
        limit: bytes a request up to which memory stays put.
    """
    rows = one.boundaries
    lengths = [row.prompt_tokens for row in rows]
    grouped = comparable(lengths) is lengths
    warmup = _warmup(lengths, warmup_cycles, grouped=grouped)
    counted = tuple(row for row in rows[warmup:] if row.outcome == "ok")
    # What was asked after the last ones may be lost, where a process was killed.
    told = tuple(row for row in counted if row.allocated is not None)
    return Persistence(one, limit, warmup, told or counted, grouped, rss)


def _warmup(lengths: Sequence[int | None], cycles: int, *, grouped: bool) -> int:
    """How many requests it takes."""
    if cycles == 0 or not lengths:
        return 0
    longest = max(lengths, key=lambda length: length or 0)
    until = lengths.index(longest) + 1
    if not grouped:
        return min(max(until, cycles * max(1, len(lengths) // 10)), len(lengths))
    for length in set(lengths):
        places = [row for row, other in enumerate(lengths) if other == length]
        if len(places) > cycles:
            until = max(until, places[cycles - 1] + 1)
    return until
