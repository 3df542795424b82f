"""The allocator's memory as data frames: sizes as text where read, as bytes where data."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from app.figures.fragmentation import History, Instant
from memtrace.analysis.occupancy import Stop
from memtrace.sizes import format_size
from memtrace.trace.schema import State

#: What of reserved memory there is, from :class:`memtrace.analysis.fragmentation.Parts`.
_PARTS = ("reserved", "allocated", "slack", "pending", "hard", "releasable", "private")


def unused(instants: Sequence[Instant]) -> pd.DataFrame:
    """What reserved memory does at one instant: a column a run."""
    columns = {}
    for one in instants:
        numbers = _numbers(one.stop)
        columns[one.name] = [format_size(size) for size in numbers.values()] + [
            f"{100 * one.stop.parts.ratio:.1f} %",
            f"{one.stop.totals.segments:,}",
            f"{one.stop.totals.blocks:,}",
        ]
    names = [*_numbers(instants[0].stop), "fragmentation ratio", "segments", "blocks in use"]
    return pd.DataFrame(columns, index=names)


def _numbers(stop: Stop) -> dict[str, int]:
    """Bytes by name."""
    return {name: getattr(stop.parts, name) for name in _PARTS} | {
        "largest free block": max(stop.parts.largest.values(), default=0),
        "inactive split": stop.totals.inactive_split,
    }


def blocks(instants: Sequence[Instant]) -> pd.DataFrame:
    """Every block that the segment maps draw: one row a block, free ones too."""
    return pd.concat([_blocks(one) for one in instants], ignore_index=True)


def _blocks(one: Instant) -> pd.DataFrame:
    segments, found = one.layout.segments, one.layout.blocks
    outside = found.segment < 0
    columns = {
        "run": one.name,
        "segment": np.where(outside, -1, np.append(segments.address, 0)[found.segment]),
        "stream": np.where(outside, -1, np.append(segments.stream, 0)[found.segment]),
        "address": found.address,
        "bytes": found.bytes,
        "requested": found.requested,
        "state": [State(state).name.lower() for state in found.state.tolist()],
        "component": found.component,
        "made in": [one.places.get(scope, "") for scope in found.scope.tolist()],
    }
    return pd.DataFrame(columns)


def courses(histories: Sequence[History]) -> pd.DataFrame:
    """What the curves draw: one row a span of time, sizes in bytes."""
    rows = [
        {"run": one.name, "seconds": stop.time_us / 1e6, "event": stop.event}
        | _numbers(stop)
        | {"ratio": stop.parts.ratio}
        for one in histories
        for stop in one.course.stops
    ]
    return pd.DataFrame(rows)
