"""Persistent processes, request by request: whether their memory stays put, and one request of all.

The address says what is judged, which request is looked at, and whose cycles are overlaid.
"""

from collections.abc import Mapping, Sequence

import streamlit as st

from app import frames_requests as frames
from app.figures.requests import Workload, cycles, describe, label, over_requests
from app.figures.timeline import Scale, timelines
from app.figures.timeline import describe as described
from app.frames import points
from app.load import BY_SUBJECT, MOST, Subject, Unbooked
from app.parts import Gestures, chart, escaped, link, look, table
from app.views import timeline
from memtrace.analysis.alignment import by_time
from memtrace.analysis.boundaries import Served, served_on
from memtrace.analysis.instants import Answered, look_at
from memtrace.analysis.persistence import MEASURES, Persistence, persistence
from memtrace.errors import MemtraceError
from memtrace.sizes import STEADY, parse_rate
from memtrace.steadiness import counted, counters, verdict
from memtrace.trace.manifest import Knowledge

TITLE, PATH = "Requests", "requests"

#: Keys in the session and in the address.
_LIMIT, _RSS, _WHICH, _OF = "slope", "rss", "which", "of"
_TOP = 10  # rows of what grows


def draw(subjects: Sequence[Subject | Unbooked]) -> None:
    """Every subject that named its requests, judged; and one request."""
    found = {one.name: (one, own) for one in subjects if (own := _served(one)).boundaries}
    without = [one.name for one in subjects if one.name not in found]
    if without:
        st.info(
            f"{escaped(' and '.join(without))} answered no requests: a program names them with "
            "memtrace.scopes.request()."
        )
    if found:
        _judged({name: one for name, (one, _) in found.items()})


