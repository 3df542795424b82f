"""The accounting equation as a waterfall: term by term up to what the process takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.figures.style import Look, Unit, dress, plain, unit_of
from memtrace.analysis.compare import Comparison, Terms, difference
from memtrace.components import COLOURS, PROCESS_COMPONENTS, TENSOR_COMPONENTS
from memtrace.sizes import format_size

#: From above to below; ``allocated`` and ``process`` are the sums of the terms above them.
ORDER = (*TENSOR_COMPONENTS, "allocated", *PROCESS_COMPONENTS, "process")
_HEIGHT = 24  # pixels a term
_BETWEEN = 80  # pixels between rows of panels, for a title and an axis
_LONGEST = 40  # signs of a title
_ROOM = 0.3  # of a panel's width, for the text behind its bars


@dataclass(frozen=True)
class _Bar:
    """One term: where it begins and how long it is, in bytes; None: unknown."""

    term: str
    start: int
    size: int | None
    text: str

    @property
    def ends(self) -> tuple[int, int]:
        """The lower end and the higher one."""
        end = self.start + (self.size or 0)
        return min(self.start, end), max(self.start, end)


@dataclass(frozen=True)
class _Panel:
    title: str
    bars: Sequence[_Bar]


def waterfall(comparison: Comparison, look: Look) -> go.Figure:
    """A panel a run, each term beginning where the one before ends; one for each difference.

    Two runs stand beside each other; more stand below each other, each with what differs from the
    first. All runs have one scale, all differences another one. Where a term is unknown the word
    stands in place of a bar.
    """
    first, *others = comparison.sides
    runs = [_Panel(side.name, _steps(side.at_peak)) for side in comparison.sides]
    changes = [
        _Panel(_between(other.name, first.name), _changes(other.at_peak, first.at_peak))
        for other in others
    ]
    if len(runs) <= 2:
        rows = [[*runs, *changes]]
    else:
        rows = [runs[:1], *map(list, zip(runs[1:], changes, strict=True))]
    columns = max(map(len, rows))
    height = len(rows) * (_HEIGHT * len(ORDER) + _BETWEEN)
    figure = make_subplots(
        rows=len(rows),
        cols=columns,
        specs=[[{}] * len(row) + [None] * (columns - len(row)) for row in rows],
        subplot_titles=[plain(panel.title) for row in rows for panel in row],
        shared_yaxes=True,
        horizontal_spacing=0.02,
        vertical_spacing=_BETWEEN / height,
    )
    unit = unit_of(end for panel in runs for bar in panel.bars for end in bar.ends)
    small = unit_of(end for panel in changes for bar in panel.bars for end in bar.ends)
    for number, row in enumerate(rows, start=1):
        for column, panel in enumerate(row, start=1):
            alike, own = (changes, small) if panel in changes else (runs, unit)
            for trace in _traces(panel, own, look):
                figure.add_trace(trace, row=number, col=column)
            figure.update_xaxes(
                title_text=own.name, range=_range(alike, own), row=number, col=column
            )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    dress(figure, look, height)
    figure.update_layout(showlegend=False, bargap=0.25)
    return figure


def _between(name: str, base: str) -> str:
    text = f"{name} − {base}"
    return text if len(text) <= _LONGEST else "difference"


def _steps(terms: Terms) -> list[_Bar]:
    """Each term on the end of those before it; the sums from 0."""
    bars, end = [], 0
    for term in ORDER:
        size = terms[term]
        start = 0 if term not in COLOURS else end
        bars.append(_Bar(term, start, size, "unknown" if size is None else format_size(size)))
        end = start + (size or 0)
    return bars


def _changes(mine: Terms, base: Terms) -> list[_Bar]:
    """What each term differs by, from 0."""
    bars = []
    for term in ORDER:
        size = difference(mine[term], base[term])
        text = "unknown" if size is None else format_size(size, signed=True)
        bars.append(_Bar(term, 0, size, text))
    return bars


def _traces(panel: _Panel, unit: Unit, look: Look) -> tuple[go.Bar, go.Scatter]:
    terms = [bar.term for bar in panel.bars]
    bars = go.Bar(
        orientation="h",
        y=terms,
        base=[bar.start / unit.size for bar in panel.bars],
        x=[(bar.size or 0) / unit.size for bar in panel.bars],
        marker={
            "color": [COLOURS.get(term, look.faint) for term in terms],
            "line": {"color": look.faint, "width": 1},
        },
        customdata=[bar.text for bar in panel.bars],
        hovertemplate="%{y}: %{customdata}<extra></extra>",
        name=plain(panel.title),
    )
    texts = go.Scatter(
        y=terms,
        x=[bar.ends[1] / unit.size for bar in panel.bars],
        text=[f" {bar.text}" for bar in panel.bars],
        mode="text",
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        name="sizes",
    )
    return bars, texts


def _range(panels: Iterable[_Panel], unit: Unit) -> tuple[float, float]:
    """From the lowest end of any bar to the highest, and room for a text behind that."""
    ends = np.array([end for panel in panels for bar in panel.bars for end in bar.ends])
    low, high = min(0, int(ends.min())) / unit.size, max(0, int(ends.max())) / unit.size
    width = (high - low or 1) / (1 - _ROOM)
    return low, low + width


def describe(comparison: Comparison) -> str:
    """The waterfall in words and numbers, for who can't see it."""
    texts = []
    for side in comparison.sides:
        sizes = ((term, side.at_peak[term]) for term in ORDER)
        listed = ", ".join(
            f"{term} {'unknown' if size is None else format_size(size)}" for term, size in sizes
        )
        texts.append(f"{side.name} at its peak: {listed}.")
    return " ".join(texts)
