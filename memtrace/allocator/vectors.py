"""Golden vectors: what PyTorch's own allocator did with streams of operations.

A file has one stream a line, as a JSON object; ``.gz`` is unpacked:

``torch``
    version whose allocator answered.
``settings``, ``memory_fraction``
    of the allocator; the fraction is null where none was set.
``total_memory``, ``used_outside``
    bytes of the device, and those of them that others use (0 where it is missing).
``ops``
    ``["a", block, bytes, stream]`` allocate, ``["f", block]`` free, ``["r", block, stream]``
    record_stream, ``["e"]`` empty_cache, ``["p"]`` reset peaks, ``["A"]`` reset accumulated counts;
    private pools: ``["b", pool]`` begins a scope, ``["d", pool]`` ends it, ``["x", pool]`` releases
    the pool once (each scope is one use of it), ``["e", pool]`` empties the cache of a pool that
    was released by all, as a ``torch.cuda.MemPool`` does that ends.
    Streams are 0 (the default one), 1, 2, …: stream k > 0 has the handle 0x100000 + k·0x1000.
``alloc_result``
    of each allocation the address, or ``"oom"``; 0 for no bytes.
``columns``, ``stats_after_op``
    names of counters, and by number of operation their values after it.
``trace``
    events as [action, address, bytes, handle of the stream]; of an ``oom`` the address is what the
    device had free.
``messages`` (optional)
    of each failed allocation what the error said, on device 0 whose driver tells what a process
    uses.
``completion`` (optional)
    when a freed block that another stream used is free: ``"soon"``, at the next allocation, or
    ``"late"``, once the allocator waits for all streams.
``addresses`` (optional)
    ``"upwards"``: each segment lies above those before it; ``"reused"``: in the lowest gap, from
    0x200000000000 on and, of expandable segments, from 0x480000000000.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from memtrace.allocator.caching import Completion
from memtrace.allocator.log import Log
from memtrace.allocator.ops import Op, Ops
from memtrace.allocator.settings import Settings, SettingsError, Version, parse_version
from memtrace.allocator.statistics import Statistics
from memtrace.errors import MemtraceError
from memtrace.trace.schema import Action

#: More than that PyTorch refuses itself, and what is made of it fits 64 bits.
_LARGEST = 1 << 60
_LARGEST_DEVICE = 1 << 44
#: Number of a block, stream or pool.
_HIGHEST = 1 << 40
_LONGEST_LINE = 1 << 30
_OPERATIONS: dict[str, tuple[Op, tuple[str, ...]]] = {
    "a": (Op.ALLOC, ("block", "bytes", "stream")),
    "f": (Op.FREE, ("block",)),
    "r": (Op.RECORD_STREAM, ("block", "stream")),
    "e": (Op.EMPTY_CACHE, ()),
    "p": (Op.RESET_PEAKS, ()),
    "A": (Op.RESET_ACCUMULATED, ()),
    "b": (Op.BEGIN_POOL, ("pool",)),
    "d": (Op.END_POOL, ("pool",)),
    "x": (Op.RELEASE_POOL, ("pool",)),
}
_ACTIONS = {
    action.name.lower(): action
    for action in Action
    if action not in (Action.FREE, Action.RETAG, Action.RETRY)
}
#: Counters that an allocator without a history has.
COUNTERS = frozenset(Statistics(Log.of([])).last())

Event = tuple[int, int, int, int]


class VectorError(MemtraceError):
    """A file that has something else than golden vectors, or is damaged."""


@dataclass(frozen=True)
class Vector:
    """One stream, as the module describes it; ``conf``: the settings as text."""

    torch: str
    version: Version
    conf: str
    settings: Settings
    total: int
    outside: int
    fraction: float | None
    completion: Completion
    reuses: bool
    operations: list[list[Any]]
    ops: Ops
    results: list[int | str]
    columns: list[str]
    statistics: dict[int, list[int]]
    trace: list[Event]
    messages: list[str] | None

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """From a line of a file.

        Raises:
            VectorError: what is wrong with it.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise VectorError("this is not JSON") from None
        if not isinstance(found, dict):
            raise VectorError("a stream is a JSON object")
        torch = _typed(found, "torch", str)
        settings = _typed(found, "settings", str)
        total = _size(_typed(found, "total_memory", int), "total_memory", _LARGEST_DEVICE)
        outside = _size(found.get("used_outside", 0), "used_outside")
        if outside > total:
            raise VectorError("used_outside is more than total_memory")
        operations = _typed(found, "ops", list)
        if not operations:
            raise VectorError("the stream has no operations")
        columns = _typed(found, "columns", list)
        for name in columns:
            if not isinstance(name, str) or name not in COUNTERS:
                raise VectorError(f"{name!r} is no counter of the allocator")
        try:
            version = parse_version(torch)
            parsed = Settings.parse(settings, version)
        except SettingsError as error:
            raise VectorError(f"torch {torch} refuses the settings {settings!r}: {error}") from None
        except MemtraceError as error:
            raise VectorError(str(error)) from None
        vector = cls(
            torch=torch,
            version=version,
            conf=settings,
            settings=parsed,
            total=total,
            outside=outside,
            fraction=_fraction(found.get("memory_fraction")),
            completion=_choice(found, "completion", ("soon", "late")),
            reuses=_choice(found, "addresses", ("upwards", "reused")) == "reused",
            operations=operations,
            ops=parse_operations(operations),
            results=_typed(found, "alloc_result", list),
            columns=columns,
            statistics=_statistics(found, len(operations), len(columns)),
            trace=[_event(event) for event in _typed(found, "trace", list)],
            messages=_typed(found, "messages", list) if "messages" in found else None,
        )
        allocations = int((vector.ops.kind == Op.ALLOC).sum())
        if len(vector.results) != allocations:
            raise VectorError(
                f"alloc_result has {len(vector.results)} answers to {allocations} allocations"
            )
        return vector


