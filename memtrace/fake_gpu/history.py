"""The history of a simulated allocator, as PyTorch's own keeps one."""

import sys
from itertools import islice
from types import FrameType
from typing import Any

from memtrace.allocator.log import COLUMNS, rows_of
from memtrace.trace.schema import Action

_NAMES: dict[int, str] = {
    Action.ALLOC: "alloc",
    Action.FREE_REQUESTED: "free_requested",
    Action.FREE_COMPLETED: "free_completed",
    Action.SEGMENT_ALLOC: "segment_alloc",
    Action.SEGMENT_FREE: "segment_free",
    Action.SEGMENT_MAP: "segment_map",
    Action.SEGMENT_UNMAP: "segment_unmap",
    Action.OOM: "oom",
}
_OOM = int(Action.OOM)
_BLOCKS = frozenset(map(int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)))

Frames = list[dict[str, Any]]


class History:
    """What the allocator of a card did, until somebody asks for it.

    The allocator keeps the rows of its log for a while; only how many there are is noted with each
    call. All in flat lists: what looks for garbage would go through each entry's own tuple, again
    and again.
    """

    def __init__(self) -> None:
        #: Of the log, as far as it was taken from the allocator: the values of its rows.
        self.logged: list[int] = []
        #: Of each call: how many values there were after it, the time in ns, the metadata, the
        #: stack, and the address that it annotated (0: none).
        self.calls: list[Any] = []

    def entries(self) -> list[dict[str, Any]]:
        """As PyTorch's snapshots have them."""
        found: list[dict[str, Any]] = []
        rows, values = rows_of(self.logged), iter(self.calls)
        before = 0
        for end, time_ns, text, frames, annotated in zip(*[values] * 5, strict=True):
            time_us = time_ns // 1000
            if annotated:
                found.append(
                    {
                        "action": "annotate",
                        "addr": annotated,
                        "size": 0,
                        "stream": 0,
                        "time_us": time_us,
                        "user_metadata": text,
                        "frames": frames,
                    }
                )
                continue
            for _, action, address, size, requested, stream, _, _, _ in islice(
                rows, (end - before) // len(COLUMNS)
            ):
                if action not in _NAMES:  # counted, and no part of the history
                    continue
                found.append(
                    {
                        "action": _NAMES[action],
                        "device_free" if action == _OOM else "addr": address,
                        "size": requested if action in _BLOCKS else size,
                        "stream": stream,
                        "time_us": time_us,
                        "user_metadata": text,
                        "frames": frames,
                    }
                )
            before = end
        return found


def stack() -> Frames:
    """The calling Python stack, innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append(
            {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_qualname}
        )
        frame = frame.f_back
    return found
