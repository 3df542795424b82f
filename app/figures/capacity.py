"""The capacity curve: what a prefill takes at most, against the length of its prompt."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from app.figures.style import SERIES, Look, Unit, dress, plain, unit_of
from memtrace.sizes import format_size

_HEIGHT = 480
#: Of lines, as in the other figures.
_DASHES = {"allocated": "solid", "reserved": "dash"}
#: Cards whose lines are closer than this share of the axis are named together.
_CLOSE = 0.04
_ROOM = 1.08  # of the highest value


@dataclass(frozen=True)
class Curve:
    """One method.

    Attributes:
        method: its name.
        card: what it was planned on, of the catalogue.
        probes: what was tried, as ``tidekv plan --prompts --json`` says it: ``prompt`` (tokens),
            ``fits``, ``allocated_peak`` and ``reserved_peak`` (bytes).
    """

    method: str
    card: str
    probes: Sequence[Mapping[str, Any]]

    @property
    def fitting(self) -> list[Mapping[str, Any]]:
        """Those that came to their end: the peaks of others are those until then."""
        return [probe for probe in self.probes if probe["fits"]]

    def peaks(self, name: str) -> list[int]:
        """Bytes of ``allocated`` or ``reserved`` of those."""
        return [probe[f"{name}_peak"] for probe in self.fitting]


def capacity(curves: Sequence[Curve], cards: Mapping[str, int], look: Look) -> go.Figure:
    """A colour a method, allocated drawn through and reserved dashed; a level line a card.

    Args:
        cards: bytes of memory by name.
    """
    sizes = [size for one in curves for name in _DASHES for size in one.peaks(name)]
    unit = unit_of([*sizes, *cards.values()])
    top = _ROOM * max([*sizes, *cards.values()], default=unit.size) / unit.size
    figure = go.Figure()
    for one, colour in zip(curves, _colours(len(curves)), strict=True):
        for name in _DASHES:
            figure.add_trace(_line(one, name, colour, unit))
    _levels(figure, cards, top, unit, look)
    figure.update_xaxes(title_text="prompt tokens", tickformat=",", rangemode="tozero")
    figure.update_yaxes(title_text=f"at most, {unit.name}", range=(0, top))
    dress(figure, look, _HEIGHT, top=50)
    figure.update_layout(
        margin_b=50,
        hovermode="x unified",
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0},
    )
    figure.update_annotations(font={"size": 12})
    return figure


def _colours(count: int) -> list[str]:
    return [SERIES[number % len(SERIES)] for number in range(count)]


def _line(one: Curve, name: str, colour: str, unit: Unit) -> go.Scatter:
    return go.Scatter(
        x=[probe["prompt"] for probe in one.fitting],
        y=[size / unit.size for size in one.peaks(name)],
        name=f"{plain(one.method)}, {name}",
        mode="lines+markers",
        marker={"size": 6},
        line={"color": colour, "width": 2, "dash": _DASHES[name]},
        hovertemplate=f"%{{y:,.2f}} {unit.name}",
    )


def _levels(
    figure: go.Figure, cards: Mapping[str, int], top: float, unit: Unit, look: Look
) -> None:
    """Each card's memory, named at its end."""
    for size in cards.values():
        figure.add_hline(y=size / unit.size, line={"color": look.faint, "width": 1, "dash": "dot"})
    for names, size in _together(cards, _CLOSE * top * unit.size):
        figure.add_annotation(
            text=plain(f"{', '.join(names)}: {format_size(size)}"),
            xref="paper",
            x=1,
            xanchor="right",
            y=size / unit.size,
            yanchor="bottom",
            showarrow=False,
            font={"color": look.faint},
        )


def _together(cards: Mapping[str, int], close: float) -> Iterator[tuple[list[str], int]]:
    """Cards whose names would lie on each other, and the memory of the largest."""
    names: list[str] = []
    first = last = 0
    for name, size in sorted(cards.items(), key=lambda item: item[1]):
        if names and size - first > close:
            yield names, last
            names = []
        if not names:
            first = size
        names, last = [*names, name], size
    if names:
        yield names, last


def describe(curves: Sequence[Curve]) -> str:
    """The curves in words and numbers, for who can't see them."""
    return " ".join(map(_described, curves))


def _described(one: Curve) -> str:
    if not one.fitting:
        return f"{one.method}: no prompt that was tried fits {one.card}."
    first, last = one.fitting[0], one.fitting[-1]
    text = ", ".join(
        f"{name} from {format_size(first[f'{name}_peak'])} to {format_size(last[f'{name}_peak'])}"
        for name in _DASHES
    )
    said = f"{one.method}, {first['prompt']:,} to {last['prompt']:,} tokens: {text}."
    if len(one.fitting) < len(one.probes):
        said += f" {one.probes[-1]['prompt']:,} tokens don't fit {one.card}."
    return said
