"""A recorded device and its history, for an allocator to live through again."""

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from memtrace.allocator.device import Device
from memtrace.allocator.requests import before_of, fraction_of, pools_of
from memtrace.allocator.simulation import ENDLESS
from memtrace.allocator.warm import Event
from memtrace.errors import MemtraceError
from memtrace.trace.reader import ProcessTrace
from memtrace.trace.schema import Action

RETURNED = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
TAKEN = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
#: Larger than what any process maps into one expandable segment.
_ROOM = 1 << 42


class Difference(Exception):
    """The simulator did something that the recording didn't; says what."""


class Recording(Device):
    """A device that answers as it did in a recording.

    ``script``: the segments that the allocation under way took and gave back, in order.
    """

    def __init__(self, total: int, upcoming: Callable[[], int]) -> None:
        super().__init__(total)
        self.script: deque[Event] = deque()
        self.reordered = 0
        self._upcoming = upcoming

    def _takes(self, action: Action, size: int) -> int | None:
        """The address that the recording took then; None: it got nothing."""
        if not self.script or self.script[0][0] != action:
            return None
        event = self.script.popleft()
        if event[2] != size:
            raise Difference(f"{size} bytes were asked of the device, not {event[2]}")
        return event[1]

    def malloc(self, size: int) -> int | None:
        return self._takes(Action.SEGMENT_ALLOC, size)

    def map(self, size: int, page: int) -> bool:
        return self._takes(Action.SEGMENT_MAP, size) is not None

    def reserve(self, size: int) -> int:
        mapped = (event[1] for event in self.script if event[0] == Action.SEGMENT_MAP)
        return next(mapped, None) or self._upcoming()

    def free(self, address: int, size: int) -> None:
        """Segments of private pools go back in the order of a hash table, which nobody knows."""
        for place, event in enumerate(self.script):
            if event[0] not in RETURNED:
                break
            if event[1:3] == (address, size):
                del self.script[place]
                self.reordered += place > 0
                return
        raise Difference(f"the segment at {address:#x} was given back, which stayed")

    def unmap(self, size: int) -> None:
        if self.script and self.script[0][0] == Action.SEGMENT_UNMAP:
            self.script.popleft()


class History:
    """The events of one device, but for retags."""

    def __init__(self, process: ProcessTrace, device: str, rows: np.ndarray) -> None:
        self.process = process
        self.device = device
        self.rows = rows
        events, contexts = process.events, process.contexts
        context = events["context"][rows]
        _, pool = pools_of(process, context)
        self.columns = (
            np.asarray(contexts["action"])[context],
            events["id"][rows],
            events["bytes"][rows],
            events["requested"][rows],
            np.asarray(contexts["stream"])[context],
            pool[context],
        )
        before = before_of(process)[context]
        #: How many of the first events tell what was there before, and how many blocks that were.
        self.seeded = len(rows) if before.all() else int(before.argmin())
        self.warm = int(np.count_nonzero(self.columns[0][: self.seeded] == Action.ALLOC))
        self.at = 0
        #: Memory of the device decides how many addresses an expandable segment takes.
        total, self.fraction = self._device()
        self.recording = Recording(total, self._upcoming)

    @classmethod
    def of(cls, process: ProcessTrace, device: str) -> "History":
        contexts = process.contexts
        used = process.contexts_on(device) & (contexts["action"] != Action.RETAG)
        history = cls(process, device, np.flatnonzero(used[process.events["context"]]))
        if not np.isin(history.columns[0], TAKEN).any():
            raise MemtraceError(f"{device} has no segments: its allocator wasn't recorded")
        return history

    def _device(self) -> tuple[int, float | None]:
        """Memory of the device, and what share of it may be reserved, as far as it is known."""
        found = self.process.cuda_device(self.device)
        if not found.get("total_memory"):
            return ENDLESS, None
        return int(found["total_memory"]), fraction_of(found)

    def mapped(self) -> list[Event]:
        """What is mapped after what was there before."""
        rows = np.flatnonzero(self.columns[0] == Action.SEGMENT_MAP)
        rows = rows[rows >= self.seeded]
        columns = (column[rows].tolist() for column in self.columns)
        return list(zip(*columns, strict=True))

    def _upcoming(self) -> int:
        """Where the next page will be mapped that doesn't continue anything."""
        mapped = self.columns[0][self.at :] == Action.SEGMENT_MAP
        later = np.flatnonzero(mapped)
        return int(self.columns[1][self.at + later[0]]) if len(later) else _ROOM

    def __iter__(self) -> Iterator[Event]:
        for start in range(0, len(self.rows), 1 << 16):
            stretch = (column[start : start + (1 << 16)].tolist() for column in self.columns)
            for event in zip(*stretch, strict=True):
                self.at += 1
                yield event
