"""The component-stacked timelines of several runs, side by side on one scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.figures.style import Look, Unit, dress, unit_of
from memtrace.analysis.peaks import Balance
from memtrace.analysis.timeline import Timeline
from memtrace.components import COLOURS, TENSOR_COMPONENTS
from memtrace.sizes import format_size

_COLUMNS = 2
_HEIGHT = 420  # pixels a row of panels
#: Spans of time that a panel tells apart: two pixels or so each.
SPANS = 400


@dataclass(frozen=True)
class Panel:
    """What one panel shows."""

    name: str
    timeline: Timeline
    peak: Balance
    #: What process memory was read from (``rss``, ``nvml``); None: it wasn't.
    source: str | None


def timelines(panels: Sequence[Panel], look: Look) -> go.Figure:
    """Components stacked in steps, their total and process memory as lines, the peak marked.

    Bytes are drawn in one unit (B to GiB) on axes that scale together, time in seconds since the
    run began. A component that no run holds is left out.
    """
    unit = unit_of(_largest(panel) for panel in panels)
    shown = [
        name
        for name in TENSOR_COMPONENTS
        if any(panel.timeline.components[name].any() for panel in panels)
    ]
    columns = min(len(panels), _COLUMNS)
    rows = ceil(len(panels) / columns)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        shared_yaxes="all",
        subplot_titles=[panel.name for panel in panels],
        horizontal_spacing=0.03,
    )
    for number, panel in enumerate(panels):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for trace in _traces(panel, number, shown, unit, look):
            figure.add_trace(trace, **place)
    _name_once(figure)
    figure.update_xaxes(title_text="seconds since the run began", showgrid=False)
    figure.update_yaxes(rangemode="tozero", zeroline=False)
    for row in range(rows):
        figure.update_yaxes(title_text=unit.name, row=row + 1, col=1)
    dress(figure, look, _HEIGHT * rows, top=70)
    figure.update_layout(
        hovermode="x unified",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.06, "x": 0, "traceorder": "normal"},
    )
    return figure


def _name_once(figure: go.Figure) -> None:
    """One legend entry a name; it switches that name in every panel."""
    named = set()
    for trace in figure.data:
        if trace.showlegend is None:
            trace.showlegend = trace.name not in named
            named.add(trace.name)


def _largest(panel: Panel) -> int:
    return int(max(panel.peak.allocated, panel.timeline.process.max(initial=0)))


def _traces(
    panel: Panel, number: int, shown: Sequence[str], unit: Unit, look: Look
) -> list[go.Scatter]:
    drawn = panel.timeline
    picked = highest(drawn)
    time_us = drawn.time_us[picked]
    traces = [
        _steps(
            name,
            time_us,
            drawn.components[name][picked],
            unit,
            stackgroup=f"run {number}",
            fillcolor=COLOURS[name],
            line={"width": 1, "color": look.background},
        )
        for name in shown
    ]
    edge = {"width": 1.2, "color": look.ink}
    traces.append(_steps("allocated", time_us, drawn.allocated[picked], unit, line=edge))
    if panel.source is not None and len(drawn.process):
        name = f"process ({panel.source.upper()})"
        dotted = {"width": 1.5, "color": look.faint, "dash": "dot"}
        traces.append(_steps(name, drawn.process_time_us, drawn.process, unit, line=dotted))
    return [*traces, _peak_marker(panel, unit, look)]


def highest(drawn: Timeline) -> np.ndarray:
    """Positions in a timeline: the highest event of each of :data:`SPANS` spans, and the ends.

    Workspace comes and goes faster than pixels can show; a stack of every event is a blur in which
    the component that comes and goes is what one can't see. So a panel shows each span at its
    highest, where a spike of one event is as tall as it was.
    """
    spans = np.linspace(drawn.time_us[0], drawn.time_us[-1], SPANS, endpoint=False)
    borders = np.append(np.unique(np.searchsorted(drawn.time_us, spans)), len(drawn.time_us))
    found = [start + int(drawn.allocated[start:stop].argmax()) for start, stop in pairwise(borders)]
    return np.unique([0, *found, len(drawn.time_us) - 1])


def _steps(
    name: str, time_us: np.ndarray, size: np.ndarray, unit: Unit, **options: Any
) -> go.Scatter:
    """``size`` bytes from each time until the next."""
    return go.Scatter(
        x=(time_us / 1e6).astype(np.float32),
        y=(size / unit.size).astype(np.float32),
        name=name,
        legendgroup=name,
        mode="lines",
        line_shape="hv",
        hovertemplate=f"%{{y:,.1f}} {unit.name}",
        **options,
    )


def _peak_marker(panel: Panel, unit: Unit, look: Look) -> go.Scatter:
    begin, end = int(panel.timeline.time_us[0]), int(panel.timeline.time_us[-1])
    late = 2 * panel.peak.time_us > begin + end
    return go.Scatter(
        x=[panel.peak.time_us / 1e6],
        y=[panel.peak.allocated / unit.size],
        mode="markers+text",
        marker={"size": 9, "color": look.ink, "symbol": "triangle-down"},
        text=[f"peak {format_size(panel.peak.allocated)}"],
        textposition="top left" if late else "top right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
        name="peak",
    )


def describe(panel: Panel) -> str:
    """The panel in words and numbers, for who can't see it."""
    peak = panel.peak
    shares = ", ".join(
        f"{name} {100 * size / peak.allocated:.0f} %"
        for name, size in peak.components.items()
        if 200 * size >= peak.allocated
    )
    return (
        f"{panel.name}: allocated bytes peak at {format_size(peak.allocated)} after "
        f"{peak.time_us / 1e6:.2f} s, of which {shares or 'nothing'}."
    )
