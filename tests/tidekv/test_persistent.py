"""The study of a persistent server, in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tidekv import workloads
from tidekv.tables import persistent


def tables(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tidekv", "tables", "--persistent", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_mix_is_that_of_the_workload_in_the_repository() -> None:
    made = list(workloads.mixed(persistent.LENGTHS, 150, persistent.NEW_TOKENS))
    assert made == workloads.load(Path("traces/mixed-150.jsonl"))


def configuration(allocator: str, method: str, split: int | None) -> persistent.Configuration:
    return persistent.Configuration(
        allocator,
        method,
        150,
        149,
        "plateau",
        0.0,
        (0.0, 512.0),
        -1024,
        1 << 30,
        2 << 30,
        split,
        1,
        9,
    )


def test_the_table_says_ours_beside_the_paper_s_and_what_is_not_known() -> None:
    rows = [configuration("native", method, 3 << 30) for method in ("SnapKV", "TideKV")]
    rows += [configuration("async", method, None) for method in ("SnapKV", "TideKV")]
    text = persistent.table(rows, "a mix", "a100-40g")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "answered 149/150 149/150 150/150 150/150" in lines
    assert "inactive split 3.00 GiB 3.00 GiB 7.234 GiB 1.326 GiB" in lines
    assert "inactive split - - - -" in lines
    assert "95 % up to 512 B 512 B" in lines


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--card", "nothing-like-it"], 2, "nothing-like-it"),
        (["--requests", "0"], 2, "--requests must be at least 1, not 0."),
        (["--workload", "missing.jsonl"], 2, "missing.jsonl"),
    ],
)
def test_bad_input_gets_a_sentence(arguments: list[str], status: int, sentence: str) -> None:
    told = tables(*arguments)
    assert told.returncode == status
    assert told.stderr.startswith("tidekv: ")
    assert sentence in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.slow
def test_four_configurations_answer_all_and_stay_put(tmp_path: Path) -> None:
    workloads.save(workloads.mixed((1024, 4096), 16, 1), tmp_path / "mix.jsonl")
    told = tables("--workload", tmp_path / "mix.jsonl", "-o", tmp_path / "runs", "--json")
    assert told.returncode == 0, told.stderr
    rows = json.loads(told.stdout)["configurations"]
    assert [(row["allocator"], row["method"]) for row in rows] == [
        ("native", "SnapKV"),
        ("native", "TideKV"),
        ("async", "SnapKV"),
        ("async", "TideKV"),
    ]
    for row in rows:
        assert (row["answered"], row["verdict"], row["slope"]) == (16, "plateau", 0)
        assert (row["inactive_split"] is None) == (row["allocator"] == "async")
        assert (tmp_path / "runs" / f"{row['method'].lower()}-{row['allocator']}.memtrace").exists()
    snapkv, tidekv, _, _ = rows
    assert tidekv["allocated_peak"] < snapkv["allocated_peak"]
    assert tidekv["inactive_split"] < snapkv["inactive_split"]
