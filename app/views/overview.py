"""Both equations at the peak, run by run and what differs: why one peaks higher than another."""

from collections.abc import Sequence

import streamlit as st

from app import frames
from app.figures.waterfall import describe, waterfall
from app.load import Subject
from app.parts import chart, escaped, look, table
from memtrace.analysis.compare import Comparison, compare

TITLE, PATH = "Overview", "overview"

_TOP = 10
_BESIDE = 2  # tables


def draw(subjects: Sequence[Subject]) -> None:
    """Verdicts, the equation as a waterfall, both equations as tables, what was recorded."""
    comparison = compare([subject.summary for subject in subjects])
    _verdicts(comparison)
    st.subheader("The equation, at the peak of allocated")
    chart(
        waterfall(comparison, look()),
        lambda: frames.terms(comparison),
        key="equation",
        alt=describe(comparison),
    )
    places = (f"{side.name} peaks {side.account.place.within}." for side in comparison.sides)
    st.caption(escaped(" ".join(places)))
    _equations(comparison)
    _allocations(comparison)
    st.subheader("What was recorded")
    table(frames.recordings(comparison))
    _unseen(comparison)


def _verdicts(comparison: Comparison) -> None:
    if comparison.verdicts:
        st.markdown("\n".join(f"- {escaped(text)}" for text in comparison.verdicts))
    for text in comparison.warnings:
        st.warning(escaped(text))
    for side in comparison.sides:
        for oom in side.summary.ooms[-1:]:
            st.error(escaped(f"{side.name} ran out of memory: {oom.verdict}"))


def _equations(comparison: Comparison) -> None:
    few = len(comparison.sides) <= _BESIDE
    at_peak, own = st.columns(2) if few else (st.container(), st.container())
    with at_peak:
        st.subheader("At the peak of allocated")
        table(frames.equations(comparison, own=False))
    with own:
        st.subheader("Each one's own peak")
        table(frames.equations(comparison, own=True))


def _allocations(comparison: Comparison) -> None:
    st.subheader("Live at the peak")
    columns = st.columns(min(len(comparison.sides), _BESIDE))
    for number, side in enumerate(comparison.sides):
        with columns[number % len(columns)]:
            st.markdown(f"**{escaped(side.name)}**")
            table(frames.allocations(side.account.top[:_TOP]).set_index("component"))


def _unseen(comparison: Comparison) -> None:
    """What no number here holds."""
    unseen = {
        side.name: sorted({text for one in side.summary.processes for text in one.unseen})
        for side in comparison.sides
    }
    if any(unseen.values()):
        with st.expander("What was not seen"):
            for name, texts in unseen.items():
                lines = "\n".join(f"- {escaped(text)}" for text in texts)
                st.markdown(f"**{escaped(name)}**\n\n{lines}")
