"""Record a part of the running process, without a launcher."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter_ns

from memtrace.errors import MemtraceError, TraceError
from memtrace.record.child import environment
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

_SAMPLE_MS = 20


@contextmanager
def record_here(
    path: str | Path, *, stacks: int = 0, source: str = "auto", children: bool = False
) -> Iterator[Session]:
    """Record this process for the length of a ``with`` block, into a new run at ``path``.

    What is allocated already isn't in it, unless :meth:`Session.adopt_existing` books it. Forked
    processes are followed in any case.

    Args:
        path: folder to make.
        stacks: Python frames kept for each allocation.
        source: what a :class:`~memtrace.record.session.Session` takes by that name.
        children: record the processes that are started meanwhile, too: ``os.environ``, which they
            inherit, says so.

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
    options = {"stacks": stacks, "source": source, "sample_ms": _SAMPLE_MS}
    session = Session(folder, epoch_ns=epoch_ns, **options)  # type: ignore[arg-type]
    session.start()
    try:
        inherited = environment(run.resolve(), epoch_ns, options) if children else {}
        with _variables(inherited) if children else nullcontext():
            yield session
    finally:
        session.close()
        peak = {name: high_water(os.getpid())}
        manifest |= {"state": "complete", "ended": timestamp(), "process_peak": peak}
        write_manifest(run, {**manifest, "files": _checksums(run)})


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in values}
    changed = {name: value for name, value in values.items() if before[name] != value}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            value = before[name]
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _checksums(run: Path) -> dict[str, dict[str, int]]:
    """Of every file but those of processes that record still, or were killed."""
    unfinished = set()
    for folder in run.iterdir():
        with suppress(TraceError):
            if read_manifest(folder).get("state") == "recording":
                unfinished.add(folder.name)
    return {
        name: file
        for name, file in file_checksums(run).items()
        if name.partition("/")[0] not in unfinished
    }
