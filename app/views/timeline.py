"""What was allocated when, component by component, on one scale; and what was alive at an instant.

The address says how the runs are aligned, what is in view, and which instants are looked at; all in
units of the axis.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import streamlit as st

from app import frames
from app.figures import icicle
from app.figures.timeline import SPANS, Instant, Panel, Scale, describe, timelines
from app.load import BY_SUBJECT, MOST, Subject
from app.parts import Gestures, chart, escaped, look, table
from memtrace.analysis.alignment import Axis, by_progress, by_time
from memtrace.analysis.alive import change, largest
from memtrace.analysis.peaks import top_allocations
from memtrace.analysis.places import place
from memtrace.analysis.steps import KINDS, Steps, steps
from memtrace.sizes import format_size

TITLE, PATH = "Timeline", "timeline"

_TIME, _REQUEST = "time", "request"
_NOW, _THEN = "A", "B"  # instants
#: Keys in the session and in the address.
_BY, _WHICH, _FROM, _TO, _AT, _VERSUS = "by", "request", "from", "to", "at", "versus"
_ROWS = 15  # of a table of what is alive


@st.fragment
def draw(subjects: Sequence[Subject]) -> None:
    """The stacked components of every subject, and what was alive at an instant."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        subjects, axes, title, names = _aligned(subjects)
        whole = _whole(axes)
        view = _view(whole)
    scale = Scale(title, view, names)
    panels = [panel(subject, axis, scale) for subject, axis in zip(subjects, axes, strict=True)]
    chart_at = st.container()
    instants = _instants(whole)
    words = " ".join(describe(panel) for panel in panels)
    with chart_at:
        chart(
            timelines(panels, scale, look(), instants),
            lambda: frames.points(panels, scale),
            key="timeline",
            alt=words,
            gestures=Gestures(_click, _zoom, _reset),
        )
        events = " and ".join(f"{panel.timeline.total_events:,}" for panel in panels)
        st.caption(
            f"Of {events} events the highest in each 1/{SPANS} of the view is drawn, the peak "
            "exactly. Drag to zoom in, double-click for the whole, click to see what was alive. "
            + escaped(words)
        )
    _alive(subjects, axes, {one.name: one.at for one in instants})


def _aligned(
    subjects: Sequence[Subject],
) -> tuple[Sequence[Subject], Sequence[Axis], str, Sequence[str]]:
    """Let the reader choose how; the subjects that can be, their axes, its title and its steps."""
    requests = _requests(subjects)
    ways = [_TIME, *KINDS, *([_REQUEST] if requests else [])]
    by = st.selectbox(
        "Aligned by",
        ways,
        key=_BY,
        bind="query-params",
        on_change=_forget,
        help="by a step, so that runs of different length line up: each step that all runs take "
        "is as wide as any other",
        width=150,
    )
    ends = [
        (int(subject.account.account.time_us[0]), int(subject.account.account.time_us[-1]))
        for subject in subjects
    ]
    if by == _REQUEST:
        which = st.selectbox(
            "Request",
            list(requests),
            key=_WHICH,
            bind="query-params",
            on_change=_forget,
            width=200,
        )
        of = requests[which]
        chosen = [subject for subject in subjects if subject.name in of]
        without = [subject.name for subject in subjects if subject.name not in of]
        if without:
            st.info(escaped(f"{' and '.join(without)} didn't serve {which}."))
        spans = [of[subject.name] for subject in chosen]
        axes = [by_time(start, end, zero_us=start) for start, end in spans]
        return chosen, axes, "seconds since the request began", ()
    if by in KINDS:
        axes, names = by_progress(ends, [_steps(subject, by) for subject in subjects])
        if names:
            return subjects, axes, f"progress, by {by}", names
        who = "These runs have" if len(subjects) > 1 else "This run has"
        in_common = " in common" if len(subjects) > 1 else ""
        st.info(f"{who} no {by}{in_common}; aligned by time instead.")
    axes = [by_time(begin, end) for begin, end in ends]
    return subjects, axes, "seconds since the run began", ()


def _requests(subjects: Sequence[Subject]) -> dict[str, dict[str, tuple[int, int]]]:
    """By its name, of each subject that served it when; of one name the first counts."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for subject in subjects:
        columns = subject.account.account.process.requests
        for name, start, end in zip(
            *(np.asarray(columns[one]).tolist() for one in ("name", "start_us", "end_us")),
            strict=True,
        ):
            if None not in (name, start, end) and end > start:
                found.setdefault(name, {}).setdefault(subject.name, (start, end))
    return found


@st.cache_resource(max_entries=MOST * len(KINDS), hash_funcs=BY_SUBJECT, show_spinner=False)
def _steps(subject: Subject, kind: str) -> Steps:
    return steps(subject.account.account, kind)


def _whole(axes: Sequence[Axis]) -> tuple[float, float]:
    return min(axis.at[0] for axis in axes), max(axis.at[-1] for axis in axes)


def _view(whole: tuple[float, float]) -> tuple[float, float]:
    """What of the axis is shown: as the address, the reader's numbers or a zoom say."""
    low, high = whole
    start = _number("From", _FROM, whole, placeholder=f"{low:.6g}")
    end = _number("To", _TO, whole, placeholder=f"{high:.6g}")
    start, end = (low if start is None else start), (high if end is None else end)
    st.button("Whole run", on_click=_reset, disabled=whole == (start, end))
    return (start, end) if low <= start < end <= high else whole


