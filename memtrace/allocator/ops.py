"""Operations on an allocator, as columns: what a program asks of it, in order."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Op(IntEnum):
    """What is asked."""

    ALLOC = 0
    FREE = 1  # waits for the streams that were recorded
    FREE_LATER = 2  # waits for COMPLETE, or until the allocator waits for all streams
    COMPLETE = 3
    RECORD_STREAM = 4  # another stream uses the block
    EMPTY_CACHE = 5  # of a private pool alone, where one is named
    RESET_PEAKS = 6
    RESET_ACCUMULATED = 7
    BEGIN_POOL = 8
    END_POOL = 9
    RELEASE_POOL = 10


@dataclass(frozen=True)
class Ops:
    """Arrays of one length, int64.

    Attributes:
        kind: an :class:`Op` each.
        block: a number that the caller gives the block.
        size: requested bytes; of an allocation.
        stream: of an allocation, where it is used; of RECORD_STREAM, by whom.
        pool: number of a private pool, from 1; of an allocation 0 for the one whose scope is open.
    """

    kind: np.ndarray
    block: np.ndarray
    size: np.ndarray
    stream: np.ndarray
    pool: np.ndarray

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, rows: slice | np.ndarray) -> "Ops":
        columns = (self.kind, self.block, self.size, self.stream, self.pool)
        return Ops(*(column[rows] for column in columns))

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int, int]]) -> "Ops":
        """From rows of (kind, block, size, stream, pool)."""
        found = np.array(rows, dtype=np.int64).reshape(-1, 5)
        return cls(*(np.ascontiguousarray(found[:, column]) for column in range(5)))
