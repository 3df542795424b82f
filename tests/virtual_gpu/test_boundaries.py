"""What the allocator says after each request, against the events and PyTorch's counters."""

import json
from pathlib import Path
from typing import Any

import pytest

from memtrace.analysis.boundaries import Served, differences, served
from memtrace.classify.rules import load_rules
from memtrace.classify.runs import classify
from memtrace.trace.reader import open_trace
from tests.virtual_gpu.running import run_on

EXPANDABLE = "expandable_segments:True"
COUNTERS = ("allocated", "reserved", "inactive_split")


def serve(
    run: Path, source: str = "auto", stacks: int = 0, conf: str = ""
) -> tuple[Served, list[dict[str, int]]]:
    done = run_on("a100-40g", "served.py", run, source, stacks, PYTORCH_CUDA_ALLOC_CONF=conf)
    assert done.returncode == 0, done.stderr
    [one] = served(open_trace(run))
    return one, [json.loads(line) for line in done.stdout.splitlines()]


def counted(one: Served) -> list[dict[str, Any]]:
    return [{name: getattr(row, name) for name in COUNTERS} for row in one.boundaries]


@pytest.mark.parametrize("conf", ["", EXPANDABLE])
@pytest.mark.usefixtures("cache")
def test_snapshots_equal_the_state_rebuilt_from_the_events(tmp_path: Path, conf: str) -> None:
    # GIVEN requests that leave blocks behind in many segments, pools and streams
    run = tmp_path / "run.memtrace"
    one, told = serve(run, conf=conf)
    # THEN each snapshot is, block by block, what the events lead to
    assert differences(one) == (12, [])
    # AND the counters are PyTorch's own
    assert counted(one) == [{name: row[name] for name in COUNTERS} for row in told]
    blocks = one.process.blocks
    assert {"KV_res/compact", None} <= set(blocks["component"])
    assert set(one.process.segments["pool"]) > {None}
    assert set(one.process.segments["expandable"].tolist()) == {int(conf == EXPANDABLE)}
    if conf:
        return
    # AND a change of any block is seen
    row = int((blocks["snapshot"] == 5).argmax())
    blocks["bytes"][row] += 512
    number, different = differences(one)
    assert number == 12
    assert different[0].what.startswith(("block 0x", "segment 0x"))
    # AND a classified run has its components from its events alone
    (tmp_path / "rules.toml").write_text(
        '[[rule]]\ncomponent = "Temp"\nfrom = "KV_res/compact"\nmin = "1 B"\n'
    )
    rules = load_rules(tmp_path / "rules.toml")
    classify(run, rules, tmp_path / "other.memtrace")
    [other] = served(open_trace(tmp_path / "other.memtrace"))
    assert differences(other) == (12, [])


@pytest.mark.usefixtures("cache")
def test_without_events_the_allocator_still_tells(tmp_path: Path) -> None:
    one, told = serve(tmp_path / "run.memtrace", "none", stacks=4)
    assert one.account is None
    assert len(one.process.events["id"]) == 0
    assert counted(one) == [{name: row[name] for name in COUNTERS} for row in told]
    assert differences(one) == (0, [])
    # each live block says who made it
    blocks = one.process.blocks
    lines = {one.process.stacks["frames"][row][0] for row in blocks["stack"][blocks["state"] == 1]}
    assert any("served.py" in line and line.endswith(":answer") for line in lines)


@pytest.mark.usefixtures("cache")
def test_another_allocator_is_asked_for_what_it_counts(tmp_path: Path) -> None:
    one, told = serve(tmp_path / "run.memtrace", "none", conf="backend:cudaMallocAsync")
    assert counted(one) == [
        {"allocated": row["allocated"], "reserved": row["reserved"], "inactive_split": None}
        for row in told
    ]
    assert {row.snapshot for row in one.boundaries} == {None}
    assert {row.retries for row in one.boundaries} == {None}
