"""Runs as the pages need them, kept in memory for as long as their files don't change."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import streamlit as st

from memtrace.analysis.boundaries import Served, served
from memtrace.analysis.summary import AccountSummary, Summary, summarise
from memtrace.errors import MemtraceError, TraceError
from memtrace.trace.reader import open_trace

#: Subjects that are shown at once, and runs that are kept.
MOST = 8


@dataclass(frozen=True)
class Subject:
    """One device in one process of a run: what a page shows beside others."""

    name: str  # no other subject of the page has it
    summary: Summary  # of the run; its primary account is this one, its name the subject's
    account: AccountSummary
    key: Hashable  # the same as long as the run's files are


@dataclass(frozen=True)
class Unbooked:
    """One device and one process of a run that booked no allocation, but answered requests."""

    name: str  # as a subject's
    summary: Summary
    served: Served
    key: Hashable  # as a subject's


#: For ``st.cache_resource(hash_funcs=…)`` of a function of one of these.
BY_SUBJECT: dict[str | type, Callable[[Any], Any]] = {
    Subject: lambda subject: subject.key,
    Unbooked: lambda subject: subject.key,
}


@dataclass(frozen=True)
class Run:
    """One run, as it was read when its files were last changed."""

    folder: str
    version: Hashable
    summary: Summary
    served: tuple[Served, ...]  # of a run without accounts, what answered most first

    def subject(self, name: str, account: AccountSummary) -> Subject:
        """One of the run's accounts, by a name of the caller's choice."""
        others = (one for one in self.summary.accounts if one is not account)
        summary = replace(self.summary, name=name, accounts=(account, *others))
        key = (self.folder, self.version, account.folder, account.device)
        return Subject(name, summary, account, key)

    def unbooked(self, name: str, one: Served) -> Unbooked:
        """What one process of a run without accounts answered, by a name of the caller's choice."""
        key = (self.folder, self.version, one.process.folder.name, one.device)
        return Unbooked(name, self.summary, one, key)


def version(folder: str) -> Hashable:
    """The same for as long as the files of a run don't change."""
    files = sorted(path for path in Path(folder).rglob("[!.]*") if path.is_file())
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in map(Path.stat, files))


def prepare(folders: Sequence[str]) -> None:
    """Read the runs, so that no page waits for it.

    Raises:
        TraceError: one is damaged.
    """
    for folder in folders:
        try:
            load(folder)
        except TraceError:
            raise
        except MemtraceError:
            continue  # it is whole, and the page says what it lacks


def _unchanged(run: Run) -> bool:
    return version(run.folder) == run.version


@st.cache_resource(max_entries=MOST, show_spinner=False, validate=_unchanged)
def load(folder: str) -> Run:
    """The run in ``folder``; of each only the last version is kept.

    Raises:
        MemtraceError: it is missing or damaged, or saw neither a tensor nor a request.
    """
    now = version(folder)  # before reading: what is written meanwhile makes another version
    trace = open_trace(folder)
    summary = summarise(trace)
    answered = () if summary.accounts else tuple(served(trace))
    if not summary.accounts and not answered:
        raise MemtraceError(f"{summary.name} saw no tensor, so there is nothing to draw")
    return Run(folder, now, summary, answered)
