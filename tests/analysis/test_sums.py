"""All processes of a run together."""

from pathlib import Path
from typing import Any

from memtrace.analysis.accounts import accounts
from memtrace.analysis.sums import Sum, sums
from memtrace.trace.manifest import write_manifest
from memtrace.trace.reader import open_trace
from memtrace.trace.writer import TableWriter
from tests.synthetic import History

MIB = 1 << 20


def run_of(folder: Path, samples: list[tuple[int, int, str, int]], *sizes: int) -> dict[str, Any]:
    """Processes 1, 2, …, each of which allocates one size at 1 ms and frees it at 2 ms."""
    for number, size in enumerate(sizes, start=1):
        history = History()
        history.free(history.alloc(size, "Act"))
        one = history.write(folder / f"{number}.tmp", process={"pid": number})
        (one / "4711").rename(folder / str(number))
        (one / "manifest.json").unlink()
        one.rmdir()
    folder.mkdir(exist_ok=True)
    with TableWriter(folder) as writer:
        if samples:
            time_us, pid, source, value = zip(*samples, strict=True)
            nulls = [None] * len(samples)
            columns = {"time_us": time_us, "pid": pid, "source": source, "event": nulls}
            writer.append("samples", {**columns, "value": value})
    write_manifest(folder, {"state": "running", "knowledge": "measured"})
    trace = open_trace(folder)
    return dict(sums(trace, [one for process in trace.processes for one in accounts(process)]))


def test_one_process_has_no_sum(tmp_path: Path) -> None:
    assert run_of(tmp_path / "run", [(5, 1, "rss", 9)], 100) == {}


def test_what_overlaps_adds_up(tmp_path: Path) -> None:
    found = run_of(tmp_path / "run", [], 100, 30)
    assert found == {"allocated:cpu": Sum(of_peaks=130, peak=130)}


def test_what_comes_one_after_the_other_does_not(tmp_path: Path) -> None:
    rows = [
        (0, 1, "rss", 50),
        (20_000, 1, "rss", 90),
        (60_000, 2, "rss", 70),
        (80_000, 2, "rss", 20),
        (80_000, 3, "rss", 25),
    ]
    found = run_of(tmp_path / "run", rows)
    assert found["rss"] == Sum(of_peaks=90 + 70 + 25, peak=90)


def test_samples_of_one_round_count_as_one_instant(tmp_path: Path) -> None:
    rows = [(0, 1, "rss", 10), (40, 2, "rss", 20), (20_000, 1, "rss", 30), (20_040, 2, "rss", 5)]
    # between 20,000 and 20,040 the second one is read no more and holds its last 20
    assert run_of(tmp_path / "run", rows)["rss"] == Sum(of_peaks=50, peak=50)


def test_gpus_add_up_over_processes_and_devices(tmp_path: Path) -> None:
    rows = [(0, 1, "nvml:GPU-a", 3), (0, 1, "nvml:GPU-b", 4), (0, 2, "nvml:GPU-a", 5)]
    assert run_of(tmp_path / "run", rows)["nvml"] == Sum(of_peaks=12, peak=12)
