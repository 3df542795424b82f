"""GPU memory as NVML tells it, on machines that this one isn't."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from memtrace.record import nvml as module
from memtrace.record.nvml import Nvml, Reading

NOT_AVAILABLE = (1 << 64) - 1


class Board:
    """A GPU: what it holds by process id, whether it is divided, and what it refuses to tell."""

    def __init__(
        self,
        uuid: str,
        processes: dict[int, int | None] | None = None,
        *,
        used: int = 1000,
        total: int = 8000,
        parts: "list[Board | None] | None" = None,
        refuses: tuple[str, ...] = (),
    ) -> None:
        self.uuid = uuid
        self.processes = processes or {}
        self.used = used
        self.total = total
        self.parts = parts
        self.refuses = refuses


class FakeNvml(ModuleType):
    """The calls of nvidia-ml-py that are made, as the driver answers them."""

    class NVMLError(Exception):
        pass

    def __init__(self, *boards: Board, driver: str | None = None) -> None:
        super().__init__("pynvml")
        self.boards = boards
        self.driver = driver

    def _ask(self, board: Board, what: str) -> None:
        if what in board.refuses:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        if self.driver:
            raise self.NVMLError(self.driver)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:
        return self.boards[index]

    def nvmlDeviceGetMigMode(self, board: Board) -> list[int]:
        if board.parts is None:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, board: Board) -> int:
        return len(board.parts or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: Board, index: int) -> Board:
        part = (board.parts or [])[index]
        if part is None:
            raise self.NVMLError("Not Found")
        return part

    def nvmlDeviceGetUUID(self, board: Board) -> str:
        return board.uuid

    def nvmlDeviceGetName(self, board: Board) -> str:
        self._ask(board, "name")
        return "NVIDIA A100-SXM4-40GB"

    def nvmlDeviceGetMemoryInfo(self, board: Board) -> Any:
        self._ask(board, "memory")
        return SimpleNamespace(used=board.used, total=board.total, free=board.total - board.used)

    def nvmlDeviceGetComputeRunningProcesses(self, board: Board) -> list[Any]:
        self._ask(board, "processes")
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=value) for pid, value in board.processes.items()
        ]


@pytest.fixture(autouse=True)
def no_tegra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TEGRA_RELEASE", "/nowhere")
    monkeypatch.setattr(module, "_DEVICE_TREE", "/nowhere")


def opened(monkeypatch: pytest.MonkeyPatch, *boards: Board, driver: str | None = None) -> Nvml:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*boards, driver=driver))
    nvml = Nvml()
    nvml.open()
    return nvml


def test_each_process_on_each_gpu_and_what_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = opened(
        monkeypatch,
        Board("GPU-a", {7: 100, 9: 5, 8: 20}, used=200),
        Board("GPU-b", {7: 40}, used=41),
        Board("GPU-c", used=3),
    )
    assert nvml.status == "no process of the run was on a GPU"
    assert nvml.read({7, 8}) == [
        Reading(None, "nvml-used:GPU-a", 200),
        Reading(7, "nvml:GPU-a", 100),
        Reading(8, "nvml:GPU-a", 20),
        Reading(None, "nvml-others:GPU-a", 80),
        Reading(None, "nvml-used:GPU-b", 41),
        Reading(7, "nvml:GPU-b", 40),
        Reading(None, "nvml-others:GPU-b", 1),
        Reading(None, "nvml-used:GPU-c", 3),
    ]
    assert nvml.status == "by process"
    assert nvml.gpus[2].status == "no process of the run was on it"
    assert nvml.gpus[0].described() == {
        "index": "0",
        "uuid": "GPU-a",
        "name": "NVIDIA A100-SXM4-40GB",
        "total": 8000,
        "status": "by process",
    }


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = opened(monkeypatch, driver="Driver Not Loaded")
    assert nvml.read({7}) == []
    assert nvml.status == "not available: Driver Not Loaded"


def test_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml = Nvml()
    nvml.open()
    assert nvml.read({7}) == []
    assert nvml.status == "not available: the module pynvml isn't installed (nvidia-ml-py)"


@pytest.mark.parametrize("value", [None, NOT_AVAILABLE])
def test_a_driver_that_keeps_memory_by_process_to_itself(
    value: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WDDM, as below WSL: the operating system owns the memory."""
    nvml = opened(monkeypatch, Board("GPU-a", {7: value, 8: 100}))
    assert nvml.read({7, 8}) == [Reading(None, "nvml-used:GPU-a", 1000)]
    assert nvml.status == "not available: the driver doesn't report memory by process"


def test_a_container_where_the_ids_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = opened(monkeypatch, Board("GPU-a", {90007: 100, 90008: 5}))
    assert nvml.read({7}) == [Reading(None, "nvml-used:GPU-a", 1000)]
    assert nvml.status == (
        "not available: NVML lists process ids that are none of the run's; in a container they "
        "are the host's"
    )


def test_the_only_process_on_a_gpu_is_kept_apart_until_it_is_known_whose_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = opened(monkeypatch, Board("GPU-a", {90007: 100}))
    assert Reading(None, "nvml-sole:GPU-a", 100) in nvml.read({7})


def test_a_divided_gpu_is_asked_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Board("MIG-x", {7: 10}, used=12, total=900), None, Board("MIG-y", used=1, total=900)]
    nvml = opened(monkeypatch, Board("GPU-a", {7: 77}, parts=parts))
    assert nvml.read({7}) == [
        Reading(None, "nvml-used:MIG-x", 12),
        Reading(7, "nvml:MIG-x", 10),
        Reading(None, "nvml-others:MIG-x", 2),
        Reading(None, "nvml-used:MIG-y", 1),
    ]
    assert [gpu.index for gpu in nvml.gpus] == ["0:0", "0:2"]


def test_a_gpu_that_tells_only_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = opened(
        monkeypatch,
        Board("GPU-a", {7: 10}, refuses=("processes",)),
        Board("GPU-b", {7: 20}, refuses=("memory", "name")),
    )
    for _ in range(2):
        assert nvml.read({7}) == [
            Reading(None, "nvml-used:GPU-a", 1000),
            Reading(7, "nvml:GPU-b", 20),
        ]
    assert nvml.gpus[0].status == "not available: Not Supported"
    assert (nvml.gpus[1].name, nvml.gpus[1].total) == (None, None)
    assert nvml.status == "by process"


def test_memory_that_is_the_cpus_as_well(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compatible = tmp_path / "compatible"
    compatible.write_bytes(b"nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0")
    monkeypatch.setattr(module, "_DEVICE_TREE", str(compatible))
    nvml = opened(monkeypatch, Board("GPU-a", {7: 10}))
    assert nvml.read({7}) == []
    assert nvml.status == (
        "not available: this GPU (Tegra) has no memory of its own, it shares the CPU's"
    )


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = opened(monkeypatch)
    assert nvml.read({7}) == []
    assert nvml.status == "there is no GPU"
