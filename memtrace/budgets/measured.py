"""One run of a test with a marker, from its set-up to its teardown."""

import gc
import unittest
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from memtrace.analysis.blocks import Moment, Stretch
from memtrace.budgets.judging import judge_requests, made_requests
from memtrace.budgets.outcome import raise_for
from memtrace.budgets.plans import Plan
from memtrace.budgets.recording import Recording, Stretches
from memtrace.budgets.verdicts import Finding

if TYPE_CHECKING:
    from memtrace.budgets.running import Running


class MeasuredTest:
    """Keeps which stretches count: of the whole test, and of its body.

    A breach is said as soon as the body has ended, so that ``xfail`` and reruns see it; one that
    only shows later, as in what the test leaves behind, when its fixtures have ended.
    """

    def __init__(
        self, running: "Running", item: pytest.Item, plan: Plan, recording: Recording
    ) -> None:
        self._running = running
        self._item = item
        self._plan = plan
        self._recording = recording
        self._said: set[tuple[object, ...]] = set()  # limits whose breach was said
        self._plateau: list[Finding] = []
        self._body: list[Stretch] | None = None  # None: it hasn't run to its end
        self._body_ends: list[Moment] = []
        self._failed = True
        self._asides = 0
        self._whole = Stretches(recording.now())

        # An item's own teardown comes after its fixtures' and before that of a wider scope's.
        def teardown() -> None:
            del item.teardown  # the class's own shows again
            item.teardown()
            self._fixtures_ended()

        item.teardown = teardown  # type: ignore[method-assign]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens meanwhile isn't the test's."""
        if self._asides == 0:
            self._whole.pause(self._recording.now())
        self._asides += 1
        try:
            yield
        finally:
            self._asides -= 1
            if self._asides == 0:
                self._whole.resume(self._recording.now())

    def begin_body(self) -> None:
        """Warm up; what comes now is the body."""
        if self._plan.warmup:
            with self.aside():
                for _ in range(self._plan.warmup):
                    self._run_body()
                gc.collect()  # its garbage must not be freed, and counted, in the body
        self._start = self._recording.now()

    def repeat_body(self) -> None:
        """The body was run once: run it as often as a plateau wants requests, unless it made any.

        Raises:
            BaseException: what the body raises.
        """
        wanted = self._plan.plateau
        if wanted is None:
            return
        self._body_ends.append(self._request_end())
        if not made_requests(self._recording, self._start, self._body_ends[-1]):
            for _ in range(wanted.requests - 1):
                self._run_body()
                self._body_ends.append(self._request_end())

    def end_body(self, *, failed: bool) -> None:
        """Judge what is known by now.

        Raises:
            MemoryBudgetExceeded: something is over.
            pytest.fail.Exception: something can't be judged.
        """
        self._failed = failed
        now = self._end() if self._plan.scope == "body" else self._recording.now()
        self._body = [(self._start, now)]
        wanted = self._plan.plateau
        if wanted is not None and not failed:
            ends = self._body_ends
            one = judge_requests(wanted, self._recording, self._start, ends, self._running.root)
            self._plateau = [one]
        findings = [self._judge(now, end=False), *self._plateau]
        self._running.note(self._item, findings)
        if not failed:
            self._say(findings)

    def finish(self) -> None:
        """Judge what the whole test took, unless it failed.

        Raises:
            MemoryBudgetExceeded: something is over that wasn't before.
            pytest.fail.Exception: something can't be judged.
        """
        if self._failed:
            for name in self._plan.names:
                self._running.keep_baseline(self._item, name, None)
            return
        one = self._judge(self._recording.now(), end=True)
        self._running.note(self._item, [one, *self._plateau])
        for name in self._plan.names:
            self._running.keep_baseline(self._item, name, one)
        self._say([one])

    def _run_body(self) -> None:
        """Once more than pytest does."""
        case = getattr(self._item, "cls", None)
        if case is not None and issubclass(case, unittest.TestCase):
            pytest.fail("a test of unittest can't be run again: no warm-up, no plateau", False)
        self._item.runtest()

    def _fixtures_ended(self) -> None:
        """What the test leaves behind is what is there now; what a wider scope frees is its own."""
        getattr(self._item, "funcargs", {}).clear()
        self._whole.pause(self._end() if self._plan.scope == "test" else self._recording.now())

    def _end(self) -> Moment:
        """Now, where it may matter what is left behind."""
        if self._running.leaves(self._plan.limits) or self._plan.names:
            gc.collect()
        return self._recording.now()

    def _request_end(self) -> Moment:
        gc.collect()  # garbage isn't a leak
        return self._recording.now()

    def _judge(self, now: Moment, *, end: bool) -> Finding:
        """``end``: the fixtures have ended, so what the test leaves behind can be judged."""
        limits = self._plan.limits
        whole = [one for one in limits if one.scope == "test" and (end or one.metric != "end")]
        body = [
            one
            for one in limits
            if one.scope == "body" and not (self._failed and one.metric == "end")
        ]
        parts = [(self._whole.until(now), whole), (self._body or [], body)]
        if self._plan.scope == "body":
            parts.reverse()
        # What is kept of a test is the first one, whether anything limits it or not.
        parts = [part for number, part in enumerate(parts) if part[1] or number == 0]
        return self._running.judge(self._item, None, self._recording, parts)

    def _say(self, findings: Sequence[Finding]) -> None:
        """Fail the test for what it hasn't been failed for yet."""
        new = {breach for one in findings for breach in _breaches(one)} - self._said
        self._said |= new
        if new:
            raise_for(findings)


def _breaches(one: Finding) -> Iterator[tuple[object, ...]]:
    """What is wrong, as names that stay the same when it is judged again."""
    keys = ("scope", "metric", "phase", "device")
    yield from (tuple(limit[key] for key in keys) for limit in one.limits if limit["excess"])
    if one.plateau and one.over:
        yield ("plateau",)
    if one.problem is not None:
        yield (one.label, one.problem)
