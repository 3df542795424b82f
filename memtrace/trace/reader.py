"""Open a trace: checked first, then read table by table."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from memtrace.errors import TraceError
from memtrace.trace import MANIFEST, SUFFIX
from memtrace.trace.check import check_contexts, check_process, check_run, check_scopes
from memtrace.trace.manifest import file_checksum, life, read_manifest
from memtrace.trace.schema import TABLES

Columns = dict[str, Any]

#: Tables that name rows of those after them. A recorder writes a row after those that it names, so
#: while it still writes a table must be read before those that it names.
_LINKED = ("events", "contexts", "scopes", "stacks")


def open_trace(path: str | Path) -> "Trace":
    """Open the run at ``path`` (``.memtrace`` may be left out).

    A complete run must match the checksums in its manifest. A run whose recorder was killed has
    none: its tables are read up to their last whole batch and :attr:`Trace.torn` says what is lost.

    Raises:
        TraceError: missing, foreign, truncated, damaged, or of a newer schema.
    """
    try:
        folder = Path(path)
        if not folder.exists() and folder.with_name(folder.name + SUFFIX).exists():
            folder = folder.with_name(folder.name + SUFFIX)
        if not folder.exists():
            raise TraceError(f"{path} doesn't exist")
        if not folder.is_dir():
            raise TraceError(
                f"{path} is not a memtrace run: a run is a folder made by memtrace record"
            )
        manifest = read_manifest(folder)
        check_run(folder, manifest)
        if manifest.get("files") is not None:
            _verify(folder, manifest["files"])
        torn: dict[str, int] = {}
        processes = tuple(
            _open_process(child, torn)
            for child in sorted(folder.iterdir())
            if child.is_dir() and (child / MANIFEST).exists()
        )
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}") from None
    return Trace(folder, manifest, processes, torn)


def _open_process(folder: Path, torn: dict[str, int]) -> "ProcessTrace":
    manifest = read_manifest(folder)
    check_process(folder, manifest)
    return ProcessTrace(folder, manifest, torn)


def _verify(folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise TraceError(f"{path} is missing or not a file")
        found = file_checksum(path)
        if found["bytes"] < expected["bytes"]:
            raise TraceError(
                f"{path} is truncated: {found['bytes']} of {expected['bytes']} bytes are there"
            )
        if found != expected:
            raise TraceError(f"{path} is damaged: its checksum doesn't match")


def _read(path: Path, table: str, torn: dict[str, int]) -> pa.Table:
    """Every whole batch of one table; the bytes of a torn last one go to ``torn``."""
    schema = TABLES[table]
    batches: list[pa.RecordBatch] = []
    if path.exists():
        if not path.is_file():
            raise TraceError(f"{path} is damaged: it is not a file")
        with pa.memory_map(str(path)) as file:
            end = 0
            try:
                with pa.ipc.open_stream(file) as stream:
                    if not stream.schema.equals(schema):
                        raise TraceError(f"{path} is damaged: it is not a table of {table}")
                    end = file.tell()
                    while True:
                        try:
                            batch = stream.read_next_batch()
                        except StopIteration:
                            break
                        batch.validate(full=True)
                        batches.append(batch)
                        end = file.tell()
            except (pa.ArrowException, OSError, EOFError, MemoryError):
                torn[str(path)] = file.size() - end
    return pa.Table.from_batches(batches, schema=schema)


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Integers without nulls.

    ``to_numpy()`` looks for pandas: it imports it, and loses a Ctrl-C while it does.
    """
    parts = [np.from_dlpack(chunk) for chunk in column.chunks]
    return np.concatenate(parts) if parts else np.empty(0, np.dtype(str(column.type)))


