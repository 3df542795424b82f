"""``memtrace export --to torch-snapshot``: one process as a snapshot of PyTorch's allocator.

What was there before the history stands in the segments only, as in PyTorch's own snapshots: an
import finds it by walking back. Components and scopes are ``user_metadata`` in the recorder's own
words (:mod:`memtrace.allocator.metadata`), and what a snapshot has no place for lies beside it
(:mod:`memtrace.interchange.ours`).
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from memtrace.allocator.history import AFTER_RETRY, BEFORE, RETURNED
from memtrace.allocator.metadata import birth_text, retag_text
from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.segments import layout_at
from memtrace.errors import MemtraceError
from memtrace.interchange import ours
from memtrace.interchange.snapshot import OURS, PINNED
from memtrace.trace.reader import ProcessTrace, Trace
from memtrace.trace.schema import TABLES, Action, State

_ACTIONS: Mapping[Action, str] = {
    Action.ALLOC: "alloc",
    Action.FREE: "free_completed",
    Action.FREE_REQUESTED: "free_requested",
    Action.FREE_COMPLETED: "free_completed",
    Action.RETAG: "annotate",
    Action.OOM: "oom",
    Action.SEGMENT_ALLOC: "segment_alloc",
    Action.SEGMENT_FREE: "segment_free",
    Action.SEGMENT_MAP: "segment_map",
    Action.SEGMENT_UNMAP: "segment_unmap",
}
_FREES = (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
_STATES = {
    State.FREE: "inactive",
    State.ALLOCATED: "active_allocated",
    State.PENDING: "active_pending_free",
}
#: ``file:line:function``, as stacks have it.
_FRAME = re.compile(r"(.*?):(\d+):(.*)", re.DOTALL)


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    file: Path
    pid: int
    devices: tuple[str, ...]
    entries: int
    left_out: tuple[str, ...]


def export_snapshot(trace: Trace, file: Path, pid: int | None = None) -> Exported:
    """Write one process of ``trace`` as a snapshot.

    Raises:
        MemtraceError: it has no such process or none with CUDA memory, several that ``pid`` doesn't
            choose from, or the file is there or can't be written.
    """
    if file.exists():
        raise MemtraceError(f"{file} is there already; remove it or name another with -o")
    process = _process(trace, pid)
    made = _Export(trace, process)
    scratch = file.with_name(f".{file.name}.part")
    try:
        with scratch.open("xb") as target:
            pickle.dump(made.snapshot, target, protocol=4)
        scratch.rename(file)
    except OSError as error:
        raise MemtraceError(f"{file} can't be written: {error.strerror}") from None
    finally:
        scratch.unlink(missing_ok=True)
    return Exported(file, process.pid, tuple(made.devices), made.entries, tuple(made.left_out))


def _process(trace: Trace, pid: int | None) -> ProcessTrace:
    chosen = [one for one in trace.processes if pid in (None, one.pid)]
    if not chosen:
        raise MemtraceError(f"{trace.folder} has no process {pid}")
    with_segments = [one for one in chosen if _accounts(one)]
    if not with_segments:
        raise MemtraceError(
            f"{trace.folder} has no memory of PyTorch's CUDA allocator, which is all that a "
            "snapshot of it can hold"
        )
    if len(with_segments) > 1:
        pids = ", ".join(str(one.pid) for one in with_segments)
        raise MemtraceError(f"{trace.folder} has several processes: choose one of {pids} by --pid")
    return with_segments[0]


def _accounts(process: ProcessTrace) -> dict[str, Account]:
    """The accounts that a snapshot has a place for, by device."""
    found: dict[str, Account] = {}
    for device in sorted({name for name in process.contexts["device"] if name}):
        if device == PINNED or re.fullmatch(r"cuda:\d{1,3}", device):
            account = Account(process, device)
            if account.reserved is not None:
                found[device] = account
    return found


class _Export:
    """The ``snapshot`` of one process."""

    def __init__(self, trace: Trace, process: ProcessTrace) -> None:
        self._process = process
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._frame: dict[str, dict[str, Any]] = {}
        self._paths: dict[int, list[tuple[str, str]]] = {0: []}
        self._texts: dict[int, str] = {}
        self._starts: dict[str, int] = {}
        self._retries: dict[str, list[int]] = {}
        self._zero = _time_zero(trace, process)
        #: An import of a snapshot without times has none to give.
        self._timed = process.manifest.get("time_zero_us", 0) is not None
        found = _accounts(process)
        self.devices = list(found)
        self.entries = 0
        self.left_out: list[str] = []
        traces = {device: self._trace(account) for device, account in found.items()}
        segments = {device: self._segments(account) for device, account in found.items()}
        cuda = [device for device in found if device != PINNED]
        count = max((_number(device) + 1 for device in cuda), default=0)
        self.snapshot: dict[str, Any] = {
            "segments": [row for device in cuda for row in segments[device]],
            "device_traces": [traces.get(f"cuda:{number}", []) for number in range(count)],
            "external_annotations": [],
            "host_segments": segments.get(PINNED, []),
            "host_traces": traces.get(PINNED, []),
            OURS: ours.write(self._kept(trace)),
        }
        settings = _settings(process)
        if settings:
            self.snapshot["allocator_settings"] = settings
        others = [one.device for one in accounts(process) if one.device not in found]
        if others:
            self.left_out.append(f"what lies on {', '.join(others)}: a snapshot holds CUDA's only")

    # -- history -----------------------------------------------------------------------------------

    def _trace(self, account: Account) -> list[dict[str, Any]]:
        """The device's history, without the events that only say what was there before it."""
        events, contexts = self._process.events, self._process.contexts
        context = events["context"]
        rows = np.flatnonzero(account.here[context])
        seeds = self._seeds(rows)
        entries: list[dict[str, Any]] = []
        if seeds:
            self._starts[account.device] = int(events["time_us"][rows[0]])
        retries = self._retries[account.device] = list[int]()
        possible, retried = 0, False
        names = ("time_us", "id", "requested", "context")
        columns = (events[name][rows].tolist() for name in names)
        for place, (time_us, address, size, number) in enumerate(zip(*columns, strict=True)):
            action = Action(contexts["action"][number])
            entry: dict[str, Any] = {
                "action": _ACTIONS.get(action),
                "addr": address,
                "size": size,
                "stream": int(contexts["stream"][number]),
                "time_us": time_us + self._zero,
                "compile_context": "N/A",
                "user_metadata": self._text(number),
                "pool_id": _pool(contexts["pool"][number]),
                "frames": self._stack(int(contexts["stack"][number])),
            }
            if place < seeds:
                # An import begins these as other, so what else they are is an annotation.
                component = contexts["component"][number]
                if action != Action.ALLOC or component == "other":
                    continue
                text = retag_text(component, [], None)
                entry |= {"action": "annotate", "user_metadata": text}
            elif action == Action.FREE:
                entries.append(entry | {"action": "free_requested"})
            elif action == Action.OOM:
                entry["device_free"] = entry.pop("addr")
            elif action == Action.RETRY:  # a snapshot has no entry for it; we add which they are
                retried = True
                continue
            if entry["action"] in AFTER_RETRY and entries and entries[-1]["action"] in RETURNED:
                retries += [possible] if retried else []
                possible, retried = possible + 1, False
            entries.append(entry)
        if not self._timed:
            for entry in entries:
                del entry["time_us"]
        self.entries += len(entries)
        return entries

    def _seeds(self, rows: np.ndarray) -> int:
        """How many of a device's events, from its first, say what was there before."""
        events, contexts = self._process.events, self._process.contexts
        before = np.array([self._is_before(int(scope)) for scope in contexts["scope"]], dtype=bool)
        found = np.flatnonzero(before[events["context"][rows]])
        if len(found) == 0:
            return 0
        end = int(found[-1]) + 1
        # Blocks that waited for a stream are freed at once.
        booked = set(events["id"][rows[found]].tolist())
        action = contexts["action"][events["context"][rows]]
        time_us, address = events["time_us"][rows], events["id"][rows]
        while (
            end < len(rows)
            and action[end] == Action.FREE_REQUESTED
            and int(address[end]) in booked
            and time_us[end] == time_us[0]
        ):
            end += 1
        return end

    def _is_before(self, scope: int) -> bool:
        scopes = self._process.scopes
        return (scopes["kind"][scope], scopes["name"][scope]) == ("op", BEFORE)

    # -- segments ----------------------------------------------------------------------------------

    def _segments(self, account: Account) -> list[dict[str, Any]]:
        layout = layout_at(account, len(self._process.events["id"]) - 1)
        if layout is None:
            return []
        segments, blocks = layout.segments, layout.blocks
        pinned = account.device == PINNED
        found = [
            {
                "device": -1 if pinned else _number(account.device),
                "address": address,
                "total_size": size,
                "allocated_size": 0,
                "active_size": 0,
                "requested_size": 0,
                "stream": stream,
                "segment_type": "small" if small or pinned else "large",
                "segment_pool_id": _pool(pool),
                "is_expandable": bool(expandable),
                "frames": [],
                "blocks": [],
            }
            for address, size, stream, expandable, pool, small in zip(
                segments.address.tolist(),
                segments.bytes.tolist(),
                segments.stream.tolist(),
                segments.expandable,
                segments.pool,
                segments.small,
                strict=True,
            )
        ]
        columns = (blocks.address, blocks.bytes, blocks.requested, blocks.state, blocks.segment)
        listed = (column.tolist() for column in (*columns, blocks.stack))
        for address, size, requested, state, segment, stack in zip(*listed, strict=True):
            owner: dict[str, Any] = found[segment]
            owner["blocks"].append(
                {
                    "address": address,
                    "size": size,
                    "requested_size": requested,
                    "state": _STATES[State(state)],
                    "frames": self._stack(stack),
                }
            )
            if state == State.ALLOCATED:
                owner["allocated_size"] += size
            if state != State.FREE:
                owner["active_size"] += size
                owner["requested_size"] += requested
        return found

    # -- texts -------------------------------------------------------------------------------------

    def _text(self, context: int) -> str:
        """The metadata or annotation that says a context's component and scope."""
        if context not in self._texts:
            contexts = self._process.contexts
            action, component = contexts["action"][context], contexts["component"][context]
            path = self._path(int(contexts["scope"][context]))
            if action == Action.RETAG:
                same = component == contexts["previous"][context]
                text = retag_text(None if same else component, path, None)
            elif action in _FREES or (component in (None, "other") and not path):
                text = ""
            else:
                text = birth_text(component or "other", path)
            self._texts[context] = text
        return self._texts[context]

    def _path(self, scope: int) -> list[tuple[str, str]]:
        if scope not in self._paths:
            scopes = self._process.scopes
            outer = self._path(int(scopes["parent"][scope]))
            self._paths[scope] = [*outer, (scopes["kind"][scope], scopes["name"][scope])]
        return self._paths[scope]

    def _stack(self, stack: int) -> list[dict[str, Any]]:
        """The frames of a stack; equal ones are one object, which a pickle stores once."""
        if stack not in self._frames:
            texts = self._process.stacks["frames"][stack] if stack >= 0 else []
            self._frames[stack] = [self._frame_of(text) for text in texts]
        return self._frames[stack]

    def _frame_of(self, text: str) -> dict[str, Any]:
        if text not in self._frame:
            parts = _FRAME.fullmatch(text)
            file, line, name = parts.groups() if parts else ("", 0, text)
            self._frame[text] = {"filename": intern(file), "line": int(line), "name": intern(name)}
        return self._frame[text]

    # -- beside it ---------------------------------------------------------------------------------

    def _kept(self, trace: Trace) -> ours.Kept:
        process = self._process
        pid = process.pid
        return ours.Kept(
            found=True,
            name=process.scopes["name"][0],
            time_zero_us=self._zero,
            run=trace.manifest,
            process=process.manifest,
            retries=self._retries,
            starts=self._starts,
            order=self._order(),
            outside=[row for row in _rows(trace.samples, "samples") if row[1] in (None, pid)],
            samples=[self._renumbered(row) for row in _rows(process.samples, "samples")],
            requests=_rows(process.requests, "requests"),
        )

    @cached_property
    def _places(self) -> np.ndarray:
        """Of each event the number of its device; -1 where that isn't exported."""
        contexts, context = self._process.contexts, self._process.events["context"]
        number = {device: place for place, device in enumerate(self.devices)}
        places = np.array([number.get(device, -1) for device in contexts["device"]], dtype=np.int64)
        return np.asarray(places[context])

    def _order(self) -> list[tuple[str, int]]:
        """How the events of several devices follow each other: runs of one device."""
        places = self._places[self._places >= 0]
        borders = np.flatnonzero(np.diff(places, prepend=-1, append=-1))
        return [
            (self.devices[int(places[start])], int(stop - start))
            for start, stop in pairwise(borders)
        ]

    def _renumbered(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        """A sample with the number of exported events before it, not of all."""
        *head, event, value = sample
        if event is not None:
            event = int((self._places[:event] >= 0).sum())
        return (*head, event, value)


def _rows(columns: Mapping[str, Any], table: str) -> list[tuple[Any, ...]]:
    """A table's rows, in the order of the schema's columns."""
    listed = (
        column.tolist() if isinstance(column, np.ndarray) else column
        for column in (columns[name] for name in TABLES[table].names)
    )
    return list(zip(*listed, strict=True))


def _number(device: str) -> int:
    return int(device.partition(":")[2])


def _pool(name: str | None) -> tuple[int, int]:
    """``"0.1"`` → ``(0, 1)``."""
    first, second = (name or "0.0").split(".")
    return int(first), int(second)


def _settings(process: ProcessTrace) -> Any:
    """What PyTorch called the allocator's settings; None or empty: unknown."""
    recorded = process.manifest.get("cuda")
    found = recorded.get("allocator_settings") if isinstance(recorded, dict) else None
    return process.manifest.get("allocator_settings", found)


def _time_zero(trace: Trace, process: ProcessTrace) -> int:
    """Microseconds since 1970 at time 0 of the run, as far as it is known."""
    zero = process.manifest.get("time_zero_us")
    if type(zero) is not int:
        try:
            zero = int(datetime.fromisoformat(trace.manifest["started"]).timestamp() * 1e6)
        except (KeyError, TypeError, ValueError):
            zero = 0
    return max(zero, -int(process.events["time_us"].min(initial=0)))
