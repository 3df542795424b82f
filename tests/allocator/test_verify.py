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
from memtrace.trace.schema import Action
from tests.interchange.snapshots import ALL, MIB, OWN, load, marked
from tests.interchange.test_mutated import added, history, raw, values
from tests.synthetic import History

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


def test_a_cache_is_emptied_before_an_expandable_segment_grows_again(tmp_path: Path) -> None:
    """A block over the limit serves no small request, but a segment may grow from it."""
    history = History()

    def event(action: Action, size: int, component: str | None = None) -> None:
        history.event(action, 0x7000000, size, component, device="cuda:0")

    event(Action.SEGMENT_MAP, 40 * MIB)
    event(Action.ALLOC, 40 * MIB, "other")
    event(Action.FREE, 40 * MIB, "other")
    event(Action.SEGMENT_UNMAP, 40 * MIB)
    event(Action.SEGMENT_MAP, 20 * MIB)
    event(Action.ALLOC, 5 * MIB, "other")
    settings = {"expandable_segments": True, "max_split_size": 20 * MIB}
    history.write(tmp_path / "run", process={"allocator_settings": settings})
    (found,) = verify_run(open_trace(tmp_path / "run"))
    assert found.difference is None


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
