"""The books of one recorded process: who is alive, what is interned, what is not yet written.

Everything on the path of an allocation is kept to a few dictionary look-ups. What an event says
besides its time, id and size is interned as a *context*; a thread stands in a *frame*, the
interned pair of a component and a scope, which caches the context of each operator.
"""

import os
import threading
import weakref
from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path
from struct import Struct
from time import perf_counter_ns
from typing import Any

import numpy as np

from memtrace.record.interned import Interned
from memtrace.record.interrupts import uninterrupted
from memtrace.trace.schema import TABLES, Action
from memtrace.trace.writer import TableWriter

#: Values in the event buffer (four an event) at which an allocation flushes it itself: 16 MiB.
#: Flushing holds one copy of it and its columns, which keeps all buffers below 64 MiB.
_FULL = 2 << 20
_FIELDS = 4
_pack = Struct("4q").pack  # with array.frombytes, half the time of array.extend
_NO_STACK = -1
_SCOPE = TABLES["contexts"].names.index("scope")
#: A scope that was over before a fork.
_FORGOTTEN = "over before the fork"


class StorageRef(weakref.ref):
    """A live storage: its address as a StorageImpl, and (id, bytes, context of its free)."""

    __slots__ = ("key", "row")
    key: int
    row: tuple[int, int, int]


class Frame:
    """A component and a scope, with the contexts that operators got in them."""

    __slots__ = (
        "__weakref__",
        "component",
        "explicit",
        "free",
        "inner",
        "inside",
        "kinds",
        "ops",
        "scope",
        "text",
    )

    def __init__(
        self,
        component: str,
        scope: int,
        kinds: frozenset[str],
        explicit: bool,
        free: int,
        text: str,
    ) -> None:
        self.component = component
        self.scope = scope
        #: Kinds of this scope and of those around it.
        self.kinds = kinds
        #: Whether the user's code chose the component: then no rule may change it.
        self.explicit = explicit
        #: The context with which a CPU storage born here will be freed.
        self.free = free
        #: What the history of a CUDA allocator has for blocks born here. C++ keeps up to 15
        #: characters without allocating memory.
        self.text = text
        #: Whether the code runs in a module, or in a component that was chosen.
        self.inside = explicit or "module" in kinds
        #: id(operator) → context of what it allocates on the CPU, or a code of the tensor source.
        self.ops: dict[int, int] = {}
        #: Where rules lead to from here.
        self.inner: dict[Any, Frame] = {}


