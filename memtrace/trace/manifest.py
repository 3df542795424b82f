"""Manifests: small JSON documents, written atomically, that carry their own checksum."""

import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from memtrace.errors import TraceError
from memtrace.trace import FORMAT, MANIFEST, SCHEMA


class Knowledge(StrEnum):
    """How the bytes of a trace are known."""

    MEASURED = "measured"  # a real process on a real device
    VIRTUAL = "virtual"  # PyTorch's real host code and allocator, no kernels
    MODELLED = "modelled"  # fake tensors, or a replay through our simulator


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def timestamp() -> str:
    """The time of day, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def first_manifest(command: Sequence[str], epoch_ns: int) -> dict[str, Any]:
    """What a run's manifest says while it is recorded; ``epoch_ns`` is its time 0."""
    system = os.uname()
    return {
        "state": "running",
        "recorder_pid": os.getpid(),
        "knowledge": Knowledge.MEASURED,
        "command": list(command),
        "cwd": os.path.abspath("."),
        "started": timestamp(),
        "epoch_ns": epoch_ns,
        "host": system.nodename,
        "platform": f"{system.sysname} {system.release} {system.machine}",
        "python": sys.version.split()[0],
    }


def life(process: Mapping[str, Any]) -> str:
    """What names a process for good, from its manifest: ``PID-START``, or its id alone.

    A process id can be used again while the run goes on, a start time with it can't.
    """
    pid, start_ticks = process["pid"], process.get("start_ticks")
    return str(pid) if start_ticks is None else f"{pid}-{start_ticks}"


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    """Replace ``folder``'s manifest in one step.

    Raises:
        OSError: the folder can't be written or the disk is full; the old manifest stays.
    """
    body = {"format": FORMAT, "schema": SCHEMA, **body}
    text = json.dumps({**body, "crc32": _checksum(body)}, indent=1, sort_keys=True)
    scratch = folder / f".{MANIFEST}.{os.getpid()}"
    try:
        scratch.write_text(text + "\n", encoding="utf-8")
        scratch.replace(folder / MANIFEST)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run or of one of its processes.

    Raises:
        TraceError: none there, not ours, damaged, or of another schema.
    """
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path} is not a file")
        body = json.loads(path.read_bytes())
        intact = isinstance(body, dict) and body.pop("crc32", None) == _checksum(body)
    except FileNotFoundError:
        raise TraceError(f"{folder} is not a memtrace run: it has no {MANIFEST}") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path} is damaged: it is not JSON") from None
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise TraceError(f"{path} is not a memtrace manifest")
    schema = body.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise TraceError(
            f"{folder} has trace schema {schema} and this memtrace reads up to {SCHEMA}; "
            "upgrade memtrace to read it"
        )
    if isinstance(schema, int) and schema < SCHEMA:
        raise TraceError(
            f"{folder} has trace schema {schema}, which this memtrace no longer reads; "
            "record it again"
        )
    if not intact:
        raise TraceError(f"{path} is damaged: its checksum doesn't match")
    return body


def file_checksums(folder: Path) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of every table below ``folder``, by relative path."""
    return {
        path.relative_to(folder).as_posix(): file_checksum(path)
        for path in sorted(folder.rglob("*"))
        if not path.name.startswith(".") and path != folder / MANIFEST and path.is_file()
    }


def file_checksum(path: Path) -> dict[str, int]:
    """Size and CRC-32 of one file: ``{"bytes": …, "crc32": …}``."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return {"bytes": size, "crc32": crc}
