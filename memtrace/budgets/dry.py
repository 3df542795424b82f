"""A test on a card that isn't there: run by a pytest of its own, on a virtual or a fake GPU.

That has to be there before torch is imported, so no running process can keep to
``memory_budget(device=…)``. Another pytest with the same command line runs that one test and judges
it (:mod:`memtrace.budgets.dry_child`); what it reports of each phase is what this one reports.
"""

import pickle
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Set
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from memtrace.budgets.plans import PLAN, Plan
from memtrace.budgets.running import Running
from memtrace.dryrun import dry_run
from memtrace.errors import MemtraceError

#: What the child is told, and the messages that it sends.
ORDER, MESSAGES, OUTPUT = "order", "messages", "output"
_DRY = pytest.StashKey["DryTest"]()
#: Of an item, what a pytest calls in each phase.
_PHASES = ("setup", "runtest", "teardown")
#: An out-of-memory error says it all; PyTorch warns of each beforehand.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
#: Lines that are shown of a child that died without a report.
_LAST = 20


class Dry:
    """The plugin that runs tests with a card elsewhere."""

    def __init__(self, running: Running) -> None:
        self._running = running

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Comes before a skip is decided on: where its card is, a test may not be skipped."""
        plan = item.stash.get(PLAN, None)
        if plan is not None and plan.card is not None:
            running = self._running
            dry = item.stash[_DRY] = DryTest(item, plan)
            run, stacks = running.trace(item.nodeid), running.options.stacks
            dry.run(run, stacks, running.baselines.folder, running.awaited)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        dry = item.stash.get(_DRY, None)
        if dry is None:
            return report
        if call.when == "teardown":
            del item.stash[_DRY]
            dry.end()
        return dry.report(call.when, report)


class DryTest:
    """One run of a test in a child, and what this pytest does meanwhile: nothing.

    Its fixtures, its body and their end are the child's, so that nothing is set up for it here.

    Args:
        item: the test.
        plan: what it is to keep to; names a card.
    """

    def __init__(self, item: pytest.Item, plan: Plan) -> None:
        self._item = item
        self._plan = plan
        self._reports: dict[str, pytest.TestReport] = {}
        self._problems: list[str] = []
        for name in _PHASES:
            setattr(item, name, _nothing)

    def end(self) -> None:
        """The item is as it was: it may be run again."""
        for name in _PHASES:
            delattr(self._item, name)

    def report(self, when: str, ours: pytest.TestReport) -> pytest.TestReport:
        """What the child reported of a phase; ``ours`` where it didn't come to that."""
        return self._reports.get(when, ours)

    def run(self, run: Path, stacks: int, baselines: Path, awaited: Set[str]) -> None:
        """Run all of it.

        Args:
            run: the trace to make. It stays if a report refers to it.
            stacks: Python frames kept for each allocation.
            baselines: the folder of this session's.
            awaited: those that its tests measure.

        Raises:
            pytest.fail.Exception: the card can't be planned, or the child came to no end.
            KeyboardInterrupt: it was interrupted.
        """
        config = self._item.config
        factory = getattr(config, "_tmp_path_factory", None)
        order = {
            "args": list(map(str, config.invocation_params.args)),
            "test": f"{self._item.path}::{self._item.nodeid.partition('::')[2]}",
            "path": sys.path,
            "card": self._plan.card,
            "baselines": baselines,
            "awaited": set(awaited),
            "workerinput": getattr(config, "workerinput", None),
            "basetemp": None if factory is None else factory.mktemp("dry"),
        }
        run.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run, ignore_errors=True)  # of an earlier run of the same test
        with tempfile.TemporaryDirectory(prefix="memtrace-dry-") as scratch:
            folder = Path(scratch)
            (folder / ORDER).write_bytes(pickle.dumps(order))
            try:
                ended = self._planned(folder, run, stacks)
                self._read(folder)
                if "teardown" not in self._reports:
                    self._explain(folder, ended)
            except MemtraceError as error:
                pytest.fail(f"memory_budget(device={self._plan.card!r}): {error}", pytrace=False)
            finally:
                if not any(self._refers_to(run)):
                    shutil.rmtree(run, ignore_errors=True)

    def _planned(self, folder: Path, run: Path, stacks: int) -> Mapping[str, Any]:
        """Run the child; how it ended, as a manifest says it."""
        assert self._plan.card is not None
        capture = self._item.config.getoption("capture") != "no"
        with (folder / OUTPUT).open("wb") as output:
            said = output.fileno() if capture else None
            trace = dry_run(
                [sys.executable, "-P", "-m", "memtrace.budgets.dry_child", str(folder)],
                device=self._plan.card,
                out=run,
                allocator=self._plan.allocator,
                stacks=stacks,
                variables=_QUIET,
                stdout=said,
                stderr=said,
            )
        ended: Mapping[str, Any] = trace.manifest["exit"]
        return ended

    def _read(self, folder: Path) -> None:
        """Take what the child has to say."""
        item = self._item
        for kind, content in _messages(folder / MESSAGES):
            if kind == "report":
                report = item.config.hook.pytest_report_from_serializable(
                    config=item.config, data=content
                )
                self._reports[report.when] = report
            elif kind == "warning":
                item.ihook.pytest_warning_recorded.call_historic(
                    kwargs={
                        "warning_message": content,
                        "nodeid": item.nodeid,
                        "when": "runtest",
                        "location": None,
                    }
                )
            elif kind == "interrupted":
                raise KeyboardInterrupt
            else:
                self._problems.append(content)

    def _explain(self, folder: Path, ended: Mapping[str, Any]) -> NoReturn:
        """Fail for a child that didn't come to the end of the test."""
        number = ended["signal"]
        how = f"exit code {ended['code']}" if number is None else f"signal {number}"
        lines = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
        text = "\n".join(self._problems or lines[-_LAST:])
        pytest.fail(f"the pytest on {self._plan.card} ended with {how}:\n\n{text}", pytrace=False)

    def _refers_to(self, run: Path) -> Iterator[bool]:
        for report in self._reports.values():
            for one in getattr(report, "memory", ()):
                yield one["trace"] == str(run.resolve())


def _nothing() -> None:
    """In place of what happens in the child."""


def _messages(path: Path) -> Iterator[tuple[str, Any]]:
    if path.exists():
        with path.open("rb") as file:
            yield from _unpickled(file)


def _unpickled(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Written by our own child; up to where it was killed."""
    while True:
        try:
            yield pickle.load(file)
        except (EOFError, pickle.UnpicklingError):
            return
