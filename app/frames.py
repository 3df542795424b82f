"""Analysed runs as data frames: sizes as text where they are read, as bytes where they are data."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pandas as pd

from app.figures.timeline import Panel, Scale, highest
from memtrace.analysis.alive import Storage
from memtrace.analysis.compare import TERMS, Comparison, difference
from memtrace.analysis.peaks import Group
from memtrace.render import facts
from memtrace.sizes import format_size

_FRAMES = 3  # of a stack, in a table
_COLUMNS = 4  # of a table of terms
#: What both equations call their sums.
SUMS = {"live": "M_live (1)", "process": "process (2)"}


def equations(comparison: Comparison, own: bool) -> pd.DataFrame:
    """Both equations: what each run has of each term, and what each later run differs by.

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
    return narrow(pd.DataFrame(columns, index=[SUMS.get(name, name) for name in TERMS]))


def narrow(frame: pd.DataFrame) -> pd.DataFrame:
    """A table of terms as it fits a page: of many runs a row each, else a column each."""
    return frame.T if len(frame.columns) > _COLUMNS else frame


def _size(value: int | None, *, signed: bool = False) -> str:
    return "unknown" if value is None else format_size(value, signed=signed)


def allocations(groups: Iterable[Group]) -> pd.DataFrame:
    """The largest groups of storages that were live at the peak."""
    rows = [
        (group.component, format_size(group.bytes), f"{group.count:,}", group.where)
        for group in groups
    ]
    return pd.DataFrame(rows, columns=["component", "bytes", "count", "made in"])


def terms(comparison: Comparison) -> pd.DataFrame:
    """At each run's peak and each at its own peak: bytes of every term, empty where unknown."""
    rows = [
        (side.name, term, side.at_peak[term], side.own_peak[term])
        for side in comparison.sides
        for term in TERMS
    ]
    frame = pd.DataFrame(rows, columns=["run", "term", "at the peak", "own peak"])
    return frame.astype({"at the peak": "Int64", "own peak": "Int64"})


def recordings(comparison: Comparison) -> pd.DataFrame:
    """What was run, how its bytes are known, and what is missing: a column a run."""
    found = pd.DataFrame({side.name: facts(side.summary) for side in comparison.sides})
    return found.fillna("")


def storages(found: Iterable[Storage]) -> pd.DataFrame:
    """Single storages: how large, how old, and where they were made."""
    rows = [
        (
            one.component,
            format_size(one.bytes),
            _age(one.age_us),
            str(replace(one.place, op=None)),
            one.place.op or "",
            _frames(one.stack),
        )
        for one in found
    ]
    columns = ["component", "size", "age", "made in", "op", "stack"]
    return _known(pd.DataFrame(rows, columns=columns))


def changes(found: Iterable[Group]) -> pd.DataFrame:
    """What one instant has beyond another, group by group."""
    rows = [
        (
            one.component,
            format_size(one.bytes, signed=True),
            f"{one.count:+,}",
            one.where,
            _frames(one.stack),
        )
        for one in found
    ]
    return _known(pd.DataFrame(rows, columns=["component", "bytes", "count", "made in", "stack"]))


def _known(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the columns that a recording left empty."""
    return frame.loc[:, (frame != "").any()] if len(frame) else frame


def groups(found: Iterable[Group]) -> pd.DataFrame:
    """Groups of storages as data: bytes, and whole stacks from the innermost frame."""
    rows = [
        (one.component, one.bytes, one.count, one.where, " < ".join(one.stack)) for one in found
    ]
    return pd.DataFrame(rows, columns=["component", "bytes", "count", "made in", "stack"])


def _age(age_us: int) -> str:
    for unit, size in (("s", 1_000_000), ("ms", 1000)):
        if age_us >= size:
            return f"{age_us / size:,.1f} {unit}"
    return f"{age_us} µs"


def _frames(stack: Sequence[str]) -> str:
    """The innermost frames, without the folders of their files."""
    return " < ".join(frame.rpartition("/")[2] for frame in stack[:_FRAMES])


def points(panels: Sequence[Panel], scale: Scale) -> pd.DataFrame:
    """What the timelines draw, in bytes: one row a drawn event."""
    return pd.concat([_points(panel, scale) for panel in panels], ignore_index=True)


def _points(panel: Panel, scale: Scale) -> pd.DataFrame:
    drawn = panel.timeline
    columns = {
        "seconds": drawn.time_us / 1e6,
        "event": drawn.events,
        "allocated": drawn.allocated,
        **drawn.components,
    }
    frame = pd.DataFrame(columns).iloc[highest(panel, scale)]
    frame.insert(0, "run", panel.name)
    return frame
