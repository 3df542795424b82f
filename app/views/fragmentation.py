"""The allocator's segments at an instant, and what of them is unused over time."""

from collections.abc import Mapping, Sequence

import numpy as np
import streamlit as st

from app import frames_fragmentation as frames
from app.figures.fragmentation import (
    ADDRESSES,
    History,
    Instant,
    describe,
    over_time,
    row_bytes,
    segment_map,
)
from app.load import BY_SUBJECT, MOST, Subject
from app.parts import chart, escaped, look, table
from memtrace.analysis.occupancy import Course, Occupancy, course, occupancy
from memtrace.analysis.places import place
from memtrace.analysis.segments import Layout, layout_at
from memtrace.sizes import format_size

TITLE, PATH = "Fragmentation", "fragmentation"

#: Spans of time that are looked at, and that the slider goes through.
_SPANS = 200


def draw(subjects: Sequence[Subject]) -> None:
    """Every subject with segments, at one instant and over time."""
    looked = [(subject, _looked_at(subject)) for subject in subjects]
    found = [(subject, History(subject.name, *parts)) for subject, parts in looked if parts]
    without = [subject.name for subject, parts in looked if not parts]
    if without:
        st.info(
            f"No segments were recorded of {escaped(', '.join(without))}: only the caching "
            "allocator of a GPU has them. The page What if shows what it would make of such a run."
        )
    if found:
        _scrubbed(found)


@st.fragment
def _scrubbed(found: Sequence[tuple[Subject, History]]) -> None:
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
        _SPANS,
        jumps.get("Out of memory", jumps["Peak of allocated"]),
        key="instant",
        bind="query-params",
        help=f"Of each 1/{_SPANS} of the time, where most was reserved and not allocated, the peak "
        "of allocated or the last failure.",
    )
    with st.container(horizontal=True):
        for text, number in jumps.items():
            _jump(text, number)
    instants = [_instant(subject, history.course, span - 1) for subject, history in found]
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
    st.subheader("Over time")
    histories = [history for _, history in found]
    chart(
        over_time(histories, span - 1, look()),
        lambda: frames.courses(histories),
        key="unused",
        alt=" ".join(map(_described, histories)),
    )
    st.caption(
        "Hard is free in segments where a block lives, releasable in whole segments, private in "
        "pools of graphs; the ratio is hard / reserved. At the top, addresses without gaps between "
        f"segments, in {ADDRESSES} rows; what is blank was not reserved."
    )


def _jump(text: str, span: int) -> None:
    def jump() -> None:
        st.session_state["instant"] = span

    st.button(text, on_click=jump)


def _highest(courses: Sequence[Course], part: str) -> int:
    """The span, from 1, in which a run has most of a part of reserved memory."""
    return 1 + max(
        range(_SPANS), key=lambda span: max(getattr(one.stops[span].parts, part) for one in courses)
    )


@st.cache_resource(max_entries=MOST, hash_funcs=BY_SUBJECT, show_spinner="Following segments")
def _looked_at(
    subject: Subject,
) -> tuple[Course, Occupancy, Mapping[str, np.ndarray]] | None:
    """What a :class:`History` is made of; None: there are no segments."""
    account = subject.account.account
    found = course(account, _SPANS)
    if found is None:
        return None
    marked = {"retries": account.time_us[found.retries], "ooms": account.time_us[found.ooms]}
    return found, occupancy(account, ADDRESSES, found.edges_us), marked


def _instant(subject: Subject, one: Course, span: int) -> Instant:
    account, stop = subject.account.account, one.stops[span]
    process = account.process
    layout = layout_at(account, stop.event) or Layout.none()
    scope = process.contexts["scope"][process.events["context"][stop.event]]
    places = {
        int(number): str(place(process, number))
        for number in set(layout.blocks.scope)
        if number >= 0
    }
    return Instant(subject.name, stop, layout, place(process, int(scope)), places)


def _described(history: History) -> str:
    most = max(history.course.stops, key=lambda stop: stop.parts.hard)
    return (
        f"{history.name}: at most {format_size(most.parts.hard)} free in pieces after "
        f"{most.time_us / 1e6:.2f} s, {100 * most.parts.ratio:.1f} % of what was reserved; "
        f"{len(history.course.retries)} retries, {len(history.course.ooms)} failures."
    )
