"""The CUDA source, against PyTorch's own counters and against the tensor source."""

import json
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.identities import check
from memtrace.analysis.process import process_memory
from memtrace.analysis.segments import layout_at
from memtrace.trace.reader import Trace, open_trace
from memtrace.trace.schema import FREES, TENSOR_ACTIONS, Action
from tests.virtual_gpu.running import run_on

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
TORCH = tuple(int(part) for part in metadata.version("torch").split(".")[:2])
NEWER = ("_cuda_annotateMemory", "_cuda_setMemoryMetadata")


def record(run: Path, *options: str, script: str = "recorded_llama.py", **variables: str) -> Any:
    """What the script counted, by boundary or step: (events so far, counters)."""
    done = run_on("a100-40g", script, run, *options, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def on_cuda(trace: Trace) -> Account:
    [process] = trace.processes
    return next(one for one in accounts(process) if one.device == "cuda:0")


def checked(run: Path, boundaries: Any) -> Account:
    """The account of a run whose layout at each boundary is what the allocator counted."""
    trace = open_trace(run)
    account = on_cuda(trace)
    for events, counted in boundaries:
        layout = layout_at(account, events - 1)
        assert layout is not None
        assert {name: getattr(layout.totals, name) for name in counted} == counted
    found = check(account, process_memory(trace, account.process))
    assert found.hold, found.problem
    return account


def alive(account: Account, events: int) -> Counter[tuple[int, str]]:
    """(requested bytes, component) of everything alive after so many events."""
    table, contexts = account.process.events, account.process.contexts
    here = np.array([device == account.device for device in contexts["device"]])
    living: dict[int, tuple[int, str]] = {}
    for row in range(events):
        context = int(table["context"][row])
        action = contexts["action"][context]
        if here[context] and action in TENSOR_ACTIONS:
            number = int(table["id"][row])
            if action in FREES:
                del living[number]
            else:
                living[number] = int(table["requested"][row]), contexts["component"][context]
    return Counter(living.values())


@pytest.mark.parametrize(
    ("attention", "variables"),
    [("sdpa", {}), ("eager", {}), ("sdpa", EXPANDABLE)],
    ids=["sdpa", "eager", "expandable"],
)
def test_the_trace_is_what_the_allocator_counted_and_what_the_tensors_say(
    cache: Path, tmp_path: Path, attention: str, variables: dict[str, str]
) -> None:
    options = ("--attention", attention)
    boundaries = record(tmp_path / "cuda", *options, **variables)
    account = checked(tmp_path / "cuda", boundaries)
    assert account.process.manifest["cuda"]["missed"] == 0

    others = record(tmp_path / "tensors", *options, "--source", "tensors", **variables)
    tensors = on_cuda(open_trace(tmp_path / "tensors"))
    for (events, _), (other_events, _) in zip(boundaries, others, strict=True):
        mine, theirs = alive(account, events), alive(tensors, other_events)
        assert not theirs - mine  # every tensor is a block of the same bytes and component
        # What no operator returned is the workspace of cuBLAS.
        assert {component for _, component in mine - theirs} <= {"backend"}
    for component in ("model", "KV_res", "Hidden"):
        blocks, storages = (one.components[component].peak for one in (account, tensors))
        assert storages <= blocks <= 1.05 * storages


@pytest.fixture(scope="module")
def newest(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Account, Any]:
    run = tmp_path_factory.mktemp("newest") / "run"
    boundaries = record(run, "--stacks", "4")
    return checked(run, boundaries), boundaries


@pytest.mark.parametrize("missing", [NEWER[:1], NEWER], ids=["torch 2.13", "torch 2.9"])
def test_an_older_pytorch_gives_the_same_by_time(
    newest: tuple[Account, Any], tmp_path: Path, missing: tuple[str, ...]
) -> None:
    newer, boundaries = newest
    others = record(tmp_path / "older", "--without", *missing)
    older = checked(tmp_path / "older", others)
    for (events, _), (other_events, _) in zip(boundaries, others, strict=True):
        mine, theirs = alive(newer, events), alive(older, other_events)
        # At the border of a scope the two clocks may disagree by some microseconds.
        assert sum((mine - theirs).values()) <= 2, (mine - theirs, theirs - mine)


def test_an_overwritten_history_is_said_and_taken_up_again(cache: Path, tmp_path: Path) -> None:
    boundaries = record(tmp_path / "run", "--ring", "500")
    account = checked(tmp_path / "run", boundaries)
    assert account.process.manifest["cuda"]["missed"] > 0
    assert any("events of CUDA's allocator" in text for text in account.process.manifest["unseen"])


def test_stacks_are_those_of_the_program(newest: tuple[Account, Any]) -> None:
    account, _ = newest
    stacks = [frames for frames in account.process.stacks["frames"] if frames]
    assert stacks
    assert all(len(frames) <= 4 for frames in stacks)
    assert not any("memtrace/record" in frame for frames in stacks for frame in frames)
    assert any("modeling_llama.py" in frames[0] for frames in stacks)


@pytest.fixture(scope="module")
def blocks(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Account, Any]:
    run = tmp_path_factory.mktemp("blocks") / "run"
    steps = record(run, script="recorded_blocks.py")
    return checked(run, steps.values()), steps


def actions(account: Account, first: int, last: int) -> list[Action]:
    contexts = account.process.contexts
    return [
        Action(int(contexts["action"][c])) for c in account.process.events["context"][first:last]
    ]


def test_what_was_there_before_is_seeded(blocks: tuple[Account, Any]) -> None:
    account, steps = blocks
    assert alive(account, steps["seeded"][0]) == {(3 << 20, "other"): 1}


def test_a_block_waits_for_the_stream_that_uses_it(blocks: tuple[Account, Any]) -> None:
    account, steps = blocks
    pending = layout_at(account, steps["pending"][0] - 1)
    assert pending is not None
    assert pending.totals.active - pending.totals.allocated == 5 << 20
    later = actions(account, steps["pending"][0], steps["completed"][0])
    assert Action.FREE_COMPLETED in later


@pytest.mark.skipif(TORCH < (2, 13), reason="the history names pools from torch 2.13 on")
def test_a_private_pool_has_a_name(blocks: tuple[Account, Any]) -> None:
    account, steps = blocks
    layout = layout_at(account, steps["private pool"][0] - 1)
    assert layout is not None
    pools = layout.by_private_pool()
    assert len(pools) == 2
    assert [one.totals.allocated for name, one in pools.items() if name] == [7 << 20]


def test_a_retry_and_an_oom_are_events(blocks: tuple[Account, Any]) -> None:
    account, steps = blocks
    before, after = steps["emptied"][0], steps["retried"][0]
    assert actions(account, before, after).count(Action.RETRY) == 1
    assert Action.OOM in actions(account, after, steps["failed"][0])


def test_nothing_is_missed_while_threads_allocate_without_a_pause(
    cache: Path, tmp_path: Path
) -> None:
    boundaries = record(tmp_path / "run", script="recorded_threads.py")
    account = checked(tmp_path / "run", boundaries)
    assert account.process.manifest["cuda"]["missed"] == 0
    allocations = actions(account, 0, boundaries[0][0]).count(Action.ALLOC)
    assert allocations == 3 * 12_000
