"""What readers make while they look: runs and curves, in a folder of the server's own, gone when it
ends.

Each is made in a process of its own, so that pages stay quick meanwhile, the server no larger, and
a reader can cancel it.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread
from typing import IO

import streamlit as st

from app.load import MOST
from app.parts import escaped
from memtrace.trace import SUFFIX


@dataclass
class Making:
    """One of them, made or under way.

    Attributes:
        name: what a page calls it.
        folder: the run that it makes, if it makes one, in a folder of its own.
        share: how much of it is done, from 0 to 1.
        made: whether it is done.
        problem: why it wasn't made, in a sentence; empty: a reader cancelled it.
    """

    name: str
    folder: Path
    share: float = 0.0
    made: bool = False
    problem: str | None = None
    _process: "Popen[str] | None" = None

    #: Whether the process tells on its standard error, not its output, how far it is.
    tells_on_stderr = False
    #: Exit codes of a process that has made something.
    good = frozenset({0})

    def heard(self, line: str) -> None:
        """The process told something."""
        raise NotImplementedError

    def finish(self, rest: str) -> None:
        """It has made something; ``rest`` is what it wrote where it tells nothing."""
        raise NotImplementedError

    def complaint(self, rest: str) -> str:
        """Why it made nothing, in its own words; empty: it said nothing."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        return not self.made and self.problem is None

    def cancel(self) -> None:
        """Leave nothing of one that is under way."""
        if self.running and self._process is not None:
            self.problem = ""
            self._process.terminate()

    def start(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Make it with this command; others find it from now on."""
        with tempfile.TemporaryFile("w+", encoding="utf-8") as rest:
            out, err = (rest, PIPE) if self.tells_on_stderr else (PIPE, rest)
            self._process = Popen(
                words,
                stdin=DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                env={**os.environ, **(environment or {})},
            )
            there = os.fdopen(os.dup(rest.fileno()), encoding="utf-8", errors="replace")
        Thread(target=self._follow, args=(self._process, there), daemon=True).start()
        _shelf().all.append(self)

    def _follow(self, process: "Popen[str]", rest: IO[str]) -> None:
        """Read what the process says, until it ends."""
        told = process.stderr if self.tells_on_stderr else process.stdout
        assert told is not None
        for line in told:
            self.heard(line)
        code = process.wait()
        with rest:
            rest.seek(0)
            text = rest.read()
        if code in self.good and self.problem is None:
            self.finish(text)
            self.made = True
            return
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        if self.problem is None:
            self.problem = self.complaint(text) or f"{self.name} ended with exit code {code}"


@dataclass(frozen=True)
class _Shelf:
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="memtrace-view-")))
    all: list[Making] = field(default_factory=list)

    def clear(self) -> None:
        for one in self.all:
            one.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)


@st.cache_resource(show_spinner=False)
def _shelf() -> _Shelf:
    shelf = _Shelf()
    atexit.register(shelf.clear)
    return shelf


def everything() -> list[Making]:
    """What was made or is under way, in order."""
    return [one for one in _shelf().all if one.problem is None]


def made_runs() -> list[Making]:
    """Runs that were made, in order."""
    return [one for one in everything() if one.made and one.folder.exists()]


def place(name: str) -> Path:
    """For a run of this name, in a folder of its own."""
    safe = name.replace("/", "_").encode()[:200].decode(errors="ignore")
    return Path(tempfile.mkdtemp(dir=_shelf().folder)) / f"{safe}{SUFFIX}"


def wait_for(one: Making) -> None:
    """Show it to this reader once it is made."""
    st.session_state.setdefault("awaited", []).append(one)


def welcome(runs: Mapping[str, str]) -> None:
    """Add to the runs that are shown what was made since the page was last drawn.

    Why others weren't made is left to the page in ``problems``.

    Args:
        runs: the folders of all runs, by what they are called.
    """
    names = {folder: name for name, folder in runs.items()}
    for one in _ended():
        name, shown = names.get(str(one.folder)), st.session_state.get("run", [])
        if one.made and one.folder.exists() and name is None:
            continue  # since the runs were listed
        st.session_state["awaited"].remove(one)
        if one.problem:
            st.session_state.setdefault("problems", []).append(one.problem)
        elif name is not None and name not in shown and len(shown) < MOST:
            st.session_state["run"] = [*shown, name]


def settle() -> None:
    """Draw the page anew if something has ended since :func:`welcome`, which nobody would show."""
    if _ended():
        st.rerun()


def _ended() -> list[Making]:
    """What this reader asked for and hasn't been shown yet, though it has ended."""
    return [one for one in st.session_state.get("awaited", ()) if not one.running]


def say_problems() -> None:
    """Why what this reader asked for wasn't made."""
    for problem in st.session_state.pop("problems", ()):
        st.error(escaped(problem))


@st.fragment(run_every=0.5)
def under_way(running: Sequence[Making]) -> None:
    """How far they are; once one has ended the page is drawn anew, with what it made."""
    for number, one in enumerate(running):
        bar, cancel = st.columns([6, 1], vertical_alignment="bottom")
        bar.progress(one.share, f"Making {escaped(one.name)}")
        cancel.button("Cancel", key=f"cancel {number}", on_click=one.cancel)
    if not all(one.running for one in running):
        st.rerun()
