"""What ``torch.cuda.memory._snapshot()`` returned, checked and brought to one form.

The form is that of torch 2.15: entries always have ``time_us`` (where any had it), ``pool_id`` as
a tuple or not at all, ``user_metadata``; blocks always have their address; free bytes of a segment
are ``inactive`` blocks. What older versions lack is filled in where it follows from the rest
(block addresses from their order, the pool of an entry from its segment) and listed in ``notes``
where it doesn't. Sources: ``torch/csrc/cuda/memory_snapshot.cpp`` of 2.1 to 2.15.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from memtrace.allocator.settings import Settings
from memtrace.errors import MemtraceError

Data = dict[str, Any]

#: The device of pinned host memory (``host_segments`` and ``host_traces``, torch 2.14).
PINNED = "cpu:pinned"
#: Key of a snapshot under which our export keeps what a snapshot has no place for.
OURS = "memtrace"

#: Actions that make events; ``snapshot`` only marks that one was taken.
ACTIONS = frozenset(
    {
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
        "annotate",
    }
)
_SILENT = frozenset({"snapshot"})

_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive")
#: A pickle takes more bytes than this for an entry, block, segment or annotation. One that holds
#: more of them repeats references to the same few, which no snapshot does.
_LEAST_BYTES = 8
_MOST_DEVICES = 1024
_END = 1 << 63  # addresses and sizes of a trace are int64


@dataclass(frozen=True)
class Device:
    """One device: its segments at the end, sorted by address, and its history, oldest first."""

    name: str
    segments: Sequence[Data]
    entries: Sequence[Data]


@dataclass(frozen=True)
class Annotation:
    """A START or END that ``record_function`` left."""

    name: str
    begins: bool
    device: int
    time_us: int


@dataclass(frozen=True)
class Snapshot:
    """A checked snapshot. ``ours`` is what :data:`OURS` held, not yet checked."""

    devices: tuple[Device, ...]
    settings: Settings
    #: The plain values of ``allocator_settings``; None: an old version without them.
    settings_found: Mapping[str, Any] | None
    annotations: tuple[Annotation, ...]
    timed: bool
    ours: Any
    notes: tuple[str, ...]


class _Wrong(MemtraceError):
    """The snapshot has another form; whoever knows the file's name puts it before this."""


@dataclass
class _Reader:
    """Counts what is looked at, so that few bytes can't make for endless work."""

    left: int
    notes: Counter[str] = field(default_factory=Counter)

    def rows(self, value: Any, what: str) -> list[Data]:
        if not isinstance(value, list):
            raise _Wrong(f"its {what} are no list")
        self.left -= len(value)
        if self.left < 0:
            raise _Wrong(f"it holds more {what} than a file of its size can")
        if not set(map(type, value)) <= {dict}:
            raise _Wrong(f"its {what} aren't all dicts")
        return value


