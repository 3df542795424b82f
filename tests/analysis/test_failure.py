"""Why a request failed: programs whose end is known, on the simulated allocator."""

from pathlib import Path

import pytest

from memtrace.analysis.accounts import accounts
from memtrace.analysis.failure import Kind, clearing
from memtrace.analysis.oom import Oom, ooms
from memtrace.analysis.segments import layout_at
from memtrace.interchange.importer import import_snapshot
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.analysis.simulated import CUDA, MiB, Program
from tests.interchange.snapshots import DATA

GiB = 1 << 30


def fragmented() -> Program:
    """Half of what is reserved is free, between live blocks of 15 MiB."""
    program = Program(4 * GiB, outside=100 * MiB)
    program.free(program.alloc(3900 * MiB))
    blocks = [program.alloc(15 * MiB) for _ in range(260)]
    for block in blocks[::2]:
        program.free(block)
    assert program.alloc(600 * MiB, "KV_res") == 0
    return program


def pending() -> Program:
    """A block of just the right size waits for stream 9."""
    program = Program(2 * GiB, completion="late")
    program.free(program.alloc(1600 * MiB))
    waits, _ = program.alloc(700 * MiB), program.alloc(900 * MiB, "model")
    program.alloc(400 * MiB, "model")
    program.free(waits, by=9)
    assert program.alloc(700 * MiB) == 0
    return program


def exhausted() -> Program:
    program = Program(2 * GiB, outside=300 * MiB)
    while program.alloc(200 * MiB, "KV_res"):
        pass
    return program


def fraction() -> Program:
    program = Program(8 * GiB, fraction=0.25)
    while program.alloc(200 * MiB, "model"):
        pass
    return program


def private() -> Program:
    """A pool keeps 1.5 GiB that nobody uses."""
    program = Program(2 * GiB)
    program.free(program.alloc(1536 * MiB, pool=1))
    program.alloc(100 * MiB, "model")
    assert program.alloc(600 * MiB) == 0
    return program


CASES = {
    Kind.FRAGMENTED: fragmented,
    Kind.PENDING: pending,
    Kind.EXHAUSTED: exhausted,
    Kind.FRACTION: fraction,
    Kind.PRIVATE: private,
}


def failure(program: Program, folder: Path, total: int | None = None) -> Oom:
    """The last failure in a program's trace."""
    (process,) = open_trace(program.write(folder / "run")).processes
    (account,) = accounts(process)
    size = process.manifest["cuda"]["devices"][0]["total_memory"]
    return ooms(account, size if total is None else None)[-1]


@pytest.mark.parametrize("kind", CASES)
def test_each_way_to_fail_has_its_verdict(tmp_path: Path, kind: Kind) -> None:
    found = failure(CASES[kind](), tmp_path).diagnosis
    assert (found.kind, found.also, found.sure) == (kind, (), True)


@pytest.mark.parametrize("kind", CASES)
def test_the_size_of_the_device_is_needed_for_no_verdict(tmp_path: Path, kind: Kind) -> None:
    found = failure(CASES[kind](), tmp_path, total=0).diagnosis
    assert found.kind is kind
    assert found.sure == (kind is not Kind.FRACTION)


def test_the_words_have_the_numbers(tmp_path: Path) -> None:
    words = {kind: failure(CASES[kind](), tmp_path / kind).verdict for kind in CASES}
    assert words[Kind.FRAGMENTED] == (
        "600.0 MiB were asked for and would fit in what is free, in pieces: 1.90 GiB inside "
        "reserved memory, the largest block 15.0 MiB, and 96.0 MiB on the device."
    )
    assert "a free block of 700.0 MiB would have served" in words[Kind.PENDING]
    assert "52.0 MiB are missing however memory is arranged" in words[Kind.EXHAUSTED]
    assert "300.0 MiB are used outside the allocator" in words[Kind.EXHAUSTED]
    assert "largest part is KV_res with 1.56 GiB" in words[Kind.EXHAUSTED]
    assert (
        "has 6.05 GiB free, but the memory fraction allows this process 2.00 GiB"
        in (words[Kind.FRACTION])
    )
    assert "1.50 GiB are free in private pools" in words[Kind.PRIVATE]


def test_where_nothing_is_allocated_no_part_is_the_largest(tmp_path: Path) -> None:
    program = Program(2 * GiB, outside=1 * GiB)
    assert program.alloc(1500 * MiB) == 0
    said = failure(program, tmp_path).verdict
    assert "0 B are allocated" in said and "largest part" not in said


def test_a_block_that_still_waits_is_pending_too(tmp_path: Path) -> None:
    program = Program(2 * GiB)
    waits = program.alloc(700 * MiB)
    program.alloc(1200 * MiB)
    program.history.event(Action.FREE_REQUESTED, waits, 700 * MiB, "Act", device=CUDA)
    program.history.event(Action.OOM, 148 * MiB, 600 * MiB, None, device=CUDA)
    found = failure(program, tmp_path)
    assert found.kind is Kind.PENDING
    assert "700.0 MiB that were freed wait for another stream" in found.verdict


