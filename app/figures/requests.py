"""A persistent process, request by request: its memory, if that grows, and how it answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
import plotly.graph_objects as go

from app.figures.grid import axes_of, dress_grid, grid, mark
from app.figures.style import Look, Unit, unit_of
from memtrace.analysis.boundaries import Boundary
from memtrace.analysis.persistence import Measure, Persistence
from memtrace.analysis.stability import FEWEST
from memtrace.sizes import format_size
from memtrace.steadiness import counted, rate, verdict

#: What a panel is made of from above, and how many pixels each takes.
_HEIGHTS = {"memory": 260, "process": 130, "first token": 120, "tokens": 120}
_CYCLES = 250
#: Cycles that are drawn between the first and the last one, at most.
_BETWEEN = 24
#: Of lines and marks, as in the other figures.
_DASHES = {"allocated": "solid", "reserved": "dash", "process": "dot"}
_SYMBOLS = {"retry": "triangle-up", "out of memory": "x", "failed": "circle-open"}
#: An axis of the powers of ten and what is half way between.
_POWERS: Mapping[str, Any] = {
    "type": "log",
    "tickvals": [step * 10.0**power for power in range(-6, 7) for step in (1, 3)],
    "ticktext": [f"{step * 10.0**power:g}" for power in range(-6, 7) for step in (1, 3)],
}
_LEGEND = ("allocated", "reserved", "process", "slope", "interval", *_SYMBOLS)
_ROOM = 1.15  # of the highest value, for what is written above it
_FEW = 10  # requests, each of which has a tick
_MARGIN = 0.15  # of the same, where an axis doesn't begin at 0


@dataclass(frozen=True)
class Workload:
    """What one process answered, and the verdict on it."""

    name: str
    judged: Persistence

    @property
    def rows(self) -> Sequence[Boundary]:
        """The requests, in order of their ends: where they stand on the axis."""
        return self.judged.served.boundaries

    def values(self, name: str) -> np.ndarray:
        """A number of each request, NaN where it isn't known (float64)."""
        return np.array([getattr(row, name) for row in self.rows], dtype=np.float64)

    @cached_property
    def counted(self) -> np.ndarray:
        """Positions of the requests that are judged."""
        chosen = {row.request for row in self.judged.counted}
        return np.array([n for n, row in enumerate(self.rows) if row.request in chosen], dtype=int)

    def position(self, request: str | None) -> int | None:
        """Where the request of that label stands; None: it isn't one of these."""
        return next((n for n, row in enumerate(self.rows) if label(row) == request), None)


def label(row: Boundary) -> str:
    """What a request is called: its name, or else its number."""
    return row.name or str(row.request)


# -- over requests ---------------------------------------------------------------------------------


def over_requests(workloads: Sequence[Workload], chosen: str | None, look: Look) -> go.Figure:
    """Of each run, after every request: allocated and reserved bytes and those of the process, with
    the slope of those that count and its interval; then the time to the first token and tokens a
    second. What no run knows is left out. A line marks the ``chosen`` request.
    """
    parts = [part for part in _HEIGHTS if any(_knows(one, part) for one in workloads)]
    heights = [_HEIGHTS[part] for part in parts]
    figure, columns, height = grid([one.name for one in workloads], heights)
    units = {
        part: unit_of(int(size) for one in workloads for size in _sizes(one, part))
        for part in ("memory", "process")
    }
    for number, one in enumerate(workloads):
        first, column = number // columns * len(parts) + 1, number % columns + 1
        for row, part in enumerate(parts, start=first):
            for trace in _traces(one, part, units, look):
                trace.update(customdata=_labels(one, trace))
                figure.add_trace(trace, row=row, col=column)
            _name_slopes(figure, one, part, units, row, column, look)
            _scale(figure, part, parts, units, row, column)
        _warm_up(figure, one, first, column, len(parts), look)
    mark(figure, [one.position(chosen) for one in workloads], len(parts), look.accent)
    dress_grid(figure, look, height)
    few = max(len(one.rows) for one in workloads) <= _FEW
    ticks = {"dtick": 1} if few else {}  # else halves of requests, too
    figure.update_xaxes(matches="x", showgrid=False, zeroline=False, **ticks)
    figure.update_yaxes(zeroline=False)
    for number, part in enumerate(parts, start=1):
        figure.update_yaxes(range=_range(workloads, part, units), row=number, col=1)
    figure.update_layout(hovermode="x unified", uirevision="requests")
    return figure


