"""Traces made up for tests: consistent histories, written by the recorder's own writer."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from memtrace.components import TENSOR_COMPONENTS
from memtrace.trace.manifest import Knowledge, file_checksums, write_manifest
from memtrace.trace.schema import TABLES, Action
from memtrace.trace.writer import TableWriter

PID = 4711
LABELS = (*TENSOR_COMPONENTS, "KV_res/full", "KV_res/compact")


class History:
    """One process's tables, row by row. Each event is a millisecond after the one before."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self.rows["scopes"].append((-1, "process", str(PID)))
        self.live: dict[int, tuple[str, int, str]] = {}  # id → device, bytes, component
        self._scope = 0
        self._next = 0

    @property
    def time_us(self) -> int:
        return 1000 * (len(self.rows["events"]) + 1)

    @contextmanager
    def scope(self, kind: str, name: str) -> Iterator[None]:
        outer, self._scope = self._scope, self._intern("scopes", (self._scope, kind, name))
        yield
        self._scope = outer

    def alloc(
        self, size: int, component: str, device: str = "cpu", op: str = "aten.empty.memory_format"
    ) -> int:
        self._next += 1
        self.live[self._next] = (device, size, component)
        with self.scope("op", op):
            self.event(Action.ALLOC, self._next, size, component, device=device)
        return self._next

    def free(self, number: int) -> None:
        device, size, component = self.live.pop(number)
        self.event(Action.FREE, number, size, component, device=device)

    def retag(self, number: int, component: str) -> None:
        device, size, previous = self.live[number]
        self.live[number] = (device, size, component)
        self.event(Action.RETAG, number, size, component, previous, device)

    def event(
        self,
        action: int,
        number: int,
        size: int,
        component: str | None,
        previous: str | None = None,
        device: str = "cpu",
        *,
        requested: int | None = None,
        stream: int = 0,
        pool: str | None = None,
    ) -> None:
        """Any event, consistent or not."""
        scope = 0 if action == Action.FREE else self._scope
        context = self._intern(
            "contexts", (action, device, stream, pool, component, previous, scope, -1)
        )
        asked = size if requested is None else requested
        self.rows["events"].append((self.time_us, number, size, asked, context))

    def sample(self, source: str, value: int) -> None:
        """Process memory, seen just after the last event."""
        row = (self.time_us - 1, PID, source, len(self.rows["events"]), value)
        self.rows["samples"].append(row)

    def request(self, name: str, prompt_tokens: int, outcome: str = "ok") -> None:
        now = self.time_us - 1  # just after the last event
        self.rows["requests"].append((name, prompt_tokens, None, 0, None, now, outcome))

    def write(
        self,
        folder: Path,
        *,
        complete: bool = True,
        manifest: dict[str, Any] | None = None,
        process: dict[str, Any] | None = None,
    ) -> Path:
        """A run with this one process; not ``complete``: as one whose recorder was killed."""
        (folder / str(PID)).mkdir(parents=True)
        with TableWriter(folder / str(PID)) as writer:
            for table, rows in self.rows.items():
                for batch in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                    columns = zip(*batch, strict=True)
                    if batch:
                        writer.append(table, dict(zip(TABLES[table].names, columns, strict=True)))
        write_manifest(
            folder / str(PID),
            {
                "pid": PID,
                "argv": ["infer.py"],
                "state": "ended" if complete else "recording",
                "torch": "2.14.1",
                "events": len(self.rows["events"]),
                "dropped": 0,
                "unseen": ["scratch memory of kernels"],
            }
            | (process or {}),
        )
        root: dict[str, Any] = {
            "state": "complete" if complete else "running",
            "knowledge": Knowledge.MEASURED,
            "command": ["python", "infer.py"],
        }
        if complete:
            root |= {"exit": {"code": 0, "signal": None}, "files": file_checksums(folder)}
        write_manifest(folder, root | (manifest or {}))
        return folder

    def _intern(self, table: str, row: tuple[Any, ...]) -> int:
        if row not in self.rows[table]:
            self.rows[table].append(row)
        return self.rows[table].index(row)


def prefill(layers: int = 4, chunks: int = 3, scale: int = 1) -> History:
    """A small prefill as a recorder would see it; ``scale`` multiplies the workspace."""
    history = History()
    weights = [history.alloc(1 << 20, "model", op="aten.empty") for _ in range(layers)]
    history.sample("rss", 80 << 20)
    with history.scope("request", "q1"), history.scope("phase", "prefill"):
        hidden = [history.alloc(64 << 10, "Hidden") for _ in range(chunks)]
        for layer in range(layers):
            with history.scope("layer", str(layer)):
                full = history.alloc(512 << 10, "KV_res/full")
                for chunk in range(chunks):
                    with history.scope("chunk", str(chunk)):
                        history.free(history.alloc(scale * (300 << 10), "Act", op="aten.mm"))
                with history.scope("phase", "compress"):
                    kept = history.alloc(128 << 10, "Temp", op="aten.gather")
                    history.retag(kept, "KV_res/compact")
                history.free(full)
            history.sample("rss", (85 << 20) + scale * (300 << 10))
        for number in hidden:
            history.free(number)
    history.request("q1", prompt_tokens=512)
    for number in weights:
        history.free(number)
    history.sample("hwm", (86 << 20) + scale * (300 << 10))
    return history


def random_history(steps: list[tuple[int, int, int]], devices: int = 1) -> History:
    """A consistent history from numbers: (what to do, to which storage or size, to which label)."""
    history = History()
    for action, number, label in steps:
        component = LABELS[label % len(LABELS)]
        live = list(history.live)
        phase = "prefill" if number % 2 else "decode"
        with history.scope("phase", phase), history.scope("layer", str(label)):
            if action == Action.ALLOC or not live:
                history.alloc(number, component, ("cpu", "cuda:0")[label % devices])
            elif action == Action.FREE:
                history.free(live[number % len(live)])
            else:
                chosen = live[number % len(live)]
                if history.live[chosen][2] != component:
                    history.retag(chosen, component)
        if number % 5 == 0:
            history.sample("rss", 50_000 + number)
    return history


def histories(devices: int = 1) -> st.SearchStrategy[History]:
    """Histories that shrink to short ones."""
    step = st.tuples(st.sampled_from([0, 0, 1, 2]), st.integers(0, 10_000), st.integers(0, 20))
    return st.lists(step, min_size=1, max_size=60).map(
        lambda steps: random_history(steps, devices=devices)
    )


def seeded_history(seed: int, length: int) -> History:
    """One consistent history of ``length`` steps, always the same for a seed."""
    draw = random.Random(seed)
    steps = (
        (draw.choice([0, 0, 1, 2]), draw.randrange(10_000), draw.randrange(20))
        for _ in range(length)
    )
    return random_history(list(steps))
