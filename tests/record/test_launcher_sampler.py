"""Process memory from outside."""

import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from memtrace.record.launcher import _peaks
from memtrace.record.process import Nvml, Sampler, children, high_water, resident


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
    # WHEN it is gone
    os.waitpid(pid, 0)
    assert (resident(pid), high_water(pid), list(children(pid))) == (0, 0, [])


@pytest.mark.parametrize(
    ("sampled", "max_rss", "floor", "expected"),
    [
        pytest.param({1: 50}, 60, 20, {1: 60}, id="alone: wait4 saw the spike between samples"),
        pytest.param({1: 10}, 20, 20, {1: 10}, id="not above what the launcher held"),
        pytest.param({1: 5, 2: 90}, 95, 20, {1: 5, 2: 90}, id="a child reached higher"),
        pytest.param({1: 90, 2: 5}, 95, 20, {1: 95, 2: 5}, id="a child stayed below"),
        pytest.param({}, 95, 20, {1: 95}, id="it ended before the first sample"),
    ],
)
def test_peaks(sampled: dict[int, int], max_rss: int, floor: int, expected: dict[int, int]) -> None:
    assert _peaks(sampled, pid=1, max_rss=max_rss, floor=floor) == expected


def _sampler(run: Path) -> Sampler:
    return Sampler(run, os.getpid(), epoch_ns=0, interval_ms=1)


def test_a_sample_is_on_disk_within_half_a_second(tmp_path: Path) -> None:
    sampler = _sampler(tmp_path)
    sampler.sample()
    time.sleep(0.5)
    sampler.sample()
    with pa.ipc.open_stream(tmp_path / "samples.arrow") as stream:
        rows = stream.read_next_batch().to_pylist()
    assert [(row["pid"], row["source"]) for row in rows[:2]] == [
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
    assert sampler.peaks[os.getpid()] > 0


def test_many_processes_are_sampled_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN processes that take 30 ms of CPU time to read
    cpu_ns = iter([0, 30_000_000])
    monkeypatch.setattr("memtrace.record.process.thread_time_ns", lambda: next(cpu_ns))
    monkeypatch.setattr("memtrace.record.process.perf_counter_ns", lambda: 0)
    sampler = _sampler(tmp_path)
    # WHEN
    sampler.sample()
    # THEN the next sample is due so late that sampling takes a twentieth of the time
    assert sampler.wait_seconds() == 0.6


class FakeNvml(ModuleType):
    """``processes[gpu]`` maps process ids to bytes, None where the driver can't tell.

    No GPUs stand for no driver, one without processes for one that has failed.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, *processes: dict[int, int | None]) -> None:
        super().__init__("pynvml")
        self.processes = processes

    def nvmlInit(self) -> None:
        if not self.processes:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.processes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        if not self.processes[gpu]:
            raise self.NVMLError("GPU is lost")
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=value)
            for pid, value in self.processes[gpu].items()
        ]


@pytest.mark.parametrize(
    ("fake", "expected", "status"),
    [
        (FakeNvml(), {}, "not available: Driver Not Loaded"),
        (FakeNvml({7: 100, 8: 5}, {7: 20}), {7: 120}, "by process"),
        (FakeNvml({7: 100}, {}), {}, "not available: GPU is lost"),
        (FakeNvml({999: 100}), {}, "no process of the run was reported by NVML"),
        (
            FakeNvml({7: None}),
            {},
            "not available: the driver doesn't report memory by process",
        ),
        (
            FakeNvml({7: 100}, {7: None}),
            {},
            "not available: the driver doesn't report memory by process",
        ),
    ],
    ids=[
        "no driver",
        "summed over GPUs",
        "lost",
        "host's ids in a container",
        "unknown",
        "partly unknown",
    ],
)
def test_nvml(
    fake: FakeNvml, expected: dict[int, int], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    nvml = Nvml()
    nvml.open()
    assert nvml.used({7}) == expected
    assert nvml.status == status
