"""The native allocator: rules that programs notice, and invariants on random streams.

That it does what PyTorch's does is the matter of test_golden.py and tests/virtual_gpu.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memtrace.allocator.device import Device
from memtrace.allocator.invariants import InvariantError
from memtrace.allocator.log import Log
from memtrace.allocator.native import NativeAllocator
from memtrace.allocator.oom import OutOfMemory
from memtrace.allocator.settings import Settings, Version
from memtrace.allocator.statistics import Statistics
from memtrace.allocator.vectors import parse_operations
from memtrace.trace.schema import Action
from tests.allocator.streams import MIB, random_case

VERSIONS: list[Version] = [(2, 1), (2, 6), (2, 9), (2, 10), (2, 11), (2, 12), (2, 13), (2, 15)]


def made(
    conf: str = "", torch: Version = (2, 15), total: int = 1000 * MIB, **more: Any
) -> NativeAllocator:
    return NativeAllocator(Device(total), Settings.parse(conf, torch), torch, **more)


def play(case: dict[str, Any], torch: Version, **more: Any) -> tuple[NativeAllocator, Log]:
    allocator = NativeAllocator(
        Device(case["total_memory"], case["used_outside"]),
        Settings.parse(case["settings"], torch),
        torch,
        fraction=case["memory_fraction"],
        completion=case["completion"],
        **more,
    )
    return allocator, allocator.run(parse_operations(case["ops"]))


def actions(allocator: NativeAllocator) -> list[str]:
    return [Action(event[0]).name.lower() for event in allocator.drain().events().tolist()]


# -- invariants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("torch", VERSIONS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=25)
def test_invariants_hold_after_every_operation(torch: Version, seed: int) -> None:
    play(random_case(seed, torch, length=120), torch, debug=True)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=25)
def test_live_blocks_never_overlap(seed: int) -> None:
    _, log = play(random_case(seed), (2, 15))
    live: dict[int, int] = {}
    for row in log.rows.tolist():
        _, action, address, size = row[:4]
        if action == Action.ALLOC:
            assert all(a + s <= address or address + size <= a for a, s in live.items())
            live[address] = size
        elif action == Action.FREE_COMPLETED:
            del live[address]


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=25)
def test_freeing_all_gives_all_back(seed: int) -> None:
    case = random_case(seed)
    # PyTorch loses memory of such pools, see NativeAllocator.
    assume("expandable" not in case["settings"] or not any(op[0] == "b" for op in case["ops"]))
    numbers = {op[1] for op in case["ops"] if op[0] == "a"}
    numbers -= {op[1] for op in case["ops"] if op[0] == "f"}
    scopes = [op[1] for op in case["ops"] if op[0] == "b"]
    for pool in [op[1] for op in case["ops"] if op[0] == "d"]:
        scopes.remove(pool)
    uses = [op[1] for op in case["ops"] if op[0] == "b"]
    for pool in [op[1] for op in case["ops"] if op[0] == "x"]:
        uses.remove(pool)
    case["ops"] += [["f", number] for number in sorted(numbers)]
    case["ops"] += [["d", pool] for pool in scopes] + [["x", pool] for pool in uses] + [["e"]]
    allocator, _ = play(case, (2, 15), debug=True)
    assert allocator.reserved == allocator.allocated == 0
    assert allocator.device.free_bytes == case["total_memory"] - case["used_outside"]
    # Addresses that never got memory stay reserved.
    assert not any(block.mapped for blocks in allocator.segments() for block in blocks)


@given(seed=st.integers(0, 1 << 32), cut=st.integers(0, 150))
@settings(max_examples=15)
def test_a_stream_in_two_parts_does_the_same(seed: int, cut: int) -> None:
    case = random_case(seed)
    ops = parse_operations(case["ops"])
    _, whole = play(case, (2, 15))
    parted, first = play({**case, "ops": []}, (2, 15))
    rows = [first.rows, parted.run(ops[:cut]).rows, parted.run(ops[cut:]).rows]
    assert np.array_equal(np.concatenate(rows), whole.rows)


def first_free(allocator: NativeAllocator) -> Any:
    return next(block for block in allocator.segments()[0] if block.is_free)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda a: setattr(a, "reserved", 3), "reserved is counted as 3"),
        (lambda a: setattr(a, "allocated", 3), "allocated is counted as 3"),
        (lambda a: setattr(first_free(a), "size", 512), "under another key"),
        (lambda a: setattr(a.segments()[0][0], "size", 1536), "a gap follows"),
        (lambda a: setattr(a.segments()[0][0], "size", 100), "no size that a block can have"),
        (lambda a: setattr(a.segments()[0][2], "stream", 5), "of another segment"),
        (lambda a: setattr(first_free(a), "allocated", True), "is not free"),
        (lambda a: a._live.clear(), "a block is in no segment"),
        (lambda a: first_free(a).pool.free.clear(), "nobody has"),
        (lambda a: next(iter(a._small.free.values())).reverse(), "is not sorted"),
        (lambda a: setattr(a.segments()[0][0], "requested", 9999), "less than was asked for"),
    ],
)
def test_damage_is_found_and_told_in_a_sentence(
    damage: Callable[[NativeAllocator], object], sentence: str
) -> None:
    allocator = made()
    addresses = [allocator.malloc(700) for _ in range(6)]
    for address in addresses[1::2]:
        allocator.free(address)
    allocator.check()
    damage(allocator)
    with pytest.raises(InvariantError, match=sentence) as told:
        allocator.check()
    assert "\n" not in str(told.value)


# -- rules ---------------------------------------------------------------------------------------


def test_small_and_large_blocks_have_segments_of_their_own() -> None:
    allocator = made()
    small, large, huge = (allocator.malloc(size) for size in (700, 3 * MIB, 33 * MIB))
    assert allocator.reserved == (2 + 20 + 34) * MIB
    # A rest of 1 MiB or less is not split off in the large pool, and counts as allocated.
    assert allocator.allocated == 1024 + 3 * MIB + 34 * MIB
    for address in (small, large, huge):
        allocator.free(address)
    assert allocator.allocated == 0
    assert allocator.reserved == 56 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_blocks_stay_with_their_stream() -> None:
    allocator = made()
    allocator.free(allocator.malloc(10 * MIB, stream=0))
    allocator.malloc(10 * MIB, stream=1)
    assert allocator.reserved == 20 * MIB


@pytest.mark.parametrize(("torch", "lower"), [((2, 11), True), ((2, 12), False), ((2, 13), False)])
def test_ties_between_equal_blocks_depend_on_the_version(torch: Version, lower: bool) -> None:
    class Downwards(Device):
        def malloc(self, size: int) -> int | None:
            address = super().malloc(size)
            return address and (1 << 46) - address

    allocator = NativeAllocator(Downwards(1000 * MIB), Settings(), torch)
    older, newer = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
    assert newer < older
    allocator.free(older)
    allocator.free(newer)
    assert allocator.malloc(30 * MIB) == (newer if lower else older)


def test_a_block_that_another_stream_used_waits_for_it() -> None:
    late, soon = made(completion="late"), made(completion="soon")
    for allocator in (late, soon):
        address = allocator.malloc(30 * MIB)
        allocator.record_stream(address, 7)
        allocator.free(address)
        allocator.malloc(30 * MIB)
    assert (late.reserved, soon.reserved) == (60 * MIB, 30 * MIB)
    late.empty_cache()  # waits for all streams
    assert late.reserved == 30 * MIB


def test_a_retry_gives_cached_segments_back() -> None:
    allocator = made(total=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert actions(allocator)[-3:] == ["segment_free", "segment_alloc", "alloc"]


def test_what_came_back_at_the_retry_is_not_searched_again() -> None:
    allocator = made(total=20 * MIB, completion="late")
    waits, *_ = [allocator.malloc(size * MIB) for size in (5, 5, 10)]
    allocator.record_stream(waits, 7)
    allocator.free(waits)
    with pytest.raises(OutOfMemory):
        allocator.malloc(5 * MIB)
    assert allocator.malloc(5 * MIB) == waits


@pytest.mark.parametrize(("torch", "fits"), [((2, 12), False), ((2, 13), True)])
def test_nothing_is_retried_in_a_pool_up_to_2_12(torch: Version, fits: bool) -> None:
    allocator = made(torch=torch, total=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.begin_pool(1)
    if fits:
        allocator.malloc(60 * MIB)
    else:
        with pytest.raises(OutOfMemory):
            allocator.malloc(60 * MIB)


@pytest.mark.parametrize(("torch", "inner"), [((2, 9), False), ((2, 10), True)])
def test_of_nested_scopes_one_counts(torch: Version, inner: bool) -> None:
    allocator = made(torch=torch)
    for pool in (1, 2):
        allocator.begin_pool(pool)
    allocator.malloc(5)
    assert allocator.segments()[0][0].pool.number == (4 if inner else 2)


def test_a_pool_keeps_its_memory_until_it_is_released() -> None:
    allocator = made()
    allocator.begin_pool(1)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.end_pool(1)
    allocator.malloc(30 * MIB)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    allocator.release_pool(1)
    allocator.empty_cache()
    assert allocator.reserved == 30 * MIB


@pytest.mark.parametrize("torch", [(2, 9), (2, 15)])
def test_without_a_fraction_an_expandable_segment_grows_by_what_is_missing(torch: Version) -> None:
    # 60 MiB are free in the segment, so 80 MiB need 20 more, though 140 + 80 exceed the device.
    allocator = made("expandable_segments:True", torch, total=200 * MIB)
    allocator.malloc(80 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert allocator.reserved == 160 * MIB
    allocator = made("expandable_segments:True", torch, total=200 * MIB, fraction=0.99)
    allocator.malloc(80 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    statistics = Statistics(allocator.drain()).last()
    assert statistics["num_alloc_retries"] == 1  # with one the whole request has to fit


def test_the_fraction_limits_what_is_reserved() -> None:
    allocator = made(fraction=0.1, total=1000 * MIB)
    allocator.malloc(90 * MIB)
    with pytest.raises(OutOfMemory, match=r"100\.00 MiB allowed"):
        allocator.malloc(30 * MIB)


@pytest.mark.parametrize(("torch", "limited"), [((2, 9), True), ((2, 10), False)])
def test_all_of_the_memory_was_a_fraction_before_2_10(torch: Version, limited: bool) -> None:
    allocator = made(torch=torch, fraction=1.0)
    with pytest.raises(OutOfMemory) as failed:
        allocator.malloc(1 << 40)
    assert ("1000.00 MiB allowed" in str(failed.value)) == limited
    with pytest.raises(OutOfMemory) as failed:
        made(torch=torch).malloc(1 << 40)
    assert "allowed" not in str(failed.value)


def test_an_oom_says_what_the_device_was_asked_for() -> None:
    allocator = made(total=30 * MIB)
    allocator.malloc(20 * MIB)
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 20\.00 MiB") as failed:
        allocator.malloc(3 * MIB)
    assert failed.value.failure.requested == 3 * MIB


@pytest.mark.parametrize(
    ("fraction", "conf", "rejected"),
    [
        (None, "", True),
        (1.0, "", True),
        (0.5, "", False),  # the limit that the program set comes first
        (None, ",per_process_memory_fraction:0.5", False),
        (1.0, ",per_process_memory_fraction:0.5", True),  # but the settings' is looked at as well
    ],
)
def test_what_throw_on_cudamalloc_oom_rejects(
    fraction: float | None, conf: str, rejected: bool
) -> None:
    allocator = made(f"throw_on_cudamalloc_oom:True{conf}", fraction=fraction, total=100 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    with pytest.raises(OutOfMemory) as failed:
        allocator.malloc(150 * MIB)
    statistics = Statistics(allocator.drain()).last()
    assert failed.value.failure.rejected == rejected
    assert statistics["num_oom_rejections"] == rejected
    assert statistics["num_alloc_retries"] == statistics["num_ooms"] == (not rejected)


def test_no_block_is_larger_than_an_expandable_segments_reserve() -> None:
    allocator = made("expandable_segments:True,expandable_segments_reserve:0.1")
    allocator.malloc(100 * MIB)
    with pytest.raises(OutOfMemory, match=r"exceeds the expandable-segment reserve of 100\.00 MiB"):
        allocator.malloc(101 * MIB)
    with pytest.raises(OutOfMemory, match="running out of virtual address space"):
        allocator.malloc(1001 * MIB)  # which no reserve would help
    allocator.malloc(100 * MIB)
    assert [block.address for (block,) in allocator.segments()] == [0x300000000, 0x340000000]


@pytest.mark.parametrize(
    ("torch", "end"),
    [
        ((2, 9), "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"),
        ((2, 10), "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"),
        ((2, 11), "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"),
        ((2, 14), "unallocated."),
        ((2, 15), "expandable_segments_reserve_by_class."),
    ],
)
def test_advice_with_expandable_segments_depends_on_the_version(torch: Version, end: str) -> None:
    allocator = made("expandable_segments:True", torch)
    with pytest.raises(OutOfMemory) as failed:
        allocator.malloc(1 << 40)
    assert str(failed.value).endswith(end)


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda one: one.malloc(-1), ValueError),
        (lambda one: one.free(12345), KeyError),
        (lambda one: one.free_later(12345), KeyError),
        (lambda one: one.record_stream(12345, 1), KeyError),
        (lambda one: one.end_pool(1), KeyError),
        (lambda one: one.release_pool(1), KeyError),
        (lambda one: (one.begin_pool(1), one.end_pool(1), one.end_pool(1)), KeyError),
        (lambda one: (one.begin_pool(1), one.release_pool(1), one.release_pool(1)), KeyError),
        (lambda one: one.malloc(1 << 60), OutOfMemory),
    ],
)
def test_wrong_use_is_an_error_that_harms_nothing(
    misuse: Callable[[NativeAllocator], object], error: type[Exception]
) -> None:
    allocator = NativeAllocator(Device(100 * MIB))
    address = allocator.malloc(5000)
    with pytest.raises(error):
        misuse(allocator)
    allocator.check()
    assert allocator.holds(address)


def test_no_bytes_are_no_allocation() -> None:
    allocator = made()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert actions(allocator) == []
    with pytest.raises(KeyError):
        allocator.free(512)
