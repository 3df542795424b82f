"""Whether memory stays where it is over the requests of a test.

The requests are those that the test names with :func:`memtrace.scopes.request`, in this process or
in one that it started; where there are none, each run of the test's body is one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from memtrace.analysis.accounts import Account, Series, accounts
from memtrace.analysis.blocks import Moment
from memtrace.analysis.growth import growing_allocations
from memtrace.analysis.stability import Slope, Stability, comparable, judged_slope
from memtrace.budgets.verdicts import Finding, user_frames
from memtrace.budgets.words import Plateau
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size
from memtrace.trace.reader import ProcessTrace

#: Kinds of allocations listed.
_TOP = 8


@dataclass(frozen=True)
class Requests:
    """When each request was over, and what may be compared with what."""

    process: ProcessTrace
    end_us: np.ndarray
    prompt_tokens: Sequence[int | None]


def named_requests(
    processes: Sequence[ProcessTrace], start: Moment, end: Moment
) -> Requests | None:
    """Those that a process named between two moments, of the one that named most; None: none did.

    A single one is none: then the test's body is a request.
    """
    found = []
    for process in processes:
        table = process.requests
        rows = [
            (end_us, tokens)
            for end_us, tokens in zip(table["end_us"], table["prompt_tokens"], strict=True)
            if end_us is not None and start.time_us <= end_us <= end.time_us
        ]
        if len(rows) > 1:
            times = np.array([end_us for end_us, _ in rows], dtype=np.int64)
            found.append(Requests(process, times, [tokens for _, tokens in rows]))
    return max(found, key=lambda one: len(one.end_us), default=None)


def repeated(process: ProcessTrace, ends: Sequence[Moment]) -> Requests:
    """The runs of a test's body."""
    times = np.array([moment.time_us for moment in ends], dtype=np.int64)
    return Requests(process, times, [None] * len(ends))


def judge_plateau(wanted: Plateau, requests: Requests, root: Path) -> Finding:
    """The slopes of allocated, and of reserved where an allocator caches.

    Raises:
        MemtraceError: there were too few requests.
    """
    number = len(requests.end_us)
    if number < wanted.requests:
        raise MemtraceError(
            f"memory_plateau wants {wanted.requests} requests, the test made {number}"
        )
    one = Finding("plateau")
    parts = []
    for account in accounts(requests.process):
        if account.device == "meta":
            continue
        ends = account.event_at(requests.end_us)[wanted.warmup :]
        groups = comparable(requests.prompt_tokens[wanted.warmup :])
        for name, series in _measured(account):
            values = series.read(ends)
            found, since = judged_slope(values, wanted.slope, groups)
            verdict = found.judge(wanted.slope)
            one.plateau.append(
                {
                    "measure": name,
                    "device": account.device,
                    "slope": found.value,
                    "interval": [_finite(found.low), _finite(found.high)],
                    "allowed": wanted.slope,
                    "requests": len(values),
                    "first": int(values[0]) if len(values) else None,
                    "last": int(values[-1]) if len(values) else None,
                    "verdict": str(verdict),
                }
            )
            if verdict is Stability.GROWING:
                one.over.append(_growing(name, account, found, wanted))
                growth = _growth(account, ends[since:], groups[since:], root)
                parts.append("\n".join([one.over[-1], *_levels(values), *growth]))
            elif verdict is Stability.UNDECIDED:
                one.problem = _undecided(name, account, found, wanted)
                parts.append("\n".join([one.problem, *_levels(values)]))
    one.text = "\n\n".join(parts)
    return one


def _measured(account: Account) -> Iterator[tuple[str, Series]]:
    yield "allocated", account.allocated
    if account.device != "cpu" and account.reserved is not None:
        yield "reserved", account.reserved


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _rate(value: float) -> str:
    return f"{format_size(round(value))}/request" if isfinite(value) else "unknown"


def _growing(name: str, account: Account, found: Slope, wanted: Plateau) -> str:
    excess = format_size(round(found.value - wanted.slope), signed=True)
    return f"{name} on {account.device} {_rate(found.value)} > {_rate(wanted.slope)} ({excess})"


def _undecided(name: str, account: Account, found: Slope, wanted: Plateau) -> str:
    more = found.wanting(wanted.slope)
    decide = "no number of requests would decide" if more is None else f"{more} more might decide"
    return (
        f"it is undecided whether {name} on {account.device} stays put: its slope is between "
        f"{_rate(found.low)} and {_rate(found.high)}, {_rate(wanted.slope)} are allowed; {decide}"
    )


def _levels(values: np.ndarray) -> list[str]:
    if len(values) == 0:
        return []
    first, last = int(values[0]), int(values[-1])
    change = format_size(last - first, signed=True)
    return [
        f"{format_size(first)} after the first request that counts, {format_size(last)} after the "
        f"last of {len(values)} ({change})"
    ]


def _growth(
    account: Account, ends: np.ndarray, groups: Sequence[int | None], root: Path
) -> list[str]:
    """What more and more stays of, with the user's frames that made it."""
    lines = ["", f"{'a request':>12}  what stays"]
    for row in growing_allocations(account, ends.tolist(), groups)[:_TOP]:
        value, component = format_size(round(row.slope.value)), row.component or ""
        lines.append(f"{value:>12}  {component:<14}{row.count:>5} ×  {row.where}")
        lines += [f"{'':>36}{frame}" for frame in user_frames(row.stack, root)]
    return lines
