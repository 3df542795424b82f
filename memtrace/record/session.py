"""A recording of this process: the sources, the scopes that reach them, and the writing thread."""

import atexit
import gc
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import compress
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from memtrace import components, scopes
from memtrace.errors import MemtraceError
from memtrace.record.boundaries import Boundaries
from memtrace.record.cuda import CudaSource, unsupported
from memtrace.record.enter import enter_run
from memtrace.record.following import follow
from memtrace.record.interrupts import uninterruptible
from memtrace.record.ledger import Frame, Ledger
from memtrace.record.modules import Rules
from memtrace.record.process import high_water, resident
from memtrace.record.rule import Wrapping
from memtrace.record.source import Source
from memtrace.record.tensors import TensorSource, Within
from memtrace.trace.manifest import read_manifest, write_manifest

#: Seconds between two writes: what a killed process can lose at most.
FLUSH_SECONDS = 0.5

#: Seconds between two looks at how full CUDA's history is.
_LOOK_SECONDS = 0.05

#: What a dispatch mode can't see, said in every trace.
UNSEEN = (
    "scratch memory that kernels take below the dispatcher",
    "storages made without an operator (frombuffer, DLPack, files mapped by safetensors) until "
    "they become parameters or inputs of a model",
    "storages resized by themselves (untyped_storage().resize_) until they are freed",
    "what code compiled by torch.compile keeps without returning it",
    "threads that ran before recording began, until they call a module or a scope",
)


#: What isn't seen once CUDA's own history is read.
UNSEEN_ON_CUDA = (
    "host tensors made after CUDA came into use, until they become parameters or inputs of a model",
    "device memory that isn't the allocator's (context, libraries, others' cudaMalloc): external",
    "which component and scope autograd's own threads work for: what they allocate is other",
)


class _Request(scopes.Request):
    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self.first_token_us: int | None = None

    def first_token(self) -> None:
        if self.first_token_us is None:
            self.first_token_us = self._now_us()


class _Nothing:
    """The source that books no tensor."""

    def retag(self, tensor: Any, component: str, *, only: tuple[str, ...] | None = None) -> None:
        """As :class:`memtrace.record.source.Source` has it."""

    def adopt(self, tensor: Any, component: str) -> None:
        """As :class:`memtrace.record.source.Source` has it."""


_NOTHING = _Nothing()


