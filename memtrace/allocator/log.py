"""What an allocator did, one row a deed: what traces, statistics and comparisons are made from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from memtrace.trace.schema import Action


class Mark(IntEnum):
    """Deeds that are no event of a trace; numbers go on where those of actions leave room."""

    SYNC = 32  # waited for every stream
    REJECTION = 33  # throw_on_cudamalloc_oom
    RESET_PEAKS = 34
    RESET_ACCUMULATED = 35


#: Columns of a log, all int64.
#:
#: op: number of the operation during which it happened.
#: action: an :class:`~memtrace.trace.schema.Action` or a :class:`Mark`.
#: address: of the block or segment; of an OOM, the bytes that the device had free.
#: size: bytes of the block or segment; of an OOM, the rounded request.
#: requested: what was asked for; of an OOM, what the device was asked for.
#: stream: handle of the stream.
#: pool: 2 k + 1 of large, 2 k of small blocks; k > 0 for private pools.
#: split_blocks, split_bytes: how ``inactive_split`` changed.
COLUMNS = (
    "op",
    "action",
    "address",
    "size",
    "requested",
    "stream",
    "pool",
    "split_blocks",
    "split_bytes",
)


def rows_of(values: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The rows again, of their values one after the other."""
    return zip(*[iter(values)] * len(COLUMNS), strict=True)


@dataclass(frozen=True)
class Log:
    """Rows in the order in which they happened (int64, rows × :data:`COLUMNS`)."""

    rows: np.ndarray

    @classmethod
    def of(cls, values: Sequence[int]) -> "Log":
        """From the values of all rows, one row after the other."""
        found = np.fromiter(values, np.int64, len(values))
        return cls(found.reshape(-1, len(COLUMNS)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> np.ndarray:
        return self.rows[:, COLUMNS.index(column)]

    def events(self) -> np.ndarray:
        """Rows that are events of a trace, as (action, address, size or requested, stream)."""
        rows = self.rows[self["action"] < min(Mark)]
        action, requested = rows[:, 1], rows[:, 4]
        blocks = (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
        size = np.where(np.isin(action, blocks), requested, rows[:, 3])
        kept = action != Action.RETRY
        return np.stack((action, rows[:, 2], size, rows[:, 5]), axis=1)[kept]
