"""``memtrace stability`` and ``report --request``/``--at``, as a user types them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.record.launching import PYTHON, Launch
from tests.synthetic import History, prefill

LEAKING = """\
import sys
import torch
from memtrace import scopes

kind, kept = sys.argv[1], []
model = torch.nn.Linear(64, 64)
for number in range(40):
    length = (256, 512, 1024)[number % 3]
    with scopes.request(f"r{number}", prompt_tokens=length), torch.no_grad():
        with scopes.phase("prefill"):
            with scopes.component("Hidden"):
                hidden = torch.zeros(length, 64)
                if kind == "hidden":
                    kept.append(hidden[:256].clone())  # one chunk
            if kind == "cache":
                with scopes.component("KV_res/compact"):
                    kept.append(list(map(torch.zeros, [64] * 4, [64] * 4)))
            with scopes.component("Act"):
                out = model(hidden)
            del hidden, out
"""


def memtrace(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "memtrace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("kind", "code", "component", "line"),
    [
        ("none", 0, None, None),
        ("hidden", 3, "Hidden", "leaking.py:14:<module>"),
        ("cache", 3, "KV_res/compact", "leaking.py:17:<module>"),
    ],
)
def test_a_planted_leak_of_64_kib_is_found_within_40_requests_and_named(
    tmp_path: Path, kind: str, code: int, component: str | None, line: str | None
) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING)
    launch = Launch(tmp_path, PYTHON, "leaking.py", kind, options=["--stacks", "4"])
    assert launch.run().returncode == 0

    told = memtrace("stability", launch.folder)
    assert told.returncode == code, told.stdout + told.stderr
    document = json.loads(memtrace("stability", launch.folder, "--json").stdout)
    [one] = document["processes"]
    assert (one["requests"], one["answered"], one["warmup"]) == (40, 40, 3)
    if component is None:
        assert one["verdict"] == "plateau"
        assert one["growing"] == []
        assert told.stdout.splitlines()[-1].startswith(("plateau: ", "set, "))
        return
    assert one["measures"]["allocated"]["slope"] == 64 << 10
    [first] = one["growing"]
    assert (first["component"], first["slope"]) == (component, 64 << 10)
    assert Path(first["stack"][0]).name == line
    said = " ".join(told.stdout.split())
    assert "growing: allocated by 64.0 KiB/request, 10.2 KiB/request allowed" in said
    assert f"first of all {component}, prefill" in said


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prefill().write(tmp_path_factory.mktemp("runs") / "one.memtrace")


def test_undecided_says_how_many_more(run: Path) -> None:
    told = memtrace("stability", run)
    assert told.returncode == 4
    assert "more might decide" in " ".join(told.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--slope", "9" * 400 + " B/request"], f"--slope: '{'9' * 400} B' is not a size"),
        (["--slope", "1 B/" + "9" * 5000 + " requests"], "--slope: '1 B/9999"),
        (["--slope", "much"], "--slope: 'much' is no rate; write it as 1 MiB/100 requests"),
        (["--warmup-cycles", "-1"], "--warmup-cycles -1 is too few; use 0 or more"),
    ],
)
def test_bad_numbers_get_a_sentence(run: Path, arguments: list[str], sentence: str) -> None:
    told = memtrace("stability", run, *arguments)
    assert told.returncode == 1
    assert told.stderr.startswith(f"memtrace: {sentence}")
    assert "Traceback" not in told.stderr


def test_a_run_without_requests_gets_a_sentence(tmp_path: Path) -> None:
    history = History()
    history.alloc(1, "Act")
    told = memtrace("stability", history.write(tmp_path / "run.memtrace"), "--json")
    assert told.returncode == 1
    assert "has no requests; name them with memtrace.scopes.request()" in told.stderr
    assert "no requests" in json.loads(told.stdout)["error"]


def report(run: Path, *arguments: str) -> dict[str, Any]:
    told = memtrace("report", run, "--json", *arguments)
    assert told.returncode == 0, told.stderr
    document: dict[str, Any] = json.loads(told.stdout)
    return document


def test_report_of_an_instant(run: Path) -> None:
    whole = report(run)
    # the peak, asked for by its event and by its time
    peak = whole["peak"]
    for when in (f"event:{peak['at']['event']}", f"{peak['at']['time_us']}us"):
        one = report(run, "--at", when)
        assert one["at"] == peak["at"]
        assert {name: one[name] for name in one.keys() & peak.keys()} == {
            name: peak[name] for name in one.keys() & peak.keys()
        }
        assert one["top"] == whole["top"]
    text = memtrace("report", run, "--at", "event:0").stdout
    assert "model" in text
    assert "1.0 MiB" in text


def test_report_of_a_request(run: Path) -> None:
    one = report(run, "--request", "q1")
    assert one == report(run, "--request", "0")
    assert one["peak"]["at"] == report(run)["peak"]["at"]
    assert one["after"]["components"]["Hidden"] == 0
    assert one["request"]["allocated"] == one["after"]["allocated"]
    assert one["snapshot"] == {"compared": False, "equal": None, "difference": None}
    assert "request q1 on cpu: ok" in memtrace("report", run, "--request", "q1").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--at", "soon"], "--at soon: write it as 1.25s, 1250ms or event:4711"),
        (["--at", "9" * 5000], f"--at {'9' * 5000}: write it as 1.25s"),
        (["--at", f"event:{'9' * 5000}"], f"--at event:{'9' * 5000}: write it as 1.25s"),
        (["--request", "9" * 5000], f"--request {'9' * 5000}: no request has that name"),
        (["--at", "0s"], "--at 0s: the first event is 0.001 s after the run began"),
        (["--at", "event:99999"], "--at event:99999: the events are numbered from 0 to "),
        (["--request", "7"], "--request 7: no request has that name, and they are numbered from 0"),
    ],
)
def test_what_isn_t_there_gets_a_sentence(run: Path, arguments: list[str], sentence: str) -> None:
    told = memtrace("report", run, *arguments)
    assert told.returncode == 1
    assert told.stderr.startswith(f"memtrace: {sentence}")
