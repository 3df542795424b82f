"""What is alive at an instant, as an icicle: component, then where it was made, frame by frame."""

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from app.figures.style import Look, dress, plain
from memtrace.analysis.peaks import Group
from memtrace.components import COLOURS, base
from memtrace.sizes import format_size

_HEIGHT = 380
_LEAST = 300  # what is less than one part in so many of all is not drawn


def icicle(groups: Sequence[Group], look: Look) -> go.Figure:
    """From above to below what holds, in width how many bytes; the colour is the component's.

    Below a component come phase, module, operator and the stack from its outermost frame.
    """
    sizes = _sizes(groups)
    total = sum(group.bytes for group in groups)
    drawn = sorted((path, size) for path, size in sizes.items() if _LEAST * size >= total)
    figure = go.Figure(
        go.Icicle(
            ids=["\n".join(path) or " " for path, _ in drawn],
            parents=["" if not path else "\n".join(path[:-1]) or " " for path, _ in drawn],
            labels=[plain(_label(path)) for path, _ in drawn],
            values=[size for _, size in drawn],
            text=[format_size(size) for _, size in drawn],
            branchvalues="total",
            leaf={"opacity": 1},
            tiling={"orientation": "v"},
            textinfo="label+text",
            hovertemplate="%{label}<br>%{text}, %{percentRoot:.1%} of all<extra></extra>",
            marker={
                "colors": [COLOURS[base(path[0])] if path else look.grid for path, _ in drawn],
                "line": {"color": look.background, "width": 1},
            },
            pathbar={"visible": False},
        )
    )
    dress(figure, look, _HEIGHT, top=10)
    figure.update_layout(uniformtext={"minsize": 11, "mode": "hide"})
    return figure


def _sizes(groups: Iterable[Group]) -> dict[tuple[str, ...], int]:
    """Bytes of each path of the tree; the root's is ()."""
    sizes: dict[tuple[str, ...], int] = {}
    for group in groups:
        where = group.place
        parts = (where.phase, where.module, where.op, where.tag)
        path = (group.component, *(part for part in parts if part), *reversed(group.stack))
        for depth in range(len(path) + 1):
            sizes[path[:depth]] = sizes.get(path[:depth], 0) + group.bytes
    return sizes


def _label(path: tuple[str, ...]) -> str:
    return path[-1].rpartition("/")[2] if path[2:] else path[-1] if path else "allocated"


def describe(name: str, groups: Sequence[Group]) -> str:
    """The icicle in words and numbers, for who can't see it."""
    total = sum(group.bytes for group in groups)
    largest = "; ".join(
        f"{format_size(group.bytes)} of {group.component}, {group.where}" for group in groups[:5]
    )
    return f"{name} holds {format_size(total)}: {largest or 'nothing'}."
