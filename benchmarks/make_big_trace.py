"""Write a run of many events: a GPU that serves a language model, as PyTorch's allocator sees it.

    python benchmarks/make_big_trace.py [--events 10_000_000] [--concurrent 8] [--seed 0] -o OUT

Llama-3.1-8B's shapes in bfloat16 on 80 GiB: weights that stay; requests whose passes take turns, a
prompt in chunks, then a token at a time; in each layer activations that come and go, and a KV cache
that grows by a block a chunk, later by one every few tokens, and goes with its request. Sampled
tokens are copied by another stream, so their frees wait. The allocator is memtrace's own, so a
replay under the run's settings is equal to it. Needs numba.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.allocator.compiled import CompiledAllocator
from memtrace.allocator.device import Device
from memtrace.allocator.log import Log, Mark
from memtrace.allocator.ops import Op, Ops
from memtrace.errors import MemtraceError
from memtrace.trace.folders import new_folder
from memtrace.trace.manifest import Knowledge, file_checksums, first_manifest, write_manifest
from memtrace.trace.schema import TABLES, Action
from memtrace.trace.writer import TableWriter

LAYERS, HIDDEN, FFN, KV, VOCABULARY, BYTES = 32, 4096, 14336, 1024, 128256, 2
TOTAL = 80 << 30
CHUNK, PAGE = 1024, 64  # tokens of a prompt's chunk, and of a cache's block while decoding
OP_US = 10  # from one operation to the next
#: Operations that are done and written at once, at least.
STRETCH = 1 << 17
COMPONENTS = ("model", "KV_res", "Hidden", "Act", "Temp")
MODEL, CACHE, STREAM, ACT, TEMP = range(len(COMPONENTS))
FILE = "transformers/models/llama/modeling_llama.py"
#: Where each component's bytes are allocated.
STACKS = [(f"{FILE}:{line}:forward", "serve.py:40:step") for line in (92, 181, 310, 144, 420)]
#: Of an operation here: those of :class:`Ops` on one stream, then whose it is and where.
#: layer: 1 + its number, 0 outside the layers. place: a row of :attr:`Serving.places`.
COLUMNS = ("kind", "block", "size", "component", "layer", "place")
KIND, BLOCK, SIZE, COMPONENT, LAYER, PLACE = range(len(COLUMNS))


class Pass:
    """A forward pass; its sizes depend on its tokens, all else is fixed.

    ``grows``: whether each layer's cache gets another block.

    Attributes:
        blocks: how many it allocates.
        caches: those of them that stay: the caches' blocks.
    """

    def __init__(self, grows: bool) -> None:
        self._made: list[tuple[int, ...]] = []
        self.blocks = 0
        self._layer = 0
        hidden = self._alloc(HIDDEN, component=STREAM)
        for self._layer in range(1, LAYERS + 1):
            hidden = self._attention(hidden, grows)
            hidden = self._mlp(hidden)
        self._layer = 0
        norm = self._alloc(HIDDEN)
        self._free(hidden, STREAM)
        logits = self._alloc(0, norm, component=TEMP, fixed=VOCABULARY)
        token = self._alloc(0, component=TEMP, fixed=4)
        self._free(logits, TEMP)
        self._made.append((Op.FREE_LATER, token, 0, 0, TEMP, 0))
        kind, block, self._values, self._fixed, component, layer = np.array(self._made).T
        self._rows = np.stack((kind, block, block, component, layer, layer), axis=1)
        self._cached = component == CACHE
        self.caches = block[self._cached]

    def rows(self, first: int, tokens: int, cached: int, place: int) -> np.ndarray:
        """(n, COLUMNS) int64; blocks are numbered from ``first``.

        ``cached``: tokens for which a new block of the cache has room.
        """
        rows = self._rows.copy()
        rows[:, BLOCK] += first
        of = np.where(self._cached, cached, tokens)
        rows[:, SIZE] = (self._values * of + self._fixed) * BYTES
        rows[:, PLACE] = place
        return rows

    def _alloc(self, values: int, *inputs: int, component: int = ACT, fixed: int = 0) -> int:
        """A result of so many values a token, after which the inputs go."""
        block, self.blocks = self.blocks, self.blocks + 1
        self._made.append((Op.ALLOC, block, values, fixed, component, self._layer))
        for one in inputs:
            self._free(one, ACT)
        return block

    def _free(self, block: int, component: int) -> None:
        self._made.append((Op.FREE, block, 0, 0, component, self._layer))

    def _attention(self, hidden: int, grows: bool) -> int:
        norm = self._alloc(HIDDEN)
        query, key = self._alloc(HIDDEN), self._alloc(KV)
        value = self._alloc(KV, norm)
        query, key = self._alloc(HIDDEN, query), self._alloc(KV, key)  # with positions
        if grows:
            self._alloc(2 * KV, component=CACHE)
        attended = self._alloc(HIDDEN, query, key, value)
        return self._added(hidden, self._alloc(HIDDEN, attended))

    def _mlp(self, hidden: int) -> int:
        norm = self._alloc(HIDDEN)
        gate = self._alloc(FFN, self._alloc(FFN))
        up = self._alloc(FFN, norm)
        product = self._alloc(FFN, gate, up)
        return self._added(hidden, self._alloc(HIDDEN, product))

    def _added(self, hidden: int, result: int) -> int:
        found = self._alloc(HIDDEN, result, component=STREAM)
        self._free(hidden, STREAM)
        return found


@dataclass
class Request:
    """A request that is served.

    Attributes:
        row: its number in the table of requests.
        scope: its own.
        prompt, generated: tokens; of the latter how many there will be.
        done: tokens of both that are done.
        place: where its passes are now.
        caches: blocks of its cache.
    """

    row: int
    scope: int
    prompt: int
    generated: int
    done: int = 0
    phase: int = -1
    place: int = -1
    caches: list[np.ndarray] = field(default_factory=list)


class Serving:
    """What the program asks for, pass by pass, and where."""

    def __init__(self, concurrent: int, seed: int) -> None:
        self.scopes: list[tuple[int, str, str]] = [(-1, "process", "serve.py")]
        self.places: list[int] = [0]  # scopes; those of its layers follow each but the first
        self.requests: list[list[Any]] = []  # rows of the table
        self._random = np.random.default_rng(seed)
        self._concurrent = concurrent
        self._passes = {grows: Pass(grows) for grows in (False, True)}
        self._blocks = 0
        self._ops = 0

    def rows(self) -> Iterator[np.ndarray]:
        """Operations without end, (n, COLUMNS) int64 a pass."""
        yield self._weights()
        active: list[Request] = []
        copied = np.empty((0, len(COLUMNS)), dtype=np.int64)
        while True:
            while len(active) < self._concurrent:
                active.append(self._arrived())
            request = active[self._random.integers(len(active))]
            made = self._pass(request)
            self._ops += len(copied) + len(made)
            parts = [copied, made]
            copied = made[-1:].copy()  # the token, until the next pass has begun
            copied[:, KIND] = Op.COMPLETE
            row = self.requests[request.row]
            if request.done == request.prompt:
                row[4] = self._ops * OP_US
            if request.done == request.prompt + request.generated:
                row[2], row[5], row[6] = request.generated, self._ops * OP_US, "ok"
                active.remove(request)
                parts.append(self._freed(request))
                self._ops += len(parts[-1])
            yield np.concatenate(parts)

    def _weights(self) -> np.ndarray:
        place = self._place(self._scope(0, "phase", "loading"))
        shapes = (HIDDEN * (HIDDEN + KV), HIDDEN * KV, HIDDEN * HIDDEN, *3 * [HIDDEN * FFN], HIDDEN)
        sizes = [(values, layer + 1) for layer in range(LAYERS) for values in shapes]
        sizes += [(HIDDEN * VOCABULARY, 0)] * 2
        rows = [
            (Op.ALLOC, number, values * BYTES, MODEL, layer, place)
            for number, (values, layer) in enumerate(sizes)
        ]
        self._blocks = self._ops = len(rows)
        return np.array(rows, dtype=np.int64)

    def _arrived(self) -> Request:
        row = len(self.requests)
        prompt = int(np.clip(self._random.lognormal(7.3, 0.8), 16, 16384))
        generated = 1 + int(min(self._random.exponential(80), 1024))
        self.requests.append([f"request-{row}", prompt, None, self._ops * OP_US, None, None, None])
        return Request(row, self._scope(0, "request", f"request-{row}"), prompt, generated)

    def _pass(self, request: Request) -> np.ndarray:
        """The next chunk of the prompt, or the next token."""
        done, decoded = request.done, request.done - request.prompt
        if decoded < 0:
            tokens = cached = min(CHUNK, -decoded)
            if done == 0:
                request.phase = self._scope(request.scope, "phase", "prefill")
            chunk = self._scope(request.phase, "chunk", str(done // CHUNK))
            request.place = self._place(chunk)
        else:
            tokens, cached = 1, 0 if decoded % PAGE else PAGE
            if decoded == 0:
                request.place = self._place(self._scope(request.scope, "phase", "decode"))
        one = self._passes[cached > 0]
        rows = one.rows(self._blocks, tokens, cached, request.place)
        if cached:
            request.caches.append(one.caches + self._blocks)
        request.done += tokens
        self._blocks += one.blocks
        return rows

    def _freed(self, request: Request) -> np.ndarray:
        blocks = np.concatenate(request.caches)
        rows = np.zeros((len(blocks), len(COLUMNS)), dtype=np.int64)
        rows[:, KIND], rows[:, BLOCK], rows[:, COMPONENT] = Op.FREE, blocks, CACHE
        return rows

    def _scope(self, parent: int, kind: str, name: str) -> int:
        self.scopes.append((parent, kind, name))
        return len(self.scopes) - 1

    def _place(self, scope: int) -> int:
        """A scope with layers in it, which is the last one."""
        self.places.append(scope)
        for layer in range(LAYERS):
            self._scope(scope, "layer", str(layer))
        return len(self.places) - 1


class Recording:
    """Writes what the allocator did, as a recorder would have."""

    def __init__(self, serving: Serving, writer: TableWriter) -> None:
        self.events = 0
        self._serving = serving
        self._writer = writer
        self._allocator = CompiledAllocator(Device(TOTAL))
        self._contexts: dict[tuple[Any, ...], int] = {}
        self._scopes = 0  # written
        self._ops = 0
        writer.append_rows("stacks", [(stack,) for stack in STACKS])

    def add(self, rows: np.ndarray) -> None:
        """Do operations and write the events that they make."""
        kind = rows[:, KIND]
        zeros = np.zeros_like(kind)
        log = self._allocator.run(Ops(kind, rows[:, BLOCK], rows[:, SIZE], zeros, zeros))
        if (log["action"] >= min(Mark)).any() or (log["action"] == Action.OOM).any():
            raise MemtraceError(f"{TOTAL >> 30} GiB are too few; serve fewer requests at once")
        events = self._events(rows, log)
        self._ops += len(rows)
        self._writer.append_rows("scopes", self._serving.scopes[self._scopes :])
        self._scopes = len(self._serving.scopes)
        self._writer.append("events", events)
        self.events += len(events["id"])

    def _events(self, rows: np.ndarray, log: Log) -> dict[str, np.ndarray]:
        op = log["op"] - self._ops
        action = log["action"].copy()
        # A free that nothing waits for is one event.
        free = rows[op, KIND] == Op.FREE
        kept = ~(free & (action == Action.FREE_REQUESTED))
        action[free & (action == Action.FREE_COMPLETED)] = Action.FREE
        # A block is part of the cache once it is there.
        cached = (action == Action.ALLOC) & (rows[op, COMPONENT] == CACHE)
        times = kept + cached.astype(int)
        op, action = np.repeat(op, times), np.repeat(action, times)
        action[np.flatnonzero(np.repeat(cached, times))[1::2]] = Action.RETAG
        address, size, requested = np.repeat(log.rows[:, 2:5], times, axis=0).T
        return {
            "time_us": (self._ops + op) * OP_US,
            "id": address,
            "bytes": size,
            "requested": np.where(action == Action.RETAG, size, requested),
            "context": self._context(action, *rows[op][:, [COMPONENT, LAYER, PLACE]].T),
        }

    def _context(
        self, action: np.ndarray, component: np.ndarray, layer: np.ndarray, place: np.ndarray
    ) -> np.ndarray:
        """The contexts' numbers; those that are new are written."""
        keys, row = np.unique(
            np.stack((action, component, layer, place)), axis=1, return_inverse=True
        )
        known = len(self._contexts)
        numbers = [
            self._contexts.setdefault(self._described(*key), len(self._contexts))
            for key in keys.T.tolist()
        ]
        self._writer.append_rows("contexts", list(self._contexts)[known:])
        return np.array(numbers, dtype=np.int32)[row]

    def _described(self, action: int, component: int, layer: int, place: int) -> tuple[Any, ...]:
        """A row of the table of contexts."""
        name: str | None = COMPONENTS[component]
        previous, scope, stack = None, self._serving.places[place] + layer, -1
        if action == Action.ALLOC:
            stack = component
            name = "Act" if component == CACHE else name
        elif action == Action.RETAG:
            previous = "Act"
        elif action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE):
            name = None
        else:
            scope = 0
        return (action, "cuda:0", 0, None, name, previous, scope, stack)


