"""Dry runs of any command."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from memtrace import dry_run
from memtrace.analysis.summary import summarise
from memtrace.errors import MemtraceError
from memtrace.render import facts
from memtrace.trace.reader import Trace
from tests.synthetic import prefill

SCRIPT = """
import torch
kept = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_snapshot()[0]["is_expandable"])
"""


@pytest.fixture(scope="module")
def planned(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, str]:
    """A run with settings, and what it printed."""
    folder = tmp_path_factory.mktemp("planned")
    with (folder / "said").open("w+") as said:
        trace = dry_run(
            [sys.executable, "-c", SCRIPT],
            device="rtx-3090-24g",
            out=str(folder / "run.memtrace"),
            allocator="expandable_segments:True",
            stdout=said.fileno(),
        )
        said.seek(0)
        return trace, said.read()


def test_the_run_is_marked_with_what_it_rests_on(planned: tuple[Trace, str]) -> None:
    summary = summarise(planned[0])
    assert summary.exit_code == 0
    assert summary.planned is not None
    assert (summary.planned.engine, summary.planned.device) == ("virtual", "rtx-3090-24g")
    assert any("CUDA context" in text and "256.0 MiB" in text for text in summary.planned.modelled)
    assert "for rtx-3090-24g with expandable_segments:True" in facts(summary)["planned"]
    assert summary.primary is not None
    assert summary.primary.peak.allocated == 64 << 20


def test_settings_and_output_are_the_command_s(planned: tuple[Trace, str]) -> None:
    assert planned[1] == "True\n"


def test_a_planned_run_stands_beside_a_recorded_one(
    planned: tuple[Trace, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In comparisons and in the viewer: which one is planned is said, and no number made up."""
    recorded = prefill().write(tmp_path / "recorded.memtrace")
    folders = [str(planned[0].folder), str(recorded)]
    told = subprocess.run(
        [sys.executable, "-m", "memtrace", "compare", *folders, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    compared = json.loads(told.stdout)
    assert [one["knowledge"] for one in compared["runs"]] == ["virtual", "measured"]
    assert any("run virtual, recorded measured" in text for text in compared["warnings"])
    (difference,) = compared["differences"]
    assert difference["at_peak"]["external"] is None
    assert difference["at_peak"]["process"] is None
    assert difference["at_peak"]["allocated"] is not None
    pytest.importorskip("streamlit")
    from tests.app.opening import opened

    app = opened(monkeypatch, folders)
    assert any("run virtual, recorded measured" in one.value for one in app.warning)
    equation = app.table[0].value
    for term in ("external", "process (2)"):
        row = [text.replace("\\", "") for text in equation.loc[_escaped(term, equation.index)]]
        assert row[0] == row[2] == "unknown"
        assert row[1] != "unknown"
    facts_of = app.table[-1].value
    assert "by the engine virtual" in facts_of.loc["planned"].iloc[0]
    assert facts_of.loc["planned"].iloc[1] == ""
    for page in ("timeline", "fragmentation", "allocations", "what-if"):
        assert not opened(monkeypatch, folders, page).error


def _escaped(name: str, index: Iterable[str]) -> str:
    """How a table of the viewer has it."""
    return next(one for one in index if one.replace("\\", "") == name)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"engine": "magic"}, "no engine 'magic'"),
        ({"device": "nothing-like-it"}, "'nothing-like-it' is no known card"),
        ({"allocator": "nothing:1"}, "'nothing' is no setting"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    asked: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    options = {"device": "a100-40g", **asked}
    with pytest.raises(MemtraceError, match=sentence):
        dry_run([sys.executable, "-c", ""], out=tmp_path / "run", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
