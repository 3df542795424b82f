"""What tests look at in a run."""

from pathlib import Path
from typing import Any

import numpy as np

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.identities import check
from memtrace.analysis.process import process_memory
from memtrace.analysis.segments import Totals, layout_at
from memtrace.trace.reader import Columns, ProcessTrace, Trace, open_trace
from memtrace.trace.schema import TABLES, Action


def open_one(run: Path) -> tuple[Trace, ProcessTrace]:
    trace = open_trace(run)
    (process,) = trace.processes
    return trace, process


def last(account: Account) -> Totals:
    layout = layout_at(account, len(account.process.events["id"]) - 1)
    assert layout is not None
    return layout.totals


def assert_consistent(run: Path) -> None:
    """Both identities at every event, and the blocks add up to the sums of the events."""
    trace, process = open_one(run)
    for account in accounts(process):
        assert check(account, process_memory(trace, process, account.device)).problem is None
        totals = last(account)
        assert account.reserved is not None
        assert totals.allocated == account.allocated.levels[-1]
        assert totals.reserved == account.reserved.levels[-1] == totals.active + totals.free


def assert_state(run: Path, snapshot: dict[str, Any]) -> None:
    """After the last event the bytes by state are those that the snapshot's segments have."""
    _, process = open_one(run)
    for account in accounts(process):
        segments = [
            one
            for one in [*snapshot["segments"], *snapshot.get("host_segments", [])]
            if account.device == (f"cuda:{one['device']}" if one["device"] >= 0 else "cpu:pinned")
        ]
        sums = dict.fromkeys(("active_allocated", "active_pending_free", "inactive"), 0)
        for segment in segments:
            for block in segment["blocks"]:
                sums[block["state"]] += block["size"]
        totals = last(account)
        assert totals.reserved == sum(segment["total_size"] for segment in segments)
        assert totals.segments == len(segments)
        assert totals.allocated == sums["active_allocated"]
        assert totals.active - totals.allocated == sums["active_pending_free"]
        # Where the blocks of a made-up snapshot don't fill a segment, the rest of it is free.
        assert totals.free == totals.reserved - totals.active >= sums["inactive"]


def rows(process: ProcessTrace) -> list[tuple[Any, ...]]:
    """Every event with all that it says, by name instead of number."""
    scopes, contexts = process.scopes, process.contexts
    paths: list[tuple[tuple[str, str], ...]] = []
    for parent, kind, name in zip(scopes["parent"], scopes["kind"], scopes["name"], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), (kind, name)))
    stacks = [*map(tuple, process.stacks["frames"]), ()]
    columns = (
        contexts[name].tolist() if isinstance(contexts[name], np.ndarray) else contexts[name]
        for name in TABLES["contexts"].names
    )
    said = [
        (Action(action).name, *where, paths[scope][1:], stacks[stack])
        for action, *where, scope, stack in zip(*columns, strict=True)
    ]
    names = ("time_us", "id", "bytes", "requested")
    events = (process.events[name].tolist() for name in (*names, "context"))
    return [(*values, *said[context]) for *values, context in zip(*events, strict=True)]


def listed(columns: Columns) -> dict[str, list[Any]]:
    """A table whose columns compare with ``==``."""
    return {name: list(column) for name, column in columns.items()}


def actions(process: ProcessTrace, device: str = "cuda:0") -> list[str]:
    return [row[4] for row in rows(process) if row[5] == device]


def unseen(process: ProcessTrace) -> str:
    return "\n".join(process.manifest["unseen"])
