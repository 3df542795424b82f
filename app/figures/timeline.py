"""The component-stacked timelines of several runs, side by side on one scale."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import plotly.graph_objects as go

from app.figures.style import Look, Unit, dress, plain, unit_of
from memtrace.analysis.alignment import Axis
from memtrace.analysis.peaks import Balance
from memtrace.analysis.steps import KINDS, Steps
from memtrace.analysis.summary import AccountSummary
from memtrace.analysis.timeline import Timeline, timeline
from memtrace.components import COLOURS, TENSOR_COMPONENTS
from memtrace.sizes import format_size

_COLUMNS = 2
_BETWEEN = 0.03  # of the width, between columns
#: Pixels: of a stack, of a ruler, of a title above a panel, of an axis below it, of the legend.
_STACK, _RULER, _TITLE, _AXIS, _LEGEND = 330, 24, 26, 46, 44
#: Places on the axis that a panel tells apart: two pixels or so each.
SPANS = 400
#: A ruler leaves out what is narrower than one part in so many of the view, until it is zoomed.
_NARROWEST = 200
_MOST_TICKS = 6


@dataclass(frozen=True)
class Scale:
    """The axis that all panels share."""

    title: str
    view: tuple[float, float]  # what of it is shown
    #: Names of the steps that begin at 0, 1, 2, …; empty: the axis has numbers.
    names: Sequence[str] = ()

    @property
    def edges(self) -> np.ndarray:
        """Between which a panel shows one event each: float64 (SPANS + 1)."""
        return np.linspace(*self.view, SPANS + 1)


@dataclass(frozen=True)
class Panel:
    """What one panel shows."""

    name: str
    timeline: Timeline
    peak: Balance
    #: What process memory was read from (``rss``, ``nvml``); None: it wasn't.
    source: str | None
    axis: Axis
    rulers: Sequence[Steps] = ()  # above the stack, from the coarsest

    @classmethod
    def of(
        cls, name: str, one: AccountSummary, axis: Axis, scale: Scale, rulers: Sequence[Steps]
    ) -> "Panel":
        """As much of an account as can be told apart in view."""
        edges = axis.times(scale.edges)
        drawn = timeline(one.account, one.memory, span_us=(edges[0], edges[-1]), bins=edges)
        return cls(name, drawn, one.peak, one.memory.source, axis, rulers)


@dataclass(frozen=True)
class Instant:
    """A place on the axis that the reader chose."""

    name: str
    at: float


def timelines(
    panels: Sequence[Panel], scale: Scale, look: Look, instants: Sequence[Instant] = ()
) -> go.Figure:
    """Components stacked in steps, reserved and process memory as lines, the peak marked.

    Bytes are drawn in one unit (B to GiB) on axes that scale together. Above each stack are rulers
    of what the program did. A component that no run holds is left out. An invisible mark at each
    drawn event makes it selectable.
    """
    unit = unit_of(_largest(panel) for panel in panels)
    shown = [
        name
        for name in TENSOR_COMPONENTS
        if any(panel.timeline.components[name].any() for panel in panels)
    ]
    rulers = [_visible(panel, scale) for panel in panels]
    kinds = [kind for kind in KINDS if any(kind == one.kind for own in rulers for one in own)]
    grid = _Grid(len(panels), len(kinds))
    figure = go.Figure()
    for number, panel in enumerate(panels):
        axes = {"xaxis": f"x{_suffix(number)}", "yaxis": f"y{_suffix(number)}"}
        for trace in _traces(panel, number, scale, shown, unit, look):
            figure.add_trace(trace.update(axes))
        for trace in _rulers(rulers[number], scale, look):
            figure.add_trace(trace.update(axes | {"yaxis": f"y{_ruler_of(number)}"}))
        if kinds and not rulers[number]:  # of an axis without a trace the labels aren't drawn
            nothing = go.Bar(orientation="h", y=kinds, x=[0] * len(kinds), hoverinfo="skip")
            nothing.update(base=scale.view[0], showlegend=False, name="no step")
            figure.add_trace(nothing.update(axes | {"yaxis": f"y{_ruler_of(number)}"}))
        _lay_out(figure, number, panel.name, grid, scale, unit)
        figure.layout[f"yaxis{_ruler_of(number)}"].update(
            categoryarray=kinds, tickvals=kinds, range=(len(kinds) - 0.5, -0.5)
        )
        for instant in instants:
            figure.add_shape(_mark(instant, number, look))
    _name_once(figure)
    dress(figure, look, grid.height, top=_LEGEND)
    figure.update_yaxes(zeroline=False)
    highest_of = max(int(panel.timeline.allocated.max(initial=0)) for panel in panels)
    figure.layout.yaxis.update(  # so that the stack is larger once the legend hides the process
        autorange=True, rangemode="tozero", autorangeoptions_include=1.08 * highest_of / unit.size
    )
    figure.update_xaxes(showgrid=False, zeroline=False, automargin=False)
    figure.update_layout(
        hovermode="x unified",
        hoverdistance=-1,  # between two events that are far apart, too
        barmode="overlay",  # each ruler in the middle of its row
        dragmode="select",
        selectdirection="h",
        uniformtext={"minsize": 11, "mode": "hide"},
        legend={
            "orientation": "h",
            "yref": "container",
            "yanchor": "top",
            "y": 1,
            "x": 0,
            "traceorder": "normal",
        },
    )
    return figure


def _suffix(number: int) -> str:
    """Plotly's name of the axes of a panel: x, x2, x3, …"""
    return str(number + 1) if number else ""


