"""Many settings for the same requests, and which of them is best."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from memtrace.allocator.requests import Requests
from memtrace.allocator.settings import Settings, SettingsError, Version
from memtrace.allocator.simulation import (
    ENDLESS,
    Outcome,
    Progress,
    Setup,
    simulate,
    smallest_memory,
)

#: Settings that people try, each for a reason of its own.
GRID = (
    "",
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:8",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "max_split_size_mb:128,roundup_power2_divisions:8",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.8",
    "large_segment_size_mb:32",
    "large_segment_size_mb:64",
    "large_segment_size_mb:128",
)
#: How often a trial goes through the requests, at a guess: once, and for the smallest memory.
PASSES = 12


@dataclass(frozen=True)
class Trial:
    """One settings string, and what it led to.

    ``memory``: the smallest device it fits, bytes; None: it fits none.
    """

    conf: str
    outcome: Outcome
    memory: int | None

    @property
    def rank(self) -> tuple[int, int, int, int, int]:
        """Sorts the best first: what fits, then the smallest device, fewest retries."""
        one = self.outcome
        memory = ENDLESS if self.memory is None else self.memory
        return one.failures, memory, one.retries, one.reserved_peak, len(self.conf)


def grid(torch: Version, fraction: float | None) -> list[str]:
    """The settings strings of :data:`GRID` that mean something there."""
    found = []
    for conf in GRID:
        if conf.startswith("garbage") and (fraction is None or fraction >= 1):
            continue  # nothing is collected without a memory fraction
        try:
            Settings.parse(conf, torch)
        except SettingsError:
            continue
        found.append(conf)
    return found


def trials(
    requests: Requests,
    setup: Setup,
    confs: Sequence[tuple[str, Settings]],
    progress: Progress = lambda done: None,
    begin: Callable[[str], object] = lambda conf: None,
) -> list[Trial]:
    """Each of the settings, in this order, on ``setup``'s device."""
    ops_in_all = len(confs) * PASSES * len(requests.ops)
    found = []
    for conf, settings in confs:
        begin(conf)
        tried = replace(setup, settings=settings)
        outcome = simulate(requests, tried, progress=progress, ops_in_all=ops_in_all)
        memory = smallest_memory(requests, tried, progress=progress, ops_in_all=ops_in_all)
        found.append(Trial(conf, outcome, memory))
    return found


def ranked(found: Iterable[Trial]) -> list[Trial]:
    """The best first; of equals, the one that was tried first."""
    return sorted(found, key=lambda trial: trial.rank)
