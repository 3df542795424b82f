"""Snapshots for tests: recorded, made up, and those that may lie beside the project.

Those in tests/data are PyTorch's own, recorded on a virtual GPU.
"""

import os
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"
OWN = sorted(DATA.glob("*.pickle"))
#: More of them, where there are: by torch version, recorded by others, and impossible ones.
SHARED = Path(os.environ.get("MEMTRACE_SNAPSHOTS", Path(__file__).parents[3] / "shared/snapshots"))
_NAMES = {file.name for file in OWN}
ALL = [*OWN, *(file for file in sorted(SHARED.glob("*/*.pickle")) if file.name not in _NAMES)]

BASE = 0x7F0000000000
MIB = 1 << 20


def marked(files: Iterable[Path]) -> list[Any]:
    """Parameters of a test, large files as slow ones."""
    return [
        pytest.param(
            file,
            id=file.stem,
            marks=[pytest.mark.slow] if file.stat().st_size > 2 * MIB else [],
        )
        for file in files
    ]


def load(path: Path) -> dict[str, Any]:
    """A snapshot that we trust."""
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def dump(snapshot: Any, folder: Path, protocol: int = 4) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=protocol))
    return path


def block(size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": state, **more}


def segment(address: int, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A segment that is full of these blocks."""
    at = address
    for one in blocks:
        one["address"] = at
        at += one["size"]
    return {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "stream": 0,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": list(blocks),
        **more,
    }


def entry(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, **more}


def free(address: int, size: int) -> list[dict[str, Any]]:
    return [entry("free_requested", address, size), entry("free_completed", address, size)]


def snapshot(
    segments: Sequence[dict[str, Any]], *traces: Sequence[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A snapshot whose entries are a microsecond apart, from 1000 on, where they have no time."""
    for trace in traces:
        for number, one in enumerate(trace):
            one.setdefault("time_us", 1000 + number)
    return {"segments": list(segments), "device_traces": [list(one) for one in traces], **more}