def read(path: Path, file: IO[bytes]) -> Iterator[tuple[int, Vector]]:
    """The streams of a file that is open, with the numbers of their lines.

    Raises:
        VectorError: it can't be read, or has something else; streams before that are given.
    """
    count = 0
    lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    try:
        for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), b""), 1):
            if not line.strip():
                continue
            try:
                vector = Vector.parse(line)
            except VectorError as error:
                raise VectorError(f"{path}, line {number}: {error}") from None
            count += 1
            yield number, vector
    except gzip.BadGzipFile:
        raise VectorError(f"{path} is not packed with gzip, or damaged") from None
    except (EOFError, zlib.error):
        raise VectorError(f"{path} is cut off or damaged after stream {count}") from None
    except OSError as error:
        raise VectorError(f"{path} can't be read: {error.strerror}") from None
    if count == 0:
        raise VectorError(f"{path} has no streams")


def parse_operations(operations: list[Any]) -> Ops:
    """The ``ops`` of a stream.

    Raises:
        VectorError: one isn't in the format, or uses a block or pool that isn't there.
    """
    allowed = _Allowed()
    rows = []
    for number, operation in enumerate(operations):
        try:
            rows.append(allowed.row(operation))
        except VectorError as error:
            raise VectorError(f"operation {number}, {operation!r:.100}: {error}") from None
    return Ops.of(rows)


# -- what a line has -----------------------------------------------------------------------------


def _typed(found: dict[str, Any], key: str, kind: type) -> Any:
    if key not in found:
        raise VectorError(f"the stream has no {key!r}")
    value = found[key]
    if type(value) is not kind:
        raise VectorError(f"{key!r} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _choice(found: dict[str, Any], key: str, allowed: tuple[str, ...]) -> Any:
    value = found.get(key, allowed[0])
    if value not in allowed:
        raise VectorError(f"{key!r} is {value!r:.40}, not one of {', '.join(allowed)}")
    return value


def _size(value: Any, what: str, largest: int = _LARGEST) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise VectorError(f"{what} is {value!r:.40}, not a whole number from 0 to {largest}")
    return value


def _fraction(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise VectorError(f"memory_fraction is {value!r:.40}, not a number from 0 to 1")
    return float(value)


def _statistics(found: dict[str, Any], operations: int, columns: int) -> dict[int, list[int]]:
    rows = {}
    for key, row in _typed(found, "stats_after_op", dict).items():
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= operations:
            raise VectorError(f"stats_after_op has operation {key!r:.20}, which there isn't")
        wrong = not isinstance(row, list) or len(row) != columns
        if wrong or any(type(one) is not int or abs(one) >= 1 << 63 for one in row):
            raise VectorError(f"stats_after_op of operation {key} is not {columns} whole numbers")
        rows[int(key)] = row
    return rows


def _event(event: Any) -> Event:
    if not isinstance(event, list) or len(event) != 4 or type(event[0]) is not str:
        raise VectorError(f"{event!r:.100} is not an event: action, address, bytes, stream")
    action, *values = event
    if action not in _ACTIONS:
        raise VectorError(f"{action!r:.100} is no action of a trace")
    if any(type(value) is not int for value in values):
        raise VectorError(f"{event!r:.100} is not an event: its numbers are not whole")
    return (_ACTIONS[action], *values)


class _Allowed:
    """Knows what a program can ask for, having asked what it did."""

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._open: list[int] = []
        self._uses: dict[int, int] = {}

    def row(self, operation: Any) -> tuple[int, int, int, int, int]:
        if not isinstance(operation, list) or not operation or type(operation[0]) is not str:
            raise VectorError("an operation is a list that begins with its name")
        name, *values = operation
        if name not in _OPERATIONS:
            raise VectorError(
                f"there is no operation {name!r:.20}; known: {', '.join(_OPERATIONS)}"
            )
        kind, fields = _OPERATIONS[name]
        if kind == Op.EMPTY_CACHE and values:
            fields = ("pool",)
        if len(values) != len(fields):
            raise VectorError(f"{name} takes {len(fields)} numbers")
        given = {
            field: _size(value, field, _LARGEST if field == "bytes" else _HIGHEST)
            for field, value in zip(fields, values, strict=True)
        }
        block, pool = given.get("block", 0), given.get("pool", 0)
        if kind == Op.ALLOC:
            if block in self._live:
                raise VectorError(f"block {block} is allocated already")
            self._live.add(block)
        elif "block" in given and block not in self._live:
            raise VectorError(f"block {block} is not allocated")
        if kind == Op.FREE:
            self._live.remove(block)
        if "pool" in given:
            self._use(kind, pool)
        stream = given.get("stream", 0)
        handle = stream and 0x100000 + stream * 0x1000
        return kind, block, given.get("bytes", 0), handle, pool

    def _use(self, kind: Op, pool: int) -> None:
        if kind == Op.BEGIN_POOL:
            if pool == 0 or self._uses.get(pool, 1) == 0 or pool in self._open:
                raise VectorError(f"pool {pool} is 0, in use or was released")
            self._uses[pool] = self._uses.get(pool, 0) + 1
            self._open.append(pool)
        elif kind == Op.END_POOL:
            if pool not in self._open:
                raise VectorError(f"no scope of pool {pool} is open")
            self._open.remove(pool)
        elif kind == Op.EMPTY_CACHE:
            if self._uses.get(pool) != 0:
                raise VectorError(f"pool {pool} was not released")
        else:
            if pool in self._open or not self._uses.get(pool):
                raise VectorError(f"pool {pool} is in use, or nobody has it")
            self._uses[pool] -= 1
