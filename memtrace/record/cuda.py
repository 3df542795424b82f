"""The CUDA source: PyTorch's own allocator history, with our names in it.

The allocator writes down every block, segment and failure, of every operator and every scratch
buffer inside one. Each thread's memory metadata says which component and scope it stands in, and an
annotation says what a tensor becomes; see :mod:`memtrace.allocator.metadata`. The history is a
ring: it is drained into the trace between requests and before it is full. What was lost
all the same is found by comparing with the allocator's own state, and said.
"""

import gc
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from memtrace.allocator.history import BEFORE, MISSED, History
from memtrace.allocator.layout import Layout
from memtrace.allocator.metadata import Names, retag_text
from memtrace.allocator.settings import Settings
from memtrace.record.interrupts import uninterrupted
from memtrace.record.ledger import Frame, Ledger
from memtrace.record.tensors import HIDDEN, TensorSource
from memtrace.record.timed import TimedTexts
from memtrace.record.workspace import FirstProduct

#: Entries that the ring of one device holds, and bytes that each takes.
RING = 1 << 18
_ENTRY_BYTES = 170
#: Entries at which it is drained, and seconds after which it is in any case: what a killed process
#: can lose.
_FULL = 3 << 15
_STALE_SECONDS = 5.0
#: Seconds that a thread which allocates has to drain it.
_PATIENCE_SECONDS = 0.1

_NEVER: Any = object()
_function_mode_active = torch._C._is_torch_function_mode_enabled
#: Types of tensors that have the storage that they show.
_PLAIN = (Tensor, torch.nn.Parameter)

#: More than a drain takes.
_UNINTERRUPTED_SECONDS = 60.0

#: The sources of our samples, and where ``memory_stats()`` has them.
_SAMPLED = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "active": "active_bytes",
    "inactive_split": "inactive_split_bytes",
    "requested": "requested_bytes",
}


def unsupported() -> str | None:
    """Why this process's CUDA allocator can't be recorded; None: it can."""
    if not hasattr(torch._C, "_cuda_record_memory_history"):
        return "this PyTorch is built without CUDA"
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        return f"the allocator {backend} keeps no history"
    return None