class Ledger:
    """Interns, buffers and writes the events of one process.

    Appending is safe from any thread (one C call under the interpreter lock); interning and
    flushing take locks.
    """

    def __init__(self, folder: Path, epoch_ns: int) -> None:
        self.epoch_ns = epoch_ns
        self.live: dict[int, StorageRef] = {}
        #: Why writing stopped before the end, if it did.
        self.failure: OSError | None = None
        self.events_written = 0
        self.events_dropped = 0
        #: Threads that allocate on CUDA, where its allocator's history tells of the storages there;
        #: None: it doesn't.
        self.cuda_threads: weakref.WeakSet[threading.Thread] | None = None
        #: Tensors that have none (sparse, opaque) and so could not be booked.
        self.without_storage = 0
        self.peak_buffer_bytes = 0
        self._events = array("q")  # never replaced: those who append hold on to it
        self._append = self._events.frombytes
        self._on_death = self._death_callback()
        self._rows: dict[str, list[tuple[Any, ...]]] = {}  # by table, not yet written
        self._requests = 0
        self._pid = os.getpid()
        self._next_id = count(1).__next__
        self._scopes = Interned((0, "op", _FORGOTTEN))
        self._contexts = Interned((int(Action.FREE), "cpu", 0, None, "other", None, 0, _NO_STACK))
        self._stacks = Interned(([],))
        self._frames: dict[tuple[str, int, bool], Frame] = {}
        self._texts = count()
        self._by_text: dict[str, Frame] = {}
        # Those of scopes that are over, as long as a thread stands in them.
        self._fading: weakref.WeakValueDictionary[str, Frame] = weakref.WeakValueDictionary()
        self._over: list[int] = []  # scopes
        self._kinds: dict[int, frozenset[str]] = {0: frozenset(("process",))}
        self._scopes.number((-1, "process", folder.name))
        self._writer = TableWriter(folder)
        self._closed = False
        self._inherited: list[TableWriter] = []
        self._intern_lock = threading.RLock()
        self._flush_lock = threading.RLock()

    # -- events ------------------------------------------------------------------------------

    def _death_callback(self) -> Callable[[StorageRef], None]:
        forget, append, now = self.live.pop, self._append, perf_counter_ns

        def dead(ref: StorageRef) -> None:
            append(_pack(now(), *ref.row))
            forget(ref.key, None)

        return dead

    def allocate(self, storage: Any, key: int, context: int, free: int) -> None:
        """``storage`` (an UntypedStorage) was just seen for the first time.

        Args:
            key: its ``_cdata``.
            context: of its allocation.
            free: context with which its free will be booked.
        """
        ref = StorageRef(storage, self._on_death)
        ref.key = key
        number = self._next_id()
        size = storage.nbytes()
        ref.row = (number, size, free)
        self.live[key] = ref
        self._append(_pack(perf_counter_ns(), number, size, context))
        if len(self._events) > _FULL:
            self.flush()

    def find(self, storage: Any) -> StorageRef | None:
        """The books' entry of ``storage``; an entry of a dead one at its address doesn't count."""
        ref = self.live.get(storage._cdata)
        return ref if ref is not None and ref() is storage else None

    def resize(self, ref: StorageRef, storage: Any, scope: int) -> None:
        """A live storage changed its size in place: its old bytes go, its new ones come."""
        number, _, free = ref.row
        size = storage.nbytes()
        _, device, stream, _, component, *_ = self._contexts.rows[free]
        context = self.context(Action.ALLOC, device, component, scope, stream=stream)
        now = perf_counter_ns()
        self._append(_pack(now, *ref.row) + _pack(now, number, size, context))
        ref.row = (number, size, free)

    def retag(self, ref: StorageRef, component: str, scope: int) -> None:
        """The bytes of a live storage belong to ``component`` from now on."""
        number, size, free = ref.row
        _, device, stream, _, previous, *_ = self._contexts.rows[free]
        if previous == component:
            return
        context = self.context(Action.RETAG, device, component, scope, previous, stream=stream)
        self._append(_pack(perf_counter_ns(), number, size, context))
        free = self.context(Action.FREE, device, component, 0, stream=stream)
        ref.row = (number, size, free)

    def component_of(self, ref: StorageRef) -> str:
        """The component that a live storage belongs to now."""
        return str(self._contexts.rows[ref.row[2]][4])

    def allocated(self) -> dict[str, int]:
        """Bytes alive by device, counted from who is alive and not from the events."""
        totals: dict[str, int] = {}
        for ref in list(self.live.values()):
            _, size, free = ref.row
            device = str(self._contexts.rows[free][1])
            totals[device] = totals.get(device, 0) + size
        return totals

    @property
    def position(self) -> int:
        """Events so far, dropped ones excepted."""
        return self.events_written + len(self._events) // _FIELDS

    # -- interning ---------------------------------------------------------------------------

    def scope(self, parent: int, kind: str, name: str) -> int:
        """The number of a scope; the same (parent, kind, name) is the same scope."""
        with self._intern_lock:
            number = self._scopes.number((parent, kind, name))
            if number not in self._kinds:
                self._kinds[number] = self._kinds.get(parent, frozenset()) | {kind}
            return number

    def path(self, scope: int) -> list[tuple[str, str]]:
        """(kind, name) from the outermost scope inside the process to this one."""
        path: list[tuple[str, str]] = []
        while scope in self._scopes.rows and scope:
            scope, kind, name = self._scopes.rows[scope]
            path.insert(0, (kind, name))
        return path

    def stack(self, frames: tuple[str, ...]) -> int:
        """The number of a call stack, innermost frame first."""
        with self._intern_lock:
            return self._stacks.number((frames,))

    def context(
        self,
        action: Action,
        device: str,
        component: str | None,
        scope: int,
        previous: str | None = None,
        stack: int = _NO_STACK,
        stream: int = 0,
        pool: str | None = None,
    ) -> int:
        """The number of a context."""
        with self._intern_lock:
            return self._contexts.number(
                (int(action), device, stream, pool, component, previous, scope, stack)
            )

    def frame(self, component: str, scope: int, explicit: bool) -> Frame:
        """The frame of a component in a scope."""
        key = (component, scope, explicit)
        found = self._frames.get(key)
        if found is None:
            free = self.context(Action.FREE, "cpu", component, 0)
            text = f"memtrace:{next(self._texts)}"
            kinds = self._kinds.get(scope, frozenset())
            found = Frame(component, scope, kinds, explicit, free, text)
            self._frames[key] = self._by_text[text] = found
        return found

    def frame_of(self, text: str) -> Frame | None:
        """The frame with this text; None: it is none of ours."""
        return self._by_text.get(text) or self._fading.get(text)

    def over(self, scope: int) -> None:
        """A request is over: what is known of places in it can go once it is written.

        Otherwise a process that answers requests for days would be filled by its recorder.
        """
        self._over.append(scope)

    def _forget(self) -> None:
        with self._intern_lock:
            gone = set(self._over)
            self._over.clear()
            for number, (parent, *_) in self._scopes.rows.items():  # parents come first
                if parent in gone:
                    gone.add(number)
            self._scopes.forget(gone & self._scopes.rows.keys())
            rows = self._contexts.rows.items()
            self._contexts.forget([number for number, row in rows if row[_SCOPE] in gone])
            for key, frame in list(self._frames.items()):
                if frame.scope in gone:
                    del self._frames[key], self._by_text[frame.text]
                    self._fading[frame.text] = frame
            for number in gone:
                self._kinds.pop(number, None)

    # -- writing -----------------------------------------------------------------------------

    def now_us(self) -> int:
        """Microseconds since the run's epoch."""
        return (perf_counter_ns() - self.epoch_ns) // 1000

    def sample_allocated(self) -> None:
        """What is allocated by the books, by device, beside the events that say so too."""
        for _ in range(3):
            before = self.position
            totals = self.allocated()
            if self.position == before:  # no other thread came between
                for device, size in totals.items():
                    self.sample(f"allocated:{device}", size)
                return

    def sample(self, source: str, value: int) -> None:
        """A value that the process knows of itself, at the current event."""
        self.add("samples", (self.now_us(), self._pid, source, self.position, value))

    def request(self, row: tuple[Any, ...]) -> int:
        """One finished request, in the order of the schema's columns; its number."""
        with self._intern_lock:
            self.add("requests", row)
            self._requests += 1
            return self._requests - 1

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        """A row of a table, in the order of the schema's columns; the next flush writes it."""
        self._rows.setdefault(table, []).append(row)

    def append(self, rows: np.ndarray) -> None:
        """Write events of another book-keeper, (n, 5): time_us, id, bytes, requested, context."""
        with self._flush_lock, uninterrupted():
            self.flush()  # so that the numbers of earlier events stand
            self._keep(len(rows), lambda: self._write_events(*rows.T))

    def note_buffers(self, size: int) -> None:
        """Somebody's buffers took so many bytes just now."""
        self.peak_buffer_bytes = max(self.peak_buffer_bytes, size)

    def flush(self) -> None:
        """Write what is buffered. A failure (full disk) is kept in ``failure``, never raised."""
        with self._flush_lock, uninterrupted():  # what was taken out would be lost
            # Events first: every row that they name is then already interned.
            taken = self._events[:]
            del self._events[: len(taken)]
            # The buffer, the copy taken from it, and the columns that are written.
            self.note_buffers(3 * taken.itemsize * len(taken))
            self._keep(len(taken) // _FIELDS, lambda: self._write(taken))

    def _keep(self, events: int, write: Callable[[], None]) -> None:
        if self._closed:  # a thread that still runs under an old source
            return
        if self.failure is None:
            try:
                write()
                self.events_written += events
                return
            except OSError as error:
                self.failure = error
        self.events_dropped += events

    def _write(self, taken: "array[int]") -> None:
        time, number, size, context = np.frombuffer(taken, np.int64).reshape(-1, _FIELDS).T
        time_us = (time - self.epoch_ns) // 1000
        # A storage is as large as was asked for.
        self._write_events(time_us, number, size, size, context)
        for table in list(self._rows):  # in their order: rows come after those that they name
            rows = self._rows[table][:]
            del self._rows[table][: len(rows)]  # another thread may add one meanwhile
            self._writer.append_rows(table, rows)
        if self._over:
            self._forget()

    def _write_events(self, *columns: np.ndarray) -> None:
        """Append events, and before them every row that they name."""
        for table, interned in (
            ("scopes", self._scopes),
            ("stacks", self._stacks),
            ("contexts", self._contexts),
        ):
            self._writer.append_rows(table, interned.take_new())
        self._writer.append("events", dict(zip(TABLES["events"].names, columns, strict=True)))

    def close(self) -> None:
        """Write the rest and end the tables."""
        self.flush()
        with self._flush_lock:
            self._closed = True
            try:
                self._writer.close()
            except OSError as error:
                self.failure = self.failure or error

    def restart(self, folder: Path) -> None:
        """Go on in a forked child: new tables, which begin with all that it inherited alive.

        The parent's open tables are kept, untouched: nothing of the child may reach them.
        """
        self._inherited.append(self._writer)
        self._writer = TableWriter(folder)
        self._pid = os.getpid()
        self._intern_lock = threading.RLock()  # a thread that the child lacks may hold the old ones
        self._flush_lock = threading.RLock()
        for interned in (self._scopes, self._stacks, self._contexts):
            interned.begin_again()
        del self._events[:]  # the parent writes these
        self._rows, self._requests = {}, 0
        self.events_written = self.events_dropped = 0
        scope = self.scope(0, "op", "inherited by fork")
        now = perf_counter_ns()
        for ref in list(self.live.values()):
            number, size, free = ref.row
            _, device, stream, _, component, *_ = self._contexts.rows[free]
            context = self.context(Action.ALLOC, device, component, scope, stream=stream)
            self._append(_pack(now, number, size, context))
