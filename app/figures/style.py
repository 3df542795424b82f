"""How all figures look: light or dark, one unit of bytes an axis, room for what is written."""

import html
from collections.abc import Iterable
from dataclasses import dataclass

import plotly.graph_objects as go
import plotly.io as pio


@dataclass(frozen=True)
class Look:
    """Colours of all that is no component."""

    background: str  # and between the bands of a stack
    ink: str  # text, and lines that matter
    faint: str  # sums, outlines, what is beside the matter
    grid: str
    accent: str  # of controls


LIGHT = Look("#FFFFFF", "#222222", "#777777", "#E5E5E5", "#332288")
DARK = Look("#15171C", "#EEEEEE", "#A0A0A0", "#363A42", "#6677CC")
#: Of lines that stand for no component, in their order: Paul Tol's "bright", which both looks show.
SERIES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")


_AXIS = {"automargin": True, "ticks": "", "title": {"standoff": 15}, "zerolinewidth": 2}
#: What Plotly copies into each figure that is made: of its own, which know 50 kinds of charts, a
#: copy takes as long as all else in a figure.
pio.templates["memtrace"] = go.layout.Template(
    layout={
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "coloraxis": {"colorbar": {"outlinewidth": 0, "ticks": ""}},
        "hoverlabel": {"align": "left"},
    }
)
pio.templates.default = "memtrace"


@dataclass(frozen=True)
class Unit:
    """A unit of the axes; ``size`` in bytes."""

    name: str
    size: int


_UNITS = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10), Unit("B", 1))


def unit_of(sizes: Iterable[int]) -> Unit:
    """The unit in which the largest of ``sizes`` (bytes) has one digit before the point or more."""
    largest = max(map(abs, sizes), default=0)
    return next(unit for unit in _UNITS if largest >= 2 * unit.size or unit.size == 1)


def plain(text: str) -> str:
    """A name for a figure, where Plotly would take ``<b>`` and its like for HTML."""
    return html.escape(visible(text), quote=False)


def visible(text: str) -> str:
    """Without signs that nobody sees, or that turn what stands behind them."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


def dress(figure: go.Figure, look: Look, height: int, top: int = 30) -> None:
    """What every figure has in common; ``height`` and the margin at the ``top`` in pixels."""
    figure.update_layout(
        height=height,
        margin={"l": 10, "r": 10, "t": top, "b": 10},
        font={"color": look.ink, "size": 13},
        paper_bgcolor=look.background,
        plot_bgcolor=look.background,
        hoverlabel={"bgcolor": look.background, "font": {"color": look.ink}},
    )
    figure.update_xaxes(gridcolor=look.grid, linecolor=look.grid, zerolinecolor=look.faint)
    figure.update_yaxes(gridcolor=look.grid, linecolor=look.grid, zerolinecolor=look.faint)
    figure.update_annotations(font={"size": 14})
