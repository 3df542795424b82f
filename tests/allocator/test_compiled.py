"""The compiled allocator does what the readable one does, bit for bit."""

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memtrace.allocator.device import Device
from memtrace.allocator.native import NativeAllocator
from memtrace.allocator.ops import Op, Ops
from memtrace.allocator.settings import Settings, Version
from memtrace.allocator.vectors import parse_operations
from tests.allocator.streams import MIB, random_case

pytest.importorskip("numba")
from memtrace.allocator.compiled import CompiledAllocator

STREAMS = tuple(0x100000 + number * 0x1000 for number in range(1, 5))


def delayed(ops: Ops, draw: random.Random) -> Ops:
    """Some frees wait for somebody else, who may come or not."""
    rows: list[tuple[int, int, int, int, int]] = []
    waiting: list[int] = []
    for kind, block, size, stream, pool in zip(
        ops.kind.tolist(),
        ops.block.tolist(),
        ops.size.tolist(),
        ops.stream.tolist(),
        ops.pool.tolist(),
        strict=True,
    ):
        if kind == Op.FREE and draw.random() < 0.3:
            kind = Op.FREE_LATER
            waiting.append(block)
        rows.append((kind, block, size, stream, pool))
        if waiting and draw.random() < 0.2:
            rows.append((Op.COMPLETE, waiting.pop(draw.randrange(len(waiting))), 0, 0, 0))
    return Ops.of(rows)


@pytest.mark.parametrize("torch", [(2, 11), (2, 12), (2, 13), (2, 15)])
@given(seed=st.integers(0, 1 << 32), cut=st.integers(1, 150))
@settings(max_examples=60)
def test_logs_are_equal(torch: Version, seed: int, cut: int) -> None:
    case = random_case(seed, torch)
    ops = delayed(parse_operations(case["ops"]), random.Random(seed))
    in_pools = (ops.kind == Op.BEGIN_POOL).any()
    assume(not (in_pools and "expandable" in case["settings"]))
    if in_pools and torch <= (2, 12):
        ops = ops[ops.kind != Op.RECORD_STREAM]
    device = case["total_memory"], case["used_outside"]
    parsed = Settings.parse(case["settings"], torch)
    more = {"fraction": case["memory_fraction"], "completion": case["completion"]}
    plain = NativeAllocator(Device(*device), parsed, torch, **more)
    pools = int(ops.pool.max(initial=0))
    fast = CompiledAllocator(Device(*device), parsed, torch, **more, streams=STREAMS, pools=pools)
    for part in (ops[:cut], ops[cut:]):
        assert np.array_equal(fast.run(part).rows, plain.run(part).rows)
        assert fast.largest_free() == plain.largest_free()


def test_it_grows_with_the_stream() -> None:
    """Tables begin small; thousands of blocks and segments need more."""
    rows = [(Op.ALLOC, number, 600_000, 0, 0) for number in range(20_000)]
    rows += [(Op.FREE, number, 0, 0, 0) for number in range(0, 20_000, 2)]
    rows += [(Op.EMPTY_CACHE, 0, 0, 0, 0)]
    ops = Ops.of(rows)
    device = Device(1 << 40)
    plain = NativeAllocator(Device(1 << 40))
    assert np.array_equal(CompiledAllocator(device).run(ops).rows, plain.run(ops).rows)


def test_a_block_that_nobody_has() -> None:
    with pytest.raises(KeyError):
        CompiledAllocator(Device(100 * MIB)).run(Ops.of([(Op.FREE, 7, 0, 0, 0)]))


def test_deferred_frees_are_left_to_the_readable_definition() -> None:
    allocator = CompiledAllocator(Device(100 * MIB), torch=(2, 12), pools=1)
    ops = Ops.of([(Op.ALLOC, 0, 100, 0, 0), (Op.RECORD_STREAM, 0, 0, 0, 0)])
    with pytest.raises(ValueError, match="deferred"):
        allocator.run(ops)


def test_private_pools_that_grow_are_left_to_it_too() -> None:
    with pytest.raises(ValueError, match="expandable"):
        CompiledAllocator(Device(100 * MIB), Settings(expandable=True), pools=1)
