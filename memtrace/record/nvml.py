"""Memory of GPUs and of the processes on them, as the driver's NVML library tells it.

NVML numbers GPUs in its own order while CUDA's order is each process's own affair
(CUDA_VISIBLE_DEVICES), so what is read here carries the GPU's UUID, which both know.

What NVML can't tell is said in words and never 0: in a container it has the host's process ids,
under WDDM (WSL) no memory by process, on Tegra (Jetson) the GPU has no memory of its own, and a
GPU that is divided (MIG) is asked part by part.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

#: What the driver's structs hold where a value isn't known.
_NOT_AVAILABLE = (1 << 64) - 1

#: Files that only Tegra systems have, and what the second one says there.
_TEGRA_RELEASE, _DEVICE_TREE = "/etc/nv_tegra_release", "/proc/device-tree/compatible"


class Reading(NamedTuple):
    """One value in bytes; ``pid`` None: of the whole GPU."""

    pid: int | None
    source: str
    value: int


def process_source(uuid: str) -> str:
    """The samples of what one process uses of a GPU."""
    return f"nvml:{uuid}"


def used_source(uuid: str) -> str:
    """The samples of what is used of a GPU, by whomever."""
    return f"nvml-used:{uuid}"


def others_source(uuid: str) -> str:
    """The samples of what is used of a GPU by others than processes of the run."""
    return f"nvml-others:{uuid}"


def sole_source(uuid: str) -> str:
    """The samples of the only process on a GPU where its id is none of ours."""
    return f"nvml-sole:{uuid}"


@dataclass
class Gpu:
    """A GPU, or a part of a divided one. ``status`` says how much of it can be seen."""

    handle: Any
    index: str  # NVML's; "0:1" for part 1 of GPU 0
    uuid: str
    name: str | None
    total: int | None  # bytes
    status: str
    seen: bool = True  # whether it still answers when asked for its processes

    def described(self) -> dict[str, Any]:
        """What the manifest keeps of it."""
        keys = ("index", "uuid", "name", "total", "status")
        return {key: getattr(self, key) for key in keys}


class Nvml:
    """All GPUs of the machine. :attr:`status` says what could be seen of the run's processes."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self.gpus: list[Gpu] = []
        self.status = "not sampled"

    def open(self) -> None:
        """Load the driver's library, which may take a second; nothing is seen before."""
        if _is_tegra():
            self.status = (
                "not available: this GPU (Tegra) has no memory of its own, it shares the CPU's"
            )
            return
        try:
            import pynvml
        except ImportError:
            self.status = "not available: the module pynvml isn't installed (nvidia-ml-py)"
            return
        try:
            pynvml.nvmlInit()
            self.gpus = list(_gpus(pynvml))
        except pynvml.NVMLError as error:
            self.status = f"not available: {error}"
            return
        self._nvml = pynvml
        self.status = "no process of the run was on a GPU" if self.gpus else "there is no GPU"

    def read(self, pids: Collection[int]) -> list[Reading]:
        """What each of ``pids`` uses of each GPU where that is known, and each GPU as a whole."""
        if self._nvml is None:
            return []
        found = [reading for gpu in self.gpus for reading in self._read(self._nvml, gpu, pids)]
        told = [gpu.status for gpu in self.gpus if gpu.status != _UNTOLD]
        if told:
            self.status = _BY_PROCESS if _BY_PROCESS in told else told[0]
        return found

    def _read(self, nvml: ModuleType, gpu: Gpu, pids: Collection[int]) -> Iterator[Reading]:
        device_used = _memory(nvml, gpu.handle, "used")
        if device_used is not None:
            yield Reading(None, used_source(gpu.uuid), device_used)
        if not gpu.seen:
            return
        try:
            listed = nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        except nvml.NVMLError as error:
            gpu.status = f"not available: {error}"
            gpu.seen = False
            return
        ours: dict[int, int] = {}
        for process in listed:
            if process.pid not in pids:
                continue
            value = _known(process.usedGpuMemory)
            if value is None:
                gpu.status = "not available: the driver doesn't report memory by process"
                return
            # once for each part of the GPU that the process uses, as with MPS
            ours[process.pid] = ours.get(process.pid, 0) + value
        if ours:
            gpu.status = _BY_PROCESS
            for pid, value in ours.items():
                yield Reading(pid, process_source(gpu.uuid), value)
            if device_used is not None:
                yield Reading(None, others_source(gpu.uuid), device_used - sum(ours.values()))
        elif listed:
            if gpu.status == _UNTOLD:
                gpu.status = (
                    "not available: NVML lists process ids that are none of the run's; in a "
                    "container they are the host's"
                )
            sole = _known(listed[0].usedGpuMemory) if len(listed) == 1 else None
            if sole is not None:
                yield Reading(None, sole_source(gpu.uuid), sole)


_UNTOLD = "no process of the run was on it"
_BY_PROCESS = "by process"


def _is_tegra() -> bool:
    if Path(_TEGRA_RELEASE).exists():
        return True
    try:
        return b"nvidia,tegra" in Path(_DEVICE_TREE).read_bytes()
    except OSError:
        return False


def _gpus(nvml: ModuleType) -> Iterator[Gpu]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        parts = list(_parts(nvml, handle))
        if not parts:
            yield _gpu(nvml, handle, str(index))
        for number, part in parts:
            yield _gpu(nvml, part, f"{index}:{number}")


def _parts(nvml: ModuleType, handle: Any) -> Iterator[tuple[int, Any]]:
    """The parts of a GPU that is divided (MIG); none of one that isn't or can't be."""
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if divided else 0
    except nvml.NVMLError:
        return
    for number in range(slots):
        try:
            yield number, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # nothing in this slot
            continue


def _gpu(nvml: ModuleType, handle: Any, index: str) -> Gpu:
    try:
        name = nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError:
        name = None
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return Gpu(handle, index, uuid, name, _memory(nvml, handle, "total"), _UNTOLD)


def _memory(nvml: ModuleType, handle: Any, field: str) -> int | None:
    """A field of the GPU's memory; None where the driver doesn't tell, as on shared memory."""
    try:
        return _known(getattr(nvml.nvmlDeviceGetMemoryInfo(handle), field))
    except nvml.NVMLError:
        return None


def _known(value: int | None) -> int | None:
    return None if value is None or value == _NOT_AVAILABLE else int(value)
