"""A pytest of one test on a card that isn't there: ``python -m memtrace.budgets.dry_child FOLDER``.

It has the command line of the pytest that started it (:mod:`memtrace.budgets.dry`) and, under
pytest-xdist, passes for the same worker. It prints nothing: reports, warnings and what went wrong
are messages, pickled one after another.
"""

import pickle
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest
from _pytest.config import _prepareconfig
from _pytest.runner import runtestprotocol

from memtrace.budgets.dry import MESSAGES, ORDER
from memtrace.budgets.running import AWAITED, CARD
from memtrace.pytest_plugin import FOLDER

#: Options that are the first pytest's to obey: who runs what, and who writes files.
_OVERRIDDEN: Mapping[str, Any] = {
    "usepdb": False,
    "numprocesses": None,
    "maxprocesses": None,
    "dist": "no",
    "tx": [],
    "distload": False,
    "looponfail": False,
    "xmlpath": None,
    "no_cov": True,
    "memory_save": None,
    "memory_json": None,
}


class Messenger:
    """Runs the one test, and says how it went."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def send(self, kind: str, content: Any) -> None:
        pickle.dump((kind, content), self._file)
        self._file.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Once, whatever other plugins repeat: they do so in the first pytest."""
        for report in runtestprotocol(item, log=False, nextitem=None):
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            self.send("report", data)
        return True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not session.items and not session.testsfailed:
            self.send("problem", "it isn't collected anew, by the same name")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.send("problem", report.longreprtext)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Of the test alone: the first pytest collects, too."""
        if when == "runtest":
            message = warning_message.message
            if not isinstance(message, Warning) or not _can_be_sent(message):
                message = Warning(str(message))
            where = warning_message.filename, warning_message.lineno
            self.send("warning", warnings.WarningMessage(message, type(message), *where))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # an error in collection
            self.send("interrupted", None)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.send("problem", str(excrepr))


def _can_be_sent(message: Warning) -> bool:
    try:
        pickle.loads(pickle.dumps(message))
    except Exception:  # whatever a class of the user's raises
        return False
    return True


def main(folder: Path) -> int:
    """Run the test; pytest's exit status."""
    order = pickle.loads((folder / ORDER).read_bytes())
    sys.path[:] = order["path"]
    config = _prepareconfig(order["args"])
    for name, value in {**_OVERRIDDEN, "basetemp": order["basetemp"]}.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.args = [order["test"]]
    if order["workerinput"] is not None:
        config.workerinput = order["workerinput"]  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
    config.stash[CARD] = order["card"]
    config.stash[AWAITED] = order["awaited"]
    config.stash[FOLDER] = order["baselines"]
    config.pluginmanager.unregister(name="terminal")
    with (folder / MESSAGES).open("wb") as file:
        config.pluginmanager.register(Messenger(file))
        try:
            return int(config.hook.pytest_cmdline_main(config=config))
        finally:
            config._ensure_unconfigure()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
