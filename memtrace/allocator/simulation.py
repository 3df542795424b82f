"""One stream of requests under another allocator: what it would have taken, and failed to get."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from memtrace.allocator.caching import Completion
from memtrace.allocator.device import Device
from memtrace.allocator.log import Log, Mark
from memtrace.allocator.native import NativeAllocator
from memtrace.allocator.requests import Requests
from memtrace.allocator.settings import NEWEST, ROUND_LARGE, Settings, Version
from memtrace.allocator.statistics import change
from memtrace.trace.schema import Action

if TYPE_CHECKING:
    from memtrace.allocator.compiled import CompiledAllocator

_WATCHED = ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
#: More memory than any device has: nothing fails.
ENDLESS = 1 << 50
#: Operations between two looks at the progress.
_STRETCH = 1 << 17
#: From so many operations on it pays to load (the first time: to compile) the fast path.
_MANY = 2_000_000

#: Called with the number of operations done since the last time.
Progress = Callable[[int], object]


@dataclass(frozen=True)
class Setup:
    """An allocator and the device that it runs on; bytes.

    Attributes:
        total: memory of the device.
        outside: what others than the allocator use of it.
        pool: the most that the pool of cudaMallocAsync can hold; None: all that there is.
        fraction: of ``total``, what may be reserved; None: as the settings say.
        completion: when blocks that other streams used come back, where the requests don't tell.
    """

    settings: Settings = field(default_factory=Settings)
    torch: Version = NEWEST
    total: int = ENDLESS
    outside: int = 0
    pool: int | None = None
    fraction: float | None = None
    completion: Completion = "soon"


@dataclass(frozen=True)
class Outcome:
    """What became of the requests; bytes where nothing else is said.

    Attributes:
        reserved_peak, allocated_peak, inactive_split_peak: the largest values, as
            ``memory_stats()`` has them.
        reserved_end, largest_free: at the end: reserved, and the largest free block outside
            private pools.
        retries: how often the cache was given back to the device and tried again.
        failures: requests that ran out of memory; they are left out of what follows.
        first_failure: number of the operation that failed first; None: none did.
        segments: how many segments were allocated or mapped.
        ops: operations that were done: all, unless the caller stopped at a failure.
    """

    reserved_peak: int
    allocated_peak: int
    inactive_split_peak: int
    reserved_end: int
    largest_free: int
    retries: int
    failures: int
    first_failure: int | None
    segments: int
    ops: int

    @property
    def fits(self) -> bool:
        return self.failures == 0


def simulate(
    requests: Requests,
    setup: Setup,
    *,
    progress: Progress = lambda done: None,
    watch: Callable[[int, int, Log], object] = lambda first, count, log: None,
    stop_at_failure: bool = False,
    ops_in_all: int = 0,
) -> Outcome:
    """Do the requests under another allocator.

    ``watch`` sees each stretch: its first operation, how many there are, and their log.
    ``ops_in_all``: how many operations the caller is going to simulate, which decides whether it
    pays to compile.
    """
    allocator = _allocator(requests, setup, max(ops_in_all, len(requests.ops)))
    figures = _Figures()
    done = 0
    while done < len(requests.ops) and not (stop_at_failure and figures.failures):
        ops = requests.ops[done : done + _STRETCH]
        log = allocator.run(ops)
        figures.add(log)
        watch(done, len(ops), log)
        done += len(ops)
        progress(len(ops))
    return figures.outcome(allocator.largest_free(), done)


def smallest_memory(
    requests: Requests,
    setup: Setup,
    *,
    progress: Progress = lambda done: None,
    ops_in_all: int = 0,
) -> int | None:
    """The smallest memory of a device on which nothing fails, by bisection, in steps of 2 MiB.

    What is used outside the allocator (``setup.outside``) is part of it. None: there is no such
    device, since the settings themselves refuse something.
    """

    def at(total: int) -> Outcome:
        tried = replace(setup, total=total)
        return simulate(
            requests, tried, progress=progress, stop_at_failure=True, ops_in_all=ops_in_all
        )

    free = at(ENDLESS)
    if not free.fits:
        return None
    # With less than what is allocated at the peak something fails. What an endless device's
    # allocator reserves is enough, unless the settings allow or address a share of the memory only.
    low = free.allocated_peak // ROUND_LARGE
    high = (free.reserved_peak + ROUND_LARGE - 1) // ROUND_LARGE
    while not at(high * ROUND_LARGE + setup.outside).fits:
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        if at(middle * ROUND_LARGE + setup.outside).fits:
            high = middle
        else:
            low = middle + 1
    return high * ROUND_LARGE + setup.outside


def _allocator(
    requests: Requests, setup: Setup, ops_in_all: int
) -> "NativeAllocator | CompiledAllocator":
    device = Device(setup.total, setup.outside)
    follows = not (requests.pools and setup.settings.expandable)
    if ops_in_all >= _MANY and follows and find_spec("numba"):
        from memtrace.allocator.compiled import CompiledAllocator

        return CompiledAllocator(
            device,
            setup.settings,
            setup.torch,
            fraction=setup.fraction,
            completion=setup.completion,
            streams=requests.streams,
            pools=len(requests.pools),
        )
    return NativeAllocator(
        device,
        setup.settings,
        setup.torch,
        fraction=setup.fraction,
        completion=setup.completion,
    )


class _Figures:
    """Sums over logs."""

    def __init__(self) -> None:
        self._now = dict.fromkeys(_WATCHED, 0)
        self._peak = dict.fromkeys(_WATCHED, 0)
        self._counts = dict.fromkeys((Action.RETRY, Action.OOM, Mark.REJECTION), 0)
        self._segments = 0
        self._first: int | None = None

    @property
    def failures(self) -> int:
        return self._counts[Action.OOM] + self._counts[Mark.REJECTION]

    def add(self, log: Log) -> None:
        for name in _WATCHED:
            levels = np.cumsum(change(log, name)) + self._now[name]
            if len(levels):
                self._now[name] = int(levels[-1])
                self._peak[name] = max(self._peak[name], int(levels.max()))
        action = log["action"]
        for one in self._counts:
            self._counts[one] += int(np.count_nonzero(action == one))
        taken = (action == Action.SEGMENT_ALLOC) | (action == Action.SEGMENT_MAP)
        self._segments += int(np.count_nonzero(taken))
        failed = np.flatnonzero((action == Action.OOM) | (action == Mark.REJECTION))
        if self._first is None and len(failed):
            self._first = int(log["op"][failed[0]])

    def outcome(self, largest_free: int, ops: int) -> Outcome:
        return Outcome(
            reserved_peak=self._peak["reserved_bytes"],
            allocated_peak=self._peak["allocated_bytes"],
            inactive_split_peak=self._peak["inactive_split_bytes"],
            reserved_end=self._now["reserved_bytes"],
            largest_free=largest_free,
            retries=self._counts[Action.RETRY],
            failures=self.failures,
            first_failure=self._first,
            segments=self._segments,
            ops=ops,
        )