def _ruler_of(number: int) -> str:
    """The same of the axis of its rulers, which no stack has."""
    return str(number + 101)


@dataclass(frozen=True)
class _Grid:
    """Where panels stand; parts of the figure's width and height, from below."""

    panels: int
    rulers: int  # of a panel

    @property
    def columns(self) -> int:
        return min(self.panels, _COLUMNS)

    @property
    def _row(self) -> int:
        return _TITLE + self.rulers * _RULER + _STACK + _AXIS

    @property
    def _inner(self) -> int:
        return ceil(self.panels / self.columns) * self._row

    @property
    def height(self) -> int:
        """Of the whole figure in pixels."""
        return self._inner + _LEGEND + 10

    def across(self, number: int) -> tuple[float, float]:
        width = (1 - _BETWEEN * (self.columns - 1)) / self.columns
        left = number % self.columns * (width + _BETWEEN)
        return left, left + width

    def up(self, number: int) -> tuple[float, float, float]:
        """The stack's lower end, its upper one, and that of the rulers above it."""
        top = self._inner - number // self.columns * self._row - _TITLE
        ends = (top - self.rulers * _RULER - _STACK, top - self.rulers * _RULER, top)
        bottom, middle, above = (end / self._inner for end in ends)
        return bottom, middle, above


def _lay_out(
    figure: go.Figure, number: int, name: str, grid: _Grid, scale: Scale, unit: Unit
) -> None:
    """The axes and the title of one panel."""
    left, right = grid.across(number)
    bottom, middle, top = grid.up(number)
    first = number % grid.columns == 0
    here = _suffix(number)
    figure.update_layout(
        {
            f"xaxis{here}": {
                "domain": (left, right),
                "anchor": f"y{here}",
                "matches": "x" if number else None,
                "range": scale.view,
                "title": {"text": scale.title},
                **_ticks(scale),
            },
            f"yaxis{here}": {
                "domain": (bottom, middle),
                "anchor": f"x{here}",
                "matches": "y" if number else None,
                "showticklabels": first,
                "title": {"text": unit.name if first else None},
            },
            f"yaxis{_ruler_of(number)}": {
                "domain": (middle, top),
                "anchor": f"x{here}",
                "type": "category",
                "fixedrange": True,
                "showgrid": False,
                "showticklabels": first,
                "visible": grid.rulers > 0,
            },
        }
    )
    figure.add_annotation(
        text=plain(name),
        x=(left + right) / 2,
        y=top,
        xref="paper",
        yref="paper",
        xanchor="center",
        yanchor="bottom",
        showarrow=False,
    )


def _ticks(scale: Scale) -> dict[str, Any]:
    """Few names of steps in place of numbers, or numbers that don't reach into the next panel."""
    low, high = scale.view
    if not scale.names:
        return {"ticklabeloverflow": "hide past domain" if low else "allow"}
    within = [at for at in range(len(scale.names)) if low <= at <= high]
    some = within[:: ceil(len(within) / _MOST_TICKS) or 1]
    return {"tickvals": some, "ticktext": [plain(scale.names[at]) for at in some], "tickangle": 0}


def _name_once(figure: go.Figure) -> None:
    """One legend entry a name; it switches that name in every panel."""
    named = set()
    for trace in figure.data:
        if trace.showlegend is None:
            trace.showlegend = trace.name not in named
            named.add(trace.name)


def _largest(panel: Panel) -> int:
    drawn = panel.timeline
    lines = (drawn.allocated, drawn.reserved, drawn.process)
    return int(max(line.max(initial=0) for line in lines))


def _traces(
    panel: Panel, number: int, scale: Scale, shown: Sequence[str], unit: Unit, look: Look
) -> Iterator[go.Scatter]:
    drawn = panel.timeline
    picked = highest(panel, scale)
    at = panel.axis.places(drawn.time_us[picked])
    for name in shown:
        yield _steps(
            name,
            at,
            drawn.components[name][picked],
            unit,
            stackgroup=f"run {number}",
            fillcolor=COLOURS[name],
            line={"width": 1, "color": look.background},
        )
    edge = {"width": 1.2, "color": look.ink}
    yield _steps("allocated", at, drawn.allocated[picked], unit, line=edge)
    if len(drawn.reserved):
        dashed = {"width": 1.5, "color": look.faint, "dash": "dash"}
        places = panel.axis.places(drawn.reserved_time_us)
        yield _steps("reserved", places, drawn.reserved, unit, line=dashed)
    if panel.source is not None and len(drawn.process):
        dotted = {"width": 1.5, "color": look.faint, "dash": "dot"}
        places = panel.axis.places(drawn.process_time_us)
        name = f"process ({panel.source.upper()})"
        yield _steps(name, places, drawn.process, unit, line=dotted)
    yield go.Scatter(
        x=at,
        y=drawn.allocated[picked] / unit.size,
        mode="markers",
        marker={"size": 1, "opacity": 0},
        unselected={"marker": {"opacity": 0}},
        hoverinfo="none",
        showlegend=False,
        name="events",
    )
    yield _peak_marker(panel, scale, unit, look)


