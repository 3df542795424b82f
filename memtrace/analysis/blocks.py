"""What a stretch of a recording added to what was there when it began."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account, Series
from memtrace.analysis.peaks import Group, top_allocations
from memtrace.analysis.places import Place, place


@dataclass(frozen=True)
class Block:
    """Bytes above those on entry; 0 where a block only freed."""

    account: Account
    peak: int
    place: Place  # of the event at the peak
    components: Mapping[str, int]  # at the peak; negative where the block freed
    own_peaks: Mapping[str, int]
    top: tuple[Group, ...]  # all that lived at the peak, older allocations too


def block(account: Account, start: int) -> Block:
    """The account's events from number ``start`` to its end, against the moment before them."""
    before = start - 1
    peak, event = _growth(account.allocated, start)
    scope = account.process.contexts["scope"][account.process.events["context"][event]]
    return Block(
        account=account,
        peak=peak,
        place=place(account.process, int(scope)),
        components={
            name: series.read_one(event) - series.read_one(before)
            for name, series in account.components.items()
        },
        own_peaks={name: _growth(one, start)[0] for name, one in account.components.items()},
        top=tuple(top_allocations(account, event)),
    )


def _growth(series: Series, start: int) -> tuple[int, int]:
    """The most that a series rose above its value before event ``start``, and where."""
    base = series.read_one(start - 1)
    first = int(np.searchsorted(series.at, start))
    levels = series.levels[first + 1 :]
    if len(levels) == 0 or int(levels.max()) <= base:
        return 0, max(start - 1, 0)
    step = int(levels.argmax())
    return int(levels[step]) - base, int(series.at[first + step])