def _knows(one: Workload, part: str) -> bool:
    """Whether a run has what a part shows; the first part is always there."""
    names = {"process": "process", "first token": "first_token_s", "tokens": "tokens_per_s"}
    return part not in names or bool(np.isfinite(one.values(names[part])).any())


def _lines(one: Workload, part: str) -> list[str]:
    """What a part draws; without a caching allocator what is reserved is what is allocated."""
    if part == "process":
        return ["process"]
    alike = np.array_equal(one.values("allocated"), one.values("reserved"), equal_nan=True)
    return ["allocated"] if alike else ["reserved", "allocated"]


def _range(workloads: Sequence[Workload], part: str, units: dict[str, Unit]) -> tuple[float, float]:
    """From 0 to what is highest in any run; of a process what is in use, as it hardly varies; of
    the first token powers of ten."""
    if part == "first token":
        found = np.concatenate([one.values("first_token_s") for one in workloads])
        found = np.log10(found[found > 0]) if (found > 0).any() else np.zeros(1)
        return found.min() - _MARGIN, found.max() + _MARGIN
    if part == "tokens":
        return 0, _ROOM * max(np.nanmax(one.values("tokens_per_s"), initial=0) for one in workloads)
    found = np.concatenate([_sizes(one, part) for one in workloads]) / units[part].size
    low, high = (found.min(), found.max()) if len(found) else (0, 1)
    if part == "memory":
        return 0, _ROOM * (high or 1)
    return low - _MARGIN * (high - low or high), high + 2 * _MARGIN * (high - low or high)


def _sizes(one: Workload, part: str) -> np.ndarray:
    found = np.concatenate([one.values(name) for name in _lines(one, part)])
    return found[np.isfinite(found)]


def _scale(
    figure: go.Figure,
    part: str,
    parts: Sequence[str],
    units: dict[str, Unit],
    row: int,
    column: int,
) -> None:
    """The axes of one part of a panel: every run has the same."""
    _, alike = axes_of(figure, parts.index(part) + 1, 1)
    title = {"first token": "first token, s", "tokens": "tokens/s"}.get(part)
    if title is None:
        title = f"{'after it' if part == 'memory' else part}, {units[part].name}"
    figure.update_yaxes(
        matches=alike,
        title_text=title if column == 1 else None,
        **(_POWERS if part == "first token" else {}),
        row=row,
        col=column,
    )
    last = part == parts[-1]
    figure.update_xaxes(
        showticklabels=last, title_text="requests answered" if last else None, row=row, col=column
    )


def _traces(one: Workload, part: str, units: dict[str, Unit], look: Look) -> Iterator[go.Scatter]:
    if part == "first token":
        yield _points("first token", one.values("first_token_s"), "%{y:.3f} s", look)
        return
    if part == "tokens":
        yield _points("tokens/s", one.values("tokens_per_s"), "%{y:,.1f} tokens/s", look)
        return
    unit = units[part]
    measures = {measure.name: measure for measure in one.judged.measures}
    for name in _lines(one, part):
        if name in measures:
            yield from _slope(one, measures[name], unit, look)
        yield go.Scatter(
            x=np.arange(len(one.rows)),
            y=one.values(name) / unit.size,
            name=name,
            legendgroup=name,
            legendrank=_LEGEND.index(name),
            mode="lines+markers",
            marker={"size": 4},
            line={
                "width": 1.5,
                "dash": _DASHES[name],
                "color": look.ink if name == "allocated" else look.faint,
            },
            hovertemplate=f"%{{y:,.3f}} {unit.name}",
        )
    if part == "memory":
        yield from _marks(one, look)


def _labels(one: Workload, trace: go.Scatter) -> list[str]:
    """By which a click knows the request."""
    return [label(one.rows[int(at)]) for at in trace.x]


