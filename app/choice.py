"""What is shown: runs of the command line, and of each its devices and processes.

The choice is part of the address, so that a link shows the same.
"""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from app.load import MOST, Run, Subject, load
from app.parts import escaped
from memtrace.analysis.summary import AccountSummary, Summary
from memtrace.errors import MemtraceError
from memtrace.trace import SUFFIX


def chosen(folders: Sequence[str]) -> list[Subject]:
    """Let the reader choose; a run that can't be read is said and left out."""
    names = {_label(folder, folders): folder for folder in folders}
    subjects: list[Subject] = []
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


def _subjects(name: str, run: Run) -> list[Subject]:
    """The primary account, unless the reader chooses others."""
    accounts = {_place(one, run.summary): one for one in run.summary.accounts}
    if len(accounts) == 1:
        return [run.subject(name, one) for one in accounts.values()]
    places = st.multiselect(
        f"Devices and processes of {escaped(name)}",
        list(accounts),
        list(accounts)[:1],
        help="the one with the highest peak comes first",
        max_selections=MOST,
        key=f"in {name}",
        bind="query-params",
    )
    alone = places == list(accounts)[:1]
    return [run.subject(name if alone else f"{name}, {one}", accounts[one]) for one in places]


def _place(account: AccountSummary, summary: Summary) -> str:
    """``rank 0, cuda:0``; without a rank, the process by its id or what else names it."""
    processes = summary.processes
    [process] = [one for one in processes if one.folder == account.folder]
    alone = sum(one.pid == process.pid for one in processes) == 1
    whose = f"process {process.pid if alone else process.folder}"
    if process.rank is not None:
        whose = f"rank {process.rank}"
    return f"{whose}, {account.device}"
