"""Process memory, seen from outside: RSS from ``/proc`` and GPU memory from NVML.

Seen from outside, so a process that hangs, crashes or is killed is measured to its end, and neither
torch nor the recorder pays for it.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.trace.writer import TableWriter

_PAGE = os.sysconf("SC_PAGE_SIZE")

#: Looking for descendants, high-water marks and NVML cost more than RSS: every so many samples.
_RARELY = 5
#: Sampling takes at most this share of one core, however many processes there are.
_SHARE = 0.05
#: What a killed launcher can lose at most.
_FLUSH_NS = 500_000_000
_COLUMNS = ("time_us", "pid", "source", "event", "value")
_GONE = (FileNotFoundError, ProcessLookupError)


def resident(pid: int) -> int:
    """RSS of a process in bytes; 0 once it has ended.

    The kernel may batch the counter: a reading can be off by some pages for each CPU.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * _PAGE
    except _GONE:
        return 0


def high_water(pid: int) -> int:
    """Highest RSS that the program a process runs now ever had (VmHWM), in bytes; 0 if it ended."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            value = file.read().partition(b"VmHWM:")[2].split(maxsplit=1)
    except _GONE:
        return 0
    return int(value[0]) * 1024 if value else 0


def children(pid: int) -> Iterator[int]:
    """Children of every thread of a process; none where the kernel doesn't list them."""
    with suppress(*_GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(*_GONE), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())


class Nvml:
    """GPU memory by process, summed over the GPUs. :attr:`status` says what it could see."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._gpus: list[Any] = []
        self.status = "not sampled"

    def open(self) -> None:
        """Load the driver's library, which may take a second; nothing is seen before."""
        try:
            import pynvml
        except ImportError:
            self.status = "not available: the module pynvml isn't installed"
            return
        try:
            pynvml.nvmlInit()
            self._gpus = [
                pynvml.nvmlDeviceGetHandleByIndex(index)
                for index in range(pynvml.nvmlDeviceGetCount())
            ]
        except pynvml.NVMLError as error:
            self.status = f"not available: {error}"
            return
        self._nvml = pynvml
        # In a container NVML may report the host's process ids, which match none of ours.
        self.status = "no process of the run was reported by NVML"

    def used(self, pids: set[int]) -> dict[int, int]:
        """Bytes by process, of those that NVML reports with a known value on every GPU."""
        if self._nvml is None:
            return {}
        used: dict[int, int | None] = {}
        try:
            for gpu in self._gpus:
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                    if process.pid in pids:
                        before = used.get(process.pid, 0)
                        now = process.usedGpuMemory  # None: the driver doesn't tell
                        used[process.pid] = None if before is None or now is None else before + now
        except self._nvml.NVMLError as error:
            self.status = f"not available: {error}"
            self._nvml = None
            return {}
        known = {pid: value for pid, value in used.items() if value is not None}
        if known:
            self.status = "by process"
        elif used:
            self.status = "not available: the driver doesn't report memory by process"
        return known


class Sampler:
    """Samples a process, its descendants and every process with a folder in the run.

    Args:
        run: the folder of the run; rows go to its ``samples`` table.
        pid: the command's process.
        epoch_ns: ``perf_counter_ns()`` that counts as time 0.
        interval_ms: time between two samples; more when there are too many processes for it.
    """

    def __init__(self, run: Path, pid: int, *, epoch_ns: int, interval_ms: int) -> None:
        self._run = run
        self._epoch_ns = epoch_ns
        self._interval_ns = interval_ms * 1_000_000
        self._next_ns = perf_counter_ns()
        self._flush_ns = self._next_ns + _FLUSH_NS
        self._ticks = 0
        self._folders: set[str] = set()
        self._rows: list[tuple[int, int, str, None, int]] = []
        self._writer: TableWriter | None = None
        #: Processes that lived at the last sample.
        self.alive = {pid}
        #: Highest RSS seen of each process, in bytes.
        self.peaks: dict[int, int] = {}
        #: Why samples are no longer written, if they aren't.
        self.failure: OSError | None = None
        self.nvml = Nvml()

    def wait_seconds(self) -> float:
        """Time until the next sample is due."""
        return max(0.0, (self._next_ns - perf_counter_ns()) / 1e9)

    def sample(self) -> None:
        """Take a sample if one is due; write what was taken twice a second."""
        start_ns = perf_counter_ns()
        if start_ns < self._next_ns:
            return
        cpu_ns = thread_time_ns()
        rarely = self._ticks % _RARELY == 0
        self._ticks += 1
        self._enter_recorded()
        if rarely:
            self._enter_descendants()
        for pid in list(self.alive):
            rss = resident(pid)
            if not rss:
                self.alive.discard(pid)
                continue
            self._add(pid, "rss", rss)
            if rarely and (hwm := high_water(pid)):
                self._add(pid, "hwm", hwm)
        if rarely:
            for pid, used in self.nvml.used(self.alive).items():
                self._add(pid, "nvml", used)
        cpu_ns = thread_time_ns() - cpu_ns
        self._next_ns = start_ns + max(self._interval_ns, round(cpu_ns / _SHARE))
        if start_ns >= self._flush_ns:
            self._flush()
            self._flush_ns = start_ns + _FLUSH_NS

    def _add(self, pid: int, source: str, value: int) -> None:
        time_us = (perf_counter_ns() - self._epoch_ns) // 1000
        self._rows.append((time_us, pid, source, None, value))
        if source != "nvml":
            self.peaks[pid] = max(self.peaks.get(pid, 0), value)

    def _enter_recorded(self) -> None:
        """Processes that have made a folder in the run, whoever their parent is."""
        with suppress(OSError):  # somebody may have moved the run away
            for name in os.listdir(self._run):
                if name[0].isdigit() and name not in self._folders:
                    self._folders.add(name)
                    self.alive.add(int(name.partition("-")[0]))

    def _enter_descendants(self) -> None:
        """Children of those that are known, recorded or not."""
        found = list(self.alive)
        for pid in found:  # grows while it is walked
            for child in children(pid):
                if child not in self.alive:
                    self.alive.add(child)
                    found.append(child)

    def _open(self) -> "TableWriter":
        # pyarrow and NVML take a while to load: by now the command runs and was sampled once.
        from memtrace.trace.writer import TableWriter

        self.nvml.open()
        return TableWriter(self._run)

    def _flush(self) -> None:
        if self._writer is None:
            self._writer = self._open()
        rows, self._rows = self._rows, []
        if self.failure is not None or not rows:
            return
        columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
        try:
            self._writer.append("samples", columns)
        except OSError as error:
            self.failure = error

    def survivors(self) -> set[int]:
        """Processes of the run that live now."""
        self._enter_recorded()
        self._enter_descendants()
        return {pid for pid in self.alive if resident(pid)}

    def close(self) -> None:
        """Write the rest and end the table."""
        self._flush()
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self.failure = self.failure or error
