"""The memory of fake GPUs: the simulator of PyTorch's caching allocator, one for each card.

It keeps the history and the statistics that PyTorch's own allocator would (``torch.cuda``'s memory
functions find them through :mod:`memtrace.fake_gpu.binding`), so the recorder reads them as it does
on a card. A storage may die while the allocator is at work, since looking for garbage ends many;
what it held is then given back as soon as the allocator has finished.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from memtrace import devices
from memtrace.allocator.device import Device
from memtrace.allocator.log import Log
from memtrace.allocator.native import NativeAllocator
from memtrace.allocator.oom import OutOfMemory
from memtrace.allocator.pools import Block
from memtrace.allocator.settings import Settings, Version
from memtrace.allocator.statistics import Running
from memtrace.fake_gpu.history import Frames, History, stack
from memtrace.fake_gpu.tensors import Lease, leases

#: Values of a log that are kept before they are counted.
_STRETCH = 1 << 17
_NO_FRAMES: Frames = []


class _Thread(threading.local):
    """What PyTorch keeps for each thread."""

    text = ""


class CardMemory:
    """One card: its allocator, what that did, and what it counts."""

    def __init__(self, card: devices.Device, settings: Settings, version: Version) -> None:
        self.card = card
        self.device = Device(card.total, card.context or 0)
        self.allocator = NativeAllocator(self.device, settings, version)
        self.counters = Running()
        #: None: none is kept.
        self.history: History | None = None

    def note(self, text: str, frames: Frames, annotated: int = 0) -> None:
        """Keep what the allocator just did, or the annotation of the block at an address."""
        logged, history = self.allocator.logged, self.history
        if history is not None:
            end = len(history.logged) + len(logged)
            history.calls += (end, time.time_ns(), text, frames, annotated)
        if len(logged) >= _STRETCH:
            self.count()

    def count(self) -> Running:
        """The statistics up to now."""
        if self.allocator.logged:
            logged = self.allocator.drain_values()
            self.counters.add(Log.of(logged))
            if self.history is not None:
                self.history.logged += logged
        return self.counters

    def entries(self) -> list[dict[str, Any]]:
        """The history up to now, as PyTorch's snapshots have it."""
        self.count()
        return [] if self.history is None else self.history.entries()


