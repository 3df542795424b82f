"""Panels of several runs: the parts of each one below the other, two runs side by side."""

from collections.abc import Iterator, Sequence
from math import ceil

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.figures.style import Look, dress, plain

_COLUMNS = 2
_BETWEEN, _APART = 56, 90  # pixels between parts, and where an axis and a title come together
_TOP, _BELOW = 90, 50  # pixels for the legend and a title, and for the last axis


def grid(names: Sequence[str], heights: Sequence[int]) -> tuple[go.Figure, int, int]:
    """Room for the parts of each run one below the other, two runs side by side.

    Returns:
        The figure, its columns, and the height of all that it draws in pixels.
    """
    columns = columns_of(len(names))
    blocks = ceil(len(names) / columns)
    rows = [*heights] * blocks
    titles = []
    for block in range(blocks):
        own = [*map(plain, names[block * columns : (block + 1) * columns]), *[""] * columns]
        titles += [*own[:columns], *[""] * columns * (len(heights) - 1)]
    between = _BETWEEN if blocks == 1 else _APART
    height = sum(rows) + between * (len(rows) - 1)
    figure = make_subplots(
        rows=len(rows),
        cols=columns,
        row_heights=rows,
        subplot_titles=titles,
        horizontal_spacing=0.06,
        vertical_spacing=between / height if len(rows) > 1 else 0,
    )
    return figure, columns, height


def columns_of(panels: int) -> int:
    """How many panels stand side by side."""
    return min(panels, _COLUMNS)


def axes_of(figure: go.Figure, row: int, column: int) -> tuple[str, str]:
    """What the axes of a panel are called: ``x2`` and ``y2`` or so."""
    plot = figure.get_subplot(row, column)
    return plot.xaxis.plotly_name.replace("axis", ""), plot.yaxis.plotly_name.replace("axis", "")


def lines(
    figure: go.Figure, places: Sequence[float | None], parts: int
) -> Iterator[tuple[str, str, float]]:
    """A line through all parts of each run at its place on the x axis: what the axes of each part
    are called, and the place; None: no line."""
    columns = columns_of(len(places))
    for number, at in enumerate(places):
        row, column = number // columns * parts + 1, number % columns + 1
        if at is not None:
            for part in range(parts):
                yield *axes_of(figure, row + part, column), at


def mark(figure: go.Figure, places: Sequence[float | None], parts: int, colour: str) -> None:
    """Draw :func:`lines`."""
    for x, y, at in lines(figure, places, parts):
        figure.add_shape(
            type="line",
            xref=x,
            yref=f"{y} domain",
            x0=at,
            x1=at,
            y0=0,
            y1=1,
            line={"color": colour, "width": 1.5, "dash": "dot"},
        )


def dress_grid(figure: go.Figure, look: Look, height: int) -> None:
    """One legend entry a name, in the order of the ranks; it switches that name in every panel."""
    named = set()
    for trace in figure.data:
        if trace.showlegend is None:
            trace.showlegend = trace.name not in named
            named.add(trace.name)
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        if axis.matches == axis.plotly_name.replace("axis", ""):
            axis.matches = None  # Plotly complains of an axis that is like itself
    dress(figure, look, height + _TOP + _BELOW, top=_TOP)
    figure.update_layout(
        margin_b=_BELOW,
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
    )
