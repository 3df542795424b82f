"""What our export adds to a snapshot, as one JSON text that PyTorch's tools pass over.

It holds what a snapshot has no place for: both manifests, requests, samples, where the allocator
retried, and what time 0 was.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from memtrace.errors import MemtraceError
from memtrace.interchange.tables import clean
from memtrace.trace.schema import TABLES

#: Version of this text; a newer one is refused.
VERSION = 1

_WRONG = "what memtrace export added to it is damaged"
_INT64 = 1 << 63


@dataclass(frozen=True)
class Kept:
    """What an export kept beside the snapshot."""

    #: Whether the snapshot is such an export; everything else is empty if not.
    found: bool = False
    #: Name of the process's scope.
    name: str = "snapshot"
    time_zero_us: int | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    process: Mapping[str, Any] = field(default_factory=dict)
    #: By device: which of its possible retries there were, and when what was there before was
    #: booked.
    retries: Mapping[str, Sequence[int]] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    #: How the events of devices follow each other: (device, how many).
    order: Sequence[tuple[str, int]] = ()
    #: What was sampled from outside, of this process.
    outside: Sequence[tuple[Any, ...]] = ()
    samples: Sequence[tuple[Any, ...]] = ()
    requests: Sequence[tuple[Any, ...]] = ()


def write(kept: Kept) -> str:
    """``kept`` as text."""
    return json.dumps({**vars(kept), "version": VERSION})


def read(text: Any) -> Kept:
    """What :func:`write` wrote; None: a snapshot that isn't of our making.

    Raises:
        MemtraceError: it is of a newer version or damaged.
    """
    if text is None:
        return Kept()
    try:
        body = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise MemtraceError(_WRONG) from None
    version = body.pop("version", None) if isinstance(body, dict) else None
    if type(version) is int and version > VERSION:
        raise MemtraceError("a newer memtrace exported it; upgrade memtrace to read it")
    kinds: dict[str, type | tuple[type, ...]] = {
        "found": bool,
        "name": str,
        "time_zero_us": int,
        "run": dict,
        "process": dict,
        "retries": dict,
        "starts": dict,
        "order": list,
        "outside": list,
        "samples": list,
        "requests": list,
    }
    if (
        version != VERSION
        or body.keys() != kinds.keys()
        or not all(isinstance(body[key], kind) for key, kind in kinds.items())
        or not all(isinstance(numbers, list) for numbers in body["retries"].values())
        or not all(_is_int64(one) for numbers in body["retries"].values() for one in numbers)
        or not all(_is_int64(time_us) for time_us in body["starts"].values())
        or not _is_int64(body["time_zero_us"])
        or not 0 <= _number(body["process"].get("pid")) < 1 << 31
    ):
        raise MemtraceError(_WRONG)
    for rows, table in (("outside", "samples"), ("samples", "samples"), ("requests", "requests")):
        body[rows] = [_row(row, TABLES[table]) for row in body[rows]]
    for run in body["order"]:
        if not isinstance(run, list) or len(run) != 2 or not isinstance(run[0], str):
            raise MemtraceError(_WRONG)
        if _number(run[1]) < 0:
            raise MemtraceError(_WRONG)
    for manifest in (body["run"], body["process"]):
        for key in ("format", "schema", "files", "crc32"):  # the new one has its own
            manifest.pop(key, None)
    return Kept(**body | {"name": clean(body["name"])})


def _row(row: Any, schema: pa.Schema) -> tuple[Any, ...]:
    """A row of a table; its integers must fit, its texts be text, and either may be null."""
    fits = isinstance(row, list) and len(row) == len(schema)
    for value, column in zip(row if fits else [], schema, strict=fits):
        whole = _is_int64(value) if pa.types.is_integer(column.type) else type(value) is str
        fits = fits and (value is None or whole)
    if not fits:
        raise MemtraceError(_WRONG)
    return tuple(clean(value) if isinstance(value, str) else value for value in row)


def _is_int64(value: Any) -> bool:
    return type(value) is int and -_INT64 // 4 < value < _INT64 // 4


def _number(value: Any) -> int:
    return value if type(value) is int else -1
