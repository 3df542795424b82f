"""``memtrace import``: a snapshot of PyTorch's allocator becomes a run.

What a snapshot tells goes where a recorder would have put it. Text that others left becomes scopes:
memory metadata a ``tag`` (unless it names a component: then the bytes join that), compile contexts
a ``compile``, internal metadata an ``internal``, annotations of tensors a retag that changes the
place and not the component. ``record_function`` ranges become phases. What it doesn't tell is said
in the manifest's ``unseen``.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from memtrace.allocator.history import BEFORE, FIELDS, MISSED, History
from memtrace.allocator.layout import Layout
from memtrace.allocator.metadata import BIRTH, BORN, RETAG, Names, Retag, is_component
from memtrace.allocator.rewind import Start, before
from memtrace.errors import MemtraceError, TraceError
from memtrace.interchange import ours
from memtrace.interchange.phases import intervals, scopes_at
from memtrace.interchange.snapshot import Data, Device, Snapshot, parse
from memtrace.interchange.tables import Tables, clean
from memtrace.interchange.unpickle import read_pickle, without_collections
from memtrace.sizes import format_size
from memtrace.trace.check import check_process, check_run
from memtrace.trace.folders import new_folder
from memtrace.trace.manifest import Knowledge, file_checksums, write_manifest
from memtrace.trace.schema import Action
from memtrace.trace.writer import TableWriter

#: Entries on the way, with a text that says whose and how many.
Watch = Callable[[Sequence[Data], str], Iterable[Data]]

#: Texts may take this much more than the file: frames are named once there and once a stack here.
_TEXTS, _TEXTS_AT_LEAST = 200, 64 << 20

#: Actions whose place is recorded; a free has that of its block.
_PLACED = frozenset({"alloc", "segment_alloc", "segment_map", "oom", "annotate"})
#: Kinds of scopes that lie around the metadata, and where an entry has their names.
_AROUND = (("compile", "compile_context"), ("internal", "internal_metadata"))
_NO_COMPILE = "N/A"

_NAMELESS = "the process, its torch and whether its device is real: a snapshot doesn't name them"


@dataclass(frozen=True)
class Imported:
    """What an import made."""

    run: Path
    devices: tuple[str, ...]
    entries: int
    events: int
    #: Entries that no allocator could have written after those before them.
    impossible: int
    unseen: tuple[str, ...]


def import_snapshot(path: Path, run: Path, watch: Watch = lambda entries, _: entries) -> Imported:
    """Make the run ``run`` from the snapshot at ``path``.

    Raises:
        MemtraceError: it is no snapshot or damaged, or ``run`` can't be made; nothing is left then.
    """
    with new_folder(run) as folder, without_collections():
        data, size = read_pickle(path)
        try:
            snapshot = parse(data, size)
            kept = ours.read(snapshot.ours)
            made = _Import(snapshot, kept, max(_TEXTS * size, _TEXTS_AT_LEAST), watch)
            check_process(path, {"pid": 0, **kept.process})
            process = _process(kept.process, snapshot, made) | {
                "imported": {"file": path.name, "bytes": size}
            }
            root = _root(kept.run, path)
            check_process(path, process)
            check_run(path, root)
        except TraceError as error:
            raise MemtraceError(str(error)) from None
        except MemtraceError as error:
            raise MemtraceError(f"{path} can't be imported: {error}") from None
        tables = folder / str(process["pid"])
        tables.mkdir()
        made.tables.write(tables, made.events)
        with TableWriter(tables) as writer:
            writer.append_rows("samples", kept.samples)
            writer.append_rows("requests", kept.requests)
        with TableWriter(folder) as writer:
            writer.append_rows("samples", kept.outside)
        write_manifest(tables, process)
        write_manifest(folder, root | {"files": file_checksums(folder)})
    return Imported(
        run=run,
        devices=tuple(device.name for device in snapshot.devices),
        entries=sum(len(device.entries) for device in snapshot.devices),
        events=len(made.events),
        impossible=made.impossible,
        unseen=tuple(made.unseen()),
    )


def _process(known: Mapping[str, Any], snapshot: Snapshot, made: "_Import") -> dict[str, Any]:
    """The process's manifest, of what our export kept of it and of what we have now."""
    return {
        "pid": 0,  # a snapshot doesn't say
        "argv": [],
        "torch": "unknown",
        "state": "ended",
        **known,
        "events": len(made.events),
        "dropped": (known.get("dropped") or 0) + made.impossible,
        "unseen": list(dict.fromkeys([*(known.get("unseen") or []), *made.unseen()])),
        "allocator_settings": snapshot.settings_found,
        "time_zero_us": made.time_zero_us if snapshot.timed else None,
    }


