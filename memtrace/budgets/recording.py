"""The recording of a test, and the stretches of it that count.

A test is recorded from before its fixtures to after their end. What the fixtures of a wider scope
and the warm-up allocate meanwhile is there for others too, or was asked to be left out: these
stretches are stepped over, so that a test adds the same whichever test runs first.
"""

import gc
import shutil
import threading
import warnings
from collections.abc import Set
from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

import pytest
import torch  # noqa: F401 - first: under memtrace record its import starts the session

from memtrace.errors import MemtraceError, TraceError
from memtrace.record.here import record_here
from memtrace.record.session import Session
from memtrace.trace.manifest import read_manifest
from memtrace.trace.reader import ProcessTrace

if TYPE_CHECKING:
    from memtrace.analysis.blocks import Moment, Stretch


class MemoryBudgetWarning(pytest.PytestWarning):
    """What a budget can't see."""


class Recording:
    """This process's recording: the one it is under already, or one of its own at ``path``.

    Args:
        path: the run to make. It has the name only once it is closed and kept; one that was there
            before goes in any case.
        stacks: Python frames kept for each allocation, in a recording of its own.
        harness: threads that were there before any test, and aren't the tests'.
        start: the folder that pytest was started in, wherever a test goes.
    """

    #: Whether a recording of its own outlives its end.
    keep = False

    def __init__(
        self, path: Path, stacks: int, harness: "Set[threading.Thread]", start: Path
    ) -> None:
        self.start = start
        self._exits = ExitStack()
        self._scratch: Path | None = None
        gc.collect()  # what is garbage already must not be freed, and counted, in the test
        session = Session.active()
        if session is None:
            _warn_of_threads(harness)
            self._scratch = _free_name(path)
            session = self._exits.enter_context(
                record_here(self._scratch, stacks=stacks, children=True)
            )
            session.adopt_existing()
        self._session = session
        self._folder = session.folder
        #: Where the run will be found.
        self.path = self._folder.parent if self._scratch is None else path
        self._epoch_ns = int(read_manifest(self._folder.parent)["epoch_ns"])

    def now(self) -> "Moment":
        """This moment; everything before it is written."""
        from memtrace.analysis.blocks import Moment

        event = self._session.checkpoint()
        return Moment(event, (perf_counter_ns() - self._epoch_ns) // 1000)

    def processes(self) -> tuple[ProcessTrace, list[ProcessTrace]]:
        """This process, and those that it started, as far as they are written.

        Raises:
            MemtraceError: the recording is incomplete.
        """
        own = _open(self._folder)
        if failure := own.manifest.get("failure"):
            raise MemtraceError(f"the recording is incomplete: {failure}")
        found = [own]
        parents = {own.pid}
        others = []
        for folder in self._folder.parent.iterdir():
            if folder.is_dir() and folder != self._folder:
                with suppress(TraceError):  # it is starting right now
                    others.append(_open(folder))
        # Beside others' processes its own are known by who started them.
        alone = self._scratch is not None
        for one in sorted(others, key=lambda one: int(one.manifest.get("start_ticks") or 0)):
            if alone or one.manifest.get("parent_pid") in parents:
                parents.add(one.pid)
                found.append(one)
        return own, found[1:]

    def close(self) -> None:
        """End a recording of its own."""
        self._exits.close()
        if self._scratch is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)  # of an earlier run of the same test
        if self.keep:
            self._scratch.rename(self.path)
        else:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch = None


class Stretches:
    """From a moment on, with gaps."""

    def __init__(self, start: "Moment") -> None:
        self._done: list[Stretch] = []
        self._start: Moment | None = start

    def pause(self, now: "Moment") -> None:
        """What follows doesn't count."""
        if self._start is not None:
            self._done.append((self._start, now))
        self._start = None

    def resume(self, now: "Moment") -> None:
        """What follows counts again."""
        self._start = now

    def until(self, now: "Moment") -> "list[Stretch]":
        """Those that count so far."""
        return self._done if self._start is None else [*self._done, (self._start, now)]


def _open(folder: Path) -> ProcessTrace:
    return ProcessTrace(folder, read_manifest(folder), {})


def _free_name(path: Path) -> Path:
    """A name beside ``path`` that nobody has, hidden."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = perf_counter_ns()
    return path.with_name(f".{path.name}.{number}")


def _warn_of_threads(harness: "Set[threading.Thread]") -> None:
    ours = {threading.current_thread(), *harness}
    others = [thread.name for thread in threading.enumerate() if thread not in ours]
    if others:
        warnings.warn(
            MemoryBudgetWarning(
                "memory_budget can't see what threads allocate that ran before it: "
                f"{', '.join(others)}; memtrace record -- pytest does"
            ),
            stacklevel=2,
        )
