"""``torch.cuda.memory_stats()`` of an allocator, from its log: every counter at every row.

Meaning of each counter: ``c10/core/CachingDeviceAllocator.h``; names as PyTorch flattens them.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from memtrace.allocator.log import Log, Mark
from memtrace.allocator.settings import UNLIMITED
from memtrace.trace.schema import Action

#: Counters that exist for all blocks, for small ones and for large ones.
ARRAYS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
#: Plain counters, by the deed that they count.
COUNTS = {
    "num_alloc_retries": (Action.RETRY,),
    "num_ooms": (Action.OOM,),
    "num_sync_all_streams": (Mark.SYNC,),
    "num_device_alloc": (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP),
    "num_device_free": (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP),
    "num_oom_rejections": (Mark.REJECTION,),
}
POOLS = ("all", "small_pool", "large_pool")
VALUES = ("current", "peak", "allocated", "freed")


def change(log: Log, name: str) -> np.ndarray:
    """By how much each row of a log changes one of :data:`ARRAYS`."""
    if name.startswith("inactive_split"):
        return log["split_bytes" if name.endswith("bytes") else "split_blocks"]
    if name in ("segment", "reserved_bytes"):
        more: tuple[Action, ...] = (Action.SEGMENT_ALLOC,)
        less: tuple[Action, ...] = (Action.SEGMENT_FREE,)
        if name == "reserved_bytes":
            more, less = (*more, Action.SEGMENT_MAP), (*less, Action.SEGMENT_UNMAP)
    else:
        more = (Action.ALLOC,)
        follows_free = name in ("allocation", "allocated_bytes")
        less = (Action.FREE_REQUESTED if follows_free else Action.FREE_COMPLETED,)
    amount: np.ndarray | int = 1
    if name.endswith("bytes"):
        amount = log["requested" if name == "requested_bytes" else "size"]
    return _signed(log, more, less) * amount


def _signed(log: Log, more: tuple[Action, ...], less: tuple[Action, ...]) -> np.ndarray:
    signs = np.zeros(max(Mark) + 1, dtype=np.int64)
    signs[list(more)], signs[list(less)] = 1, -1
    return signs[log["action"]]


class Statistics:
    """The counters over a log (the whole one, from an empty allocator on).

    ``max_split_size``: from it on blocks count as oversize.
    """

    def __init__(self, log: Log, max_split_size: int = UNLIMITED) -> None:
        self._log = log
        self._limit = max_split_size
        action = log["action"]
        self._resets = np.flatnonzero(action == Mark.RESET_PEAKS)
        self._renewals = np.flatnonzero(action == Mark.RESET_ACCUMULATED)

    def at(self, rows: np.ndarray) -> Mapping[str, np.ndarray]:
        """Each counter after each of these rows of the log; -1 is before the first."""
        return {name: np.append(values, 0)[rows] for name, values in self._series()}

    def last(self) -> dict[str, int]:
        """``torch.cuda.memory_stats()`` after the log."""
        row = np.array([len(self._log) - 1])
        return {name: int(values[0]) for name, values in self.at(row).items()}

    def _series(self) -> Iterator[tuple[str, np.ndarray]]:
        small = self._log["pool"] % 2 == 0
        for name in ARRAYS:
            changes = change(self._log, name)
            for pool, chosen in zip(POOLS, (None, small, ~small), strict=True):
                found = changes if chosen is None else np.where(chosen, changes, 0)
                yield from self._counter(f"{name}.{pool}", found)
        for name in ("oversize_allocations", "oversize_segments"):
            yield from self._counter(name, self._oversize(name))
        for name, actions in COUNTS.items():
            yield name, self._since_renewal(np.cumsum(np.isin(self._log["action"], actions)))

    def _oversize(self, name: str) -> np.ndarray:
        more, less = {
            "oversize_allocations": (Action.ALLOC, Action.FREE_REQUESTED),
            "oversize_segments": (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE),
        }[name]
        if self._limit > np.iinfo(np.int64).max:
            return np.zeros(len(self._log), dtype=np.int64)
        return _signed(self._log, (more,), (less,)) * (self._log["size"] >= self._limit)

    def _counter(self, name: str, changes: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        current = np.cumsum(changes)
        yield f"{name}.current", current
        yield f"{name}.peak", self._peak(current)
        yield f"{name}.allocated", self._since_renewal(np.cumsum(np.maximum(changes, 0)))
        yield f"{name}.freed", self._since_renewal(np.cumsum(np.maximum(-changes, 0)))

    def _peak(self, current: np.ndarray) -> np.ndarray:
        peak = np.empty_like(current)
        for first, end in self._stretches(self._resets):
            peak[first:end] = np.maximum.accumulate(current[first:end])
        if len(current):  # before the first event everything was 0
            first_end = self._resets[0] if len(self._resets) else len(current)
            np.maximum(peak[:first_end], 0, out=peak[:first_end])
        return peak

    def _since_renewal(self, total: np.ndarray) -> np.ndarray:
        for row in self._renewals:
            total[row:] -= total[row]
        return total

    def _stretches(self, borders: np.ndarray) -> Iterator[tuple[int, int]]:
        edges = [0, *borders.tolist(), len(self._log)]
        yield from pairwise(edges)


class Running:
    """The counters of an allocator that still runs, from one piece of its log after the other.

    ``oversize`` counters stay 0: they need ``max_split_size_mb``, which :class:`Statistics` knows.
    """

    def __init__(self) -> None:
        self._arrays = {name: np.zeros((len(POOLS), len(VALUES)), np.int64) for name in ARRAYS}
        self._counts = dict.fromkeys(COUNTS, 0)

    def add(self, log: Log) -> None:
        """The next piece of the log."""
        small = log["pool"] % 2 == 0
        for name, values in self._arrays.items():
            changes = change(log, name)
            for row, chosen in zip(values, (None, small, ~small), strict=True):
                found = changes if chosen is None else np.where(chosen, changes, 0)
                levels = row[0] + np.cumsum(found)
                row[1] = max(row[1], levels.max(initial=0))
                row[0] += found.sum()
                row[2] += found[found > 0].sum()
                row[3] -= found[found < 0].sum()
        for name, actions in COUNTS.items():
            self._counts[name] += int(np.isin(log["action"], actions).sum())

    def reset_peaks(self) -> None:
        """``torch.cuda.reset_peak_memory_stats()``."""
        for values in self._arrays.values():
            values[:, 1] = values[:, 0]

    def reset_accumulated(self) -> None:
        """``torch.cuda.reset_accumulated_memory_stats()``."""
        for values in self._arrays.values():
            values[:, 2:] = 0
        self._counts = dict.fromkeys(COUNTS, 0)

    def nested(self) -> dict[str, Any]:
        """As ``torch._C._cuda_memoryStats`` has them: by name, pool and value."""
        found: dict[str, Any] = {
            name: {
                pool: dict(zip(VALUES, row.tolist(), strict=True))
                for pool, row in zip(POOLS, values, strict=True)
            }
            for name, values in self._arrays.items()
        }
        for name in ("oversize_allocations", "oversize_segments"):
            found[name] = dict.fromkeys(VALUES, 0)
        return found | self._counts
