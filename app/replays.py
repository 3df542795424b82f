"""Runs that readers made by replaying: in a folder of the server's own, gone when it ends.

Each is made in a process of its own (:mod:`app.replaying`), so that pages stay quick meanwhile, the
server no larger, and a reader can cancel it.
"""

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread

import streamlit as st

from app.load import MOST, Subject
from memtrace.allocator.simulation import Outcome
from memtrace.analysis.accounts import Account
from memtrace.analysis.what_if import Change
from memtrace.trace import SUFFIX


@dataclass
class Replay:
    """One of them, made or under way: of which subject and run, and what is changed.

    Attributes:
        share: how much of it is done, from 0 to 1.
        outcome: what came of it, once it is made.
        notes: what it takes for granted.
        problem: why it wasn't made, in a sentence; empty: a reader cancelled it.
    """

    key: Hashable
    source: Path
    change: Change
    folder: Path
    share: float = 0.0
    outcome: Outcome | None = None
    notes: list[str] = field(default_factory=list)
    problem: str | None = None
    _process: "Popen[str] | None" = None

    @property
    def name(self) -> str:
        return self.folder.name.removesuffix(SUFFIX)

    @property
    def running(self) -> bool:
        return self.outcome is None and self.problem is None

    def cancel(self) -> None:
        """Leave nothing of one that is under way."""
        if self.running and self._process is not None:
            self.problem = ""
            self._process.kill()

    def start(self, account: Account) -> None:
        """Make it of this account of the run."""
        order = {
            "run": str(self.source),
            "process": account.process.folder.name,
            "device": account.device,
            "change": asdict(self.change),
            "out": str(self.folder),
        }
        words = [sys.executable, "-P", "-m", "app.replaying", json.dumps(order)]
        self._process = Popen(words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True)
        events = len(account.process.events["id"])
        Thread(target=self._follow, args=(self._process, events), daemon=True).start()

    def _follow(self, process: "Popen[str]", events: int) -> None:
        """Read what the process says, until it ends."""
        assert process.stdout is not None and process.stderr is not None
        said = {}
        for line in process.stdout:
            said = json.loads(line)
            if "done" in said:
                self.share = min(said["done"] / max(events, 1), 1.0)
        errors = process.stderr.read().splitlines()
        if process.wait() == 0:
            self.notes = said["notes"]
            self.outcome = Outcome(**said["outcome"])
            return
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        if self.problem is None:
            ended = f"{self.name} ended with exit code {process.returncode}"
            self.problem = errors[-1] if errors else ended


@dataclass(frozen=True)
class _Shelf:
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="memtrace-view-")))
    replays: list[Replay] = field(default_factory=list)

    def clear(self) -> None:
        for one in self.replays:
            one.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)


@st.cache_resource(show_spinner=False)
def _shelf() -> _Shelf:
    shelf = _Shelf()
    atexit.register(shelf.clear)
    return shelf


def replays() -> list[Replay]:
    """Those that were made, in order."""
    return [one for one in _shelf().replays if one.outcome is not None]


def of(subject: Subject) -> list[Replay]:
    """Those of one subject, and those under way."""
    return [one for one in _shelf().replays if one.key == subject.key and one.problem is None]


def replay(subject: Subject, change: Change) -> Replay:
    """Make a run of ``subject`` under ``change``, unless it is there already or under way."""
    for known in of(subject):
        if known.change == change:
            return known
    safe = f"{subject.name}, {change}".replace("/", "_")[:200]
    folder = Path(tempfile.mkdtemp(dir=_shelf().folder)) / f"{safe}{SUFFIX}"
    made = Replay(subject.key, subject.summary.folder, change, folder)
    made.start(subject.account.account)
    _shelf().replays.append(made)
    return made


def wait_for(one: Replay) -> None:
    """Show it to this reader once it is made."""
    st.session_state.setdefault("awaited", []).append(one)


def welcome(runs: Mapping[str, str]) -> None:
    """Add to the runs that are shown what was made since the page was last drawn.

    Why others weren't made is left to the page in ``problems``.

    Args:
        runs: the folders of all runs, by what they are called.
    """
    names = {folder: name for name, folder in runs.items()}
    for one in list(st.session_state.get("awaited", ())):
        name, shown = names.get(str(one.folder)), st.session_state["run"]
        if one.problem is not None:
            st.session_state["awaited"].remove(one)
            if one.problem:
                st.session_state.setdefault("problems", []).append(one.problem)
        elif name is not None:
            st.session_state["awaited"].remove(one)
            if name not in shown and len(shown) < MOST:
                st.session_state["run"] = [*shown, name]
