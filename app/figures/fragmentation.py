"""The allocator's memory: its segments at one instant, and what of it is unused over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import plotly.graph_objects as go

from app.figures.grid import axes_of, dress_grid, grid, lines, mark
from app.figures.style import Look, Unit, plain, unit_of
from memtrace.analysis.accounts import Account
from memtrace.analysis.occupancy import Course, Occupancy, Stop, course, occupancy
from memtrace.analysis.places import Place
from memtrace.analysis.places import place as place_of
from memtrace.analysis.segments import SMALL_SEGMENT, Layout, layout_at
from memtrace.components import COLOURS, TENSOR_COMPONENTS, base
from memtrace.sizes import format_size
from memtrace.trace.schema import State

#: Rows of the segment map at most, and how many places of a row are told apart.
_ROWS, _CELLS = 24, 1024
_ROW = 16  # pixels
#: Of the largest blocks so many say what they are under the pointer, at so many points of a row.
_HOVERED, _POINTS = 500, 48
#: Rows of the map over time, and how many pixels each of its parts takes: the map, what is
#: unused, the ratio.
ADDRESSES = 96
#: Spans of time that are looked at.
SPANS = 200
_HEIGHTS = (260, 220, 120)
_ROOM = 1.08  # of the highest value that is drawn
#: What is no component, by its pattern; all in the colour of the allocator.
_PATTERNS = {"slack": "|", "pending": ".", "hard": "/", "releasable": "-", "private": "x"}
#: Kinds of bytes in the order of the legend.
KINDS = (*TENSOR_COMPONENTS, *_PATTERNS)


@dataclass(frozen=True)
class Instant:
    """One run after one event."""

    name: str
    stop: Stop
    layout: Layout
    place: Place  # of the event
    places: Mapping[int, str]  # where the blocks were allocated, by their scope

    @classmethod
    def of(cls, name: str, account: Account, stop: Stop) -> "Instant":
        """An account at one of the stops of its course."""
        process = account.process
        layout = layout_at(account, stop.event) or Layout.none()
        scope = process.contexts["scope"][process.events["context"][stop.event]]
        places = {
            int(number): str(place_of(process, number))
            for number in set(layout.blocks.scope)
            if number >= 0
        }
        return cls(name, stop, layout, place_of(process, int(scope)), places)


@dataclass(frozen=True)
class History:
    """One run over its time."""

    name: str
    course: Course
    occupancy: Occupancy
    time_us: Mapping[str, np.ndarray]  # of "retries" and "ooms"

    @classmethod
    def of(cls, name: str, account: Account) -> "History | None":
        """An account in so many spans as are looked at; None: it has no segments."""
        found = course(account, SPANS)
        if found is None:
            return None
        marked = {"retries": account.time_us[found.retries], "ooms": account.time_us[found.ooms]}
        return cls(name, found, occupancy(account, ADDRESSES, found.edges_us), marked)

    @property
    def telling(self) -> int:
        """The span of the last failure, or else of the peak of allocated."""
        failed = self.time_us["ooms"]
        if len(failed):
            return self.course.span_of(int(failed[-1]))
        return max(range(SPANS), key=lambda span: self.course.stops[span].parts.allocated)


# -- at one instant --------------------------------------------------------------------------------


def kinds(layout: Layout) -> dict[str, np.ndarray]:
    """Start and end of every range of bytes inside segments, by kind (int64, n x 2).

    Positions are addresses without the gaps between segments. A component's ranges are what was
    asked for; what its blocks have beyond that is slack. Free bytes are hard, releasable or
    private as in :mod:`memtrace.analysis.fragmentation`.
    """
    segments, blocks = layout.segments, layout.blocks
    offset = np.cumsum(segments.bytes) - segments.bytes
    inside = blocks.segment >= 0
    segment = blocks.segment[inside]
    start = offset[segment] + blocks.address[inside] - segments.address[segment]
    size, state = blocks.bytes[inside], blocks.state[inside]
    end = start + size
    asked = start + np.minimum(blocks.requested[inside], size)
    private = np.array([pool is not None for pool in segments.pool], dtype=bool)[segment]
    whole = size == segments.bytes[segment]
    free, allocated = state == State.FREE, state == State.ALLOCATED
    named = np.array([name and base(name) for name in blocks.component], dtype=object)[inside]
    found = {name: _ranges(allocated & (named == name), start, asked) for name in TENSOR_COMPONENTS}
    return found | {
        "slack": _ranges(allocated & (asked < end), asked, end),
        "pending": _ranges(state == State.PENDING, start, end),
        "hard": _ranges(free & ~private & ~whole, start, end),
        "releasable": _ranges(free & ~private & whole, start, end),
        "private": _ranges(free & private, start, end),
    }


def _ranges(chosen: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    return np.stack((start[chosen], end[chosen]), axis=1)


def row_bytes(reserved: int) -> int:
    """How much a row of the segment map holds where so many bytes are reserved at most."""
    return int(2 ** np.ceil(np.log2(max(reserved / _ROWS, SMALL_SEGMENT))))


def segment_map(instants: Sequence[Instant], row: int, look: Look) -> go.Figure:
    """Every segment as a bar, by address, in rows of ``row`` bytes that are read like lines.

    A place shows the kind of bytes that has most of it. Components have their colours; what isn't
    a component is told by its pattern. Thin lines are where segments begin.
    """
    rows = max(1, *(ceil(one.stop.parts.reserved / row) for one in instants))
    figure, columns, height = grid([one.name for one in instants], [rows * _ROW])
    unit = unit_of([row])
    for number, one in enumerate(instants):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for trace in _bars(one, row, unit, look):
            figure.add_trace(trace, **place)
    figure.update_xaxes(range=[0, row / unit.size], title_text=unit.name, showgrid=False)
    figure.update_yaxes(range=[rows, 0], showticklabels=False, showgrid=False)
    figure.update_yaxes(zeroline=False)
    dress_grid(figure, look, height)
    return figure


def _bars(one: Instant, row: int, unit: Unit, look: Look) -> list[go.Scatter]:
    ranges = kinds(one.layout)
    cells = ceil(one.stop.parts.reserved / row) * _CELLS
    shares = np.array([_shares(ranges[kind], row / _CELLS, cells) for kind in KINDS])
    most = np.where(shares.any(axis=0), shares.argmax(axis=0), -1)
    begins = np.flatnonzero((np.diff(most, prepend=-2) != 0) | (np.arange(cells) % _CELLS == 0))
    ends = np.append(begins[1:], cells)
    scale = row / _CELLS / unit.size
    traces = []
    for number, kind in enumerate(KINDS):
        own = most[begins] == number
        if ranges[kind].size and own.any():
            line, first = np.divmod(begins[own], _CELLS)
            width = ends[own] - begins[own]
            traces.append(_boxes(kind, line, first * scale, (first + width) * scale, look))
    return [*traces, _borders(one.layout, row, unit, look), _hovers(one, row, unit)]


def _shares(ranges: np.ndarray, cell: float, cells: int) -> np.ndarray:
    """How much of each cell the ranges cover (float64)."""
    found = np.zeros(cells + 2)
    for place, sign in ((ranges[:, 0] / cell, 1.0), (ranges[:, 1] / cell, -1.0)):
        first = place.astype(np.int64)
        late = place - first
        np.add.at(found, first, sign * (1 - late))
        np.add.at(found, first + 1, sign * late)
    return np.where((covered := found.cumsum()[:cells]) > 1e-9, covered, 0)


def _boxes(
    kind: str, line: np.ndarray, low: np.ndarray, high: np.ndarray, look: Look
) -> go.Scatter:
    gap = np.full(len(line), np.nan)
    top, bottom = line + 0.1, line + 0.9
    x = np.stack((low, high, high, low, low, gap), axis=1)
    y = np.stack((top, top, bottom, bottom, top, gap), axis=1)
    return go.Scatter(
        x=x.ravel().astype(np.float32),
        y=y.ravel().astype(np.float32),
        name=kind,
        legendgroup=kind,
        legendrank=KINDS.index(kind),
        mode="lines",
        line={"width": 0},
        fill="toself",
        hoverinfo="skip",
        **_filling(kind, look),
    )


def _filling(kind: str, look: Look) -> dict[str, Any]:
    if kind in COLOURS:
        return {"fillcolor": COLOURS[kind]}
    return {
        "fillcolor": COLOURS["allocator"],
        "fillpattern": {
            "shape": _PATTERNS[kind],
            "fgcolor": COLOURS["allocator"],
            "bgcolor": look.background,
            "size": 6,
            "solidity": 0.5,
        },
    }


def _borders(layout: Layout, row: int, unit: Unit, look: Look) -> go.Scatter:
    """Where segments begin; of those that lie closer together than can be seen, one."""
    offset = np.cumsum(layout.segments.bytes) - layout.segments.bytes
    line, first = np.divmod(offset, row)
    _, kept = np.unique(offset // (row * 4 // _CELLS), return_index=True)
    x = np.stack([first[kept] / unit.size] * 2 + [np.full(len(kept), np.nan)], axis=1)
    y = np.stack((line[kept], line[kept] + 1, np.full(len(kept), np.nan)), axis=1)
    return go.Scatter(
        x=x.ravel().astype(np.float32),
        y=y.ravel().astype(np.float32),
        mode="lines",
        line={"width": 1, "color": look.ink},
        name="a segment begins",
        legendgroup="a segment begins",
        legendrank=len(KINDS),
        hoverinfo="skip",
    )


def _hovers(one: Instant, row: int, unit: Unit) -> go.Scatter:
    """What the largest blocks are: a point in the middle of each, or several along a long one."""
    segments, blocks = one.layout.segments, one.layout.blocks
    inside = np.flatnonzero(blocks.segment >= 0)
    chosen = inside[np.argsort(-blocks.bytes[inside], kind="stable")[:_HOVERED]]
    segment, size = blocks.segment[chosen], blocks.bytes[chosen]
    offset = np.cumsum(segments.bytes) - segments.bytes
    start = offset[segment] + blocks.address[chosen] - segments.address[segment]
    points = np.maximum(size * _POINTS // row, 1)
    block = np.repeat(np.arange(len(chosen)), points)
    step = np.arange(len(block)) - np.repeat(np.cumsum(points) - points, points)
    place = start[block] + ((step + 0.5) * size[block] / points[block]).astype(np.int64)
    texts = []
    for number in chosen.tolist():
        state = State(int(blocks.state[number])).name.lower()
        what = f"{format_size(int(blocks.bytes[number]))} {state} {blocks.component[number] or ''}"
        where = one.places.get(int(blocks.scope[number]), "")
        texts.append("<br>".join(map(plain, filter(None, (what, where)))))
    return go.Scatter(
        x=((place % row) / unit.size).astype(np.float32),
        y=(place // row + 0.5).astype(np.float32),
        text=[texts[number] for number in block.tolist()],
        mode="lines",  # one path, where each marker would be an element of its own
        line={"width": 0},
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        name="blocks",
    )


def describe(one: Instant) -> str:
    """An instant in words and numbers, for who can't see it."""
    parts = one.stop.parts
    largest = max(parts.largest.values(), default=0)
    return (
        f"{one.name} after {one.stop.time_us / 1e6:.3f} s, {one.place.within}: "
        f"{format_size(parts.reserved)} reserved in {one.stop.totals.segments:,} segments, "
        f"{format_size(parts.allocated)} allocated, {format_size(parts.hard)} free in pieces "
        f"({100 * parts.ratio:.1f} %), the largest free block {format_size(largest)}."
    )


