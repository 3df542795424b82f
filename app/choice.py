"""What is shown: runs of the command line, and of each its devices and processes.

The choice is part of the address, so that a link shows the same.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import streamlit as st

from app.load import MOST, Run, Subject, Unbooked, load
from app.parts import escaped
from memtrace.analysis.summary import ProcessSummary, Summary
from memtrace.errors import MemtraceError
from memtrace.trace import SUFFIX

_Part = TypeVar("_Part")


def chosen(folders: Sequence[str]) -> list[Subject | Unbooked]:
    """Let the reader choose; a run that can't be read is said and left out."""
    names = {_label(folder, folders): folder for folder in folders}
    subjects: list[Subject | Unbooked] = []
    problems = []
    with st.container(horizontal=True):
        runs = st.multiselect(
            "Runs",
            list(names),
            list(names)[:MOST],
            max_selections=MOST,
            key="run",
            bind="query-params",
        )
        for name in runs:
            try:
                run = load(names[name])
            except MemtraceError as error:
                problems.append(str(error))
            else:
                subjects += _subjects(name, run)
    for problem in problems:
        st.error(escaped(problem))
    if not runs:
        st.info("Choose a run above.")
    if len(subjects) > MOST:
        st.warning(f"These are {len(subjects)} devices; the first {MOST} are shown.")
    return subjects[:MOST]


def _label(folder: str, folders: Sequence[str]) -> str:
    name = Path(folder).name.removesuffix(SUFFIX)
    alike = [other for other in folders if Path(other).name.removesuffix(SUFFIX) == name]
    return name if len(alike) == 1 else folder


def _subjects(name: str, run: Run) -> list[Subject] | list[Unbooked]:
    """The primary account, or the process that answered most, unless the reader chooses others."""
    summary = run.summary
    if not summary.accounts:
        answered = Counter(request.pid for request in summary.requests)
        processes = [one for one in summary.processes if one.pid in answered]
        processes.sort(key=lambda one: -answered[one.pid])
        named = {_process(one, summary): one for one in processes}
        return [run.unbooked(*pair) for pair in _picked(name, named).items()]
    accounts = {
        f"{_process(process, summary)}, {one.device}": one
        for one in summary.accounts
        for process in summary.processes
        if process.folder == one.folder
    }
    return [run.subject(*pair) for pair in _picked(name, accounts).items()]


def _picked(name: str, among: Mapping[str, _Part]) -> dict[str, _Part]:
    """The first part of a run, or those that the reader chooses, by names for the page."""
    if len(among) == 1:
        return dict(zip([name], among.values(), strict=True))
    places = st.multiselect(
        f"Devices and processes of {escaped(name)}",
        list(among),
        list(among)[:1],
        help="the one with the highest peak, or the most requests, comes first",
        max_selections=MOST,
        key=f"in {name}",
        bind="query-params",
    )
    alone = places == list(among)[:1]
    return {name if alone else f"{name}, {one}": among[one] for one in places}


def _process(process: ProcessSummary, summary: Summary) -> str:
    """``rank 0``; without a rank, the process by its id or what else names it."""
    if process.rank is not None:
        return f"rank {process.rank}"
    alone = sum(one.pid == process.pid for one in summary.processes) == 1
    return f"process {process.pid if alone else process.folder}"
