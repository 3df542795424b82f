"""Replay a run in a process of its own, which the viewer starts: see :mod:`app.replays`.

    python -m app.replaying ORDER

``ORDER`` is JSON: the ``run``, the ``process`` in it (the name of its folder), the ``device``, the
``change`` (:class:`~memtrace.analysis.what_if.Change`) and the folder ``out``. Each line that is
printed is JSON, too: ``{"done": events}``, and at last the ``outcome`` with its ``notes``. What
can't be done ends in a sentence and exit code 1.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from memtrace.analysis.accounts import accounts
from memtrace.analysis.what_if import Change, replayed
from memtrace.errors import MemtraceError
from memtrace.trace.reader import open_trace

_EVERY = 0.2  # seconds between two lines


def main(order: dict[str, Any]) -> None:
    trace = open_trace(order["run"])
    [account] = [
        account
        for process in trace.processes
        if process.folder.name == order["process"]
        for account in accounts(process)
        if account.device == order["device"]
    ]
    done, said = 0, monotonic()

    def progress(more: int) -> None:
        nonlocal done, said
        done += more
        if monotonic() - said > _EVERY:
            said = monotonic()
            print(json.dumps({"done": done}), flush=True)

    outcome, notes = replayed(
        trace, account, Change(**order["change"]), Path(order["out"]), progress
    )
    print(json.dumps({"outcome": asdict(outcome), "notes": notes}))


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except MemtraceError as error:
        sys.exit(str(error))
