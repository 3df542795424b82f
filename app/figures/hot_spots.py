"""Which allocations held most for longest."""

from collections.abc import Sequence

import plotly.graph_objects as go

from app.figures.style import Look, dress, plain, unit_of
from memtrace.analysis.catalogue import HotSpot
from memtrace.components import COLOURS, base
from memtrace.sizes import format_size

_HEIGHT = 26  # pixels a bar
_LONGEST = 64  # signs of a place beside its bar


def hot_spots(spots: Sequence[HotSpot], look: Look) -> go.Figure:
    """A bar a group of allocations, as long as its size x lifetime, in its component's colour."""
    unit = unit_of(int(spot.byte_seconds) for spot in spots)
    figure = go.Figure()
    for name in dict.fromkeys(base(spot.group.component) for spot in spots):
        own = [n for n, spot in enumerate(spots) if base(spot.group.component) == name]
        figure.add_bar(
            orientation="h",
            y=own,
            x=[spots[n].byte_seconds / unit.size for n in own],
            marker={"color": COLOURS[name], "line": {"color": look.faint, "width": 1}},
            customdata=[_said(spots[n]) for n in own],
            hovertemplate="%{customdata}<extra></extra>",
            name=name,
            showlegend=True,
        )
    figure.update_yaxes(
        tickvals=list(range(len(spots))),
        ticktext=[plain(_short(spot.group.where)) for spot in spots],
        autorange="reversed",
        showgrid=False,
        zeroline=False,
    )
    figure.update_xaxes(title_text=f"{unit.name} x seconds", rangemode="tozero")
    dress(figure, look, _HEIGHT * len(spots) + 110, top=50)
    figure.update_layout(
        bargap=0.25,
        margin_b=50,
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0},
    )
    return figure


def _short(text: str) -> str:
    """The end of a place, which tells more than its beginning."""
    return text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}"


def _said(spot: HotSpot) -> str:
    group = spot.group
    return (
        f"{group.component}: {group.count:,} allocations, {format_size(group.bytes)} in all"
        f"<br>{plain(group.where)}"
    )


def describe(spots: Sequence[HotSpot]) -> str:
    """The chart in words and numbers, for who can't see it."""
    texts = [
        f"{spot.group.component} in {spot.group.where}: "
        f"{format_size(int(spot.byte_seconds))} x seconds in {spot.group.count:,} allocations."
        for spot in spots
    ]
    return " ".join(texts)