def cuda_ordinal(device: str) -> int | None:
    """``cuda:1`` → 1; None: no CUDA device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


@dataclass(frozen=True)
class ProcessTrace:
    """One process of a run. Columns are NumPy arrays where they are numbers, lists otherwise."""

    folder: Path
    manifest: Mapping[str, Any]
    torn: dict[str, int]

    @property
    def pid(self) -> int:
        return int(self.manifest["pid"])

    @property
    def life(self) -> str:
        """Names the process for good, as :func:`memtrace.trace.manifest.life` does."""
        return life(self.manifest)

    def _columns(self, table: str) -> Columns:
        data = _read(self.folder / f"{table}.arrow", table, self.torn)
        return {
            field.name: (
                _numbers(data.column(field.name))
                if pa.types.is_integer(field.type) and data.column(field.name).null_count == 0
                else data.column(field.name).to_pylist()
            )
            for field in data.schema
        }

    @cached_property
    def _linked(self) -> dict[str, Columns]:
        """The tables of :data:`_LINKED`, unchecked."""
        tables = {table: self._columns(table) for table in _LINKED}
        pa.default_memory_pool().release_unused()  # as much again as the columns take
        return tables

    def _whole_columns(self, table: str, *names: str) -> Columns:
        """The columns of a table; a null in one of the columns ``names`` is damage."""
        columns = self._linked[table] if table in _LINKED else self._columns(table)
        for name in names:
            if not isinstance(columns[name], np.ndarray):
                raise TraceError(f"{self.folder} is damaged: {table} has rows without {name}")
        return columns

    @cached_property
    def contexts(self) -> Columns:
        contexts = self._whole_columns("contexts", "action", "scope", "stack")
        scopes, stacks = len(self.scopes["parent"]), len(self.stacks["frames"])
        check_contexts(self.folder, contexts, scopes, stacks)
        return contexts

    def contexts_on(self, device: str) -> np.ndarray:
        """Which contexts name ``device``: bool, one a row."""
        return np.array([name == device for name in self.contexts["device"]], dtype=bool)

    def cuda_device(self, device: str) -> Mapping[str, Any]:
        """What the process itself said of a CUDA device; empty if it didn't, or it is none."""
        number = cuda_ordinal(device)
        devices = (self.manifest.get("cuda") or {}).get("devices") or []
        return next((one for one in devices if one.get("ordinal") == number), {})

    @cached_property
    def scopes(self) -> Columns:
        scopes = self._whole_columns("scopes", "parent")
        check_scopes(self.folder, scopes)
        return scopes

    @property
    def stacks(self) -> Columns:
        return self._linked["stacks"]

    def frames(self, stack: int) -> tuple[str, ...]:
        """The frames of row ``stack`` of the stacks, innermost first; of -1 none."""
        return tuple(self.stacks["frames"][stack] or ()) if stack >= 0 else ()

    @cached_property
    def samples(self) -> Columns:
        return self._columns("samples")

    @cached_property
    def requests(self) -> Columns:
        return self._columns("requests")

    @cached_property
    def boundaries(self) -> Columns:
        """What CUDA's allocator said of itself after each request: one row a request and device."""
        boundaries = self._whole_columns("boundaries", "request")
        if None in boundaries["device"]:
            raise TraceError(f"{self.folder} is damaged: boundaries has rows without device")
        return boundaries

    @cached_property
    def segments(self) -> Columns:
        """The segments of the snapshots that boundaries name."""
        return self._whole_columns("segments", "snapshot", "address", "bytes", "stream")

    @cached_property
    def blocks(self) -> Columns:
        """The blocks of the snapshots that boundaries name."""
        named = ("snapshot", "address", "bytes", "requested", "state", "stack")
        return self._whole_columns("blocks", *named)

    @cached_property
    def events(self) -> Columns:
        """``time_us``, ``id``, ``bytes``, ``context``: one NumPy array each.

        Raises:
            TraceError: an event names a context that isn't there.
        """
        events = self._whole_columns("events", "time_us", "id", "bytes", "context")
        context = events["context"]
        if len(context) and not (
            int(np.min(context)) >= 0 and int(np.max(context)) < len(self.contexts["action"])
        ):
            raise TraceError(f"{self.folder} is damaged: its events name contexts it doesn't have")
        return events


@dataclass(frozen=True)
class Trace:
    """A run: its manifest, its processes and what was sampled from outside."""

    folder: Path
    manifest: Mapping[str, Any]
    processes: tuple[ProcessTrace, ...]
    #: Bytes after the last whole batch, by file; filled as tables are read.
    torn: dict[str, int]

    @property
    def name(self) -> str:
        return self.folder.name.removesuffix(SUFFIX)

    @property
    def complete(self) -> bool:
        """Whether the recorder ended the run itself (its checksums were then verified)."""
        return self.manifest.get("files") is not None

    @cached_property
    def samples(self) -> Columns:
        """Process memory by ``pid`` and ``source``, sampled from outside."""
        data = _read(self.folder / "samples.arrow", "samples", self.torn)
        return {name: data.column(name).to_pylist() for name in data.column_names}

    @cached_property
    def sampled(self) -> dict[str | None, dict[str, list[tuple[int, int]]]]:
        """The same as (time, value) by life of the process and source; life None: no process's.

        A process id may be used again: each row ``start`` begins another life.
        """
        columns = (self.samples[name] for name in ("time_us", "pid", "source", "value"))
        lives: dict[int | None, str | None] = {None: None}
        found: dict[str | None, dict[str, list[tuple[int, int]]]] = {}
        for time_us, pid, source, value in zip(*columns, strict=True):
            if time_us is None or source is None or value is None or (pid is not None and pid < 1):
                continue
            if source == "start" and pid is not None:
                lives[pid] = f"{pid}-{value}"
            of_process = found.setdefault(lives.get(pid, str(pid)), {})
            of_process.setdefault(source, []).append((time_us, value))
        return found
