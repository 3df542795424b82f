"""Analysed runs as data frames: sizes as text where they are read, as bytes where they are data."""

from collections.abc import Iterable

import pandas as pd

from app.figures.timeline import highest
from memtrace.analysis.compare import TERMS, Comparison, difference
from memtrace.analysis.peaks import Group
from memtrace.analysis.timeline import Timeline
from memtrace.sizes import format_size

_LABELS = {
    "live": "M_live (1)",
    "process": "process (2)",
}


def equations(comparison: Comparison, own: bool) -> pd.DataFrame:
    """Both equations: a row a term, a column a run, and for each later run what it differs by.

    Args:
        comparison: the runs; one alone is fine.
        own: each term's own peak instead of its bytes at the peak of allocated.
    """
    first, *others = comparison.sides
    columns: dict[str, list[str]] = {}
    for side in comparison.sides:
        terms = side.own_peak if own else side.at_peak
        columns[side.name] = [_size(terms[name]) for name in TERMS]
    for other in others:
        mine, base = (other.own_peak, first.own_peak) if own else (other.at_peak, first.at_peak)
        columns[f"{other.name} - {first.name}"] = [
            _size(difference(mine[name], base[name]), signed=True) for name in TERMS
        ]
    return pd.DataFrame(columns, index=[_LABELS.get(name, name) for name in TERMS])


def _size(value: int | None, *, signed: bool = False) -> str:
    return "unknown" if value is None else format_size(value, signed=signed)


def allocations(groups: Iterable[Group]) -> pd.DataFrame:
    """The largest groups of storages that were live at the peak."""
    rows = [
        (group.component, format_size(group.bytes), f"{group.count:,}", group.where)
        for group in groups
    ]
    return pd.DataFrame(rows, columns=["component", "bytes", "count", "made in"])


def points(drawn: Timeline) -> pd.DataFrame:
    """What a panel draws, in bytes: one row a drawn event."""
    columns = {
        "seconds": drawn.time_us / 1e6,
        "event": drawn.events,
        "allocated": drawn.allocated,
        **drawn.components,
    }
    return pd.DataFrame(columns).iloc[highest(drawn)]