class FakeMemory:
    """The memory of all cards, and what PyTorch keeps of it beside."""

    def __init__(
        self, cards: list[devices.Device], settings: Settings, version: Version, conf: str
    ) -> None:
        self.cards = [CardMemory(card, settings, version) for card in cards]
        self.settings = settings
        self.keeps_workspace = version < (2, 15)
        self.conf = conf
        self.observers: list[Callable[[int, int, int, int], object]] = []
        #: Of the stream that a thread is on, by device; set by :mod:`memtrace.fake_gpu.streams`.
        self.stream_of: Callable[[int], int] = lambda device: 0
        self._recording = False
        self._stacks = False
        self._thread = _Thread()
        #: Workspaces of cuBLAS: their addresses by thread, card and stream.
        self._workspaces: dict[tuple[int, int, int], int] = {}
        self._lock = threading.RLock()
        self._busy = False
        self._dead: deque[tuple[int, int]] = deque()

    # -- storages ------------------------------------------------------------------------------

    def allocate(self, storage: torch.UntypedStorage, size: int, device: torch.device) -> None:
        """As :class:`memtrace.fake_gpu.tensors.Memory` has it.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        number = device.index or 0
        address = self.malloc(size, number, self.stream_of(number))
        lease = Lease(storage, self._died)
        lease.address, lease.device, lease.size = address, number, size
        lease.key = key = storage._cdata
        leases[key] = lease

    def settle(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """As :class:`memtrace.fake_gpu.tensors.Memory` has it."""
        before, size = leases.get(storage._cdata), storage.nbytes()
        if before is None or before.size != size:
            self.allocate(storage, size, device)
            if before is not None:
                self.free(before.address, before.device)

    def hold(self, size: int, device: torch.device) -> int:
        """The address of a block for scratch memory."""
        number = device.index or 0
        return self.malloc(size, number, self.stream_of(number))

    def let_go(self, address: int, device: torch.device) -> None:
        """Give it back."""
        self.free(address, device.index or 0)

    def workspace(self, device: torch.device) -> None:
        """A matrix product is computed. A thread keeps a workspace of cuBLAS for each stream from
        its first product on, up to torch 2.14; from 2.15 on it is taken for each."""
        number = device.index or 0
        size = self.cards[number].card.cublas_workspace
        stream = self.stream_of(number)
        if not self.keeps_workspace:
            self.free(self.malloc(size, number, stream), number)
            return
        owner = (threading.get_ident(), number, stream)
        if owner not in self._workspaces:
            self._workspaces[owner] = self.malloc(size, number, stream)

    def clear_workspaces(self) -> None:
        """Every thread gives its workspaces back; the next product takes one anew."""
        while self._workspaces:
            (_, number, _), address = self._workspaces.popitem()
            self.free(address, number)

    def card(self, device: torch.device) -> devices.Device:
        """The figures of a card."""
        return self.cards[device.index or 0].card

    def record_stream(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """Another stream uses a storage."""
        lease = leases.get(storage._cdata)
        if lease is not None:
            with self._lock:
                self.cards[lease.device].allocator.record_stream(lease.address, stream.stream_id)

    def _died(self, dead: Any) -> None:
        lease: Lease = dead
        if leases.get(lease.key) is dead:
            del leases[lease.key]
            self.free(lease.address, lease.device)

    # -- the allocator -------------------------------------------------------------------------

    def malloc(self, size: int, device: int, stream: int) -> int:
        """The address of a block.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        card = self.cards[device]
        with self._lock:
            self._busy = True
            try:
                return card.allocator.malloc(size, stream)
            except OutOfMemory as error:
                failure = error.failure
            finally:
                self._done(card)
        for observer in self.observers:
            observer(device, failure.wanted, failure.total, failure.free)
        raise torch.OutOfMemoryError(failure.message(device))

    def free(self, address: int, device: int) -> None:
        """Give a block back; while the allocator works, once it has finished."""
        if not address:
            return
        with self._lock:
            if self._busy:
                self._dead.append((address, device))
                return
            self._busy = True
            card = self.cards[device]
            try:
                card.allocator.free(address)
            finally:
                self._done(card)

    def call(self, device: int, what: Callable[[NativeAllocator], object]) -> None:
        """Have the allocator of a card do something."""
        with self._lock:
            self._busy = True
            try:
                what(self.cards[device].allocator)
            finally:
                self._done(self.cards[device])

    def _done(self, card: CardMemory) -> None:
        """Keep what was done, and give back what died meanwhile."""
        card.note(self._thread.text, stack() if self._stacks else _NO_FRAMES)
        self._busy = False
        while self._dead:
            self.free(*self._dead.popleft())

    # -- history, as torch._C has it -------------------------------------------------------------

    def record(self, enabled: str | None, context: str | None, *, clear: bool) -> None:
        """Begin or stop to keep the history."""
        with self._lock:
            self._recording = enabled == "all"
            self._stacks = self._recording and context is not None
            for card in self.cards:
                card.count()  # what was done until now is no part of a new history
                if not self._recording:
                    card.history = None
                elif clear or card.history is None:
                    card.history = History()

    @property
    def text(self) -> str:
        """The memory metadata of the calling thread."""
        return self._thread.text

    @text.setter
    def text(self, text: str) -> None:
        self._thread.text = text

    def annotate(self, address: int, text: str) -> None:
        """Note in the history what the block at ``address`` is."""
        if not self._recording:
            return
        with self._lock:
            for card in self.cards:
                if card.allocator.holds(address):
                    card.note(text, _NO_FRAMES, address)

    def snapshot(self, *, traces: bool) -> dict[str, Any]:
        """As ``torch.cuda.memory._snapshot()`` gives it."""
        with self._lock:
            return {
                "segments": [
                    _segment(number, blocks)
                    for number, card in enumerate(self.cards)
                    for blocks in card.allocator.segments()
                ],
                "device_traces": [card.entries() if traces else [] for card in self.cards],
                "allocator_settings": self.settings.to_snapshot(self.conf),
                "external_annotations": [],
            }

    def statistics(self, device: int) -> dict[str, Any]:
        """As ``torch._C._cuda_memoryStats`` gives it."""
        with self._lock:
            return self.cards[device].count().nested()

    @property
    def recording(self) -> bool:
        """Whether a history is kept."""
        return self._recording

    def set_fraction(self, device: int, fraction: float) -> None:
        """``torch.cuda.set_per_process_memory_fraction``."""
        allocator = self.cards[device].allocator
        allocator.fraction = fraction
        allocator.allowed = int(fraction * self.cards[device].card.total)
        allocator.collects = self.settings.gc_threshold > 0

    def reset(self, device: int, *, peaks: bool) -> None:
        """Set the peaks back, or what was counted since the beginning."""
        with self._lock:
            counters = self.cards[device].count()
            counters.reset_peaks() if peaks else counters.reset_accumulated()


def _segment(device: int, blocks: list[Block]) -> dict[str, Any]:
    first = blocks[0]
    mapped = [one for one in blocks if one.mapped]
    return {
        "device": device,
        "address": first.address,
        "total_size": sum(one.size for one in mapped),
        "allocated_size": sum(one.size for one in mapped if one.allocated),
        "active_size": sum(one.size for one in mapped if not one.is_free),
        "requested_size": sum(one.requested for one in mapped if not one.is_free),
        "stream": first.stream,
        "segment_type": "small" if first.pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": first.segment is not None,
        "frames": [],
        "blocks": [
            {
                "address": one.address,
                "size": one.size,
                "requested_size": one.requested,
                "state": _state(one),
                "frames": [],
            }
            for one in mapped
        ],
    }


def _state(block: Block) -> str:
    if block.is_free:
        return "inactive"
    return "active_allocated" if block.allocated else "active_pending_free"