# -- over time -------------------------------------------------------------------------------------


def over_time(
    histories: Sequence[History], look: Look, chosen: Sequence[int] | None = None
) -> go.Figure:
    """Of each run: addresses by time, coloured by how much of them is used; what is unused, and
    the largest free block; and the fragmentation ratio. A line marks each one's ``chosen`` span.

    What is unused is drawn to the scale of what it is while a run still allocates more: in the end
    all is freed, and that would dwarf it.
    """
    figure, columns, height = grid([one.name for one in histories], _HEIGHTS)
    most = max(_unused(stop) for one in histories for stop in _growing(one.course))
    unit = unit_of([most])
    span = unit_of(int(one.occupancy.edges[-1]) for one in histories)
    parts = len(_HEIGHTS)
    for number, one in enumerate(histories):
        row, column = number // columns * parts + 1, number % columns + 1
        figure.add_trace(_map(one, span), row=row, col=column)
        for trace in _curves(one, unit, look):
            figure.add_trace(trace, row=row + 1, col=column)
        figure.add_trace(_ratio(one, look), row=row + 2, col=column)
        time, _ = axes_of(figure, row, column)
        for part in range(parts):
            last = part == parts - 1
            figure.update_xaxes(matches=time, showticklabels=last, row=row + part, col=column)
        figure.update_xaxes(
            title_text="seconds since the run began", row=row + parts - 1, col=column
        )
        if column == 1:
            titles = (f"addresses, {span.name}", f"unused, {unit.name}", "ratio, %")
            for part, title in enumerate(titles):
                figure.update_yaxes(title_text=title, row=row + part, col=column)
    _match_parts(figure, len(histories), columns)
    if chosen is not None:
        mark(figure, _seconds(histories, chosen), parts, look.ink)
    dress_grid(figure, look, height)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(rangemode="tozero", zeroline=False)
    highest = max(stop.parts.ratio for one in histories for stop in one.course.stops)
    # Plotly forgets to find the range of axes that match where other ones have a range.
    for row, top in ((2, most / unit.size), (3, 100 * highest)):
        figure.update_yaxes(range=(0, _ROOM * top or 1), row=row, col=1)
    figure.update_layout(
        hovermode="x unified",
        coloraxis={
            "cmin": 0,
            "cmax": 100,
            "colorscale": [[0, COLOURS["allocator"]], [1, look.ink]],
            "colorbar": {
                "title": {"text": "used, %"},
                "thickness": 12,
                "len": _HEIGHTS[0],
                "lenmode": "pixels",
                "y": 1,
                "yanchor": "top",
                "x": 1.01,
            },
        },
    )
    return figure


