"""The allocator's segments at an instant, and what of them is unused over time."""

from collections.abc import Sequence

import plotly.graph_objects as go
import streamlit as st

from app import frames_fragmentation as frames
from app.figures.fragmentation import (
    ADDRESSES,
    SPANS,
    History,
    Instant,
    describe,
    describe_course,
    moments,
    over_time,
    row_bytes,
    segment_map,
)
from app.load import BY_SUBJECT, MOST, Subject
from app.parts import chart, escaped, look, mark, table
from memtrace.analysis.occupancy import Course

TITLE, PATH = "Fragmentation", "fragmentation"

_COURSE = "unused"  # the chart over time


def draw(subjects: Sequence[Subject]) -> None:
    """Every subject with segments, at one instant and over time."""
    found = [(subject, one) for subject in subjects if (one := _history(subject)) is not None]
    shown = {subject.name for subject, _ in found}
    without = [subject.name for subject in subjects if subject.name not in shown]
    if without:
        st.info(
            f"No segments were recorded of {escaped(', '.join(without))}: only the caching "
            "allocator of a GPU has them. The page What if shows what it would make of such a run."
        )
    if not found:
        return
    histories = [history for _, history in found]
    drawn = over_time(histories, look())
    _scrubbed(found, drawn)
    chart(
        drawn,
        lambda: frames.courses(histories),
        key=_COURSE,
        alt=" ".join(map(describe_course, histories)),
    )
    st.caption(
        "Hard is free in segments where a block lives, releasable in whole segments, private in "
        "pools of graphs; the ratio is hard / reserved. At the top, addresses without gaps between "
        f"segments, in {ADDRESSES} rows; what is blank was not reserved. What is unused has the "
        "scale of a run that still allocates more; double-click for what it frees in the end."
    )


@st.fragment
def _scrubbed(found: Sequence[tuple[Subject, History]], over_time: go.Figure) -> None:
    """The segments where the slider is, and a line there in the chart over time."""
    courses = [history.course for _, history in found]
    jumps = {
        "Peak of allocated": _highest(courses, "allocated"),
        "Most in pieces": _highest(courses, "hard"),
    }
    for _, one in reversed(found):  # the first run's counts
        for time_us in one.time_us["ooms"][-1:].tolist():
            jumps["Out of memory"] = 1 + one.course.span_of(time_us)
    span = st.slider(
        "Instant, in parts of each run's time",
        1,
        SPANS,
        jumps.get("Out of memory", jumps["Peak of allocated"]),
        key="instant",
        bind="query-params",
        help=f"Of each 1/{SPANS} of the time, where most was reserved and not allocated, the peak "
        "of allocated or the last failure.",
    )
    with st.container(horizontal=True):
        for text, number in jumps.items():
            _jump(text, number)
    instants = [
        Instant.of(subject.name, subject.account.account, history.course.stops[span - 1])
        for subject, history in found
    ]
    row = row_bytes(max(subject.account.reserved_peak or 0 for subject, _ in found))
    st.subheader("Segments")
    chart(
        segment_map(instants, row, look()),
        lambda: frames.blocks(instants),
        key="segments",
        alt=" ".join(map(describe, instants)),
    )
    st.caption(escaped(" ".join(map(describe, instants))))
    table(frames.unused(instants))
    histories = [history for _, history in found]
    mark(_COURSE, moments(over_time, histories, [span - 1] * len(histories)))
    st.subheader("Over time")


def _jump(text: str, span: int) -> None:
    def jump() -> None:
        st.session_state["instant"] = span

    st.button(text, on_click=jump)


def _highest(courses: Sequence[Course], part: str) -> int:
    """The span, from 1, in which a run has most of a part of reserved memory."""
    return 1 + max(
        range(SPANS), key=lambda span: max(getattr(one.stops[span].parts, part) for one in courses)
    )


@st.cache_resource(max_entries=MOST, hash_funcs=BY_SUBJECT, show_spinner="Following segments")
def _history(subject: Subject) -> History | None:
    return History.of(subject.name, subject.account.account)
