"""Process memory: what the operating system or the driver says, beside what is booked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.sizes import format_size
from memtrace.trace.manifest import Knowledge
from memtrace.trace.reader import ProcessTrace, Trace, cuda_ordinal


@dataclass(frozen=True)
class Samples:
    """Bytes over time (int64 arrays, ascending in time); empty: unknown."""

    time_us: np.ndarray
    value: np.ndarray

    @cached_property
    def peak(self) -> int | None:
        """The largest value in bytes, None where nothing is known."""
        return int(self.value.max()) if len(self.value) else None

    def nearest(self, time_us: int) -> int | None:
        """The number of the sample nearest in time."""
        if len(self.value) == 0:
            return None
        return int(np.abs(self.time_us - time_us).argmin())

    def at(self, time_us: int) -> int | None:
        """The sample nearest in time, in bytes."""
        number = self.nearest(time_us)
        return None if number is None else int(self.value[number])


@dataclass(frozen=True)
class ProcessMemory(Samples):
    """Samples of one process's memory."""

    source: str | None
    #: The kernel's own high-water mark in bytes; exact where samples can miss a short peak.
    high_water: int | None
    #: Why nothing is known, in words; None: something is.
    missing: str | None = None

    @cached_property
    def peak(self) -> int | None:
        """The largest value in bytes, None where nothing is known."""
        return super().peak if self.high_water is None else self.high_water


def process_memory(trace: Trace, process: ProcessTrace, device: str = "cpu") -> ProcessMemory:
    """The memory that ``process`` takes where the tensors of ``device`` live."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        planned = trace.manifest.get("virtual_gpu")
        if planned is not None and not planned["devices"]:
            return _unknown(None, "the run is planned: its large tensors take no memory")
        marks = [value for _, value in _rows(trace, process, "hwm")]
        exact = (trace.manifest.get("process_peak") or {}).get(process.life)
        rss = samples(_rows(trace, process, "rss"))
        high_water = exact if exact is not None else max(marks, default=None)
        missing = None if high_water or len(rss.value) else "it ended before it could be sampled"
        return ProcessMemory(rss.time_us, rss.value, "rss", high_water, missing)
    if kind != "cuda":
        return _unknown(None, f"tensors on {device} take none")
    uuid, why = gpu(trace, process, device)
    if uuid is None:
        return _unknown("nvml", why)
    rows = trace.sampled.get(process.life, {}).get(f"nvml:{uuid}") or _sole(
        trace, process, device, uuid
    )
    if not rows:
        return _unknown("nvml", _statuses(trace).get(uuid) or "no sample of it was taken")
    used = samples(rows)
    return ProcessMemory(used.time_us, used.value, "nvml", None)


def gpu(trace: Trace, process: ProcessTrace, device: str) -> tuple[str | None, str | None]:
    """The UUID by which NVML knows ``device``, a CUDA device of ``process``; or why it is unknown.

    CUDA numbers the devices that a process may use, NVML those of the machine.
    """
    virtual = trace.manifest.get("knowledge") == Knowledge.VIRTUAL
    if virtual or "virtual_gpu" in trace.manifest:
        context = _catalogued(trace, device)
        kind = "virtual" if virtual else "fake"
        return None, f"the GPU is {kind}, so there is no process on it to be measured{context}"
    known = list(_statuses(trace)) or [
        source.partition(":")[2]
        for source in trace.sampled.get(None, {})
        if source.startswith("nvml-used:")
    ]
    if not known:
        sampling = trace.manifest.get("sampling") or {}
        return None, sampling.get("nvml") or "no launcher sampled it"
    own = process.cuda_device(device).get("uuid")
    if own is not None:
        found = [uuid for uuid in known if _bare(uuid) == _bare(own)]
        if found:
            return found[0], None
        return None, f"NVML doesn't list {device} ({own}) or lists its parts (MIG) only"
    if len(known) == 1:
        return known[0], None
    return None, f"it isn't known which of the machine's {len(known)} GPUs {device} is"


def beside(
    trace: Trace, process: ProcessTrace, device: str
) -> tuple[Mapping[str, Samples], int | None]:
    """What is no term of the equations: samples by name where there are any.

    ``used``: of the device, by whomever. ``others``: of these, by others than processes of the run
    and by the driver. ``pinned``: host memory that PyTorch has pinned for transfers; it is the
    CPU's, not the device's.

    Returns:
        The samples, and the size of the device in bytes.
    """
    if device.partition(":")[0] != "cuda":
        return {}, None
    total = process.cuda_device(device).get("total_memory")
    found = {"pinned": _rows(trace, process, "pinned")}
    uuid, _ = gpu(trace, process, device)
    if uuid is not None:
        whole = trace.sampled.get(None, {})
        found |= {name: whole.get(f"nvml-{name}:{uuid}", []) for name in ("used", "others")}
    return {name: samples(rows) for name, rows in found.items() if rows}, total


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


def samples(rows: Sequence[tuple[int, int]]) -> Samples:
    """Samples from (time, value) in any order."""
    time_us, value = np.array(sorted(rows), dtype=np.int64).reshape(-1, 2).T
    return Samples(time_us, value)


def _unknown(source: str | None, why: str | None) -> ProcessMemory:
    nothing = np.array([], dtype=np.int64)
    return ProcessMemory(nothing, nothing, source, None, why)


def _statuses(trace: Trace) -> dict[str, str]:
    """By UUID of each GPU, in words, what NVML could tell of the processes on it."""
    gpus = (trace.manifest.get("sampling") or {}).get("gpus") or []
    return {gpu["uuid"]: gpu["status"] for gpu in gpus}


def virtual_card(trace: Trace, device: str) -> Mapping[str, Any]:
    """The figures of a virtual device, as the catalogue has them; none of another device."""
    devices = (trace.manifest.get("virtual_gpu") or {}).get("devices") or []
    number = cuda_ordinal(device)
    found: Mapping[str, Any] = {}
    if number is not None and number < len(devices):
        found = devices[number]
    return found


def catalogued_context(trace: Trace, device: str) -> int | None:
    """What the catalogue says that a CUDA context takes on a virtual device, in bytes."""
    context: int | None = virtual_card(trace, device).get("context")
    return context


def _catalogued(trace: Trace, device: str) -> str:
    context = catalogued_context(trace, device)
    return "" if context is None else f"; on such a card a context takes {format_size(context)}"


def _bare(uuid: str) -> str:
    """NVML says ``GPU-…`` or ``MIG-…`` where PyTorch gives the rest alone."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def _sole(trace: Trace, process: ProcessTrace, device: str, uuid: str) -> list[tuple[int, int]]:
    """Samples of the only process on a GPU while this one was surely on it: then they are its own.

    So it is known in a container too, where NVML has other process ids. Wrong where a server holds
    the memory of several processes (MPS) and is listed as the only one.
    """
    times = process.events["time_us"][process.contexts_on(device)[process.events["context"]]]
    if len(times) == 0:
        return []
    rows = trace.sampled.get(None, {}).get(f"nvml-sole:{uuid}", [])
    return [(time_us, value) for time_us, value in rows if times.min() <= time_us <= times.max()]


def _rows(trace: Trace, process: ProcessTrace, source: str) -> list[tuple[int, int]]:
    """(time, value) of a source: sampled from outside, or by the process itself."""
    own = process.samples
    return trace.sampled.get(process.life, {}).get(source, []) + [
        (int(time_us), int(value))
        for time_us, pid, name, value in zip(
            own["time_us"], own["pid"], own["source"], own["value"], strict=True
        )
        if pid == process.pid and name == source and value is not None and time_us is not None
    ]
