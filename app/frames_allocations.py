"""Allocations as data frames: sizes as text where read, as bytes where data."""

from collections.abc import Sequence

import pandas as pd

from memtrace.analysis.catalogue import Allocation, HotSpot
from memtrace.sizes import format_size

_FRAMES = 3  # of a stack, in the table


def listed(allocations: Sequence[Allocation]) -> pd.DataFrame:
    """To be read: a row an allocation."""
    stacks = any(one.stack for one in allocations)
    rows = [
        {
            "component": one.component,
            "size": format_size(one.bytes),
            "asked for": format_size(one.requested),
            "at, s": f"{one.born_us / 1e6:,.6f}",
            "lifetime, s": f"{one.lifetime_us / 1e6:,.6f}" + ("" if one.freed else ", kept"),
            "made in": str(one.place),
        }
        | ({"stack": " < ".join(one.stack[:_FRAMES])} if stacks else {})
        for one in allocations
    ]
    return pd.DataFrame(rows)


def data(allocations: Sequence[Allocation]) -> pd.DataFrame:
    """All that is known of each, in bytes and microseconds."""
    rows = [
        vars(one) | {"place": str(one.place), "stack": " < ".join(one.stack)} for one in allocations
    ]
    return pd.DataFrame(rows)


def hot_spots(spots: Sequence[HotSpot]) -> pd.DataFrame:
    """What the chart of hot spots draws."""
    rows = [
        {
            "component": spot.group.component,
            "made in": spot.group.where,
            "stack": " < ".join(spot.group.stack),
            "count": spot.group.count,
            "bytes": spot.group.bytes,
            "byte seconds": spot.byte_seconds,
        }
        for spot in spots
    ]
    return pd.DataFrame(rows)
