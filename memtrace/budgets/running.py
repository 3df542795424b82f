"""The hooks around a test that has a budget: record, judge, say."""

import gc
import re
import threading
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from memtrace.budgets.fitting import FITS, does_not_fit, ran_out
from memtrace.budgets.judging import judge_stretches
from memtrace.budgets.measured import MeasuredTest
from memtrace.budgets.options import Options
from memtrace.budgets.outcome import (
    MemoryBudgetExceeded,
    add_section,
    mark,
    properties,
    raise_for,
)
from memtrace.budgets.plans import PLAN, parameters
from memtrace.budgets.recording import Recording
from memtrace.budgets.store import Baselines, Values
from memtrace.budgets.verdicts import Finding
from memtrace.budgets.words import Budget, Limit, parse_budget
from memtrace.errors import MemtraceError

#: How long a worker of xdist waits for a baseline that another one may be measuring.
_WAIT_SECONDS = 60

#: What was found in a test, and how much of it a report has shown.
_FINDINGS = pytest.StashKey[list[Finding]]()
_SHOWN = pytest.StashKey[list[Finding]]()
#: Of a pytest on cards that aren't there: what they are, and the baselines of the one that
#: started it.
CARD = pytest.StashKey[str]()
AWAITED = pytest.StashKey[set[str]]()


