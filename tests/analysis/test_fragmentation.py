"""What is free, and why it serves nobody: the series against the segments at each event."""

import random
from pathlib import Path

import numpy as np
import pytest

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.fragmentation import Owner, fragmentation, parts
from memtrace.analysis.segments import layout_at
from memtrace.interchange.importer import import_snapshot
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import TENSOR_ACTIONS, Action
from tests.analysis.simulated import CUDA, MiB, Program
from tests.analysis.test_segments import Allocator
from tests.interchange.snapshots import DATA
from tests.synthetic import History, prefill


def account_of(run: Path) -> Account:
    (process,) = open_trace(run).processes
    return next(one for one in accounts(process) if one.device == CUDA)


def assert_series_are_the_instants(account: Account) -> None:
    found = fragmentation(account)
    assert found is not None
    for event in range(len(account.process.events["id"])):
        layout = layout_at(account, event)
        if layout is not None:
            assert found.at(event) == parts(layout), event


@pytest.mark.parametrize("seed", range(6))
def test_random_segments_and_blocks(tmp_path: Path, seed: int) -> None:
    allocator = Allocator(seed)
    for _ in range(150):
        allocator.step()
    allocator.history.write(tmp_path / "run")
    assert_series_are_the_instants(account_of(tmp_path / "run"))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:40"])
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_on_the_simulated_allocator(tmp_path: Path, seed: int, conf: str) -> None:
    draw = random.Random(seed)
    program = Program(200 * MiB, conf, completion="late" if seed % 2 else "soon")
    live: list[int] = []
    for _ in range(150):
        if draw.random() < 0.6 or not live:
            size = draw.choice([300, 5000, MiB, 3 * MiB, 15 * MiB, 33 * MiB])
            live.append(
                program.alloc(size, stream=draw.choice([0, 0, 7]), pool=draw.choice([None, 1]))
            )
            if not live[-1]:
                live.pop()
        elif draw.random() < 0.1:
            program.empty_cache()
        else:
            address = live.pop(draw.randrange(len(live)))
            program.free(address, by=draw.choice([0, 0, 9]))
    program.write(tmp_path / "run")
    assert_series_are_the_instants(account_of(tmp_path / "run"))


@pytest.mark.parametrize("name", ["rich_oom_torch2.13.0", "rich_oom_torch2.15.0"])
def test_pytorchs_own_history(tmp_path: Path, name: str) -> None:
    import_snapshot(DATA / f"{name}.pickle", tmp_path / "run")
    assert_series_are_the_instants(account_of(tmp_path / "run"))


def test_an_imported_run_whose_segments_jump(tmp_path: Path) -> None:
    import_snapshot(DATA / "memtrace_2gpus_expandable_torch2.14.1.pickle", tmp_path / "run")
    account = account_of(tmp_path / "run")
    found = fragmentation(account)
    assert found is not None
    count = len(account.process.events["id"])
    for event in np.linspace(0, count - 1, 50, dtype=int).tolist():
        layout = layout_at(account, event)
        assert layout is None or found.at(event) == parts(layout)


def test_every_kind_of_free_memory(tmp_path: Path) -> None:
    program = Program(1 << 30)
    held = program.alloc(2 * MiB + 100)  # leaves 18 MiB of its segment
    program.free(program.alloc(30 * MiB))  # a segment of its own
    program.free(program.alloc(40 * MiB, pool=1))
    program.alloc(2 * MiB, stream=7)
    late = program.alloc(22 * MiB)  # the front of the 30 MiB
    program.history.event(Action.FREE_REQUESTED, late, 22 * MiB, "Act", device=CUDA)
    program.write(tmp_path / "run")
    layout = layout_at(account_of(tmp_path / "run"), len(program.history.rows["events"]) - 1)
    assert layout is not None
    found = parts(layout)
    block = 2 * MiB + 512
    assert held
    assert found.slack == block - 2 * MiB - 100
    assert (found.pending, found.releasable, found.private) == (22 * MiB, 0, 40 * MiB)
    assert found.hard == (20 * MiB - block) + 8 * MiB + 18 * MiB
    assert found.elsewhere(0) == 18 * MiB
    assert found.largest[Owner("0.1", 0)] == 40 * MiB
    assert found.ratio == found.hard / (110 * MiB)
    total = found.allocated + found.pending + found.hard + found.releasable + found.private
    assert total == found.reserved


@pytest.mark.parametrize("seed", range(5))
def test_contradictions_are_followed_as_far_as_they_go(tmp_path: Path, seed: int) -> None:
    history = History()
    draw = random.Random(seed)
    actions = [one for one in Action if one != Action.RETAG]
    for _ in range(3000):
        action, address = draw.choice(actions), draw.randrange(64) * 512
        component = "Act" if action in TENSOR_ACTIONS else None
        history.event(action, address, draw.randrange(-1, 9) * 512, component, device=CUDA)
    history.write(tmp_path / "run")
    found = fragmentation(account_of(tmp_path / "run"))
    assert found is not None and len(found.event) > 0
    assert found.free.min() >= 0 and (found.largest <= found.free).all()


def test_a_run_without_segments_has_none(tmp_path: Path) -> None:
    prefill().write(tmp_path / "run")
    (process,) = open_trace(tmp_path / "run").processes
    (account,) = accounts(process)
    assert fragmentation(account) is None
