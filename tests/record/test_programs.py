"""What programs do while they are recorded: threads, tasks, subclasses, modes, a full disk."""

import asyncio
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from memtrace import record_here, scopes
from memtrace.analysis.places import place
from memtrace.errors import MemtraceError
from memtrace.record.session import Session
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.record.books import allocations, booked


def test_threads_started_while_recording_are_booked(record) -> None:
    def work() -> None:
        threads = [threading.Thread(target=torch.zeros, args=(1000,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert Counter(allocations(record(work))) == {("aten.zeros.default", 4000): 4}


def test_a_thread_begins_in_the_scope_of_who_started_it(record) -> None:
    """But an explicit component is not handed down: pools outlive the block they start in."""

    def work() -> None:
        for scope in (scopes.phase("prefill"), scopes.component("Temp")):
            with scope:
                thread = threading.Thread(target=torch.zeros, args=(1000,))
                thread.start()
            thread.join()

    process = record(work)
    found = [
        (process.contexts["component"][context], place(process, process.contexts["scope"][context]))
        for context in process.events["context"]
        if process.contexts["action"][context] == Action.ALLOC
    ]
    assert [(component, where.phase) for component, where in found] == [
        ("other", "prefill"),
        ("other", None),
    ]


def test_tasks_of_asyncio_stand_in_their_own_scopes(record) -> None:
    async def task(component: str, seconds: float) -> None:
        with scopes.component(component):
            await asyncio.sleep(seconds)
            torch.zeros(1000)

    async def both() -> None:
        await asyncio.gather(task("Act", 0.01), task("Temp", 0.02))
        torch.zeros(1000)

    events = booked(record(lambda: asyncio.run(both())))
    assert [c for action, c, *_ in events if action == Action.ALLOC] == ["Act", "Temp", "other"]


class Halved(torch.Tensor):
    """A float32 tensor on the outside, int8 inside, as quantised weights are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Halved":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Halved(func(args[0].inner))


def test_a_wrapper_counts_as_what_it_wraps(record) -> None:
    events = booked(record(lambda: torch.neg(Halved(torch.zeros(1000, dtype=torch.int8)))))
    assert [size for action, _, size, _ in events if action == Action.ALLOC] == [1000, 1000]


def test_operators_and_tensors_that_can_not_be_asked(record) -> None:
    """Fake tensors ask prim:: operators; lazy parameters have no storage."""

    def work() -> None:
        with FakeTensorMode():
            torch.nn.Linear(20, 20)(torch.empty(2, 20))
        torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
        torch.nn.LazyLinear(4)(torch.zeros(1, 2))

    record(work)


def test_function_modes_see_the_users_calls_only(record) -> None:
    class Log(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def work() -> None:
        net = torch.nn.Linear(2, 2)
        with Log() as log:
            net(torch.zeros(1, 2))
        work.calls = log.calls

    work()
    plain = work.calls
    record(work)
    assert work.calls == plain


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_composite_operators_round_as_ever_under_inference_mode(record, mode) -> None:
    image = torch.randn(1, 3, 17, 17, generator=torch.Generator().manual_seed(0))

    def work() -> None:
        with torch.inference_mode():
            work.out = torch.nn.functional.interpolate(image, scale_factor=1.7, mode=mode)

    work()
    plain = work.out
    record(work)
    assert torch.equal(plain, work.out)


def test_what_was_there_before_can_be_booked(record) -> None:
    old = torch.zeros(5000)
    layer = torch.nn.Linear(10, 10, bias=False)

    def work() -> None:
        nonlocal old
        session = Session.active()
        assert session is not None
        session.adopt_existing()
        layer(torch.ones(1, 10))
        del old

    events = booked(record(work))
    assert (Action.ALLOC, "other", 20000, "adopted") in events
    assert (Action.ALLOC, "model", 400, "adopted") in events
    assert [(action, size) for action, _, size, _ in events][-1] == (Action.FREE, 20000)


def test_recordings_leave_no_trace_in_the_interpreter(record) -> None:
    for _ in range(2):
        record(lambda: None)
    finders, hooks = len(sys.meta_path), torch.nn.Module.__call__
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            record(lambda: pool.submit(torch.nn.Linear(2, 2), torch.zeros(1, 2)).result())
        modes = pool.submit(torch._C._len_torch_dispatch_stack).result()
    assert (len(sys.meta_path), torch.nn.Module.__call__, modes) == (finders, hooks, 1)


def test_a_thread_that_outlives_the_recording_does_no_harm(tmp_path, monkeypatch) -> None:
    """Its mode can't be taken from it: what it goes on to book is let go, the trace stays."""
    monkeypatch.setattr("memtrace.record.ledger._FULL", 64)
    ended, done = threading.Event(), threading.Event()

    def work() -> None:
        torch.zeros(8)
        done.set()
        ended.wait()
        for _ in range(100):
            torch.zeros(8)

    with record_here(tmp_path / "run"):
        thread = threading.Thread(target=work)
        thread.start()
        done.wait()
    before = len(open_trace(tmp_path / "run").processes[0].events["id"])
    ended.set()
    thread.join()
    assert len(open_trace(tmp_path / "run").processes[0].events["id"]) == before == 2


def test_nothing_is_left_behind(record) -> None:
    """After a recording PyTorch runs as before: no mode, no hook, no wrapper."""
    call = torch.nn.Module.__call__
    record(lambda: torch.nn.Linear(2, 2)(torch.zeros(1, 2)))
    assert torch.nn.Module.__call__ is call
    assert not scopes.recording()
    assert Session.active() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_failing_disk_stops_the_recording_and_not_the_program(tmp_path, capfd) -> None:
    with record_here(tmp_path / "run") as session:
        torch.zeros(4)
        session._ledger._writer.append = _full  # type: ignore[method-assign]
        session.checkpoint()
        torch.zeros(4)
    assert "No space left" in capfd.readouterr().err
    process = open_trace(tmp_path / "run").processes[0]
    assert process.manifest["dropped"] == 4
    assert "No space left" in process.manifest["failure"]


def _full(table: str, columns: object) -> None:
    raise OSError(28, "No space left on device")


def test_one_recording_at_a_time(record, tmp_path) -> None:
    def work() -> None:
        with pytest.raises(MemtraceError, match="recorded already"), record_here(tmp_path / "b"):
            pass

    record(work)


def test_an_existing_run_is_not_overwritten(tmp_path) -> None:
    with record_here(tmp_path / "a"):
        pass
    with pytest.raises(MemtraceError, match="exists"), record_here(tmp_path / "a"):
        pass
