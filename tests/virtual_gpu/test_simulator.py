"""Our allocator against the installed PyTorch's own, on streams that nobody has seen."""

import random
from pathlib import Path
from typing import Any

import pytest

from memtrace.allocator.golden import compare
from memtrace.allocator.settings import Settings, SettingsError
from memtrace.allocator.vectors import Vector
from tests.allocator.streams import MIB, random_case, random_text
from tests.virtual_gpu.running import REAL, results
from tests.virtual_gpu.vectors import TORCH, record

pytestmark = pytest.mark.skipif(REAL, reason="a real card's memory can't be chosen")


def assert_equal(cases: list[dict[str, Any]]) -> None:
    """Every address, event, counter and message is what the simulator says."""
    found = {}
    for case, line in zip(cases, record(cases), strict=True):
        if line != "null" and (difference := compare(Vector.parse(line))):
            found[str(case)] = difference
    assert found == {}


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_streams_are_equal(cache: Path, seeds: range) -> None:
    assert_equal([random_case(seed, TORCH, length=200) for seed in seeds])


def case(conf: str, fraction: float | None, ops: list[list[Any]]) -> dict[str, Any]:
    """A stream on a card of 300 MiB."""
    memory = {"total_memory": 300 * MIB, "used_outside": 20 * MIB, "memory_fraction": fraction}
    return {"settings": conf, **memory, "ops": ops}


def test_failures_are_told_in_the_same_words(cache: Path) -> None:
    ops: list[list[Any]] = [
        ["a", 1, 140 * MIB, 0],
        ["a", 2, 100 * MIB, 0],
        ["f", 2],
        ["a", 3, 110 * MIB, 0],
        ["a", 4, 3 * MIB, 0],
        ["b", 1],
        ["a", 5, 5 * MIB, 0],
        ["a", 6, 700, 0],
        ["f", 5],
        ["d", 1],
        ["a", 7, 200 * MIB, 0],
        ["f", 6],
        ["x", 1],
        ["a", 8, 1 << 40, 0],
    ]
    confs = ["", "expandable_segments:True"]
    if TORCH >= (2, 12):
        throws = "throw_on_cudamalloc_oom:True"
        confs += [throws, f"{throws},per_process_memory_fraction:0.8", f"{throws},{confs[1]}"]
    if TORCH >= (2, 15):
        confs += [f"{confs[1]},expandable_segments_reserve:0.3"]
    assert_equal([case(conf, fraction, ops) for conf in confs for fraction in (None, 0.9, 1.0)])


def test_settings_are_read_alike(cache: Path) -> None:
    texts = [random_text(random.Random(seed)) for seed in range(150)]
    found = results("a100-40g", "allocator_settings.py", TEXTS="\n".join(texts))
    for text, theirs in found.items():
        try:
            ours = Settings.parse(text, TORCH)
        except SettingsError:
            assert theirs is None, text
            continue
        assert theirs is not None, text
        assert ours.expandable == theirs["expandable_segments"], text
        assert ours.gc_threshold == theirs["garbage_collection_threshold"], text
        divisions = {str(1 << n): value for n, value in enumerate(ours.divisions)}
        assert divisions == theirs["roundup_power2_divisions"], text
        limit = theirs["max_split_size"]
        assert min(ours.max_split_size, (1 << 63) - 1) == (limit if limit >= 0 else (1 << 63) - 1)