def _points(name: str, values: np.ndarray, template: str, look: Look) -> go.Scatter:
    return go.Scatter(
        x=np.arange(len(values)),
        y=values,
        name=name,
        mode="markers",
        marker={"size": 5, "color": look.ink},
        showlegend=False,
        hovertemplate=template,
    )


def _slope(one: Workload, measure: Measure, unit: Unit, look: Look) -> Iterator[go.Scatter]:
    """The line through the middle of the requests that count, and what its interval allows."""
    found = measure.slope
    if found.points < FEWEST:
        return
    at = one.counted[measure.since :]
    beyond = np.arange(len(at)) - (len(at) - 1) / 2
    middle = _middle(one, measure)
    if isfinite(found.low) and isfinite(found.high):
        low, high = (middle + value * beyond for value in (found.low, found.high))
        yield go.Scatter(
            x=np.concatenate([at, at[::-1]]),
            y=np.concatenate([low, high[::-1]]) / unit.size,
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=look.accent,
            opacity=0.25,
            hoverinfo="skip",
            name="its interval of 95 %",
            legendgroup="interval",
            legendrank=_LEGEND.index("interval"),
        )
    yield go.Scatter(
        x=at,
        y=(middle + found.value * beyond) / unit.size,
        mode="lines",
        line={"width": 4, "color": look.accent},
        hoverinfo="skip",
        name="slope",
        legendgroup="slope",
        legendrank=_LEGEND.index("slope"),
    )


def _middle(one: Workload, measure: Measure) -> float:
    """Through which all slopes go, in bytes."""
    return float(np.median(one.values(measure.name)[one.counted[measure.since :]]))


def _end(one: Workload, measure: Measure) -> float:
    """The outer one of where the slope ends and of the last value, in bytes."""
    end = _middle(one, measure) + measure.slope.value * (len(one.counted) - measure.since - 1) / 2
    return min(end, measure.last) if measure.name == "allocated" else max(end, measure.last)


def _name_slopes(
    figure: go.Figure,
    one: Workload,
    part: str,
    units: dict[str, Unit],
    row: int,
    column: int,
    look: Look,
) -> None:
    """Bytes a request, at the end of each slope: below that of allocated, above the others."""
    names = _lines(one, part) if part in units else []
    for measure in one.judged.measures:
        if measure.name in names and measure.slope.points >= FEWEST:
            figure.add_annotation(
                text=rate(measure.slope.value),
                x=one.counted[-1],
                y=_end(one, measure) / units[part].size,
                xanchor="right",
                yshift=-13 if measure.name == "allocated" else 13,
                showarrow=False,
                font={"color": look.accent},
                bgcolor=look.background,  # a steep slope is behind it
                opacity=0.9,
                row=row,
                col=column,
            )


def _marks(one: Workload, look: Look) -> Iterator[go.Scatter]:
    """During which requests the allocator had to try again, memory ran out, or they failed."""
    outcomes = np.array([row.outcome or "" for row in one.rows])
    risen = {name: _risen(one.values(name)) for name in ("retries", "ooms")}
    found = {
        "retry": risen["retries"],
        "out of memory": risen["ooms"] | (outcomes == "oom"),
        "failed": ~np.isin(outcomes, ["ok", "oom", ""]),
    }
    for name, where in found.items():
        if where.any():
            at = np.flatnonzero(where)
            yield go.Scatter(
                x=at,
                y=np.zeros(len(at)),
                mode="markers",
                marker={"symbol": _SYMBOLS[name], "size": 11, "color": look.ink},
                name=name,
                legendgroup=name,
                legendrank=_LEGEND.index(name),
                cliponaxis=False,
                hovertemplate=f"{name}<extra></extra>",
            )


def _risen(counts: np.ndarray) -> np.ndarray:
    """Where a running count is more than it was."""
    return np.diff(np.nan_to_num(counts), prepend=0) > 0


