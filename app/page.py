"""The one page of the viewer."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import streamlit as st

from app import frames
from app.figures.timeline import SPANS, Panel, describe, timelines
from app.load import Run, load
from memtrace.analysis.compare import Comparison, compare
from memtrace.errors import MemtraceError
from memtrace.trace import SUFFIX

_TOP = 10


def page(folders: Sequence[str]) -> None:
    """Draw the page for the runs that ``memtrace view`` was given."""
    st.set_page_config(page_title="memtrace", layout="wide")
    st.title("Where each byte goes")
    runs = []
    for folder in _chosen(folders):
        try:
            runs.append(load(folder))
        except MemtraceError as error:
            st.error(str(error))
    if not runs:
        st.info("Choose a run above.")
        return
    comparison = compare([run.summary for run in runs])
    _verdicts(comparison)
    _charts(comparison, runs)
    _equations(comparison)
    _allocations(comparison)
    _points(comparison, runs)


def _chosen(folders: Sequence[str]) -> list[str]:
    """The runs to show, kept in the address so that it can be shared and reloaded."""
    names = {_label(folder, folders): folder for folder in folders}
    asked = [name for name in st.query_params.get_all("run") if name in names]
    chosen = st.multiselect("Runs", list(names), default=asked or list(names), key="runs")
    st.query_params["run"] = chosen
    return [names[name] for name in chosen]


def _label(folder: str, folders: Sequence[str]) -> str:
    name = Path(folder).name.removesuffix(SUFFIX)
    alike = [other for other in folders if Path(other).name.removesuffix(SUFFIX) == name]
    return name if len(alike) == 1 else folder


def _verdicts(comparison: Comparison) -> None:
    if comparison.verdicts:
        st.markdown("\n".join(f"- {_escaped(text)}" for text in comparison.verdicts))
    for text in comparison.warnings:
        st.warning(_escaped(text))


def _escaped(text: str) -> str:
    """Names in a trace are text, not Markdown."""
    return "".join(f"\\{sign}" if sign in r"\`*_{}[]<>()#+|~$:" else sign for sign in text)


def _table(frame: pd.DataFrame) -> None:
    """A small table as HTML, which a screen reader reads; its cells would else be Markdown."""
    st.table(frame.map(_escaped).rename(index=_escaped, columns=_escaped))


def _charts(comparison: Comparison, runs: Sequence[Run]) -> None:
    panels = [
        Panel(side.name, run.timeline, run.account.peak, run.account.memory.source)
        for side, run in zip(comparison.sides, runs, strict=True)
    ]
    st.plotly_chart(
        timelines(panels),
        theme=None,
        key="timelines",
        alt=" ".join(describe(panel) for panel in panels),
        config={"displaylogo": False, "toImageButtonOptions": {"format": "svg", "scale": 2}},
    )
    events = " and ".join(f"{panel.timeline.total_events:,}" for panel in panels)
    st.caption(
        f"Of {events} events the highest in each 1/{SPANS} of the time is drawn, the peak exactly. "
        + _escaped(" ".join(describe(panel) for panel in panels))
    )


def _equations(comparison: Comparison) -> None:
    at_peak, own = st.columns(2)
    with at_peak:
        st.subheader("At the peak of allocated")
        _table(frames.equations(comparison, own=False))
    with own:
        st.subheader("Each one's own peak")
        _table(frames.equations(comparison, own=True))
    places = (f"{side.name} peaks in {side.account.place}." for side in comparison.sides)
    st.caption(_escaped(" ".join(places)))


def _allocations(comparison: Comparison) -> None:
    st.subheader("Live at the peak")
    columns = st.columns(len(comparison.sides))
    for column, side in zip(columns, comparison.sides, strict=True):
        with column:
            st.markdown(f"**{_escaped(side.name)}**")
            _table(frames.allocations(side.account.top[:_TOP]).set_index("component"))


def _points(comparison: Comparison, runs: Sequence[Run]) -> None:
    with st.expander("The charts as a table, in bytes"):
        for side, run in zip(comparison.sides, runs, strict=True):
            st.markdown(f"**{_escaped(side.name)}**")
            st.dataframe(frames.points(run.timeline), hide_index=True)
