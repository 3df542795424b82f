"""From when to when each allocation of an account lives, so that any instant is found at once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtrace.trace.reader import ProcessTrace
from memtrace.trace.schema import FREES, Action

_SEGMENTS = (
    Action.SEGMENT_ALLOC,
    Action.SEGMENT_FREE,
    Action.SEGMENT_MAP,
    Action.SEGMENT_UNMAP,
)
#: Events of a stretch: most allocations live and die inside one, and only the others are looked
#: through for an instant outside it.
_STRETCH = 1 << 16


@dataclass(frozen=True)
class Lifetimes:
    """Allocations in the order in which they were made, twelve bytes each.

    All are events of the process (int32). An allocation that doesn't end has the number of events
    there; one whose free isn't in the trace ends where its address is given out again.

    Attributes:
        here: which contexts of the process are of the device: bool, one a row.
        born: what made each, ascending.
        freed: what gave each back.
        gone: from where on its bytes serve others: later than ``freed`` if it waited for a stream.
        retags: the changes of component, ascending.
        retagged: of each change, the allocation (a row of ``born``).
    """

    process: ProcessTrace
    here: np.ndarray
    born: np.ndarray
    freed: np.ndarray
    gone: np.ndarray
    retags: np.ndarray
    retagged: np.ndarray

    def alive(self, event: int) -> np.ndarray:
        """The allocations whose bytes are used after ``event``: rows of ``born``, ascending."""
        start = event - event % _STRETCH
        near = np.arange(_before(self.born, start - 1), _before(self.born, event))
        far = self._lasting[: _before(self.born[self._lasting], start - 1)]
        rows = np.concatenate((far, near))
        return np.asarray(rows[self.gone[rows] > event])

    def allocated(self, event: int) -> np.ndarray:
        """Those of them that weren't freed, and only wait for a stream."""
        rows = self.alive(event)
        return np.asarray(rows[self.freed[rows] > event])

    def events(self, event: int) -> np.ndarray:
        """The events up to ``event`` that segments and blocks after it follow from, ascending."""
        alive = self.alive(event)
        freed = self.freed[alive]
        retags = self.retags[: _before(self.retags, event)]
        of_these = self.retagged[: len(retags)]
        segments = self._segments[: _before(self._segments, event)]
        found = (
            segments,
            self.born[alive],
            retags[self.gone[of_these] > event],
            freed[freed <= event],
        )
        return np.sort(np.concatenate(found))

    def labels_at(self, event: int) -> np.ndarray:
        """Of each allocation made by ``event`` the one that says which component it has (int32)."""
        found = self.born.copy()
        count = _before(self.retags, event)
        found[self.retagged[:count]] = self.retags[:count]  # of several the last: they ascend
        return found

    @cached_property
    def _lasting(self) -> np.ndarray:
        """The allocations that outlive the stretch in which they were made."""
        return np.flatnonzero(self.born // _STRETCH != self.gone // _STRETCH)

    @cached_property
    def _segments(self) -> np.ndarray:
        taken = np.isin(self.process.contexts["action"], _SEGMENTS) & self.here
        return np.flatnonzero(taken[self.process.events["context"]]).astype(np.int32)


def _before(events: np.ndarray, event: int) -> int:
    """How many of ``events`` (int32, ascending) come up to ``event``.

    Compared with a wider number, all of them would be widened first.
    """
    return int(events.searchsorted(np.int32(event), side="right"))


def lifetimes(process: ProcessTrace, here: np.ndarray, rows: np.ndarray) -> Lifetimes:
    """Match what was allocated with what was freed: ten million events take a second.

    Args:
        rows: the tensor events of a device (int32), grouped by storage and in order in each group.
    """
    events, contexts = process.events, process.contexts
    action = contexts["action"][events["context"][rows]]
    storage = events["id"][rows]
    begins = np.append(True, storage[1:] != storage[:-1])[: len(rows)]
    del storage
    never = len(events["id"])
    alloc = action == Action.ALLOC
    births = np.flatnonzero(alloc)
    # The allocation that each event is about: the last one before it, of the same storage.
    about = np.cumsum(alloc, dtype=np.int32) - 1
    known = about >= 0
    known[known] = births[about[known]] >= _begin_of(begins)[known]
    born = rows[births]
    gone = np.full(len(born), never, dtype=np.int32)
    again = np.flatnonzero(~begins[births])  # the storage was there before
    again = again[known[births[again] - 1]]
    gone[again - 1] = born[again]
    freed = gone.copy()
    ends = np.flatnonzero(np.isin(action, FREES) & known)[::-1]  # of several frees the first counts
    freed[about[ends]] = rows[ends]
    pending = np.flatnonzero(action == Action.FREE_REQUESTED)
    at_once = np.ones(len(born), dtype=bool)
    at_once[about[pending[known[pending]]]] = False
    gone[at_once] = freed[at_once]
    waits = np.flatnonzero(~at_once)
    done = _completions(process, here, born[waits], freed[waits])
    gone[waits] = np.minimum(gone[waits], done)
    moved = np.flatnonzero((action == Action.RETAG) & known)
    by_birth = np.argsort(born)
    place = np.empty(len(born), dtype=np.int32)
    place[by_birth] = np.arange(len(born), dtype=np.int32)
    by_event = np.argsort(rows[moved])
    return Lifetimes(
        process,
        here,
        born[by_birth],
        freed[by_birth],
        gone[by_birth],
        rows[moved][by_event],
        place[about[moved]][by_event],
    )


def _begin_of(begins: np.ndarray) -> np.ndarray:
    """Of each position, where its group begins (int32)."""
    positions = np.where(begins, np.arange(len(begins), dtype=np.int32), 0)
    return np.asarray(np.maximum.accumulate(positions))


def _completions(
    process: ProcessTrace, here: np.ndarray, born: np.ndarray, freed: np.ndarray
) -> np.ndarray:
    """Where each of the allocations that waited for a stream came back."""
    events, contexts = process.events, process.contexts
    completes = here & (contexts["action"] == Action.FREE_COMPLETED)
    rows = np.flatnonzero(completes[events["context"]])
    address, waiting = events["id"][rows], events["id"][born]
    found = np.full(len(born), len(events["id"]))
    # Both in one order of address and event: the next completion is that of the same address.
    order = np.lexsort((np.append(rows, freed), np.append(address, waiting)))
    completion = order < len(rows)
    following = np.where(completion, np.arange(len(order)), len(order))
    following = np.minimum.accumulate(following[::-1])[::-1]
    place = np.flatnonzero(~completion & (following < len(order)))
    which, row = order[place] - len(rows), order[following[place]]
    same = address[row] == waiting[which]
    found[which[same]] = rows[row[same]]
    return found
