"""A whole run under other rules: a new folder, whose manifest says which rules were applied."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.classify.relabel import relabel
from memtrace.classify.rules import UserRule, UserRules
from memtrace.errors import MemtraceError
from memtrace.trace import MANIFEST
from memtrace.trace.manifest import file_checksums, write_manifest
from memtrace.trace.reader import Trace, open_trace
from memtrace.trace.writer import TableWriter

#: What is written anew; blocks lose their components, which are those that the recorder booked.
_TABLES = ("contexts", "events", "blocks")


@dataclass(frozen=True)
class Hit:
    """What one rule matched in all processes of a run."""

    rule: UserRule
    events: int  # allocations and retags
    bytes: int  # of the allocations

    def document(self) -> dict[str, Any]:
        """As manifests and ``--json`` have it."""
        return {**self.rule.document(), "events": self.events, "bytes": self.bytes}


def classify(path: str | Path, rules: UserRules, out: Path) -> list[Hit]:
    """Write the run at ``path`` to a new folder ``out``, its components decided by the rules.

    Raises:
        MemtraceError: the run can't be read, or ``out`` exists or can't be made.
    """
    trace = open_trace(path)
    if out.exists():
        raise MemtraceError(f"{out} exists; choose another name with -o or remove it")
    if out.resolve().is_relative_to(trace.folder.resolve()):
        raise MemtraceError(f"{out} would lie in {trace.folder}, which stays as it is")
    with _written(trace, rules, out) as (scratch, hits):
        scratch.rename(out)
    return hits


def classify_in_place(folder: Path, rules: UserRules) -> list[Hit]:
    """The same for a run that was just recorded: the result takes its place.

    Raises:
        MemtraceError: the run can't be read or the result can't be written; then it is as before.
    """
    with _written(open_trace(folder), rules, folder) as (scratch, hits):
        before = folder.with_name(f".{folder.name}.{os.getpid()}.before")
        folder.rename(before)
        scratch.rename(folder)
        shutil.rmtree(before, ignore_errors=True)
    return hits


@contextmanager
def _written(trace: Trace, rules: UserRules, out: Path) -> Iterator[tuple[Path, list[Hit]]]:
    """The classified run, in a folder beside ``out`` that goes unless it is renamed."""
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        scratch.mkdir()
        try:
            yield scratch, _write(trace, rules, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise MemtraceError(f"{out} can't be written: {error.strerror}") from None


def _write(trace: Trace, rules: UserRules, folder: Path) -> list[Hit]:
    _copy(trace, folder)
    found = []
    for process in trace.processes:
        new = relabel(process, rules.rules)
        found.append(new)
        with TableWriter(folder / process.folder.name) as writer:
            writer.append("contexts", new.contexts)
            writer.append("events", new.events)
            blocks = process.blocks
            writer.append("blocks", {**blocks, "component": [None] * len(blocks["address"])})
    hits = [
        Hit(rule, sum(new.matched[row] for new in found), sum(new.bytes[row] for new in found))
        for row, rule in enumerate(rules.rules)
    ]
    applied = {
        "run": trace.name,
        "rules": rules.file,
        # Bytes of a torn last batch, which the new tables don't have.
        "torn": {
            path.relative_to(trace.folder).as_posix(): trace.torn[str(path)]
            for path in _rewritten(trace)
            if str(path) in trace.torn
        },
        "applied": [hit.document() for hit in hits],
    }
    ours = ("format", "schema")  # of this memtrace, from now on
    manifest = {key: value for key, value in trace.manifest.items() if key not in ours}
    manifest["classified"] = [*manifest.get("classified", ()), applied]
    if trace.complete:
        manifest["files"] = file_checksums(folder)
    write_manifest(folder, manifest)
    return hits


def _rewritten(trace: Trace) -> list[Path]:
    """The tables that a classified run has anew."""
    return [process.folder / f"{table}.arrow" for process in trace.processes for table in _TABLES]


def _copy(trace: Trace, folder: Path) -> None:
    """Every file but the manifest of the run and the tables that are written anew."""
    left_out = {trace.folder / MANIFEST, *_rewritten(trace)}
    for path in sorted(trace.folder.rglob("*")):
        target = folder / path.relative_to(trace.folder)
        if path.is_dir():
            target.mkdir()
        elif path.is_file() and path not in left_out and not path.name.startswith("."):
            shutil.copyfile(path, target)  # a hidden one is half a manifest of a killed writer