def _warm_up(
    figure: go.Figure, one: Workload, first: int, column: int, parts: int, look: Look
) -> None:
    """A shade behind the requests that don't count yet, in all parts of a panel."""
    if one.judged.warmup == 0:
        return
    for row in range(first, first + parts):
        x, y = axes_of(figure, row, column)
        figure.add_shape(
            type="rect",
            xref=x,
            yref=f"{y} domain",
            x0=-0.5,
            x1=one.judged.warmup - 0.5,
            y0=0,
            y1=1,
            line={"width": 0},
            fillcolor=look.grid,
            layer="below",
            name="warm-up",
            legendgroup="warm-up",
            legendrank=len(_LEGEND),
            showlegend=row == first == column == 1,
        )


# -- cycle over cycle ------------------------------------------------------------------------------


def cycles(workloads: Sequence[Workload], measure: str, look: Look) -> go.Figure:
    """Of each run a line a cycle: bytes of ``measure`` after the requests of each prompt length,
    beyond the first that counts of that length. Where memory stays put the lines are one. The axis
    holds at least what memory may grow by.
    """
    found = [beyond_first(one, measure) for one in workloads]
    sizes = [size for one in found for line in one.values() for size in line]
    allowed = max(one.judged.limit * len(one.counted) for one in workloads)
    low, high = min(*sizes, -allowed), max(*sizes, allowed)
    unit = unit_of([round(low), round(high)])
    figure, columns, height = grid([one.name for one in workloads], [_CYCLES])
    _, alike = axes_of(figure, 1, 1)
    figure.layout.yaxis.range = (_ROOM * low / unit.size, _ROOM * high / unit.size)
    for number, own in enumerate(found):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        lengths = ["unknown" if length is None else f"{length:,}" for length in own]
        longest = max(map(len, own.values()), default=0)
        some = np.unique(np.linspace(1, longest - 1, min(_BETWEEN, max(longest - 1, 0)), dtype=int))
        between = {"width": 1, "color": look.faint}
        for cycle in some.tolist():
            some_of = [line[cycle] if cycle < len(line) else None for line in own.values()]
            figure.add_trace(_cycle("between", lengths, some_of, unit, line=between), **place)
        ends = {"first": (0, {"width": 1.5, "color": look.ink, "dash": "dot"})}
        ends["last"] = (-1, {"width": 2.5, "color": look.accent})
        for name, (cycle, style) in ends.items():
            ends_of = [line[cycle] for line in own.values()]
            figure.add_trace(_cycle(name, lengths, ends_of, unit, line=style), **place)
        figure.update_xaxes(title_text="prompt tokens", type="category", **place)
        figure.update_yaxes(matches=alike, **place)
        if number % columns == 0:
            figure.update_yaxes(title_text=f"beyond the first, {unit.name}", **place)
    dress_grid(figure, look, height)
    figure.update_xaxes(showgrid=False)
    return figure


def beyond_first(one: Workload, measure: str) -> dict[int | None, list[int]]:
    """By prompt length, the shortest first: bytes after each request that counts beyond those after
    the first; nothing where they aren't known."""
    found: dict[int | None, list[int]] = {}
    for row in one.judged.counted:
        if (size := getattr(row, measure)) is not None:
            found.setdefault(row.prompt_tokens, []).append(size)
    ordered = sorted(found, key=lambda length: length or 0)
    return {length: [size - found[length][0] for size in found[length]] for length in ordered}


def _cycle(
    name: str, lengths: Sequence[str], sizes: Sequence[int | None], unit: Unit, **options: Any
) -> go.Scatter:
    return go.Scatter(
        x=lengths,
        y=[None if size is None else size / unit.size for size in sizes],
        name=f"{name} cycle" if name != "between" else "cycles between",
        legendgroup=name,
        legendrank=["first", "between", "last"].index(name),
        mode="lines+markers",
        marker={"size": 4},
        hovertemplate=f"%{{x}} tokens: %{{y:,.3f}} {unit.name}<extra>{name}</extra>",
        **options,
    )


def describe(one: Workload) -> str:
    """A run in words and numbers, for who can't see it."""
    sizes = ", ".join(
        f"{measure.name} from {format_size(measure.first)} to {format_size(measure.last)}, at most "
        f"{format_size(measure.highest)}"
        for measure in one.judged.measures
    )
    known = sizes or "no memory is known"
    return f"{one.name}: {counted(one.judged)}. {known}. {verdict(one.judged)}."