def _judged(subjects: Mapping[str, Subject | Unbooked]) -> None:
    """The verdicts, and what they are about."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        rate = st.text_input(
            "Growth that still counts as none", STEADY, key=_LIMIT, bind="query-params", width=260
        )
        rss = st.toggle(
            "Judge the resident set too",
            key=_RSS,
            bind="query-params",
            help="It moves by itself, by what malloc keeps and libraries load. What NVML says of a "
            "process on a GPU is always judged.",
        )
    try:
        limit = parse_rate(rate)
    except MemtraceError as error:
        st.error(escaped(str(error)))
        return
    workloads = [Workload(name, _verdict(one, limit, rss)) for name, one in subjects.items()]
    lines = [
        f"- **{escaped(one.name)}** ({one.judged.served.device}): {escaped(verdict(one.judged))}."
        for one in workloads
    ]
    st.markdown("\n".join(lines))
    _requests(subjects, workloads)
    _growth(workloads)


@st.fragment
def _requests(subjects: Mapping[str, Subject | Unbooked], workloads: Sequence[Workload]) -> None:
    """The courses over requests and over cycles, and one request."""
    chart_at = st.container()
    chosen = st.selectbox(
        "Request",
        list(dict.fromkeys(label(row) for one in workloads for row in one.rows)),
        index=None,
        placeholder="click one above, or choose it here",
        key=_WHICH,
        bind="query-params",
        width=320,
    )
    with chart_at:
        st.subheader("After each request")
        chart(
            over_requests(workloads, chosen, look()),
            lambda: frames.rows(workloads),
            key="requests",
            alt=" ".join(map(describe, workloads)),
            gestures=Gestures(_click, lambda start, end: None, lambda: None),
        )
        st.caption(escaped(" ".join(f"{one.name}: {counted(one.judged)}." for one in workloads)))
        virtual = [
            one.name for one in subjects.values() if one.summary.knowledge is Knowledge.VIRTUAL
        ]
        if virtual:
            names = escaped(" and ".join(virtual))
            st.caption(f"Nothing is computed on a virtual GPU: times of {names} mean nothing.")
    if chosen is not None:
        _one(subjects, workloads, chosen)
    _cycles(workloads)


def _click(request: str) -> None:
    st.session_state[_WHICH] = request


def _one(
    subjects: Mapping[str, Subject | Unbooked], workloads: Sequence[Workload], chosen: str
) -> None:
    """What each run knows of a request, and its part of the timeline."""
    answered = {
        one.name: _answered(subjects[one.name], position)
        for one in workloads
        if (position := one.position(chosen)) is not None
    }
    without = [one.name for one in workloads if one.name not in answered]
    if without:
        st.info(escaped(f"{' and '.join(without)} didn't serve {chosen}."))
    if not answered:
        return
    st.subheader(f"Request {escaped(chosen)}")
    table(frames.one_request(answered))
    booked = {
        name: one
        for name in answered
        if isinstance(one := subjects[name], Subject) and answered[name].peak is not None
    }
    if not booked:
        return
    table(frames.terms(answered))
    spans = [(answered[name].boundary.start_us, answered[name].boundary.end_us) for name in booked]
    longest = max(end - start for start, end in spans)
    scale = Scale("seconds since the request began", (0, max(longest, 1) / 1e6))
    panels = [
        timeline.panel(one, by_time(start, end, zero_us=start), scale)
        for one, (start, end) in zip(booked.values(), spans, strict=True)
    ]
    chart(
        timelines(panels, scale, look()),
        lambda: points(panels, scale),
        key="request",
        alt=" ".join(map(described, panels)),
    )
    query = {"run": st.session_state["run"], "by": "request", "request": chosen}
    link("Open it in the Timeline", timeline.PATH, query)


def _cycles(workloads: Sequence[Workload]) -> None:
    """Request by request of each prompt length."""
    alike = [one for one in workloads if one.judged.grouped and len(one.judged.counted) > 1]
    if not alike:
        st.caption("No two prompts of one length count, so there are no cycles to overlay.")
        return
    st.subheader("Cycles overlaid")
    measure = st.segmented_control(
        "After each request",
        MEASURES,
        default="reserved",
        required=True,
        key=_OF,
        bind="query-params",
    )
    known = [one for one in alike if any(m.name == measure for m in one.judged.measures)]
    if not known:
        st.caption(f"The {measure} bytes after each request aren't known.")
        return
    chart(
        cycles(known, measure, look()),
        lambda: frames.counted(known, measure),
        key="cycles",
        alt=" ".join(map(describe, known)),
    )
    st.caption(
        f"Bytes that are {measure} after a request, beyond those after the first request that "
        "counts and has a prompt of its length: where memory stays put, the lines are one."
    )


def _growth(workloads: Sequence[Workload]) -> None:
    """Slopes as tables, and what grows."""
    st.subheader("What grows")
    columns = st.columns(min(len(workloads), 2))
    for number, one in enumerate(workloads):
        with columns[number % len(columns)]:
            st.markdown(f"**{escaped(one.name)}**")
            table(frames.measures(one.judged))
            for text in counters(one.judged):
                st.caption(escaped(text))
    for one in workloads:
        if one.judged.growing:
            st.markdown(f"**{escaped(one.name)}**, by what made it")
            table(frames.growing(one.judged.growing[:_TOP]))
            if (more := len(one.judged.growing) - _TOP) > 0:
                st.caption(f"And {more:,} more.")


@st.cache_resource(max_entries=MOST, hash_funcs=BY_SUBJECT, show_spinner=False)
def _served(subject: Subject | Unbooked) -> Served:
    if isinstance(subject, Subject):
        one = subject.account
        return served_on(one.account.process, one.device, one.memory, one.account)
    return subject.served


@st.cache_resource(max_entries=2 * MOST, hash_funcs=BY_SUBJECT, show_spinner="Judging requests")
def _verdict(subject: Subject | Unbooked, limit: float, rss: bool) -> Persistence:
    return persistence(_served(subject), limit=limit, rss=rss)


@st.cache_resource(max_entries=4 * MOST, hash_funcs=BY_SUBJECT, show_spinner=False)
def _answered(subject: Subject | Unbooked, position: int) -> Answered:
    own = _served(subject)
    return look_at(own, own.boundaries[position])
