"""A run under another allocator: a new run, of the same schema, with the segments that it had."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.allocator.log import Log, Mark
from memtrace.allocator.requests import Requests
from memtrace.allocator.simulation import ENDLESS, Outcome, Progress, Setup, simulate
from memtrace.trace.folders import new_folder
from memtrace.trace.manifest import Knowledge, file_checksums, write_manifest
from memtrace.trace.reader import ProcessTrace, Trace
from memtrace.trace.schema import TABLES, Action
from memtrace.trace.writer import TableWriter

#: What a replay can't know, whatever was replayed.
_UNSEEN = (
    "how the program would have reacted: the same requests were made in the same order, with the "
    "same kernels, whatever failed or was slower",
    "addresses of the device: its driver's are not known, ours go upwards",
    "memory outside the allocator",
)
_EVENTS = TABLES["events"].names
# Plain integers, as in :mod:`memtrace.allocator.requests`.
_ALLOC, _FREE, _FREE_REQUESTED, _FREE_COMPLETED = map(
    int, (Action.ALLOC, Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
)
_WITHOUT_BYTES = frozenset(
    {
        Action.SEGMENT_ALLOC,
        Action.SEGMENT_FREE,
        Action.SEGMENT_MAP,
        Action.SEGMENT_UNMAP,
        Action.RETRY,
        Action.OOM,
    }
)


def write_replay(
    trace: Trace,
    requests: Sequence[Requests],
    setups: Sequence[Setup],
    conf: str,
    out: Path,
    progress: Progress = lambda done: None,
) -> list[Outcome]:
    """Replay ``requests``, those of a process side by side, into the new run ``out``.

    ``setups``: of each of them. ``conf``: their settings string, for the manifest.

    Raises:
        MemtraceError: ``out`` is there or can't be made; nothing is left then.
    """
    outcomes = []
    with new_folder(out) as folder:
        pairs = zip(requests, setups, strict=True)
        for _, own in groupby(pairs, lambda pair: pair[0].process.folder):
            outcomes += _write_process(list(own), conf, folder, progress)
        kept = (
            *("command", "cwd", "started", "ended", "epoch_ns"),
            *("host", "python", "platform", "planned"),
        )
        root = {name: trace.manifest[name] for name in kept if name in trace.manifest} | {
            "knowledge": Knowledge.MODELLED,
            "state": "complete",
            "replayed": {"run": trace.name, "settings": conf, **_described(setups[0])},
        }
        write_manifest(folder, root | {"files": file_checksums(folder)})
    return outcomes


def _described(setup: Setup) -> dict[str, Any]:
    return {
        "torch": ".".join(map(str, setup.torch)),
        "total": None if setup.total == ENDLESS else setup.total,
        "outside": setup.outside,
        "fraction": setup.fraction,
    }


def _write_process(
    replays: Sequence[tuple[Requests, Setup]],
    conf: str,
    folder: Path,
    progress: Progress,
) -> list[Outcome]:
    first, setup = replays[0]
    process = first.process
    target = folder / process.folder.name
    target.mkdir()
    with TableWriter(target) as writer:
        for table in ("scopes", "stacks", "requests"):
            columns: Mapping[str, Sequence[Any]] = getattr(process, table)
            rows = zip(*(list(columns[name]) for name in TABLES[table].names), strict=True)
            writer.append_rows(table, list(rows))
        contexts = _Contexts(process, writer)
        outcomes = []
        events = 0
        for one, own in replays:
            writing = _Writing(one, contexts, writer)
            outcomes.append(simulate(one, own, progress=progress, watch=writing.add))
            events += writing.written
    kept = ("pid", "start_ticks", "rank", "argv", "parent_pid", "executable", "state", "stacks")
    body = {name: process.manifest[name] for name in kept if name in process.manifest} | {
        "torch": _described(setup)["torch"],
        "replayed": conf,
        "cuda": {
            "devices": [_device(one, own) for one, own in replays],
            "allocator_settings": setup.settings.to_snapshot(conf),
        },
        "events": events,
        "dropped": (process.manifest.get("dropped") or 0) + sum(one.strange for one, _ in replays),
        "unseen": [*(process.manifest.get("unseen") or []), *_unseen(one for one, _ in replays)],
    }
    write_manifest(target, body)
    return outcomes


def _device(requests: Requests, setup: Setup) -> dict[str, Any]:
    return {
        "ordinal": int(device_name(requests).partition(":")[2]),
        "name": None,
        "uuid": None,
        "total_memory": None if setup.total == ENDLESS else setup.total,
        "memory_fraction": setup.fraction,
    }


def device_name(requests: Requests) -> str:
    """What the replayed device is called: what ran on the host runs on the first GPU."""
    return requests.device if requests.device.startswith("cuda:") else "cuda:0"


def _unseen(requests: Iterable[Requests]) -> list[str]:
    warm = sum(one.warm for one in requests)
    order = (
        f"the order in which {warm} blocks came that were there before the recording: they were "
        "asked for by address"
    )
    return [*_UNSEEN, *([order] if warm else [])]


class _Contexts:
    """The contexts of a replayed process, made from those of the recorded one."""

    def __init__(self, process: ProcessTrace, writer: TableWriter) -> None:
        self._columns = process.contexts
        self._writer = writer
        self._rows: dict[tuple[Any, ...], int] = {}
        self._new: list[tuple[Any, ...]] = []

    def of(self, action: Action, like: int, device: str, stream: int, pool: str | None) -> int:
        """The number of a context: the component and the place are those of ``like``."""
        columns = self._columns
        component = columns["component"][like] or "other"
        scope, stack, previous = int(columns["scope"][like]), int(columns["stack"][like]), None
        if action in _WITHOUT_BYTES:
            component = None
        if action in (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            scope, stack = 0, -1
        elif action == Action.RETAG:
            previous = columns["previous"][like]
        elif action != Action.ALLOC:
            stack = -1
        row = (int(action), device, stream, pool, component, previous, scope, stack)
        found = self._rows.get(row)
        if found is None:
            found = self._rows[row] = len(self._rows)
            self._new.append(row)
        return found

    def write(self) -> None:
        """Write the rows that are new."""
        self._writer.append_rows("contexts", self._new)
        self._new.clear()


class _Writing:
    """Writes the events of one device, a stretch of the log at a time."""

    def __init__(self, requests: Requests, contexts: _Contexts, writer: TableWriter) -> None:
        self.written = 0
        self._requests = requests
        self._contexts = contexts
        self._writer = writer
        self._device = device_name(requests)
        blocks = int(requests.ops.block.max(initial=-1)) + 1
        self._address = np.zeros(blocks, dtype=np.int64)  # by block; those that failed have none
        self._bytes = np.zeros(blocks, dtype=np.int64)
        self._pending: dict[int, int] = {}  # context like which a pending block was freed
        self._retags = 0  # how many of them are written
        # Contexts that are known, by what _contexts_of() numbers them by; none has the first.
        self._keys = np.array([-1])
        self._numbers = np.array([-1])

    def add(self, first: int, count: int, log: Log) -> None:
        """Write what operations ``first`` to ``first + count - 1`` led to."""
        requests = self._requests
        rows = log.rows[log["action"] < min(Mark)]
        event = requests.event[rows[:, 0]]
        like = requests.process.events["context"][event].astype(np.int64)
        action = rows[:, 1].copy()
        kept = self._at_once(action, rows[:, 2], like)
        action, like, event, rows = action[kept], like[kept], event[kept], rows[kept]
        born = action == _ALLOC
        blocks = requests.ops.block[rows[born, 0]]
        self._address[blocks], self._bytes[blocks] = rows[born, 2], rows[born, 3]
        stream = np.searchsorted(requests.streams, rows[:, 5])
        context = self._contexts_of(action, like, stream, rows[:, 6] // 2)
        following = first + count
        end = requests.event[following] if following < len(requests.event) else None
        self._write((event, *rows[:, 2:5].T, context), self._retagged(end))

    def _at_once(self, action: np.ndarray, address: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Make one FREE of a free that nothing waits for; which rows stay. A completion that came
        later gets the context of its free."""
        same = np.append(address[:-1] == address[1:], False)
        completed = action == _FREE_COMPLETED
        at_once = (action == _FREE_REQUESTED) & same & np.append(completed[1:], False)
        action[at_once] = _FREE
        kept = ~np.append(False, at_once[:-1]) if len(action) else at_once
        for row in np.flatnonzero(kept & (completed | (action == _FREE_REQUESTED))).tolist():
            if action[row] == _FREE_REQUESTED:
                self._pending[int(address[row])] = int(like[row])
            else:
                like[row] = self._pending.pop(int(address[row]))
        return kept

    def _contexts_of(
        self, action: np.ndarray, like: np.ndarray, stream: np.ndarray, pool: np.ndarray
    ) -> np.ndarray:
        """The context of each row; ``stream``, ``pool``: as the requests number them."""
        streams, pools = self._requests.streams, (None, *self._requests.pools)
        known = len(self._requests.process.contexts["action"])
        shape = (known, max(Action) + 1, len(streams), len(pools))
        keys = np.ravel_multi_index((like, action, stream, pool), shape)
        place = np.searchsorted(self._keys, keys)
        new = np.unique(keys[self._keys[np.minimum(place, len(self._keys) - 1)] != keys])
        if len(new):
            numbers = [
                self._contexts.of(Action(one), source, self._device, streams[handle], pools[number])
                for source, one, handle, number in zip(
                    *(part.tolist() for part in np.unravel_index(new, shape)), strict=True
                )
            ]
            at = np.searchsorted(self._keys, new)
            self._keys = np.insert(self._keys, at, new)
            self._numbers = np.insert(self._numbers, at, numbers)
            place = np.searchsorted(self._keys, keys)
        return self._numbers[place]

    def _retagged(self, end: int | None) -> tuple[np.ndarray, ...]:
        """The changes of component up to an event of the process, of blocks that there are."""
        retags = self._requests.retags[self._retags :]
        count = len(retags) if end is None else int(np.searchsorted(retags[:, 0], end))
        self._retags += count
        event, block = retags[:count].T
        there = self._bytes[block] > 0
        event, block = event[there], block[there]
        contexts = self._requests.process.contexts
        likes, row = np.unique(self._requests.process.events["context"][event], return_inverse=True)
        numbers = [
            self._contexts.of(
                Action.RETAG,
                one,
                self._device,
                int(contexts["stream"][one]),
                contexts["pool"][one],
            )
            for one in likes.tolist()
        ]
        size = self._bytes[block]
        return event, self._address[block], size, size, np.array(numbers, np.int64)[row]

    def _write(self, made: tuple[np.ndarray, ...], retagged: tuple[np.ndarray, ...]) -> None:
        """Both are ordered by their first column, the event of the process that each stands for."""
        self._contexts.write()
        at = np.searchsorted(made[0], retagged[0], side="right")
        event, *columns = (
            np.insert(one, at, other) for one, other in zip(made, retagged, strict=True)
        )
        times = self._requests.process.events["time_us"][event]
        self._writer.append("events", dict(zip(_EVENTS, (times, *columns), strict=True)))
        self.written += len(event)
