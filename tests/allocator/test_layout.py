"""Blocks followed from the allocator's history, against what PyTorch's own allocator counted."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtrace.allocator.layout import Layout, LayoutError, Segment
from memtrace.allocator.settings import UNLIMITED, Settings

#: Histories and statistics recorded from the allocators of released PyTorch versions.
VECTORS = Path(__file__).parents[3] / "shared" / "reference" / "allocator_vectors"
MIB = 1 << 20


def settings(text: str) -> Settings:
    pairs = dict(part.split(":") for part in text.split(",") if ":" in part and "[" not in part)
    split = int(pairs.get("max_split_size_mb", 0)) * MIB or UNLIMITED
    return Settings(split, (int(pairs.get("roundup_power2_divisions", 0)),) * 16)


def follow(layout: Layout, action: str, address: int, size: int, stream: int) -> None:
    if action == "alloc":
        layout.alloc(address, size)
    elif action == "free_requested":
        layout.free_requested(address)
    elif action == "free_completed":
        layout.free_completed(address)
    elif action == "segment_free":
        layout.give_back(address, size)
    elif action == "segment_unmap":
        layout.unmap(address, size)
    elif action in ("segment_alloc", "segment_map"):
        layout.take(address, Segment(size, stream, None, action == "segment_map"))


def statistics(layout: Layout) -> dict[str, int]:
    allocated = sum(block.bytes for block in layout.live.values())
    pending = sum(block.bytes for block in layout.pending.values())
    blocks = [*layout.live.items(), *layout.pending.items()]
    split = 0
    for start, segment in layout.segments.items():
        used = sum(b.bytes for a, b in blocks if start <= a < start + segment.bytes)
        if not segment.expandable and used:
            split += segment.bytes - used
    return {
        "allocated_bytes": allocated,
        "active_bytes": allocated + pending,
        "reserved_bytes": sum(segment.bytes for segment in layout.segments.values()),
        "requested_bytes": sum(block.requested for _, block in blocks),
        "inactive_split_bytes": split,
    }


def vectors() -> Iterator[Any]:
    for path in sorted(VECTORS.glob("*.gz")) if VECTORS.is_dir() else ():
        with gzip.open(path, "rt") as file:
            for number, line in enumerate(file):
                case = json.loads(line)
                yield pytest.param(case, id=f"{case['torch']}-{number}-{case['settings'][:40]}")


@pytest.mark.skipif(not VECTORS.is_dir(), reason="the recorded vectors are not at hand")
@pytest.mark.parametrize("case", list(vectors()))
def test_every_recorded_history_ends_in_the_allocators_own_statistics(case: dict) -> None:
    layout = Layout(settings(case["settings"]))
    for action, address, size, stream in case["trace"]:
        follow(layout, action, address, size, stream)
    last = case["stats_after_op"][str(len(case["ops"]) - 1)]
    counted = dict(zip(case["columns"], last, strict=True))
    found = statistics(layout)
    assert found == {name: counted[f"{name}.all.current"] for name in found}


def test_up_to_a_mebibyte_stays_in_a_large_block() -> None:
    layout = Layout()
    layout.take(0, Segment(34 * MIB, 0, None, False))
    assert layout.alloc(0, 33 * MIB).bytes == 34 * MIB
    layout.free_requested(0)
    layout.free_completed(0)
    assert layout.alloc(0, 33 * MIB - 512).bytes == 33 * MIB - 512


def test_a_freed_block_is_pending_until_its_streams_are_done() -> None:
    layout = Layout()
    layout.take(0, Segment(2 * MIB, 0, None, False))
    layout.alloc(0, 512)
    layout.free_requested(0)
    with pytest.raises(LayoutError, match="handed out without room"):
        layout.alloc(0, 512)
    layout.free_completed(0)
    layout.alloc(0, 512)


def test_neighbouring_segments_do_not_merge() -> None:
    layout = Layout()
    for start in (0, 2 * MIB):
        layout.take(start, Segment(2 * MIB, 0, None, False))
    with pytest.raises(LayoutError):
        layout.alloc(0, 3 * MIB)
    layout.give_back(2 * MIB, 2 * MIB)
    assert list(layout.segments) == [0]


@pytest.mark.parametrize(
    "step",
    [
        ("free_requested", 512, 512),
        ("free_completed", 0, 512),
        ("alloc", 0, 512),
        ("alloc", 4096, 512),
        ("segment_free", 0, 2 * MIB),
        ("segment_unmap", 0, 2 * MIB),
    ],
)
def test_what_no_allocator_does_is_refused(step: tuple[str, int, int]) -> None:
    layout = Layout()
    layout.take(0, Segment(2 * MIB, 0, None, False))
    layout.alloc(0, 512)
    before = statistics(layout)
    with pytest.raises(LayoutError):
        follow(layout, *step, 0)
    assert statistics(layout) == before


def test_mapped_pages_join_and_part() -> None:
    layout = Layout()
    for start in (0, 2 * MIB, 4 * MIB):
        layout.take(start, Segment(2 * MIB, 0, None, True))
    assert {a: s.bytes for a, s in layout.ranges().items()} == {0: 6 * MIB}
    layout.alloc(0, 512)
    layout.unmap(2 * MIB, 2 * MIB)
    assert {a: s.bytes for a, s in layout.ranges().items()} == {0: 2 * MIB, 4 * MIB: 2 * MIB}
    assert layout.alloc(4 * MIB, 3 * MIB // 2).bytes == 3 * MIB // 2