def highest(panel: Panel, scale: Scale) -> np.ndarray:
    """Positions in a timeline: the highest event between each two edges, and the ends.

    Workspace comes and goes faster than pixels can show; a stack of every event is a blur in which
    the component that comes and goes is what one can't see. So a panel shows each span at its
    highest, where a spike of one event is as tall as it was.
    """
    drawn = panel.timeline
    at = panel.axis.places(drawn.time_us)
    borders = np.unique(np.append(np.searchsorted(at, scale.edges), [0, len(at)]))
    found = [start + int(drawn.allocated[start:stop].argmax()) for start, stop in pairwise(borders)]
    return np.unique([0, *found, len(at) - 1])


def _steps(name: str, at: np.ndarray, size: np.ndarray, unit: Unit, **options: Any) -> go.Scatter:
    """``size`` bytes from each place until the next."""
    return go.Scatter(
        x=at,
        y=(size / unit.size).astype(np.float32),
        name=name,
        legendgroup=name,
        mode="lines",
        line_shape="hv",
        hovertemplate=f"%{{y:,.1f}} {unit.name}",
        **options,
    )


def _peak_marker(panel: Panel, scale: Scale, unit: Unit, look: Look) -> go.Scatter:
    """At the run's peak; where that isn't in view, at the highest that is."""
    drawn, (low, high) = panel.timeline, scale.view
    time_us, size, what = panel.peak.time_us, panel.peak.allocated, "peak"
    if not drawn.time_us[0] <= time_us <= drawn.time_us[-1]:
        top = int(drawn.allocated.argmax())
        time_us, size, what = int(drawn.time_us[top]), int(drawn.allocated[top]), "highest here"
    at = max(float(panel.axis.places(np.array(time_us))), low)
    return go.Scatter(
        x=[at],
        y=[size / unit.size],
        mode="markers+text",
        marker={"size": 9, "color": look.ink, "symbol": "triangle-down"},
        text=[f"{what} {format_size(size)}"],
        textposition="top left" if 2 * at > low + high else "top right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
        name="peak",
    )


@dataclass(frozen=True)
class _Ruler:
    """Steps in view, clipped to it."""

    kind: str
    names: Sequence[str]
    start: np.ndarray
    end: np.ndarray


def _visible(panel: Panel, scale: Scale) -> list[_Ruler]:
    """The rulers that have a step in view that can be told from its neighbours."""
    low, high = scale.view
    found = []
    for one in panel.rulers:
        start = np.clip(panel.axis.places(one.start_us), low, high)
        end = np.clip(panel.axis.places(one.end_us), low, high)
        seen = np.flatnonzero(_NARROWEST * (end - start) >= high - low)
        if len(seen):
            names = [one.keys[number][-1][1] for number in seen.tolist()]
            found.append(_Ruler(one.kind, names, start[seen], end[seen]))
    return found


def _rulers(rulers: Sequence[_Ruler], scale: Scale, look: Look) -> Iterator[go.Bar]:
    for one in rulers:
        count = len(one.names)
        width = one.end - one.start
        readable = width > (scale.view[1] - scale.view[0]) / 100
        yield go.Bar(
            orientation="h",
            y=[one.kind] * count,
            base=one.start,
            x=width,
            width=1,
            text=[plain(name) for name in one.names],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": look.ink},
            marker={
                "color": [look.grid, look.background] * (count // 2) + [look.grid] * (count % 2),
                "line": {"color": look.faint, "width": np.where(readable, 0.5, 0)},
            },
            hoverinfo="skip",
            showlegend=False,
            name=one.kind,
        )


def _mark(instant: Instant, number: int, look: Look) -> go.layout.Shape:
    return go.layout.Shape(
        type="line",
        xref=f"x{_suffix(number)}",
        yref=f"y{_suffix(number)} domain",
        x0=instant.at,
        x1=instant.at,
        y0=0,
        y1=1,
        line={"color": look.accent, "width": 2},
        label={
            "text": instant.name,
            "textposition": "end",
            "textangle": 0,
            "xanchor": "left",
            "yanchor": "top",
            "font": {"color": look.accent, "size": 15},
        },
    )


def describe(panel: Panel) -> str:
    """The panel in words and numbers, for who can't see it."""
    peak = panel.peak
    shares = ", ".join(
        f"{name} {100 * size / peak.allocated:.0f} %"
        for name, size in peak.components.items()
        if 200 * size >= peak.allocated > 0
    )
    return (
        f"{panel.name}: allocated bytes peak at {format_size(peak.allocated)} after "
        f"{peak.time_us / 1e6:.2f} s, of which {shares or 'nothing'}."
    )
