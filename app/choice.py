"""What is shown: runs of the command line, and of each its devices and processes.

The choice is part of the address, so that a link shows the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import streamlit as st

from app.figures.style import visible
from app.load import MOST, Run, Subject, Unbooked, load
from app.parts import escaped
from memtrace.analysis.summary import Summary
from memtrace.errors import MemtraceError
from memtrace.trace import SUFFIX

_Part = TypeVar("_Part")

_LONGEST = 36  # signs of a name: a third of the width of a page of 1280 pixels


def chosen(names: Mapping[str, str]) -> list[Subject | Unbooked]:
    """Let the reader choose; a run that can't be read is said and left out.

    Args:
        names: the folders of all runs, by what they are called.
    """
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
    if not names:
        st.info("No run is open: the page Plan makes some.")
    elif not runs:
        st.info("Choose a run above.")
    if len(subjects) > MOST:
        st.warning(f"These are {len(subjects)} devices; the first {MOST} are shown.")
    return subjects[:MOST]


def named(folders: Sequence[str]) -> dict[str, str]:
    """Folders by what their runs are called: the end of the path that no other one has, shortened
    and without signs that a page doesn't show or that turn what stands behind them."""
    found = []
    for folder in folders:
        parts = Path(folder).parts
        others = [Path(other).parts for other in folders if other != folder]
        ends = (parts[-count:] for count in range(1, len(parts)))
        unlike = (end for end in ends if all(other[-len(end) :] != end for other in others))
        name = "/".join(next(unlike, parts)).removesuffix(SUFFIX)
        found.append(_shortened(visible(name)))
    once = [
        name if found.count(name) == 1 else f"{name} ({found[:number].count(name) + 1})"
        for number, name in enumerate(found)
    ]
    return dict(zip(once, folders, strict=True))


def _shortened(name: str) -> str:
    """Its beginning and its end, by both of which runs differ."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[1 - half :]}"


def _subjects(name: str, run: Run) -> list[Subject] | list[Unbooked]:
    """The primary account, or what answered most requests, unless the reader chooses others."""
    summary = run.summary
    if not summary.accounts:
        answered = {_place(one.process.folder.name, one.device, summary): one for one in run.served}
        return [run.unbooked(*pair) for pair in _picked(name, answered).items()]
    accounts = {_place(one.folder, one.device, summary): one for one in summary.accounts}
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


def _place(folder: str, device: str, summary: Summary) -> str:
    """``rank 0, cuda:0``; without a rank, the process by its id or what else names it."""
    processes = summary.processes
    [process] = [one for one in processes if one.folder == folder]
    alone = sum(one.pid == process.pid for one in processes) == 1
    whose = f"process {process.pid if alone else process.folder}"
    if process.rank is not None:
        whose = f"rank {process.rank}"
    return f"{whose}, {device}"
