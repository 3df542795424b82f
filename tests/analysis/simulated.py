"""Traces of programs on the simulated allocator, for verdicts that are known beforehand."""

from pathlib import Path
from typing import Any

from memtrace.allocator.caching import Completion
from memtrace.allocator.device import Device
from memtrace.allocator.log import Log
from memtrace.allocator.native import NativeAllocator
from memtrace.allocator.oom import OutOfMemory
from memtrace.allocator.settings import NEWEST, Settings, Version
from memtrace.trace.schema import Action
from tests.synthetic import History

CUDA = "cuda:0"
MiB = 1 << 20


class Program:
    """What a program does on one device, and the trace of it."""

    def __init__(
        self,
        total: int,
        conf: str = "",
        *,
        outside: int = 0,
        fraction: float | None = None,
        completion: Completion = "soon",
        torch: Version = NEWEST,
    ) -> None:
        self.history = History()
        self.failed: list[str] = []  # what PyTorch would have said of each failure
        self._total, self._fraction, self._conf = total, fraction, conf
        self._torch = torch
        self._component: dict[int, str] = {}  # by address
        self._allocator = NativeAllocator(
            Device(total, outside),
            Settings.parse(conf, torch),
            torch,
            fraction=fraction,
            completion=completion,
        )

    def alloc(
        self, size: int, component: str = "Act", stream: int = 0, pool: int | None = None
    ) -> int:
        """The address; 0 where it failed."""
        try:
            address = self._allocator.malloc(size, stream, pool)
        except OutOfMemory as error:
            self.failed.append(str(error))
            address = 0
        self._write(self._allocator.drain(), component, pool)
        return address

    def free(self, address: int, by: int = 0) -> None:
        """``by``: a stream that used it too."""
        if by:
            self._allocator.record_stream(address, by)
        self._allocator.free(address)
        self._write(self._allocator.drain())

    def empty_cache(self) -> None:
        self._allocator.empty_cache()
        self._write(self._allocator.drain())

    def write(self, folder: Path) -> Path:
        device = {"ordinal": 0, "name": "Simulated", "uuid": "0", "total_memory": self._total}
        cuda: dict[str, Any] = {
            "devices": [device],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self._conf},
            "missed": 0,
        }
        if self._fraction is not None:
            device["memory_fraction"] = self._fraction
        return self.history.write(
            folder, process={"cuda": cuda, "torch": ".".join(map(str, self._torch)) + ".0"}
        )

    def _write(self, log: Log, component: str = "", asked: int | None = None) -> None:
        rows = log.rows.tolist()
        skip = False
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            _, action, address, size, requested, stream, pool, *_ = row
            if skip or action > max(Action):
                skip = False
                continue
            if action == Action.ALLOC:
                self._component[address] = component
            if action == Action.FREE_REQUESTED and following is not None:
                completed = following[1:3] == [Action.FREE_COMPLETED, address]
                action, skip = (Action.FREE, True) if completed else (action, False)
            number = pool // 2 or (asked or 0 if action == Action.OOM else 0)
            block = action in (Action.ALLOC, Action.FREE, *_LATE)
            self.history.event(
                action,
                address,
                size,
                self._component[address] if block else None,
                device=CUDA,
                requested=requested if block else size,
                stream=stream,
                pool=f"0.{number}" if number else None,
            )


_LATE = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
