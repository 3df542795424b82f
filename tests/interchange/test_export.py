"""A run as a snapshot, and back: nothing is lost, and PyTorch's own tools read it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtrace.errors import MemtraceError
from memtrace.interchange.exporter import export_snapshot
from memtrace.interchange.importer import import_snapshot
from memtrace.interchange.snapshot import OURS
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.interchange.runs import assert_consistent, listed, open_one, rows
from tests.interchange.snapshots import ALL, BASE, DATA, MIB, dump, load, marked
from tests.synthetic import PID, History, prefill

RICH = DATA / "rich_oom_torch2.15.0.pickle"


def _tables(run: Path) -> list[Any]:
    """All that a run says, numbering aside."""
    trace, process = open_one(run)
    changing = ("imported",)
    kept = {name: value for name, value in process.manifest.items() if name not in changing}
    root = {name: value for name, value in trace.manifest.items() if name != "files"}
    tables = (process.samples, process.requests, trace.samples)
    return [rows(process), *map(listed, tables), kept, root]


@pytest.mark.parametrize("file", marked(ALL))
def test_a_snapshot_comes_back_as_it_was_imported(tmp_path: Path, file: Path) -> None:
    import_snapshot(file, tmp_path / "first")
    made = export_snapshot(open_trace(tmp_path / "first"), tmp_path / "again.pickle")
    again = import_snapshot(made.file, tmp_path / "second")
    assert again.impossible == 0
    assert _tables(tmp_path / "second") == _tables(tmp_path / "first")
    assert_consistent(tmp_path / "second")


def test_a_history_without_its_beginning_comes_back_too(tmp_path: Path) -> None:
    """Wherever it was cut: blocks from before may be alive, or wait for their stream."""
    for gone in range(30, 70, 3):
        data = load(RICH)
        del data["device_traces"][0][:gone]
        import_snapshot(dump(data, tmp_path), tmp_path / f"{gone}")
        made = export_snapshot(open_trace(tmp_path / f"{gone}"), tmp_path / f"{gone}.pickle")
        import_snapshot(made.file, tmp_path / f"{gone}-again")
        assert _tables(tmp_path / f"{gone}-again") == _tables(tmp_path / f"{gone}")


def test_events_of_devices_keep_their_order(tmp_path: Path) -> None:
    """A recorder writes what each device did in one go: not by time."""
    history = History()
    for number in (1, 0, 1, 0, 0):
        device, at = f"cuda:{number}", BASE + len(history.rows["events"]) * 2 * MIB
        history.event(Action.SEGMENT_ALLOC, at, 2 * MIB, None, device=device)
        history.event(Action.ALLOC, at, 2 * MIB, "Act", device=device)
        history.sample(f"allocated:{device}", 2 * MIB)
    times = [9000, 9001, 100, 101, 9500, 9501, 200, 201, 300, 301]
    history.rows["events"] = [
        (time_us, *row[1:]) for time_us, row in zip(times, history.rows["events"], strict=True)
    ]
    history.write(tmp_path / "run")
    made = export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle")
    import_snapshot(made.file, tmp_path / "back")
    assert rows(open_one(tmp_path / "back")[1]) == rows(open_one(tmp_path / "run")[1])
    new, old = open_one(tmp_path / "back")[1].samples, open_one(tmp_path / "run")[1].samples
    assert listed(new) == listed(old)


def test_retries_come_back_where_they_were(tmp_path: Path) -> None:
    """A snapshot only shows that segments were returned before one was taken."""
    history = History()
    for number, retried in enumerate((False, True, False, True)):
        if number:
            history.event(Action.SEGMENT_FREE, BASE + number - 1, 2 * MIB, None, device="cuda:0")
        if retried:
            history.event(Action.RETRY, 0, 2 * MIB, None, device="cuda:0")
        history.event(Action.SEGMENT_ALLOC, BASE + number, 2 * MIB, None, device="cuda:0")
    history.write(tmp_path / "run")
    made = export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle")
    import_snapshot(made.file, tmp_path / "back")
    old, new = (rows(open_one(tmp_path / name)[1]) for name in ("run", "back"))
    # A retry has the time of the segment that it ended in.
    assert [row[1:] for row in new] == [row[1:] for row in old]


def test_the_segments_are_those_of_the_snapshot(tmp_path: Path) -> None:
    import_snapshot(RICH, tmp_path / "run")
    made = export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle")
    ours, theirs = load(made.file), load(RICH)
    for key in ("segments", "host_segments"):
        for one in ours[key] + theirs[key]:
            one.pop("frames")  # of segments, which a trace doesn't keep
            for block in one["blocks"]:
                block.pop("frames", None)
                if block["state"] == "inactive":
                    block["requested_size"] = 0  # stale in PyTorch's
        assert ours[key] == theirs[key]
    assert ours["allocator_settings"] == theirs["allocator_settings"]


def _recorded() -> History:
    """A run as the CUDA source records it, begun with a block that was there."""
    history = History()
    segment, there, later = BASE, BASE + 2 * MIB, BASE + 4 * MIB

    def event(action: Action, at: int, size: int, *labels: str | None) -> None:
        history.event(action, at, size, *(labels or (None,)), device="cuda:0")

    with history.scope("op", "before the recording"):
        event(Action.ALLOC, there, 2 * MIB, "other")
        # Both at once.
        history.rows["events"][0] = (history.time_us, *history.rows["events"][0][1:])
        event(Action.SEGMENT_ALLOC, segment, 20 * MIB)
        history.rows["events"].reverse()
    event(Action.RETAG, there, 2 * MIB, "model", "other")
    history.sample("rss", 5)
    with history.scope("request", "q|1"), history.scope("layer", "3"):
        event(Action.ALLOC, segment, 2 * MIB, "Act/x=?%")
        event(Action.ALLOC, later, 4 * MIB, "Act")
        history.sample("allocated:cuda:0", 8 * MIB)
        event(Action.RETAG, later, 4 * MIB, "KV_res/full", "Act")
    history.alloc(100, "Act")  # on the CPU
    event(Action.FREE_REQUESTED, segment, 2 * MIB, "Act/x=?%")
    event(Action.FREE, later, 4 * MIB, "KV_res/full")
    event(Action.FREE_COMPLETED, segment, 2 * MIB, "Act/x=?%")
    history.sample("allocated:cuda:0", 2 * MIB)
    history.request("q1", prompt_tokens=5)
    return history


def test_a_recorded_run_comes_back_with_all_that_a_snapshot_has_no_place_for(
    tmp_path: Path,
) -> None:
    _recorded().write(tmp_path / "run", manifest={"started": "2026-01-01T00:00:00+00:00"})
    made = export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle")
    assert made.left_out == ("what lies on cpu: a snapshot holds CUDA's only",)
    import_snapshot(made.file, tmp_path / "back")
    assert_consistent(tmp_path / "back")
    (trace, old), (again, new) = open_one(tmp_path / "run"), open_one(tmp_path / "back")
    assert rows(new) == [row for row in rows(old) if row[5] == "cuda:0"]
    assert listed(new.requests) == listed(old.requests)
    assert list(new.samples["value"]) == list(old.samples["value"])
    # The CPU's event is gone, so one fewer stands before the last sample.
    assert list(new.samples["event"]) == [3, 5, 9]
    assert (new.pid, new.manifest["torch"]) == (PID, "2.14.1")
    assert again.manifest["command"] == trace.manifest["command"]


def test_without_what_we_add_components_and_scopes_still_come_back(tmp_path: Path) -> None:
    """As when another tool wrote the file anew."""
    _recorded().write(tmp_path / "run")
    made = export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle")
    data = load(made.file)
    del data[OURS]
    import_snapshot(dump(data, tmp_path), tmp_path / "back")

    def said(run: str) -> list[Any]:
        # All but the time, which now counts from the first entry.
        found = rows(open_one(tmp_path / run)[1])
        return [row[1:] for row in found if row[5] == "cuda:0"]

    assert said("back") == said("run")


def test_pytorchs_own_viewer_reads_it(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    import_snapshot(RICH, tmp_path / "run")
    made = export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle")
    ours, theirs = load(made.file), load(RICH)
    assert _memory_viz.segsum(ours) == _memory_viz.segsum(theirs)
    text = _memory_viz.trace(ours)
    assert text.count("\n") == _memory_viz.trace(theirs).count("\n")
    assert "MemoryViz" in _memory_viz.segment_plot(ours)
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(made.file)]
    subprocess.run([*command, "-o", str(page)], check=True, timeout=60, capture_output=True)
    assert "MemoryViz" in page.read_text()


def test_a_run_without_cuda_is_refused(tmp_path: Path) -> None:
    prefill().write(tmp_path / "run")
    with pytest.raises(MemtraceError, match="no memory of PyTorch's CUDA allocator"):
        export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle")
    with pytest.raises(MemtraceError, match="has no process 1"):
        export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle", pid=1)
    assert not list(tmp_path.glob("*.pickle"))


def test_of_several_processes_one_must_be_chosen(tmp_path: Path) -> None:
    run = _recorded().write(tmp_path / "run", complete=False)
    other = _recorded().write(tmp_path / "other", process={"pid": 5})
    (other / str(PID)).rename(run / "5")
    with pytest.raises(MemtraceError, match=f"choose one of {PID}, 5 by --pid"):
        export_snapshot(open_trace(run), tmp_path / "out.pickle")
    assert export_snapshot(open_trace(run), tmp_path / "out.pickle", pid=5).pid == 5


def test_a_file_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    _recorded().write(tmp_path / "run")
    (tmp_path / "out.pickle").write_text("mine")
    with pytest.raises(MemtraceError, match="is there already"):
        export_snapshot(open_trace(tmp_path / "run"), tmp_path / "out.pickle")
    assert (tmp_path / "out.pickle").read_text() == "mine"
    with pytest.raises(MemtraceError, match="can't be written"):
        export_snapshot(open_trace(tmp_path / "run"), tmp_path / "no folder" / "out.pickle")