def test_free_memory_of_two_kinds_is_told(tmp_path: Path) -> None:
    program = Program(4 * GiB)
    program.free(program.alloc(1500 * MiB, pool=1))
    program.free(program.alloc(2500 * MiB))
    blocks = [program.alloc(25 * MiB) for _ in range(100)]
    for block in blocks[::2]:
        program.free(block)
    program.alloc(1000 * MiB)
    found = failure(program, tmp_path).diagnosis
    assert (found.kind, found.also) == (Kind.PRIVATE, (Kind.FRAGMENTED,))


def test_a_pool_without_a_name_is_inferred(tmp_path: Path) -> None:
    # GIVEN a history of a version that doesn't name pools: one of them has just what is needed
    program = Program(2 * GiB, torch=(2, 11))
    kept = program.alloc(1536 * MiB)
    program.free(kept)
    program.alloc(100 * MiB)
    program.history.event(Action.OOM, 400 * MiB, 600 * MiB, None, device=CUDA)
    # WHEN it isn't taken
    found = failure(program, tmp_path)
    # THEN nothing else explains that
    assert (found.kind, found.diagnosis.sure) == (Kind.PRIVATE, False)
    assert "must belong to a private pool" in found.verdict


def test_room_that_nobody_refused_is_unexplained(tmp_path: Path) -> None:
    program = Program(2 * GiB, fraction=1.0)
    program.free(program.alloc(1536 * MiB))
    program.alloc(100 * MiB)
    program.history.event(Action.OOM, 512 * MiB, 600 * MiB, None, device=CUDA)
    assert failure(program, tmp_path).kind is Kind.UNEXPLAINED


def test_more_than_the_device_has(tmp_path: Path) -> None:
    program = Program(2 * GiB)
    program.alloc(MiB)
    program.alloc(3 * GiB)
    found = failure(program, tmp_path)
    assert found.kind is Kind.EXHAUSTED
    assert found.verdict == "3.00 GiB were asked for and cuda:0 has 2.00 GiB in all."


def test_neighbours_in_one_segment_are_in_the_way(tmp_path: Path) -> None:
    program = Program(GiB)
    program.free(program.alloc(1000 * MiB))
    with program.history.scope("phase", "load"):
        kept = [program.alloc(size * MiB, "model") for size in (300, 20, 100, 30, 200, 350)]
    for place in (0, 2, 4):
        program.free(kept[place])
    program.alloc(410 * MiB)
    (process,) = open_trace(program.write(tmp_path / "run")).processes
    (account,) = accounts(process)
    request = ooms(account, GiB)[-1].diagnosis.request
    layout = layout_at(account, request.event)
    assert layout is not None
    found = clearing(account, request, layout)
    # 300 free, 20 live, 100 free: enough, and the fewest live bytes.
    assert found is not None
    assert (found.returned, found.bytes, found.gained) == (0, 20 * MiB, 420 * MiB)
    (block,) = found.blocks
    assert (block.address, block.component) == (kept[1], "model")
    assert block.place.phase == "load"
    born = next(
        number
        for number, row in enumerate(program.history.rows["events"])
        if row[1] == kept[1] and row[2] == 20 * MiB
    )
    assert block.age_us == 1000 * (request.event - born)


def test_segments_of_another_stream_can_be_returned(tmp_path: Path) -> None:
    program = Program(GiB)
    first = program.alloc(400 * MiB, stream=7)
    program.free(first)
    program.alloc(10 * MiB, "Temp", stream=7)  # keeps those 400 MiB from everybody else
    program.alloc(500 * MiB, "model")
    assert program.alloc(450 * MiB) == 0
    (process,) = open_trace(program.write(tmp_path / "run")).processes
    (account,) = accounts(process)
    oom = ooms(account, GiB)[-1]
    assert oom.kind is Kind.FRAGMENTED
    assert "390.0 MiB of it on other streams" in oom.verdict
    layout = layout_at(account, oom.event)
    assert layout is not None
    found = clearing(account, oom.diagnosis.request, layout)
    assert found is not None
    assert (found.returned, found.bytes, found.gained) == (1, 10 * MiB, 400 * MiB)


def test_pytorchs_own_failure(tmp_path: Path) -> None:
    import_snapshot(DATA / "rich_oom_torch2.15.0.pickle", tmp_path / "run")
    (process,) = open_trace(tmp_path / "run").processes
    account = next(one for one in accounts(process) if one.device == CUDA)
    (found,) = ooms(account, None)
    assert found.kind is Kind.EXHAUSTED