def parse(data: Any, size: int) -> Snapshot:
    """Check what was unpickled.

    Args:
        data: dicts, lists and tuples of strings and numbers. Entries are changed in place.
        size: bytes that it took as a pickle.

    Raises:
        MemtraceError: it is no snapshot, or one with values of another type.
    """
    if isinstance(data, list):  # torch.cuda.memory_snapshot()
        data = {"segments": data}
    if not isinstance(data, dict) or "segments" not in data:
        raise _Wrong("it has no segments")
    reader = _Reader(size // _LEAST_BYTES + 64)
    found = data.get("allocator_settings")
    settings, kept = _settings(found)
    segments = reader.rows(data["segments"], "segments")
    traces = data.get("device_traces", [])
    if not isinstance(traces, list) or len(traces) > _MOST_DEVICES:
        raise _Wrong("its device_traces are no list of devices")
    by_device: dict[int, list[Data]] = {number: [] for number in range(len(traces))}
    for segment, number in zip(segments, _integers(segments, "device", "segments"), strict=True):
        if number >= _MOST_DEVICES:
            raise _Wrong(f"it has a segment of device {number}")
        by_device.setdefault(number, []).append(segment)
    places = [
        (f"cuda:{number}", own, traces[number] if number < len(traces) else [])
        for number, own in sorted(by_device.items())
    ]
    pinned = reader.rows(data.get("host_segments", []), "host_segments")
    places.append((PINNED, pinned, data.get("host_traces", [])))
    devices = [_device(reader, *place) for place in places]
    devices = [device for device in devices if device.segments or device.entries]
    timed = all("time_us" in entry for device in devices for entry in device.entries[:1])
    if not timed:
        _number(devices)
        reader.notes["when things happened: its torch recorded no times, so events count 1 µs"] = 1
    if found is None:
        reader.notes["the allocator's settings: taken as the defaults"] = 1
    return Snapshot(
        devices=tuple(devices),
        settings=settings,
        settings_found=kept,
        annotations=_annotations(reader, data.get("external_annotations", [])),
        timed=timed,
        ours=data.get(OURS),
        notes=tuple(text.replace("#", str(count)) for text, count in reader.notes.items()),
    )


def _settings(found: Any) -> tuple[Settings, Data | None]:
    """The settings, and what of them can be kept as it is."""
    if found is None:
        return Settings(), None
    divisions = found.get("roundup_power2_divisions", {}) if isinstance(found, dict) else None
    if (
        not isinstance(found, dict)
        or not isinstance(divisions, dict)
        or type(found.get("max_split_size", -1)) is not int
        or any(type(value) is not int or value < 0 for value in divisions.values())
        or type(share := found.get("garbage_collection_threshold", 0.0)) not in (int, float)
        or not 0 <= share < 1
    ):
        raise _Wrong("its allocator_settings have values of a wrong type")
    plain = (str, int, float, bool)
    kept = {key: value for key, value in found.items() if type(value) in plain} | {
        "roundup_power2_divisions": divisions
    }
    if not set(map(type, [*kept, *divisions])) <= {str}:
        raise _Wrong("its allocator_settings have names of a wrong type")
    return Settings.of_snapshot(found), kept


def _device(reader: _Reader, name: str, segments: list[Data], entries: Any) -> Device:
    whole = _segments(reader, segments)
    return Device(name, whole, _entries(reader, entries, whole))


# -- segments --------------------------------------------------------------------------------------


def _segments(reader: _Reader, found: list[Data]) -> list[Data]:
    """The segments of a device with all their bytes in blocks, sorted by address."""
    starts = _integers(found, "address", "segments")
    sizes = _integers(found, "total_size", "segments", least=1)
    streams = _integers(found, "stream", "segments", default=0)
    kept: list[Data] = [
        {
            "address": start,
            "total_size": size,
            "stream": stream,
            "segment_pool_id": _pool(segment.get("segment_pool_id")),
            "is_expandable": segment.get("is_expandable", False) is True,
            "blocks": _blocks(reader, segment, start, size),
        }
        for segment, start, size, stream in zip(found, starts, sizes, streams, strict=True)
    ]
    kept.sort(key=lambda segment: segment["address"])
    for one, other in pairwise(kept):
        if one["address"] + one["total_size"] > other["address"]:
            raise _Wrong(f"its segments at {one['address']:#x} and {other['address']:#x} overlap")
    return kept


def _blocks(reader: _Reader, segment: Data, start: int, total: int) -> list[Data]:
    """The blocks of a segment without a gap between them; free neighbours are one."""
    found = reader.rows(segment.get("blocks"), "blocks")
    sizes = _integers(found, "size", "blocks", least=1)
    requested = _integers(found, "requested_size", "blocks", default=0)
    addressed = "address" in found[0] if found else False
    addresses = _integers(found, "address", "blocks") if addressed else []
    blocks: list[Data] = []
    end = start

    def add(size: int, wanted: int, state: str, recorded: bool) -> None:
        nonlocal end
        if state == "inactive" and blocks and blocks[-1]["state"] == "inactive":
            blocks[-1]["size"] += size
        else:
            block = {"address": end, "size": size, "requested_size": wanted, "state": state}
            blocks.append(block | {"recorded": recorded})
        end += size

    for row, block in enumerate(found):
        address = addresses[row] if addressed else end
        if address < end or address + sizes[row] > start + total:
            raise _Wrong(f"the blocks of its segment at {start:#x} don't fit into it")
        if block.get("state") not in _STATES:
            raise _Wrong(f"a block at {address:#x} has no state that memtrace knows")
        if address > end:
            add(address - end, 0, "inactive", False)
            reader.notes["# gaps between the blocks of its segments, taken as free"] += 1
        size, wanted = sizes[row], requested[row] or sizes[row]
        add(size, wanted, block["state"], bool(block.get("frames")))
    if end < start + total:
        add(start + total - end, 0, "inactive", False)
        reader.notes["# gaps between the blocks of its segments, taken as free"] += 1
    allocated = sum(one["size"] for one in blocks if one["state"] == "active_allocated")
    if segment.get("allocated_size", allocated) != allocated:
        text = "# segments that say another allocated size than their blocks add up to"
        reader.notes[text] += 1
    return blocks


# -- history ---------------------------------------------------------------------------------------


def _entries(reader: _Reader, found: Any, segments: list[Data]) -> list[Data]:
    """The entries of a device that make events, each with all that events need."""
    entries = reader.rows(found, "entries of its history")
    actions = Counter(_strings(entries, "action", None))
    for action in actions.keys() - ACTIONS - _SILENT:
        shown = " ".join(action[:40].encode("ascii", "replace").decode().split())
        text = f"# entries with an action that memtrace doesn't know ({shown})"
        reader.notes[text] += actions[action]
    if actions.keys() - ACTIONS:
        entries = [entry for entry in entries if entry["action"] in ACTIONS]
    if "oom" in actions:
        ooms = [entry for entry in entries if entry["action"] == "oom"]
        _integers(ooms, "device_free", "out-of-memory entries")
        for entry in ooms:
            entry["addr"] = 0
    timed = ["time_us"] if entries and "time_us" in entries[0] else []
    for key in ("addr", "size", "stream", *timed):
        _integers(entries, key, "entries")
    for key in ("user_metadata", "compile_context"):
        _strings(entries, key, "")
    rare = [one for one in entries if "internal_metadata" in one or "forward_frames" in one]
    _strings(rare, "internal_metadata", "")
    for entry in rare:
        _add_forward(entry)
    pools = _column(entries, "pool_id", None)
    kinds = set(map(type, pools))
    if kinds <= {type(None)}:
        _add_pools(entries, segments)
    elif kinds == {tuple}:  # the unpickler makes tuples of two numbers only
        for pool in set(pools):
            _pool(pool)
    else:
        for entry, pool in zip(entries, pools, strict=True):
            entry["pool_id"] = _pool(pool)
    return entries


def _add_forward(entry: Data) -> None:
    """Put the forward pass that a backward one belongs to behind the frames."""
    forward = entry.pop("forward_frames", None)
    if isinstance(forward, list) and set(map(type, forward)) == {str}:
        frames = entry.get("frames")
        extra = [{"filename": "", "line": 0, "name": f"forward: {text}"} for text in forward]
        entry["frames"] = [*(frames if isinstance(frames, list) else []), *extra]


def _add_pools(entries: list[Data], segments: list[Data]) -> None:
    """Give entries of a torch before 2.13 the private pool of the segment that they lie in.

    Only those since that segment was taken for the last time: at its address there may have been
    one of another pool before.
    """
    private = [segment for segment in segments if segment["segment_pool_id"] not in ((0, 0), None)]
    if not private:
        return
    since = {
        entry["addr"]: row
        for row, entry in enumerate(entries)
        if entry["action"] in ("segment_alloc", "segment_map")
    }
    starts = np.array([segment["address"] for segment in private])
    addresses = np.array([entry.get("addr", 0) for entry in entries], dtype=np.int64)
    for row, place in enumerate((np.searchsorted(starts, addresses, side="right") - 1).tolist()):
        segment = private[place]
        end = segment["address"] + segment["total_size"]
        if place >= 0 and addresses[row] < end and row >= since.get(segment["address"], 0):
            entries[row]["pool_id"] = segment["segment_pool_id"]


def _number(devices: Sequence[Device]) -> None:
    for device in devices:
        for row, entry in enumerate(device.entries):
            entry["time_us"] = row


def _annotations(reader: _Reader, found: Any) -> tuple[Annotation, ...]:
    rows = reader.rows(found or [], "external_annotations")
    names, stages = _strings(rows, "name", None), _strings(rows, "stage", None)
    devices = _integers(rows, "device", "annotations", default=0)
    times = _integers(rows, "time_us", "annotations", default=0)
    return tuple(
        Annotation(name, stage == "START", device, time_us)
        for name, stage, device, time_us in zip(names, stages, devices, times, strict=True)
        if stage in ("START", "END")
    )


# -- values ----------------------------------------------------------------------------------------


def _integers(
    rows: Sequence[Data], key: str, what: str, *, least: int = 0, default: int | None = None
) -> list[int]:
    """One key of all rows.

    Raises:
        MemtraceError: one isn't there (without ``default``), no integer, or out of range.
    """
    values = _column(rows, key, default)
    if values and (
        set(map(type, values)) != {int} or min(values) < least or max(values) >= _END // 4
    ):
        raise _Wrong(f"its {what} don't all have a {key!r} that is a number in its range")
    return values


def _column(rows: Sequence[Data], key: str, default: Any) -> list[Any]:
    try:
        return list(map(itemgetter(key), rows))
    except KeyError:
        return [row.get(key, default) for row in rows]


def _strings(rows: Sequence[Data], key: str, default: str | None) -> list[str]:
    values = _column(rows, key, default)
    if not set(map(type, values)) <= {str}:
        raise _Wrong(f"it has entries whose {key!r} is no text")
    return values


def _pool(found: Any) -> tuple[int, int] | None:
    if found is None:
        return None
    if not isinstance(found, (tuple, list)) or len(found) != 2 or set(map(type, found)) != {int}:
        raise _Wrong("it has a pool that isn't named by two numbers")
    return found[0], found[1]
