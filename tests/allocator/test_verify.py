"""Recordings of PyTorch's own allocator, replayed: every event, address and block as recorded."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from memtrace.allocator.verify import verify_run
from memtrace.cli import main
from memtrace.errors import MemtraceError
from memtrace.interchange.importer import import_snapshot
from memtrace.trace.reader import open_trace
from tests.interchange.snapshots import ALL, OWN, load, marked
from tests.interchange.test_mutated import added, history, raw, values

#: Made by a generator: no allocator can have done that.
IMPOSSIBLE = "synthetic"
REAL = [file for file in ALL if IMPOSSIBLE not in file.name]


@pytest.mark.parametrize("file", marked(REAL))
def test_snapshots_replay_event_by_event(file: Path, tmp_path: Path) -> None:
    import_snapshot(file, tmp_path / "run")
    found = verify_run(open_trace(tmp_path / "run"))
    assert found
    for device in found:
        assert device.difference is None
        assert device.equal == device.events
        assert device.reordered == 0


@pytest.mark.parametrize("file", [file for file in ALL if IMPOSSIBLE in file.name])
def test_an_impossible_history_is_said(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_snapshot(file, tmp_path / "run")
    assert main(["replay", str(tmp_path / "run"), "--verify"]) == 1
    assert "events of the process are missing" in capsys.readouterr().out


@pytest.mark.parametrize("mutate", [values, history, raw, added])
@pytest.mark.parametrize("seed", range(5))
def test_mutated_snapshots_crash_nothing(mutate: Any, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    original = load(next(file for file in OWN if file.name.startswith("rich")))
    for number in range(10):
        run = tmp_path / str(number)
        (tmp_path / "mutated.pickle").write_bytes(mutate(draw, copy.deepcopy(original)))
        try:
            import_snapshot(tmp_path / "mutated.pickle", run)
        except MemtraceError:
            continue
        for argv in (
            ["--verify"],
            ["--conf", "expandable_segments:True"],
            ["--allocator", "async"],
        ):
            assert main(["replay", str(run), "--json", *argv]) in (0, 1)