def _root(known: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The run's manifest."""
    return {
        "knowledge": Knowledge.MEASURED,
        "command": ["memtrace", "import", path.name],
        "state": "complete",
        **known,
    }


class _Import:
    """The events of a snapshot, in ``events`` (n, 5), and the tables that they name rows of."""

    def __init__(self, snapshot: Snapshot, kept: ours.Kept, texts: int, watch: Watch) -> None:
        self.tables = Tables(kept.name, texts)
        self.impossible = 0
        self._snapshot = snapshot
        self._kept = kept
        self._names = _Names(self.tables)
        self._unseen: list[str] = []
        first = min(
            (entry["time_us"] for one in snapshot.devices for entry in one.entries), default=0
        )
        #: What the snapshot calls the time that events call 0.
        self.time_zero_us = first if kept.time_zero_us is None else kept.time_zero_us
        rows = {device.name: self._device(device, watch) for device in snapshot.devices}
        self.events = _merged(rows, kept.order)

    def unseen(self) -> list[str]:
        """What this run doesn't know, in words."""
        notes = [] if self._kept.found else [_NAMELESS]
        return [*notes, *self._snapshot.notes, *self._unseen]

    def _device(self, device: Device, watch: Watch) -> np.ndarray:
        settings = self._snapshot.settings
        self._place(device)
        start = before(device.entries, device.segments, settings)
        layout = Layout.of_segments(start.segments, settings)
        history = History(device.name, layout, self.tables, self._names, self.time_zero_us)
        scope = self.tables.scope(0, "op", BEFORE)
        first = device.entries[0]["time_us"] - self.time_zero_us if device.entries else 0
        seeded = history.seed(self._kept.starts.get(device.name, first), "other", scope)
        rows = [seeded, self._read(history, watch(device.entries, device.name))]
        last = device.entries[-1]["time_us"] - self.time_zero_us if device.entries else 0
        state = Layout.of_segments(device.segments, settings)
        if not history.layout.same_as(state):
            rows.append(history.resume(state, last, self.tables.scope(0, "op", MISSED)))
        self.impossible += history.impossible
        self._tell(device, start, history, sum(map(len, rows[2:])))
        return np.concatenate(rows)

    def _read(self, history: History, entries: Iterable[Data]) -> np.ndarray:
        """The rows of a history; of our own, with just those retries that it had."""
        if not self._kept.found:
            return history.read(entries)
        rows = history.read(entries, sys.maxsize)  # every possible one
        contexts = self.tables.contexts_of(Action.RETRY, history.device)
        possible = np.flatnonzero(np.isin(rows[:, -1], contexts))
        there = np.isin(np.arange(len(possible)), self._kept.retries.get(history.device, []))
        return np.delete(rows, possible[~there], axis=0)

    def _place(self, device: Device) -> None:
        """Put the scope that an entry happened in before its metadata, for the names to find."""
        scope, entries = self.tables.scope, device.entries
        own = [one for one in self._snapshot.annotations if f"cuda:{one.device}" == device.name]
        nested, lost = intervals(own)
        if lost:
            self._unseen.append(f"{lost} annotations of {device.name} that don't nest as phases do")
        times = np.array([entry["time_us"] for entry in entries], dtype=np.int64)
        phases = scopes_at(nested, times, lambda outer, name: scope(outer, "phase", clean(name)))
        for entry, outer in zip(entries, phases.tolist(), strict=True):
            if entry["action"] in _PLACED:
                get = entry.get
                for kind, key in _AROUND:
                    text = get(key)
                    if text and text != _NO_COMPILE:
                        outer = scope(outer, kind, clean(text))
                entry["user_metadata"] = f"{outer}\0{get('user_metadata', '')}"

    def _tell(self, device: Device, start: Start, history: History, missed: int) -> None:
        name, entries, tell = device.name, device.entries, self._unseen.append
        if history.impossible:
            tell(
                f"{history.impossible} of {len(entries)} entries of {name}, whose history is "
                f"inconsistent: they contradict its segments; the first: {history.problem}"
            )
        if missed:
            tell(f"what happened on {name} between its history and its segments: {missed} changes")
        if start.unsure:
            tell(
                f"the exact size of {start.unsure} blocks of {name} that lived before its history "
                f"and were freed in it: up to {format_size(1 << 20)} behind each may belong to it"
            )
        if self._kept.found:
            return
        if not entries:
            tell(f"the history of {name}: the snapshot has only its last state")
            return
        born = {entry["addr"] for entry in entries if entry["action"] == "alloc"}
        blocks = [block for segment in device.segments for block in segment["blocks"]]
        lost = sum(block["recorded"] and block["address"] not in born for block in blocks)
        held = sum(
            block["size"]
            for segment in start.segments
            for block in segment["blocks"]
            if block["state"] != "inactive"
        )
        if lost:
            tell(
                f"what {name} did before its first entry: the history's ring overflowed or was "
                f"cleared there, since {lost} blocks were recorded whose allocation it lacks; "
                "allocations before it are seen only where they still live"
            )
        elif held:
            tell(
                f"what {name} did before its first entry, when it held {format_size(held)}: the "
                "recording began or the history's ring overflowed there; allocations before it are "
                "seen only where they still lived"
            )


def _merged(devices: Mapping[str, np.ndarray], order: Sequence[tuple[str, int]]) -> np.ndarray:
    """The rows of all devices, those of one in their order: as ``order`` says, else by time."""
    if not devices:
        return np.zeros((0, FIELDS), dtype=np.int64)
    rows = np.concatenate(list(devices.values()))
    names, counts = [name for name, _ in order], [count for _, count in order]
    numbers = {device: number for number, device in enumerate(devices)}
    if order and sum(counts) == len(rows) and numbers.keys() >= set(names):
        owners = np.repeat([numbers[name] for name in names], counts)
        sizes = [len(own) for own in devices.values()]
        if np.bincount(owners, minlength=len(sizes)).tolist() == sizes:
            merged = np.empty_like(rows)
            merged[np.argsort(owners, kind="stable")] = rows
            return merged
    times = np.concatenate([np.maximum.accumulate(own[:, 0]) for own in devices.values()])
    return np.asarray(rows[np.argsort(times, kind="stable")])


class _Names(Names):
    """Reads texts of the form ``SCOPE\\0TEXT``: what is said without a place of ours lies there."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self._tables = tables
        self._frames: dict[int, str] = {}
        self._stacks: dict[tuple[int, ...], int] = {}

    def _parse_birth(self, metadata: str) -> tuple[str, int]:
        outer, text = _split(metadata)
        if text.startswith(BIRTH) and _numbered(text):
            return super()._parse_birth(text)
        if is_component(text):
            return text, outer
        return "other", self._tables.scope(outer, "tag", text) if text else outer

    def _parse_retag(self, text: str) -> Retag | None:
        outer, text = _split(text)
        if text.startswith((RETAG, BORN)) and _numbered(text):
            return super()._parse_retag(text)
        if is_component(text):
            return Retag(text, outer)
        return Retag(None, self._tables.scope(outer, "tag", text))

    def stack(self, frames: Any) -> int:
        """The number of a call stack, innermost frame first."""
        if not isinstance(frames, list):
            raise MemtraceError("it has an entry whose frames are no list")
        # All frames live as long as this does, so an id is one's own.
        key = tuple(map(id, frames))
        found = self._stacks.get(key)
        if found is None:
            texts = tuple(self._frames.get(id(frame)) or self._text(frame) for frame in frames)
            found = self._stacks[key] = self._tables.stack(texts)
        return found

    def _text(self, frame: Any) -> str:
        """``file:line:function``."""
        found = frame if isinstance(frame, dict) else {}
        file, line, name = found.get("filename"), found.get("line"), found.get("name")
        if type(file) is not str or type(line) is not int or type(name) is not str:
            raise MemtraceError("it has a frame without filename, line and name")
        text = f"{file}:{line}:{name}" if file or line else name
        if "fx_node_name" in found:
            text += f" (fx node {found['fx_node_name']!s:.200})"
        self._frames[id(frame)] = text = clean(text)
        return text


def _split(text: str) -> tuple[int, str]:
    scope, _, rest = text.partition("\0")
    return int(scope), clean(rest)


def _numbered(text: str) -> bool:
    """Whether the layers and chunks that a text of ours names have numbers."""
    scopes = (part.partition("=") for part in text.split("|")[1:])
    return all(
        unquote(name).isdecimal() for kind, _, name in scopes if unquote(kind) in ("layer", "chunk")
    )