class Session:
    """Records the process it lives in, from :meth:`start` to :meth:`close`.

    Args:
        folder: an existing folder for this process's tables; what its manifest holds is kept.
        epoch_ns: ``perf_counter_ns()`` that counts as time 0.
        stacks: Python frames kept for each allocation; 0 keeps none.
        sample_ms: milliseconds between samples of this process's RSS; 0 leaves it to a launcher
            that looks from outside.
        source: "auto" reads the history of CUDA's allocator once CUDA is used, "tensors" books
            what operators return on any device, "none" books nothing: there are requests, samples
            of process memory, and what CUDA's allocator says of itself after each request.
    """

    _active: "Session | None" = None

    def __init__(
        self,
        folder: Path,
        *,
        epoch_ns: int,
        stacks: int = 0,
        sample_ms: int = 0,
        source: str = "auto",
    ) -> None:
        self._folder = folder
        self._sample_ms = sample_ms
        self._stacks = stacks
        self._manifest = {**_process(), **_existing(folder)}
        self._ledger = Ledger(folder, epoch_ns)
        # One variable a session: what a context still holds of an earlier one means nothing here.
        outermost = self._ledger.frame("other", 0, explicit=False)
        self._place = ContextVar("memtrace_frame", default=outermost)
        self._rules = Rules(Wrapping(self._ledger, self._place, self.source))
        self._source = source
        self._cuda: CudaSource | None = None
        self._boundaries = Boundaries(self._ledger, stacks)
        self._older: list[threading.Thread] = []  # threads from before the recording
        self._cuda_unseen: str | None = None
        self._stop = threading.Event()
        self._writer: threading.Thread | None = None
        self._closed = False

    @classmethod
    def active(cls) -> "Session | None":
        """The session that records this process now."""
        return cls._active

    @property
    def folder(self) -> Path:
        """The folder of this process's tables."""
        return self._folder

    # -- life --------------------------------------------------------------------------------

    def start(self) -> "Session":
        """Begin to record, in this thread and in every one that starts from now on.

        Raises:
            MemtraceError: this process is being recorded already.
            OSError: the folder can't be written.
        """
        if Session._active is not None:
            raise MemtraceError("this process is being recorded already")
        self._write_manifest("recording")
        Session._active = self
        self._older = [
            one for one in threading.enumerate() if one is not threading.current_thread()
        ]
        self.source()
        if self._source != "none":
            self._rules.install()
        scopes.attach(self)
        follow(Session.active)
        atexit.register(self._close_at_exit)
        self._start_writer()
        if self._source == "auto":
            torch.cuda._lazy_call(self._start_cuda)
        elif self._source == "none" and self._stacks:
            torch.cuda._lazy_call(self._keep_stacks)
        return self

    def close(self) -> None:
        """Stop recording and end the trace of this process."""
        if self._closed:
            return
        self._closed = True
        self._detach()
        self._stop.set()
        if self._writer is not None:
            self._writer.join()
        if self._cuda is not None:
            self._cuda.stop()
        self._ledger.sample("hwm", high_water(os.getpid()))
        self.checkpoint()
        self._ledger.close()
        self._complain()
        with suppress(OSError):  # then the manifest still says "recording", as for a killed process
            self._write_manifest("ended")

    def _close_at_exit(self) -> None:
        with uninterruptible():
            self.close()

    def _detach(self) -> None:
        """Take everything out of PyTorch and the interpreter that can be taken out."""
        atexit.unregister(self._close_at_exit)
        scopes.attach(None)
        self._rules.remove()
        Within.announce = None
        self.leave_thread()
        Session._active = None

    def adopt_existing(self) -> None:
        """Book what was allocated before the recording began and is reachable from Python."""
        source = self.source()
        things = gc.get_objects()
        kinds = set(_subclasses(torch.Tensor))
        # Without a line of Python for each: there may be a million objects.
        for tensor in compress(things, map(kinds.__contains__, map(type, things))):
            if not is_lazy(tensor):
                if isinstance(tensor, torch.nn.Parameter):
                    source.retag(tensor, "model")
                else:
                    source.adopt(tensor, "other")

    def checkpoint(self) -> int:
        """Write everything so far, and what the books say is allocated beside it.

        Returns:
            The number of events written so far.
        """
        if self._cuda is not None and not self._closed:
            self._cuda.drain()
        self._ledger.sample_allocated()
        self._sample_process()
        self._ledger.flush()
        return self._ledger.events_written

    def _start_writer(self) -> None:
        self._writer = threading.Thread(target=self._write, name="memtrace-writer", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        flushed = time.monotonic()
        while not self._stop.wait(self._pause()):
            self._sample_process()
            if self._cuda is not None:
                self._cuda.look()
            if time.monotonic() - flushed >= FLUSH_SECONDS:
                flushed = time.monotonic()
                self._ledger.flush()
                self._complain()

    def _pause(self) -> float:
        pause = self._sample_ms / 1000 or FLUSH_SECONDS
        return pause if self._cuda is None else min(pause, _LOOK_SECONDS)

    def _sample_process(self) -> None:
        if self._sample_ms:
            self._ledger.sample("rss", resident(os.getpid()))

    def _complain(self) -> None:
        """Say once, where the user reads it, that the recording ended before the program."""
        failure = self._ledger.failure
        if failure is not None and "failure" not in self._manifest:
            self._manifest["failure"] = str(failure)
            reason = os.strerror(failure.errno) if failure.errno else failure
            print(
                f"memtrace: recording stopped, {self._folder} can't be written: {reason}",
                file=sys.stderr,
            )

    def _write_manifest(self, state: str) -> None:
        ledger = self._ledger
        values = sys.modules.get("memtrace.virtual_gpu.values")
        scratch = sys.modules.get("memtrace.fake_gpu.scratch")
        unseen = list(UNSEEN if self._cuda is None else UNSEEN_ON_CUDA)
        if self._source == "none":
            unseen = ["every allocation (--source none): only requests were recorded"]
        if self._cuda is not None and self._cuda.missed:
            unseen.append(
                f"{self._cuda.missed} events of CUDA's allocator, which its history had "
                "overwritten or contradicted; the state was taken up again"
            )
        if self._cuda_unseen is not None:
            unseen.append(f"the history of CUDA's allocator: {self._cuda_unseen}")
        if ledger.without_storage:
            unseen.append(f"{ledger.without_storage} tensors without a storage (sparse or opaque)")
        write_manifest(
            self._folder,
            {
                **self._manifest,
                "state": state,
                "stacks": self._stacks,
                "events": ledger.events_written,
                "dropped": ledger.events_dropped,
                "unseen": unseen,
                "models": self._rules.models,
                "cuda": None if self._cuda is None else self._cuda.describe(),
                "values": None if values is None else values.summary(),
                "unmodelled": None if scratch is None else scratch.unmodelled(),
                "recorder": {
                    "peak_buffer_bytes": ledger.peak_buffer_bytes,
                    "flush_seconds": FLUSH_SECONDS,
                },
            },
        )

    # -- threads and children ----------------------------------------------------------------

    def _start_cuda(self) -> None:
        """CUDA was initialised: from now on its allocator's own history is what counts."""
        if Session._active is not self:
            return
        try:
            reason = unsupported()
            if reason is None:
                cuda = CudaSource(self._ledger, self._place, self._stacks, self._older)
                cuda.start()
                self._cuda = cuda
                self._ledger.cuda_threads = cuda.working
                Within.announce = cuda.announce
                _leave()
                cuda.of_thread()
        except Exception as error:  # whatever it was, the user's program must run
            reason = str(error) or type(error).__name__
        self._cuda_unseen = reason

    def _keep_stacks(self) -> None:
        """CUDA was initialised: each block remembers who allocated it, as long as it lives."""
        if Session._active is self and unsupported() is None:
            torch.cuda.memory._record_memory_history("state", context="state", stacks="python")

    def source(self) -> Source:
        """The source of the calling thread, entered when the thread first asks for it."""
        if self._source == "none":
            return _NOTHING
        if self._cuda is not None:
            return self._cuda.of_thread()
        return self._tensors()

    def _tensors(self) -> TensorSource:
        source: TensorSource | None = getattr(_thread, "source", None)
        if source is None:
            source = _thread.source = TensorSource(self._ledger, self._place, self._stacks)
            source.__enter__()
        elif source.ledger is not self._ledger:  # left by an earlier session, still entered
            source.bind(self._ledger, self._place, self._stacks)
        return source

    # -- following.Followed ------------------------------------------------------------------

    def hand_down(self, thread: threading.Thread) -> Frame | None:
        """As :class:`memtrace.record.following.Followed` has it."""
        return None if thread is self._writer else self._place.get()

    def enter_thread(self, frame: Frame) -> None:
        """As :class:`memtrace.record.following.Followed` has it."""
        self.source()
        if not frame.explicit:  # a pool outlives the block that its first task was given in
            self._place.set(frame)
            if Within.announce is not None:
                Within.announce(frame.text)

    def leave_thread(self) -> None:
        """As :class:`memtrace.record.following.Followed` has it."""
        if self._cuda is not None:
            self._cuda.leave()
        _leave()

    def forked(self) -> None:
        """As :class:`memtrace.record.following.Followed` has it: books and a folder of its own."""
        self._stop = threading.Event()  # another thread may have held the old one's lock
        try:
            self._folder = Path(enter_run(str(self._folder.parent)))
            self._manifest = {**_process(), **_existing(self._folder)}
            self._write_manifest("recording")
        except OSError as error:  # nowhere to write: the folder is still the parent's
            print(f"memtrace: process {os.getpid()} is not recorded: {error}", file=sys.stderr)
            self._closed = True
            self._detach()
            return
        if self._cuda is not None:  # CUDA doesn't survive a fork: nothing may ask it again
            self._cuda.leave()
            self._cuda.due = False
        self._cuda = Within.announce = None
        self._ledger.restart(self._folder)
        self._start_writer()

    # -- scopes.Sink -------------------------------------------------------------------------

    def component(self, component: str) -> Within:
        components.base(component)
        self.source()
        # The scope says in the trace that the user's code chose the component.
        scope = self._ledger.scope(self._place.get().scope, "component", component)
        return Within(self._place, self._ledger.frame(component, scope, explicit=True))

    def scope(self, kind: str, name: str) -> Within:
        self.source()
        now = self._place.get()
        scope = self._ledger.scope(now.scope, kind, name)
        return Within(self._place, self._ledger.frame(now.component, scope, now.explicit))

    @contextmanager
    def request(self, name: str, prompt_tokens: int | None) -> Iterator[scopes.Request]:
        ledger = self._ledger
        request = _Request(ledger.now_us)
        start_us = ledger.now_us()
        outcome = "ok"
        scope = ledger.scope(self._place.get().scope, "request", name)
        try:
            with self.scope("request", name):
                yield request
        except BaseException as error:
            outcome = "oom" if _out_of_memory(error) else "error"
            raise
        finally:
            row = (
                name,
                prompt_tokens,
                request.generated_tokens,
                start_us,
                request.first_token_us,
                ledger.now_us(),
                request.outcome or outcome,
            )
            self._note_boundary(ledger.request(row))
            (ledger if self._cuda is None else self._cuda).over(scope)

    def _note_boundary(self, request: int) -> None:
        """What CUDA's allocator says after a request, if it is in use."""
        if not torch.cuda.is_initialized():
            return
        if self._cuda is None:
            native = unsupported() is None
            self._boundaries.note(request, torch.cuda.memory._snapshot() if native else None)
            return
        snapshot = self._cuda.request_ended()
        event = None if snapshot is None else self._ledger.position
        self._boundaries.note(request, snapshot, self._cuda.component_of, event)

    def retag(self, tensor: Any, component: str) -> None:
        with self.component(component):
            self.source().retag(tensor, component)


def _subclasses(kind: type) -> Iterator[type]:
    """A class and every one derived from it."""
    yield kind
    for derived in cast("list[type]", type.__subclasses__(kind)):
        yield from _subclasses(derived)


def _out_of_memory(error: BaseException) -> bool:
    """On the CPU, PyTorch says it with a plain RuntimeError."""
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error):
        return True
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def _process() -> dict[str, Any]:
    """What a process's manifest says of it."""
    return {
        "pid": os.getpid(),
        "parent_pid": os.getppid(),
        "argv": sys.argv,
        "executable": sys.executable,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _existing(folder: Path) -> dict[str, Any]:
    ours = ("format", "schema")
    try:
        return {k: v for k, v in read_manifest(folder).items() if k not in ours}
    except MemtraceError:
        return {}


#: The source of each thread, from the first session that asked for it on.
_thread = threading.local()


def _leave() -> None:
    """Take the source out of the calling thread, if nobody entered another mode over it."""
    source: TensorSource | None = getattr(_thread, "source", None)
    if source is not None and source.leave():
        del _thread.source
