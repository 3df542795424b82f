"""Ctrl-C while a recorder writes."""

import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from memtrace.record.interrupts import uninterrupted
from memtrace.record.ledger import Ledger
from memtrace.trace.manifest import write_manifest
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action


def test_a_signal_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_have_nothing_to_wait_for() -> None:
    def block() -> None:
        with uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_what_is_written_meanwhile_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run.memtrace" / "1-1"
    folder.mkdir(parents=True)
    ledger = Ledger(folder, epoch_ns=0)
    scope = ledger.scope(0, "phase", "prefill")
    context = ledger.context(Action.ALLOC, "cuda:0", "Act", scope)
    append = ledger._writer.append_rows

    def interrupted(table: str, rows: list[tuple[object, ...]]) -> None:
        if table == "scopes" and rows:  # they are nowhere else any more
            signal.raise_signal(signal.SIGINT)
        append(table, rows)

    monkeypatch.setattr(ledger._writer, "append_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.append(np.array([[1, 2, 512, 512, context]], dtype=np.int64))
    ledger.close()
    assert ledger.events_written == 1
    write_manifest(folder.parent, {"state": "complete"})
    write_manifest(folder, {"pid": 1, "state": "ended", "events": 1, "dropped": 0})
    (process,) = open_trace(folder.parent).processes
    assert process.contexts["component"] == ["Act"]