class CudaSource:
    """Feeds a ledger with the allocator history of every CUDA device of this process.

    Args:
        ledger: where the events go.
        place: holds the frame that the running code stands in.
        stacks: Python frames kept for each allocation; 0 keeps none.
        older: threads from before the recording, which may allocate unseen.
    """

    def __init__(
        self,
        ledger: Ledger,
        place: ContextVar[Frame],
        stacks: int,
        older: Iterable[threading.Thread] = (),
    ) -> None:
        self._ledger = ledger
        self._place = place
        self._stacks = stacks
        self._host = TensorSource(ledger, place, stacks)
        self._names = _FrameNames(ledger, HIDDEN, stacks)
        self._texts: dict[tuple[str, tuple[str, ...] | None, int], str] = {}
        self._over: list[int] = []  # scopes, since the last drain
        self._histories: list[History] = []
        self._devices: list[dict[str, Any]] = []
        self._allocator_settings: Mapping[str, Any] = {}
        self._counts: list[tuple[int, int]] = []
        self._retries: list[int] = []
        self._read: list[int] = []  # entries of each history that were read and still stand
        # What the installed PyTorch can't write into its history is matched by time.
        self._timed = TimedTexts()
        binding = torch._C
        self.announce: Callable[[str], None] = getattr(
            binding, "_cuda_setMemoryMetadata", self._timed.announce
        )
        self.annotate: Callable[[int, str], None] = getattr(
            binding, "_cuda_annotateMemory", self._timed.annotate
        )
        self._entered = threading.local()
        #: Threads that may allocate: those that ran an operator, or that nobody watches.
        self.working = weakref.WeakSet(older)
        self._draining = threading.RLock()
        self._drained = self._due_since = time.monotonic()
        #: Whether the history should be drained by the next one who can.
        self.due = False
        #: Events that were lost, or that no allocator could have written.
        self.missed = 0

    # -- life ----------------------------------------------------------------------------------

    def of_thread(self) -> "CudaSource":
        """This source, entered in the calling thread if it wasn't."""
        entered = self._entered
        mode = getattr(entered, "mode", _NEVER)
        if mode is _NEVER:
            entered.mode = FirstProduct(self, self._ledger, self._place)
            entered.mode.__enter__()
            self.announce(self._place.get().text)
        elif mode is not None and mode.over and mode.leave():
            entered.mode = None
        if self.due:
            self.drain()
        return self

    def leave(self) -> None:
        """Take what is entered out of the calling thread."""
        mode = getattr(self._entered, "mode", None)
        if mode is not None:
            mode.leave()

    def start(self) -> None:
        """Begin: what is allocated already belongs to ``other`` until it is retagged."""
        self._record("all")
        self.announce(self._place.get().text)
        snapshot = torch.cuda.memory._snapshot()
        self._allocator_settings = snapshot.get("allocator_settings") or {}
        settings = Settings.of_snapshot(self._allocator_settings)
        # Times of entries are those of the system's clock; ours count from the run's epoch.
        zero_us = time.time_ns() // 1000 - self._ledger.now_us()
        scope = self._ledger.scope(0, "op", BEFORE)
        for index in range(torch.cuda.device_count()):
            device = f"cuda:{index}"
            layout = Layout.of_segments(_of_device(snapshot, index), settings)
            workspace = None if _keeps_workspace() else _workspace(index)
            history = History(device, layout, self._ledger, self._names, zero_us, workspace)
            self._ledger.append(history.seed(self._ledger.now_us(), "other", scope))
            self._histories.append(history)
            stats = torch._C._cuda_memoryStats(index)
            self._counts.append(_counts(stats))
            self._read.append(0)
            self._retries.append(stats["num_alloc_retries"])

        global _observed
        if not _observed:  # there is no way to take an observer back
            _observed = True
            attach: Any = torch._C  # the typed stubs don't know it
            attach._cuda_attach_out_of_memory_observer(_out_of_memory)
        _followed.append(self)
        self._devices = [_device(index) for index in range(torch.cuda.device_count())]

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the devices and the allocator."""
        return {
            "devices": [one | {"memory_fraction": _fraction(one)} for one in self._devices],
            "allocator_settings": self._allocator_settings,
            "missed": self.missed,
        }

    def stop(self) -> None:
        """Drain the history, and let PyTorch keep it no longer."""
        _followed.remove(self)
        self.drain()
        self._record(None)
        if hasattr(torch._C, "_cuda_setMemoryMetadata"):
            torch._C._cuda_setMemoryMetadata("")

    def _record(self, enabled: Literal["all"] | None) -> None:
        torch.cuda.memory._record_memory_history(
            enabled,
            context="alloc" if self._stacks else None,
            stacks="python",
            max_entries=RING,
            clear_history=True,
            global_record_annotations=True,  # those of a thread can't be taken back in another
        )

    # -- Source --------------------------------------------------------------------------------

    def retag(self, tensor: Tensor, component: str, *, only: tuple[str, ...] | None = None) -> None:
        """As :class:`memtrace.record.source.Source` has it."""
        if type(tensor) in _PLAIN and not _function_mode_active() and tensor.is_cuda:
            self._retag_block(tensor.untyped_storage().data_ptr(), component, only)
            return
        with torch._C.DisableTorchFunction():
            if not tensor.is_cuda:
                self._host.retag(tensor, component, only=only)
                return
            for _, storage in self._host.storages(tensor):
                self._retag_block(storage.data_ptr(), component, only)

    def _retag_block(self, address: int, component: str, only: tuple[str, ...] | None) -> None:
        if address:  # what is empty has no block
            self.annotate(address, self._retag_text(component, only))

    def _retag_text(self, component: str, only: tuple[str, ...] | None) -> str:
        scope = self._place.get().scope
        text = self._texts.get((component, only, scope))
        if text is None:
            text = retag_text(component, self._ledger.path(scope), only)
            self._texts[component, only, scope] = text
        return text

    def adopt(self, tensor: Tensor, component: str) -> None:
        """As :class:`memtrace.record.source.Source` has it; the history misses no block."""
        if not tensor.is_cuda:
            self._host.adopt(tensor, component)

    # -- draining ------------------------------------------------------------------------------

    def look(self) -> None:
        """See how full the ring is; called from the writing thread."""
        now = time.monotonic()
        if self.due:
            # Best done by a thread that allocates, since what another does meanwhile is missed; but
            # a program without modules and scopes never asks.
            if now - self._due_since > _PATIENCE_SECONDS:
                self.drain()
            return
        for index, before in enumerate(self._counts):
            # An allocation is one entry, or two with its segment; a free is two.
            new = 2 * abs(sum(_counts(torch._C._cuda_memoryStats(index))) - sum(before))
            if new >= _FULL or (new and now - self._drained >= _STALE_SECONDS):
                self.due, self._due_since = True, now

    def request_ended(self) -> Mapping[str, Any] | None:
        """Drain at the border of a request, if this thread alone allocates.

        Otherwise what was read would have to stay, and be read again at the next border.

        Returns:
            PyTorch's snapshot, which the events lead to; None: it wasn't taken.
        """
        if not self._alone():
            return None
        with self._draining, uninterrupted(), _undisturbed():
            return self._drain()

    def over(self, scope: int) -> None:
        """As :meth:`memtrace.record.ledger.Ledger.over`: once the history has been read, too."""
        self._over.append(scope)

    def component_of(self, device: int, address: int) -> str | None:
        """The component of the block there after the last drain; None: free."""
        layout = self._histories[device].layout
        block = layout.live.get(address) or layout.pending.get(address)
        return None if block is None else block.tag.component

    def drain(self) -> None:
        """Move the history into the trace, and sample what the allocator counts itself."""
        with self._draining, uninterrupted(), _undisturbed():
            self._drain()  # what it returns is gone before anyone looks for garbage in it

    def _alone(self) -> bool:
        """Whether no other thread of Python's can allocate now.

        One that was started under recording and ran no operator yet, such as the monitor of a
        progress bar, doesn't.
        """
        here = threading.current_thread()
        return not any(one in self.working and one is not here for one in threading.enumerate())

    def _drain(self) -> Mapping[str, Any]:
        """
        Returns:
            The snapshot that was read.
        """
        self.due = False
        self._drained = time.monotonic()
        before = [_counts(torch._C._cuda_memoryStats(i)) for i in range(len(self._histories))]
        # Between reading and clearing another thread could allocate, and its entries would be lost.
        # So where there is one the history stays while there is room, and what was read before is
        # skipped. Without room the few events that are lost then are counted as missed.
        cleared = self._alone() or max(self._read, default=0) > RING // 2
        snapshot = torch.cuda.memory._snapshot()
        if cleared:
            self._record("all")
        timed = self._timed.take()
        if pinned := torch.cuda.host_memory_stats().get("allocated_bytes.current"):
            self._ledger.sample("pinned", pinned)
        for index, history in enumerate(self._histories):
            stats = torch._C._cuda_memoryStats(index)
            quiet = before[index] == _counts(stats)  # no other thread came between
            self._drain_device(index, history, snapshot, timed, stats, quiet)
            self._read[index] = 0 if cleared else len(snapshot["device_traces"][index])
        self._forget()
        return snapshot

    def _forget(self) -> None:
        """What is known of places in requests that are over."""
        if not self._over:
            return
        while self._over:
            self._ledger.over(self._over.pop())
        self._texts.clear()
        self._names.forget()
        for history in self._histories:
            history.forget()

    def _drain_device(
        self,
        index: int,
        history: History,
        snapshot: Mapping[str, Any],
        timed: TimedTexts,
        stats: Mapping[str, Any],
        quiet: bool,
    ) -> None:
        ledger = self._ledger
        entries = snapshot["device_traces"][index]
        if len(entries) < RING:  # else the oldest were overwritten
            entries = entries[self._read[index] :]
        retries = stats["num_alloc_retries"]
        # The program may have set the counter back to 0.
        tried = retries - self._retries[index] if retries >= self._retries[index] else retries
        impossible = history.impossible
        rows = history.read(timed.merged(entries), tried)
        self.missed += history.impossible - impossible
        ledger.append(rows)
        ledger.note_buffers(rows.nbytes + len(entries) * _ENTRY_BYTES)
        # PyTorch reads entries and segments one after the other. If others allocated in between,
        # the segments are ahead, and the next drain has the entries.
        if quiet or history.impossible > impossible:
            state = Layout.of_segments(_of_device(snapshot, index), history.layout.settings)
            if not history.layout.same_as(state):
                scope = ledger.scope(0, "op", MISSED)
                rows = history.resume(state, ledger.now_us(), scope)
                ledger.append(rows)
                self.missed += len(rows)
        self._counts[index], self._retries[index] = _counts(stats), retries
        if quiet and any(_counts(stats)):
            for source, key in _SAMPLED.items():
                ledger.sample(f"{source}:{history.device}", stats[key]["all"]["current"])


class _FrameNames(Names):
    """Reads the texts of frames too, which are short: every entry of the history holds one."""

    def __init__(self, ledger: Ledger, hidden: tuple[str, ...], depth: int) -> None:
        super().__init__(ledger, hidden, depth)
        self._frame_of = ledger.frame_of

    def birth(self, metadata: str) -> tuple[str, int]:
        """As :class:`Names` has it."""
        frame = self._frame_of(metadata)
        return super().birth(metadata) if frame is None else (frame.component, frame.scope)


#: Sources that record now: at most one.
_followed: list[CudaSource] = []
_observed = False


def _out_of_memory(device: int, requested: int, limit: int, free: int) -> None:
    """The allocator is about to raise: keep what led to it, whatever comes next."""
    for source in _followed:
        with suppress(Exception):  # it would replace the user's
            source.drain()


def _keeps_workspace() -> bool:
    """Whether the workspace of cuBLAS lives on after a product, as up to torch 2.14."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version < (2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _workspace(index: int) -> int:
    """Bytes of the workspace, as ``at::cuda::getChosenWorkspaceSize`` has them."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * 1024
    major, _ = torch.cuda.get_device_capability(index)
    return 32 << 20 if major >= 9 else (4096 * 2 + 16 * 8) * 1024


def _device(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {
        "ordinal": index,
        "name": found.name,
        "uuid": str(found.uuid),
        "total_memory": found.total_memory,
    }


def _fraction(device: Mapping[str, Any]) -> float | None:
    """The share of a device that its allocator may reserve; None: this PyTorch doesn't say."""
    if not hasattr(torch._C, "_cuda_getMemoryFraction"):
        return None
    return torch.cuda.get_per_process_memory_fraction(device["ordinal"])


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Neither look for garbage nor let other threads run meanwhile.

    Each entry becomes a dictionary, and all live: looking for garbage among them takes two thirds
    of the time. And a thread that goes on allocating would fill the ring again meanwhile.
    """
    collecting, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(_UNINTERRUPTED_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if collecting:
            gc.enable()


def _of_device(snapshot: Mapping[str, Any], index: int) -> list[Mapping[str, Any]]:
    return [segment for segment in snapshot["segments"] if segment["device"] == index]


def _counts(stats: Mapping[str, Any]) -> tuple[int, int]:
    """Blocks that were ever handed out and ever freed."""
    both = stats["allocation"]["all"]
    return both["allocated"], both["freed"]
