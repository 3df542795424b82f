"""What the caching allocator says of itself between two requests: its counters and its blocks.

Neither depends on our events: that they agree with them is a check of both, and where no events are
booked (``--source none``) they are what there is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memtrace.allocator.layout import pool_name
from memtrace.allocator.metadata import Names
from memtrace.record.ledger import Ledger
from memtrace.record.tensors import HIDDEN
from memtrace.trace.schema import State

#: The states of blocks by PyTorch's words; what PyTorch's documentation calls
#: active_awaiting_free is active_pending_free in its code.
_STATES = {
    "inactive": State.FREE,
    "active_allocated": State.ALLOCATED,
    "active_pending_free": State.PENDING,
    "active_awaiting_free": State.PENDING,
}
_CURRENT = ("allocated", "reserved", "active", "requested", "inactive_split")
_PEAKS = ("allocated", "reserved", "inactive_split")

#: (device, address) of an allocated block → its component; None: not booked.
ComponentOf = Callable[[int, int], str | None]


class Boundaries:
    """Writes a row for each CUDA device after each request.

    Args:
        ledger: where the rows go.
        stacks: Python frames kept for each block, where PyTorch keeps them.
    """

    def __init__(self, ledger: Ledger, stacks: int) -> None:
        self._ledger = ledger
        self._names = Names(ledger, HIDDEN, stacks)
        self._snapshots = 0
        self._last: dict[int, tuple[Any, int]] = {}  # by device: a snapshot's rows, its number

    def note(
        self,
        request: int,
        snapshot: Mapping[str, Any] | None,
        component_of: ComponentOf = lambda device, address: None,
        event: int | None = None,
    ) -> None:
        """The request with this number is over.

        Args:
            snapshot: of all devices, taken just now; None: none could be.
            event: events so far, where they lead to this state.
        """
        segments = [] if snapshot is None else snapshot["segments"]
        native = torch.cuda.memory.get_allocator_backend() == "native"
        for index in range(torch.cuda.device_count()):
            stats = torch._C._cuda_memoryStats(index)
            number = None
            if snapshot is not None:
                own = [one for one in segments if one["device"] == index]
                number = self._number(index, own, component_of)
            row = (
                request,
                f"cuda:{index}",
                event,
                number,
                *(_value(stats, f"{name}_bytes", "current", native) for name in _CURRENT),
                *(_value(stats, f"{name}_bytes", "peak", native) for name in _PEAKS),
                _value(stats, "segment", "current", native),
                stats["num_alloc_retries"] if native else None,
                stats["num_ooms"] if native else None,
            )
            self._ledger.add("boundaries", row)

    def _number(
        self, device: int, segments: Sequence[Mapping[str, Any]], component_of: ComponentOf
    ) -> int:
        rows = self._read(device, segments, component_of)
        last = self._last.get(device)
        if last is not None and last[0] == rows:
            return last[1]
        number = self._snapshots
        self._snapshots += 1
        self._last[device] = rows, number
        for table, found in zip(("segments", "blocks"), rows, strict=True):
            for row in found:
                self._ledger.add(table, (number, *row))
        return number

    def _read(
        self, device: int, segments: Sequence[Mapping[str, Any]], component_of: ComponentOf
    ) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """The rows of both tables, without the snapshot's number."""
        ranges, blocks = [], []
        for segment in segments:
            start, growing = segment["address"], int(segment.get("is_expandable", False))
            pool = pool_name(segment.get("segment_pool_id"))
            ranges.append((start, segment["total_size"], segment["stream"], pool, growing))
            for block in segment["blocks"]:
                address, size = block.get("address", start), block["size"]
                state = _STATES[block["state"]]
                frames = block.get("frames") if state else None
                blocks.append(
                    (
                        address,
                        size,
                        block.get("requested_size", size) if state else 0,
                        state,
                        component_of(device, address) if state else None,
                        self._names.stack(frames) if frames else -1,
                    )
                )
                start = address + size
        return ranges, blocks


def _value(stats: Mapping[str, Any], name: str, kind: str, native: bool) -> int | None:
    """A counter over both pools. Another backend says 0 of what it doesn't count: None."""
    counted = native or name in ("allocated_bytes", "reserved_bytes")
    return int(stats[name]["all"][kind]) if counted else None