def write(out: Path, events: int, concurrent: int, seed: int) -> int:
    """Make the run; how many events it has: ``events``, and those that end a stretch.

    Raises:
        MemtraceError: ``out`` is there, or the device is too small.
    """
    with new_folder(out) as folder:
        process = folder / "1"
        process.mkdir()
        serving = Serving(concurrent, seed)
        with TableWriter(process) as writer:
            recording = Recording(serving, writer)
            made: list[np.ndarray] = []
            for rows in serving.rows():
                made.append(rows)
                count = sum(map(len, made))
                if count >= STRETCH or recording.events + count >= events:
                    recording.add(np.concatenate(made))
                    made.clear()
                if recording.events >= events:
                    break
            names = TABLES["requests"].names
            columns = zip(*serving.requests, strict=True)
            writer.append("requests", dict(zip(names, columns, strict=True)))
        device = {"ordinal": 0, "name": None, "uuid": None, "total_memory": TOTAL}
        body = {
            "pid": 1,
            "argv": ["serve.py"],
            "state": "ended",
            "torch": "2.15.0",
            "cuda": {"devices": [device], "allocator_settings": {}},
            "events": recording.events,
            "dropped": 0,
            "unseen": ["all: a benchmark made this run up"],
        }
        write_manifest(process, body)
        root = first_manifest(["serve.py"], 0) | {
            "state": "complete",
            "knowledge": Knowledge.MODELLED,
            "files": file_checksums(folder),
        }
        write_manifest(folder, root)
    return recording.events


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=10_000_000, help="at least so many")
    parser.add_argument("--concurrent", type=int, default=8, help="requests that take turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    args = parser.parse_args()
    try:
        print(f"{write(args.output, args.events, args.concurrent, args.seed):,} events")
    except MemtraceError as error:
        print(f"make_big_trace: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
