"""A recording of this process, checked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from memtrace import record_here
from memtrace.analysis.accounts import accounts
from memtrace.analysis.identities import check
from memtrace.analysis.process import process_memory
from memtrace.trace.reader import ProcessTrace, open_trace


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., ProcessTrace]:
    """Run a function under a recording; give back the trace of this process."""

    def run(work: Callable[[], object], **options: int) -> ProcessTrace:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.memtrace"
        with record_here(path, **options):
            work()
        trace = open_trace(path)
        (process,) = trace.processes
        for account in accounts(process):
            identities = check(account, process_memory(trace, process, account.device))
            assert identities.hold, identities.problem
        return process

    return run
