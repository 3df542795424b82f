"""What other allocator settings would have done with the same requests."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from memtrace.allocator.log import Log, Mark
from memtrace.allocator.ops import Op
from memtrace.allocator.requests import Requests, requests_of
from memtrace.allocator.settings import Settings
from memtrace.allocator.simulation import Setup, simulate
from memtrace.allocator.sweep import grid
from memtrace.analysis.accounts import Account
from memtrace.analysis.failure import Request
from memtrace.analysis.recorded import setup_of
from memtrace.sizes import format_size
from memtrace.trace.reader import Trace
from memtrace.trace.schema import Action

#: Called before each trial with its settings and how many are left with it; at last with 0 left.
Progress = Callable[[str, int], object]


#: Order and sizes of what was there before a recording are inferred; this much may come of it.
_TOLERATED = 0.02


@dataclass(frozen=True)
class Trial:
    """The same requests under one setting; bytes.

    Attributes:
        settings: the string to export; None: the run's own settings.
        avoids: whether the request succeeds that failed; None: none had.
        failures: requests that fail up to there.
        reserved_peak: the most that is reserved up to there.
    """

    settings: str | None
    avoids: bool | None
    failures: int
    reserved_peak: int


@dataclass(frozen=True)
class Trials:
    """What came of each setting.

    Attributes:
        own: the run's own settings again.
        others: the rest.
        distrust: why their answers can't be relied on, in words; None: the replay under the run's
            own settings does what the run did.
    """

    own: Trial
    others: tuple[Trial, ...]
    distrust: str | None


def try_settings(
    trace: Trace,
    account: Account,
    request: Request | None,
    reserved: int,
    progress: Progress = lambda settings, left: None,
) -> Trials:
    """Replay an account's requests up to the failed ``request``, or all of them.

    ``reserved``: what was reserved when it failed, or at most.
    """
    requests = requests_of(account.process, account.device)
    setup = setup_of(trace, account.process, account.device)
    if request is not None:
        failed = (requests.event == request.event) & (requests.ops.kind == Op.ALLOC)
        count = int(np.flatnonzero(failed)[0]) + 1
        requests = replace(requests, ops=requests.ops[:count], event=requests.event[:count])
        setup = _as_it_failed(setup, request, reserved)
    distinct: dict[Settings, str | None] = {setup.settings: None}
    for text in grid(setup.torch, setup.fraction):
        distinct.setdefault(Settings.parse(text, setup.torch), text)
    found = []
    for place, (settings, name) in enumerate(distinct.items()):
        progress(name or "the run's own settings", len(distinct) - place)
        tried = replace(setup, settings=settings)
        found.append(_try(requests, tried, name, request is not None, len(distinct)))
    progress("", 0)
    own, *others = found
    return Trials(own, tuple(others), _distrust(own, None if request else reserved))


def _distrust(own: Trial, reserved: int | None) -> str | None:
    """Whether the replay under the run's own settings isn't what was recorded.

    ``reserved``: what was reserved at most, where nothing failed.
    """
    known = "so what settings do here doesn't tell what they would have done"
    if own.avoids:
        return f"replayed under the run's own settings the request doesn't fail, {known}"
    if reserved is not None and abs(own.reserved_peak - reserved) > _TOLERATED * reserved:
        replayed, recorded = format_size(own.reserved_peak), format_size(reserved)
        return (
            f"replayed under the run's own settings {replayed} are reserved at most and not "
            f"{recorded}, {known}"
        )
    return None


def _as_it_failed(setup: Setup, request: Request, reserved: int) -> Setup:
    """The device as the request met it."""
    if request.total is None:  # as much as there was for this process
        return replace(setup, total=request.free + reserved, outside=0, fraction=None)
    return replace(setup, outside=max(0, request.total - request.free - reserved))


def _try(requests: Requests, setup: Setup, settings: str | None, fails: bool, passes: int) -> Trial:
    last = len(requests.ops) - 1
    failed: set[int] = set()

    def watch(first: int, count: int, log: Log) -> None:
        rows = (log["action"] == Action.OOM) | (log["action"] == Mark.REJECTION)
        failed.update(log["op"][rows].tolist())

    found = simulate(requests, setup, watch=watch, ops_in_all=passes * len(requests.ops))
    avoids = last not in failed if fails else None
    return Trial(settings, avoids, found.failures, found.reserved_peak)
