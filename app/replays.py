"""Runs that readers made by replaying: in a folder of the server's own, gone when it ends."""

import atexit
import shutil
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st

from app.load import Subject
from memtrace.allocator.simulation import Outcome, Progress
from memtrace.analysis.what_if import Change, replayed
from memtrace.trace import SUFFIX
from memtrace.trace.reader import open_trace


@dataclass(frozen=True)
class Replay:
    """One of them: of which subject and run, what was changed, and what came of it."""

    key: Hashable
    source: Path
    change: Change
    folder: Path
    outcome: Outcome
    notes: list[str]

    @property
    def name(self) -> str:
        return self.folder.name.removesuffix(SUFFIX)


@dataclass(frozen=True)
class _Shelf:
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="memtrace-view-")))
    replays: list[Replay] = field(default_factory=list)


@st.cache_resource(show_spinner=False)
def _shelf() -> _Shelf:
    shelf = _Shelf()
    atexit.register(shutil.rmtree, shelf.folder, ignore_errors=True)
    return shelf


def replays() -> list[Replay]:
    """Those that were made, in order."""
    return _shelf().replays


def of(subject: Subject) -> list[Replay]:
    """Those of one subject."""
    return [one for one in replays() if one.key == subject.key]


def replay(subject: Subject, change: Change, progress: Progress) -> Replay:
    """Make a run of ``subject`` under ``change``; one that is there already is not made again.

    Raises:
        MemtraceError: the change can't be made, or the run not be written.
    """
    for made in of(subject):
        if made.change == change:
            return made
    safe = f"{subject.name}, {change}".replace("/", "_")[:200]
    folder = _shelf().folder / f"{safe}{SUFFIX}"
    trace = open_trace(subject.summary.folder)
    outcome, notes = replayed(trace, subject.account.account, change, folder, progress)
    made = Replay(subject.key, subject.summary.folder, change, folder, outcome, notes)
    replays().append(made)
    return made
