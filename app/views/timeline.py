"""What was allocated when, component by component, on one scale."""

from collections.abc import Sequence

import streamlit as st

from app import frames
from app.figures.timeline import SPANS, Panel, describe, timelines
from app.load import BY_SUBJECT, MOST, Subject
from app.parts import chart, escaped, look
from memtrace.analysis.timeline import Timeline, timeline

TITLE, PATH = "Timeline", "timeline"


def draw(subjects: Sequence[Subject]) -> None:
    """The stacked components of every subject."""
    panels = [
        Panel(subject.name, _whole(subject), subject.account.peak, subject.account.memory.source)
        for subject in subjects
    ]
    words = " ".join(describe(panel) for panel in panels)
    chart(timelines(panels, look()), lambda: frames.points(panels), key="timeline", alt=words)
    events = " and ".join(f"{panel.timeline.total_events:,}" for panel in panels)
    st.caption(
        f"Of {events} events the highest in each 1/{SPANS} of the time is drawn, the peak exactly. "
        + escaped(words)
    )


@st.cache_resource(max_entries=MOST, hash_funcs=BY_SUBJECT, show_spinner=False)
def _whole(subject: Subject) -> Timeline:
    return timeline(subject.account.account, subject.account.memory)
