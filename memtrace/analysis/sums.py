"""All processes of a run together: the peaks added up, and the peak of what they held at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.trace.reader import Trace

#: How long a sample counts beyond itself: the samples of one round are taken one after another.
_ROUND_US = 20_000

#: A step function: times at which it steps, and by how many bytes (int64 arrays).
_Steps = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Sum:
    """In bytes. ``peak`` is at most ``of_peaks``: processes needn't peak together."""

    of_peaks: int
    peak: int


def sums(trace: Trace, accounts: Iterable[Account]) -> Mapping[str, Sum]:
    """``rss`` and ``nvml`` over all sampled processes, ``allocated:cpu`` and so on over accounts.

    Pages that processes share count in the RSS of each. Empty for a run of a single process.
    """
    lives = {life: sources for life, sources in trace.sampled.items() if life is not None}
    if len({process.life for process in trace.processes} | set(lives)) < 2:
        return {}
    found = {}
    exact = trace.manifest.get("process_peak") or {}
    for kind in ("rss", "nvml"):
        parts, peaks = [], []
        for life, sources in lives.items():
            own = [rows for name, rows in sources.items() if name.partition(":")[0] == kind]
            parts += [_sampled(rows) for rows in own]
            highest = sum(max(value for _, value in rows) for rows in own)
            peaks.append(exact.get(life, highest) if kind == "rss" else highest)
        if parts:
            found[kind] = Sum(sum(peaks), _peak(parts))
    by_kind = sorted(accounts, key=_kind)
    for kind, group in groupby(by_kind, key=_kind):
        members = list(group)
        parts = [_booked(account, _end(trace, account)) for account in members]
        peaks = [account.allocated.peak for account in members]
        found[f"allocated:{kind}"] = Sum(sum(peaks), _peak(parts))
    return found


def _kind(account: Account) -> str:
    return account.device.partition(":")[0]


def _sampled(rows: list[tuple[int, int]]) -> _Steps:
    """Each sample holds until the next one, the last one for a round more."""
    time_us, value = np.array(rows, dtype=np.int64).T
    steps = np.diff(value, prepend=0)
    return np.append(time_us, time_us[-1] + _ROUND_US), np.append(steps, -value[-1])


def _booked(account: Account, end_us: int) -> _Steps:
    """What was allocated, until the process ended."""
    series = account.allocated
    return (
        np.append(account.time_us[series.at], end_us),
        np.append(np.diff(series.levels), -series.levels[-1]),
    )


def _end(trace: Trace, account: Account) -> int:
    """When the process was last seen, from outside or by its own events."""
    last = int(account.time_us[-1])
    rss = trace.sampled.get(account.process.life, {}).get("rss", [])
    alone = sum(process.life == account.process.life for process in trace.processes) == 1
    # The program that replaced another one by exec goes on in the same process.
    return max(last, rss[-1][0]) if rss and alone else last


def _peak(parts: Iterable[_Steps]) -> int:
    """The largest value of the sum of step functions."""
    times, steps = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(times, kind="stable")
    times, totals = times[order], np.cumsum(steps[order])
    # Steps at one instant are one: in between nothing was held.
    whole = np.append(times[1:] != times[:-1], True)
    return int(totals[whole].max(initial=0))
