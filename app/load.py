"""Runs as the page needs them, kept in memory for as long as their files don't change."""

from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from memtrace.analysis.summary import AccountSummary, Summary, summarise
from memtrace.analysis.timeline import Timeline, timeline
from memtrace.errors import MemtraceError
from memtrace.trace.reader import open_trace


@dataclass(frozen=True)
class Run:
    """One run, its primary account, and what is drawn of that."""

    summary: Summary
    account: AccountSummary
    timeline: Timeline


def load(folder: str) -> Run:
    """The run in ``folder``.

    Raises:
        MemtraceError: it is missing, damaged, or saw no tensor.
    """
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return _load(folder, tuple(path.stat().st_mtime_ns for path in files))


@st.cache_resource(max_entries=8, show_spinner="Reading the run …")
def _load(folder: str, changed: tuple[int, ...]) -> Run:
    summary = summarise(open_trace(folder))
    if summary.primary is None:
        raise MemtraceError(f"{summary.name} saw no tensor, so there is nothing to draw")
    one = summary.primary
    return Run(summary, one, timeline(one.account, one.memory))