def moments(
    figure: go.Figure, histories: Sequence[History], chosen: Sequence[int]
) -> dict[str, float]:
    """Where on which x axes of :func:`over_time` the ``chosen`` spans are."""
    seconds = _seconds(histories, chosen)
    return {x.replace("x", "xaxis"): at for x, _, at in lines(figure, seconds, len(_HEIGHTS))}


def _seconds(histories: Sequence[History], chosen: Sequence[int]) -> list[float]:
    stops = (one.course.stops[span] for one, span in zip(histories, chosen, strict=True))
    return [stop.time_us / 1e6 for stop in stops]


def _growing(course: Course) -> Sequence[Stop]:
    """Its stops up to the last at which more is allocated than before."""
    allocated = np.array([stop.parts.allocated for stop in course.stops])
    grown = np.flatnonzero(np.diff(allocated, prepend=0) > 0)
    return course.stops[: grown[-1] + 1] if len(grown) else course.stops


def _match_parts(figure: go.Figure, panels: int, columns: int) -> None:
    """Unused bytes of all runs on one scale, and ratios on another one."""
    parts = len(_HEIGHTS)
    for part in range(1, parts):
        _, first = axes_of(figure, part + 1, 1)
        for number in range(panels):
            row, column = number // columns * parts + part + 1, number % columns + 1
            figure.update_yaxes(matches=first, row=row, col=column)


