"""Process memory from outside."""

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from memtrace.record.launcher import _peaks
from memtrace.record.process import children, high_water, resident, stat
from memtrace.record.sampler import Sampler


def test_resident_and_high_water_of_this_process() -> None:
    ballast = bytearray(os.urandom(1 << 20) * 32)
    assert resident(os.getpid()) > 32 << 20
    del ballast
    assert high_water(os.getpid()) > 32 << 20


def test_a_process_that_has_ended() -> None:
    # GIVEN one that has ended but still stands in the table of processes
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (resident(pid), high_water(pid), list(children(pid))) == (0, 0, [])
    found = stat(pid)
    assert found is not None
    assert (found.ended, found.parent) == (True, os.getpid())
    # WHEN it is gone
    os.waitpid(pid, 0)
    assert stat(pid) is None
    assert (resident(pid), high_water(pid), list(children(pid))) == (0, 0, [])


@pytest.mark.parametrize(
    ("sampled", "max_rss", "floor", "expected"),
    [
        pytest.param({"1-9": 50}, 60, 20, {"1-9": 60}, id="wait4 saw a spike between samples"),
        pytest.param({"1-9": 10}, 20, 20, {"1-9": 10}, id="not above what the launcher held"),
        pytest.param({"1-9": 5, "2-9": 9}, 9, 2, {"1-9": 5, "2-9": 9}, id="a child reached higher"),
        pytest.param({"1-9": 8, "2-9": 5}, 9, 2, {"1-9": 9, "2-9": 5}, id="a child stayed below"),
        pytest.param({}, 95, 20, {"1-9": 95}, id="it ended before the first sample"),
    ],
)
def test_peaks(sampled: dict[str, int], max_rss: int, floor: int, expected: dict[str, int]) -> None:
    assert _peaks(sampled, "1-9", max_rss=max_rss, floor=floor) == expected


def _sampler(run: Path) -> Sampler:
    return Sampler(run, os.getpid(), epoch_ns=0, interval_ms=1)


def test_a_sample_is_on_disk_within_half_a_second(tmp_path: Path) -> None:
    sampler = _sampler(tmp_path)
    sampler.sample()
    time.sleep(0.5)
    sampler.sample()
    with pa.ipc.open_stream(tmp_path / "samples.arrow") as stream:
        rows = stream.read_next_batch().to_pylist()
    assert [(row["pid"], row["source"]) for row in rows[:3]] == [
        (os.getpid(), "start"),
        (os.getpid(), "rss"),
        (os.getpid(), "hwm"),
    ]


def test_a_full_disk_ends_the_samples_but_not_the_sampler(tmp_path: Path) -> None:
    (tmp_path / "samples.arrow").symlink_to("/dev/full")
    sampler = _sampler(tmp_path)
    sampler.sample()
    sampler.close()
    assert sampler.failure is not None
    assert sampler.failure.errno == 28
    assert sampler.command.peak > 0


def test_many_processes_are_sampled_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN processes that take 30 ms of CPU time to read
    cpu_ns = iter([0, 30_000_000])
    monkeypatch.setattr("memtrace.record.sampler.thread_time_ns", lambda: next(cpu_ns))
    monkeypatch.setattr("memtrace.record.sampler.perf_counter_ns", lambda: 0)
    sampler = _sampler(tmp_path)
    # WHEN
    sampler.sample()
    # THEN the next sample is due so late that sampling takes a twentieth of the time
    assert sampler.wait_seconds() == 0.6


def test_a_child_that_has_ended_is_no_new_process(tmp_path: Path) -> None:
    # GIVEN a child that nobody has waited for yet
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # WHEN the sampler looks for children several times
    sampler = _sampler(tmp_path)
    for _ in range(12):
        sampler.sample()
        time.sleep(0.001)
    os.waitpid(pid, 0)
    # THEN it is none that lives
    assert [seen.pid for seen in sampler.seen] == [os.getpid()]