class Running:
    """The plugin that runs tests with budgets; one a session that has any."""

    def __init__(
        self,
        config: pytest.Config,
        options: Options,
        baselines: Baselines,
        harness: Set[threading.Thread],
    ) -> None:
        self._config = config
        self._harness = harness
        self.baselines = baselines
        self.card = config.stash.get(CARD, None)  # that this pytest runs on, and that isn't there
        self.options = options
        self.awaited = config.stash.get(AWAITED, set())  # baselines that tests will measure
        self.root = config.rootpath  # frames of files below it are the user's
        self._test: MeasuredTest | None = None
        self._recording: Recording | None = None

    # -- the marker --------------------------------------------------------------------------

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Comes after a skip was decided on and before fixtures are set up."""
        item.stash[_FINDINGS], item.stash[_SHOWN] = [], []
        plan = item.stash.get(PLAN, None)
        if plan is None or (plan.card is not None and self.card is None):
            return  # it runs elsewhere: memtrace/budgets/dry.py
        if plan.error is not None:
            pytest.fail(plan.error, pytrace=False)
        self._recording = self._new_recording(item.nodeid)
        self._test = MeasuredTest(self, item, plan, self._recording)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: "pytest.FixtureDef[Any]", request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if self._test is None or fixturedef.scope == "function":
            return (yield)
        with self._test.aside():
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        test = self._test
        if test is None:
            return (yield)
        test.begin_body()
        try:
            yield
            test.repeat_body()
        except BaseException:
            test.end_body(failed=True)
            raise
        test.end_body(failed=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        test = self._test
        if test is None:
            return (yield)
        try:
            yield
            test.finish()
        finally:
            recording, self._test, self._recording = self._recording, None, None
            if recording is not None:
                recording.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        if report.failed and self.card and self._recording and ran_out(error):
            self._note_lack(item, self._recording, self.card)
        findings, shown = item.stash.get(_FINDINGS, []), item.stash.get(_SHOWN, [])
        if not findings:
            return report
        report.memory = [asdict(one) for one in findings]  # type: ignore[attr-defined]
        report.user_properties += properties(findings)
        if report.failed and isinstance(error, MemoryBudgetExceeded):
            mark(report, error.headline)
        elif report.failed:
            for one in findings:
                if one.label == FITS and one not in shown:
                    mark(report, one.over[0])
                if not one.good and one not in shown and one.text not in str(error):
                    add_section(report, one)
        item.stash[_SHOWN] = list(findings)
        return report

    # -- the fixture -------------------------------------------------------------------------

    def block(self, item: pytest.Item, words: Mapping[str, Any]) -> AbstractContextManager[None]:
        """``with memory_budget(…):`` inside a test.

        Raises:
            MemtraceError: the words can't be.
        """
        __tracebackhide__ = True
        try:
            budget = parse_budget(words, block=True)
        except MemtraceError as error:
            raise error.with_traceback(None) from None
        return self._block(item, budget)

    @contextmanager
    def _block(self, item: pytest.Item, budget: Budget) -> Iterator[None]:
        number = sum(one.label is not None for one in item.stash[_FINDINGS]) + 1
        label = budget.name or str(number)
        limits = (*budget.limits, *self.options.regressions_for(item.nodeid, label))
        outer = self._recording
        recording = outer or self._new_recording(f"{item.nodeid} {label}")
        self._recording = recording
        start = recording.now()
        judged = False

        def judge(*metrics: Limit) -> Finding:
            part = [(start, recording.now())], metrics
            one = self.judge(item, label, recording, [part])
            item.stash[_FINDINGS].append(one)
            return one

        try:
            yield
            if self.leaves(limits) or budget.name is not None:
                gc.collect()
            judged = True
            one = judge(*limits)
            if budget.name is not None:
                self.keep_baseline(item, budget.name, one)
            raise_for([one])
        except BaseException:
            if not judged:  # it fails for another reason, and what it holds is held by that, too
                judge(*(limit for limit in limits if limit.metric != "end"))
            raise
        finally:
            self._recording = outer
            if outer is None:
                recording.close()

    # -- both --------------------------------------------------------------------------------

    def leaves(self, limits: Iterable[Limit]) -> bool:
        """Whether it matters what is left at the end, so that garbage must be collected first."""
        return self.options.report or any(limit.metric == "end" for limit in limits)

    def judge(
        self, item: pytest.Item, label: str | None, recording: Recording, parts: Any
    ) -> Finding:
        """As :func:`judge_stretches` does, for a test of this session."""
        return judge_stretches(
            label,
            recording,
            parts,
            lambda limit: self._reference(item, label, limit),
            self.root,
            self.card,
        )

    def note(self, item: pytest.Item, findings: list[Finding]) -> None:
        """What was found in the test itself; replaces what was noted of it before."""
        blocks = [one for one in item.stash[_FINDINGS] if one.label not in (None, "plateau")]
        item.stash[_FINDINGS] = [*blocks, *findings]

    def keep_baseline(self, item: pytest.Item, name: str, one: Finding | None) -> None:
        """Others can be measured by it; None: it failed."""
        self.baselines.put(name, parameters(item), None if one is None else one.devices)

    def _note_lack(self, item: pytest.Item, recording: Recording, card: str) -> None:
        """The test ran out of its card's memory."""
        with suppress(MemtraceError):  # then its own error says what is known
            one = does_not_fit(recording, card, self.root)
            if one is not None:
                item.stash[_FINDINGS].append(one)

    def trace(self, name: str) -> Path:
        """Where the run of a test is kept."""
        words = re.sub(r"[^\w.=-]+", "-", name.rpartition("/")[2]).strip("-")[:80]
        return self.options.traces / f"{words}-{zlib.crc32(name.encode()):08x}.memtrace"

    def _new_recording(self, name: str) -> Recording:
        path = self.trace(name)
        try:
            start = self._config.invocation_params.dir
            return Recording(path, self.options.stacks, self._harness, start)
        except OSError as error:
            pytest.fail(f"memory can't be recorded in {path.parent}: {error.strerror}", False)

    def _reference(self, item: pytest.Item, label: str | None, limit: Limit) -> Values:
        """What a relative limit is relative to.

        Raises:
            MemtraceError: it isn't known.
        """
        if limit.saved:
            return self.options.saved_for(item.nodeid, label)
        name = limit.size.of or ""
        elsewhere = hasattr(self._config, "workerinput") and name in self.awaited
        patience = _WAIT_SECONDS if elsewhere else 0
        deadline = time.monotonic() + patience
        while (found := self.baselines.get(name, parameters(item))) is None:
            if time.monotonic() >= deadline:
                raise MemtraceError(
                    f"baseline {name!r} was not measured in this session; what has "
                    f"memory_budget(name={name!r}) must run first"
                )
            time.sleep(0.05)
        return found