def _map(one: History, unit: Unit) -> go.Heatmap:
    found = one.occupancy
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(found.reserved > 1e-6, 100 * found.used / found.reserved, np.nan)
    return go.Heatmap(
        z=share.astype(np.float32),
        x=(one.course.edges_us / 1e6).astype(np.float32),
        y=(found.edges / unit.size).astype(np.float32),
        coloraxis="coloraxis",
        hovertemplate="%{z:.0f} % of what is reserved there<extra></extra>",
        name="used",
        showlegend=False,
    )


def _unused(stop: Stop) -> int:
    return stop.parts.reserved - stop.parts.allocated


def _curves(one: History, unit: Unit, look: Look) -> list[go.Scatter]:
    stops = one.course.stops
    time = np.array([stop.time_us for stop in stops]) / 1e6
    traces = []
    for kind in ("hard", "releasable", "private", "pending"):
        size = np.array([getattr(stop.parts, kind) for stop in stops])
        if size.any():
            traces.append(
                _steps(kind, time, size / unit.size, unit, stackgroup="unused")
                .update(line={"width": 0.5, "color": COLOURS["allocator"]}, **_filling(kind, look))
                .update(legendrank=KINDS.index(kind))
            )
    largest = np.array([max(stop.parts.largest.values(), default=0) for stop in stops])
    split = np.array([stop.totals.inactive_split for stop in stops])
    traces += [
        _steps("largest free block", time, largest / unit.size, unit).update(
            line={"width": 1.5, "color": look.ink}
        ),
        _steps("inactive split", time, split / unit.size, unit).update(
            line={"width": 1.5, "color": look.faint, "dash": "dash"}
        ),
    ]
    for name, kind, symbol in (("retry", "retries", "triangle-up"), ("out of memory", "ooms", "x")):
        at = one.time_us[kind]
        if len(at):
            spans = np.searchsorted(one.course.edges_us, at)
            at = at[np.unique(spans, return_index=True)[1]] / 1e6
            traces.append(
                go.Scatter(
                    x=at,
                    y=np.zeros(len(at)),
                    mode="markers",
                    marker={"symbol": symbol, "size": 11, "color": look.ink},
                    name=name,
                    legendgroup=name,
                    cliponaxis=False,
                    hovertemplate=f"{name}<extra></extra>",
                )
            )
    return traces


