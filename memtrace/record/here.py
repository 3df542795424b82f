"""Record a part of the running process, without a launcher."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

from memtrace.errors import MemtraceError
from memtrace.record.enter import enter_run
from memtrace.record.process import high_water
from memtrace.record.session import Session
from memtrace.trace.manifest import (
    file_checksums,
    first_manifest,
    life,
    read_manifest,
    timestamp,
    write_manifest,
)


@contextmanager
def record_here(path: str | Path, *, stacks: int = 0, source: str = "auto") -> Iterator[Session]:
    """Record this process for the length of a ``with`` block, into a new run at ``path``.

    What is allocated already isn't in it, unless :meth:`Session.adopt_existing` books it.

    Raises:
        MemtraceError: ``path`` exists, or this process is being recorded already.
        OSError: ``path`` can't be written.
    """
    run = Path(path)
    try:
        run.mkdir(parents=True)
    except FileExistsError:
        raise MemtraceError(f"{run} exists; choose another name or remove it") from None
    epoch_ns = perf_counter_ns()
    manifest = first_manifest(sys.orig_argv, epoch_ns)
    write_manifest(run, manifest)
    folder = Path(enter_run(str(run)))
    name = life(read_manifest(folder))
    session = Session(folder, epoch_ns=epoch_ns, stacks=stacks, sample_ms=20, source=source)
    session.start()
    try:
        yield session
    finally:
        session.close()
        peak = {name: high_water(os.getpid())}
        manifest |= {"state": "complete", "ended": timestamp(), "process_peak": peak}
        write_manifest(run, {**manifest, "files": file_checksums(run)})