def _number(label: str, key: str, whole: tuple[float, float], **options: Any) -> float | None:
    """A place on the axis; arrow keys move it by a hundredth of the whole."""
    return st.number_input(
        label,
        value=None,
        step=(whole[1] - whole[0]) / 100,
        format="%.6f",
        key=key,
        bind="query-params",
        width=190,
        **options,
    )


def panel(subject: Subject, axis: Axis, scale: Scale) -> Panel:
    """What the timelines show of one subject."""
    rulers = [_steps(subject, kind) for kind in KINDS]
    return Panel.of(subject.name, subject.account, axis, scale, rulers)


def _instants(whole: tuple[float, float]) -> list[Instant]:
    """What the reader looks at: no, one or two places."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        at = _number("Instant A", _AT, whole, placeholder="each run's peak")
        versus = _number("Compared with B", _VERSUS, whole, placeholder="nothing")
        st.segmented_control(
            "A click sets", [_NOW, _THEN], default=_NOW, required=True, key="click"
        )
        st.button("Each run's peak", on_click=_unlook, disabled=(at, versus) == (None, None))
    chosen = ((_NOW, at), (_THEN, versus))
    return [Instant(name, place) for name, place in chosen if place is not None]


def _click(at: float) -> None:
    st.session_state[_VERSUS if st.session_state.get("click") == _THEN else _AT] = at


def _zoom(start: float, end: float) -> None:
    st.session_state[_FROM], st.session_state[_TO] = start, end


def _reset() -> None:
    st.session_state[_FROM] = st.session_state[_TO] = None


def _unlook() -> None:
    st.session_state[_AT] = st.session_state[_VERSUS] = None


def _forget() -> None:
    """Another axis has other places."""
    _reset()
    _unlook()


def _alive(subjects: Sequence[Subject], axes: Sequence[Axis], places: dict[str, float]) -> None:
    """What was alive in each subject at the instant, and what differs from the other one."""
    st.subheader("Alive at A" if _NOW in places else "Alive at each run's peak")
    columns = st.columns(min(len(subjects), 2))
    for number, (subject, axis) in enumerate(zip(subjects, axes, strict=True)):
        event = _event(subject, axis, places.get(_NOW))
        with columns[number % len(columns)]:
            _flames(subject, event, f"alive {number}")
    for subject, axis in zip(subjects, axes, strict=True):
        event = _event(subject, axis, places.get(_NOW))
        account = subject.account.account
        if _THEN in places:
            other = _event(subject, axis, places[_THEN])
            now, before = (top_allocations(account, one) for one in (event, other))
            found = change(now, before)
            st.markdown(
                f"**{escaped(subject.name)}**, {_moment(subject, event)} against "
                f"{_moment(subject, other)}"
            )
            if found:
                table(frames.changes(found[:_ROWS]).set_index("component"))
            else:
                st.caption("Nothing differs.")
            _more(len(found), "groups differ")
        else:
            st.markdown(f"**{escaped(subject.name)}**, {_moment(subject, event)}")
            if alive := largest(account, event, _ROWS):
                table(frames.storages(alive).set_index("component"))
            _more(len(account.lives.allocated(event)), "storages are alive")


def _event(subject: Subject, axis: Axis, at: float | None) -> int:
    """The last event at a place of the axis; None: the peak."""
    if at is None:
        return subject.account.peak.event
    return max(int(subject.account.account.event_at(axis.times(np.array(at)))), 0)


def _moment(subject: Subject, event: int) -> str:
    """When and where in the program, escaped."""
    process = subject.account.account.process
    scope = process.contexts["scope"][process.events["context"][event]]
    seconds = subject.account.account.time_us[event] / 1e6
    return escaped(f"{seconds:.6f} s, {place(process, int(scope)).within}")


def _flames(subject: Subject, event: int, key: str) -> None:
    groups = top_allocations(subject.account.account, event)
    total = format_size(sum(group.bytes for group in groups))
    st.markdown(f"**{escaped(subject.name)}**: {total}")
    if not groups:
        st.caption("Nothing was alive.")
        return
    chart(
        icicle.icicle(groups, look()),
        lambda: frames.groups(groups),
        key=key,
        alt=icicle.describe(subject.name, groups),
    )


def _more(count: int, what: str) -> None:
    if count > _ROWS:
        st.caption(f"{count:,} {what}; the largest {_ROWS} are shown.")
