"""The counters of a log, against counting again, row by row and from the blocks."""

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.allocator.device import Device
from memtrace.allocator.log import COLUMNS, Log, Mark
from memtrace.allocator.native import NativeAllocator
from memtrace.allocator.settings import Settings
from memtrace.allocator.statistics import ARRAYS, COUNTS, POOLS, VALUES, Running, Statistics
from memtrace.allocator.vectors import parse_operations
from memtrace.trace.schema import Action
from tests.allocator.streams import random_case

seeds = st.integers(0, 1 << 32)


def played(seed: int, **more: Any) -> tuple[NativeAllocator, Log]:
    """An allocator after a random stream, with what it did."""
    case = random_case(seed)
    allocator = NativeAllocator(
        Device(case["total_memory"], case["used_outside"]),
        Settings.parse(case["settings"]),
        fraction=case["memory_fraction"],
        completion=case["completion"],
        **more,
    )
    return allocator, allocator.run(parse_operations(case["ops"]))


class Naive:
    """Counts as PyTorch does: one deed after another."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: Counter[str] = Counter()

    def change(self, name: str, amount: int) -> None:
        now, peak = f"{name}.current", f"{name}.peak"
        self.counts[now] += amount
        self.counts[peak] = max(self.counts[peak], self.counts[now])
        self.counts[f"{name}.{'allocated' if amount > 0 else 'freed'}"] += abs(amount)

    def both(self, row: dict[str, int], name: str, amount: int) -> None:
        for pool in ("all", "large_pool" if row["pool"] % 2 else "small_pool"):
            self.change(f"{name}.{pool}", amount)

    def sized(self, row: dict[str, int], name: str, sign: int, size: int) -> None:
        self.both(row, name, sign)
        self.both(row, f"{name}_bytes", sign * size)

    def add(self, row: dict[str, int]) -> None:
        action, size = row["action"], row["size"]
        if action == Action.ALLOC:
            self.both(row, "allocation", 1)
            self.both(row, "allocated_bytes", size)
            self.sized(row, "active", 1, size)
            self.both(row, "requested_bytes", row["requested"])
        elif action == Action.FREE_REQUESTED:
            self.both(row, "allocation", -1)
            self.both(row, "allocated_bytes", -size)
        elif action == Action.FREE_COMPLETED:
            self.sized(row, "active", -1, size)
            self.both(row, "requested_bytes", -row["requested"])
        elif action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE):
            sign = 1 if action == Action.SEGMENT_ALLOC else -1
            self.both(row, "segment", sign)
            self.both(row, "reserved_bytes", sign * size)
        elif action in (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP):
            self.both(row, "reserved_bytes", size if action == Action.SEGMENT_MAP else -size)
        self.both(row, "inactive_split", row["split_blocks"])
        self.both(row, "inactive_split_bytes", row["split_bytes"])
        self.rare(action, size)

    def rare(self, action: int, size: int) -> None:
        oversize = {
            Action.ALLOC: ("oversize_allocations", 1),
            Action.FREE_REQUESTED: ("oversize_allocations", -1),
            Action.SEGMENT_ALLOC: ("oversize_segments", 1),
            Action.SEGMENT_FREE: ("oversize_segments", -1),
        }
        if size >= self.limit and action in oversize:
            self.change(*oversize[Action(action)])
        counted = {
            Action.RETRY: "num_alloc_retries",
            Action.OOM: "num_ooms",
            Mark.SYNC: "num_sync_all_streams",
            Mark.REJECTION: "num_oom_rejections",
            Action.SEGMENT_ALLOC: "num_device_alloc",
            Action.SEGMENT_MAP: "num_device_alloc",
            Action.SEGMENT_FREE: "num_device_free",
            Action.SEGMENT_UNMAP: "num_device_free",
        }
        if action in counted:
            self.counts[counted[action]] += 1
        for name in list(self.counts):
            if action == Mark.RESET_PEAKS and name.endswith(".peak"):
                self.counts[name] = self.counts[name.removesuffix("peak") + "current"]
            if action == Mark.RESET_ACCUMULATED and not name.endswith((".current", ".peak")):
                self.counts[name] = 0


@given(seeds)
@settings(max_examples=30)
def test_each_row_counts_as_if_counted_one_by_one(seed: int) -> None:
    allocator, log = played(seed)
    limit = allocator.settings.max_split_size
    found = Statistics(log, limit).at(np.arange(-1, len(log)))
    naive = Naive(limit)
    for place, row in enumerate([None, *log.rows.tolist()]):
        if row is not None:
            naive.add(dict(zip(COLUMNS, row, strict=True)))
        for name, values in found.items():
            assert values[place] == naive.counts[name], (place, name)


def recounted(allocator: NativeAllocator) -> dict[str, int]:
    """The current values, from the blocks alone."""
    counts: Counter[str] = Counter({f"{name}.{pool}": 0 for name in ARRAYS for pool in POOLS})
    for blocks in allocator.segments():
        for block in blocks:
            free, plain = block.is_free, block.segment is None
            of_block = {
                "allocation": block.allocated,
                "allocated_bytes": block.allocated * block.size,
                "active": not free,
                "active_bytes": (not free) * block.size,
                "requested_bytes": (not free) * block.requested,
                "inactive_split": free and plain and block.is_split,
                "inactive_split_bytes": (free and plain and block.is_split) * block.size,
                "segment": plain and block is blocks[0],
                "reserved_bytes": block.mapped * block.size,
            }
            for name, amount in of_block.items():
                for pool in ("all", "small_pool" if block.pool.small else "large_pool"):
                    counts[f"{name}.{pool}"] += amount
    return dict(counts)


@given(seeds)
@settings(max_examples=50)
def test_counters_are_what_the_blocks_say_and_never_negative(seed: int) -> None:
    allocator, log = played(seed)
    statistics = Statistics(log, allocator.settings.max_split_size)
    last = statistics.last()
    blocks = recounted(allocator)
    assert {name: last[f"{name}.current"] for name in blocks} == blocks
    for name, values in statistics.at(np.arange(len(log))).items():
        assert values.min(initial=0) >= 0, name


def test_an_allocator_without_a_history_has_all_counters() -> None:
    empty = Statistics(Log.of([])).last()
    assert len(empty) == 9 * 3 * 4 + 2 * 4 + 6
    assert not any(empty.values())


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_counting_piece_by_piece_is_counting_at_once(seed: int) -> None:
    _, log = played(seed)
    running = Running()
    for piece in np.array_split(log.rows[log["action"] < Mark.RESET_PEAKS], 3):
        running.add(Log(piece))
    whole = Statistics(Log(log.rows[log["action"] < Mark.RESET_PEAKS])).last()
    found = running.nested()
    for name in ARRAYS:
        for pool in POOLS:
            for value in VALUES:
                assert found[name][pool][value] == whole[f"{name}.{pool}.{value}"]
    assert {name: found[name] for name in COUNTS} == {name: whole[name] for name in COUNTS}
