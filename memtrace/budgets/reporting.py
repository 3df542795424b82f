"""The hooks around reports: the word for a breach, the summary, and the files."""

import json
from collections.abc import Generator
from typing import Any

import pytest

from memtrace.budgets.fitting import FITS
from memtrace.budgets.options import Options, key
from memtrace.budgets.store import Values, save
from memtrace.budgets.words import METRICS
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size

#: Version of the JSON report.
SCHEMA = 1

#: What pytest counts breaches as.
CATEGORY = "over budget"


class Reporting:
    """The plugin that tells what the tests took; with xdist it is the controller's."""

    def __init__(self, config: pytest.Config, options: Options) -> None:
        self._config = config
        self._options = options
        self._tests: dict[str, dict[str, Any]] = {}
        self._problem: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a report says; the last one of a test says most."""
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "memory": []})
        if report.when == "setup":
            test.update(outcome="passed", memory=[])  # anew, in a rerun
        if report.outcome != "passed":
            over = getattr(report, "over_budget", None)
            test["outcome"] = CATEGORY if over else report.outcome
        test["memory"] = getattr(report, "memory", test["memory"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        headline = getattr(report, "over_budget", None)
        if headline is None or not report.failed:
            return None
        return CATEGORY, "M", f"OVER BUDGET {headline}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: "pytest.TerminalReporter"
    ) -> Generator[None, None, None]:
        stats = terminalreporter.stats
        over = stats.get(CATEGORY, [])
        failed = stats.get("failed", [])
        if over:
            # pytest lists what failed only; a breach has its numbers in its word already.
            for report in over:
                if getattr(report.longrepr, "reprcrash", None) is not None:
                    report.longrepr.reprcrash = None
            stats["failed"] = failed + over
        try:
            yield
        finally:
            if over:
                stats["failed"] = failed  # an empty one, too, makes the last line red
        self._compare(terminalreporter)
        if self._options.save is not None and self._problem is None:
            terminalreporter.write_line(f"memory: saved as {self._options.save}")
        if self._problem is not None:
            terminalreporter.write_line(f"memory: {self._problem}", red=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        if not hasattr(self._config, "workerinput"):
            try:
                self._write()
            except MemtraceError as error:
                self._problem = str(error)
                if session.exitstatus == pytest.ExitCode.OK:
                    session.exitstatus = pytest.ExitCode.USAGE_ERROR
        return (yield)

    def _measured(self) -> dict[str, Values]:
        """Of all tests and blocks that were measured to their end."""
        return {
            key(nodeid, one["label"]): one["devices"]
            for nodeid, test in self._tests.items()
            if test["outcome"] in ("passed", CATEGORY)
            and all(one["label"] != FITS for one in test["memory"])  # it came to no end
            for one in test["memory"]
            if one["label"] not in ("plateau", FITS) and one["problem"] is None
        }

    def _write(self) -> None:
        if self._options.save is not None:
            save(self._options.save, self._measured())
        path = self._options.json
        if path is not None:
            tests = [
                {"nodeid": nodeid, **test} for nodeid, test in self._tests.items() if test["memory"]
            ]
            document = {"schema": SCHEMA, "compared": self._options.compared, "tests": tests}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise MemtraceError(f"{path} can't be written: {error.strerror}") from None

    def _compare(self, terminal: "pytest.TerminalReporter") -> None:
        """Every metric that isn't what it was."""
        if self._options.compared is None:
            return
        saved, measured = self._options.saved, self._measured()
        terminal.section(f"memory compared with {self._options.compared}")
        rows = [
            (name, device, metric, before, after)
            for name, devices in measured.items()
            if name in saved
            for device, values in devices.items()
            for metric, after in values.items()
            if metric in METRICS and after != (before := saved[name].get(device, {}).get(metric, 0))
        ]
        for name, device, metric, before, after in rows:
            share = f" ({100 * (after - before) / before:+.1f} %)" if before > 0 else ""
            terminal.write_line(
                f"{format_size(before):>12} → {format_size(after):>12}"
                f"{format_size(after - before, signed=True):>14}{share:<12} "
                f"{metric} on {device} in {name}"
            )
        new = sorted(set(measured) - set(saved))
        same = len(measured) - len(new) - len({name for name, *_ in rows})
        terminal.write_line(f"{same} unchanged, {len({row[0] for row in rows})} changed")
        for name in new:
            terminal.write_line(f"new, not compared: {name}")
