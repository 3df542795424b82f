"""Dry runs of any command."""

import sys
from pathlib import Path

import pytest

from memtrace.analysis.summary import summarise
from memtrace.dryrun import dry_run
from memtrace.errors import MemtraceError
from memtrace.render import facts
from memtrace.trace.reader import Trace

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
            out=folder / "run.memtrace",
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