def _ratio(one: History, look: Look) -> go.Scatter:
    stops = one.course.stops
    return go.Scatter(
        x=np.array([stop.time_us for stop in stops]) / 1e6,
        y=np.array([100 * stop.parts.ratio for stop in stops]),
        mode="lines",
        line={"shape": "hv", "width": 1.5, "color": look.ink},
        name="fragmentation ratio",
        showlegend=False,
        hovertemplate="%{y:.1f} %",
    )


def _steps(name: str, time: np.ndarray, size: np.ndarray, unit: Unit, **options: Any) -> go.Scatter:
    return go.Scatter(
        x=time,
        y=size.astype(np.float32),
        name=name,
        legendgroup=name,
        mode="lines",
        line_shape="hv",
        hovertemplate=f"%{{y:,.2f}} {unit.name}",
        **options,
    )


def describe_course(one: History) -> str:
    """A run over its time in words and numbers, for who can't see it."""
    most = max(one.course.stops, key=lambda stop: stop.parts.hard)
    return (
        f"{one.name}: at most {format_size(most.parts.hard)} free in pieces after "
        f"{most.time_us / 1e6:.2f} s, {100 * most.parts.ratio:.1f} % of what was reserved; "
        f"{len(one.course.retries)} retries, {len(one.course.ooms)} failures."
    )
