"""Process memory: what the operating system or the driver says, beside what is booked."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.trace.reader import ProcessTrace, Trace

#: Where a device's memory is seen from outside. Meta tensors take none.
_SOURCES = {"cpu": "rss", "cuda": "nvml"}


@dataclass(frozen=True)
class ProcessMemory:
    """Samples of one process's memory (int64 arrays, ascending in time); empty: unknown."""

    source: str | None
    time_us: np.ndarray
    value: np.ndarray
    #: The kernel's own high-water mark in bytes; exact where samples can miss a short peak.
    high_water: int | None

    @cached_property
    def peak(self) -> int | None:
        """The largest value in bytes, None where nothing is known."""
        if self.high_water is not None:
            return self.high_water
        return int(self.value.max()) if len(self.value) else None

    def nearest(self, time_us: int) -> int | None:
        """The number of the sample nearest in time."""
        if len(self.value) == 0:
            return None
        return int(np.abs(self.time_us - time_us).argmin())


def process_memory(trace: Trace, process: ProcessTrace, device: str = "cpu") -> ProcessMemory:
    """The memory that ``process`` takes where the tensors of ``device`` live."""
    source = _SOURCES.get(device.partition(":")[0])
    taken = _samples(trace, process, source)
    taken.sort()
    time_us, value = np.array(taken, dtype=np.int64).reshape(-1, 2).T
    high_water = None
    if source == "rss":
        marks = [value for _, value in _samples(trace, process, "hwm")]
        exact = (trace.manifest.get("process_peak") or {}).get(str(process.pid))
        high_water = exact if exact is not None else max(marks, default=None)
    return ProcessMemory(source, time_us, value, high_water)


@dataclass(frozen=True)
class ProcessTerms:
    """The second identity at each sample of process memory, in bytes (int64 arrays)."""

    allocated: np.ndarray
    allocator: np.ndarray
    external: np.ndarray


def process_terms(account: Account, memory: ProcessMemory) -> ProcessTerms | None:
    """The terms of the second identity; None where the reserved bytes are unknown."""
    if account.reserved is None:
        return None
    events = account.event_at(memory.time_us)
    allocated, reserved = account.allocated.read(events), account.reserved.read(events)
    return ProcessTerms(allocated, reserved - allocated, memory.value - reserved)


def _samples(trace: Trace, process: ProcessTrace, source: str | None) -> list[tuple[int, int]]:
    """(time, value) of a source: sampled from outside, or by the process itself."""
    return [
        (int(time_us), int(value))
        for samples in (trace.samples, process.samples)
        for time_us, pid, name, value in zip(
            samples["time_us"], samples["pid"], samples["source"], samples["value"], strict=True
        )
        if pid == process.pid and name == source and value is not None and time_us is not None
    ]
