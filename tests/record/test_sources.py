"""What the tensor source books, against what PyTorch says is alive."""

import asyncio
import gc
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from memtrace import scopes
from memtrace.analysis.accounts import accounts
from memtrace.analysis.identities import check
from memtrace.analysis.places import place
from memtrace.analysis.process import process_memory
from memtrace.errors import MemtraceError
from memtrace.record.here import record_here
from memtrace.record.session import Session
from memtrace.trace.reader import ProcessTrace, open_trace
from memtrace.trace.schema import Action


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., ProcessTrace]:
    """Run a function under a recording; give back the trace of this process."""

    def run(work: Callable[[], object], **options: int) -> ProcessTrace:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.memtrace"
        with record_here(path, **options):
            work()
        trace = open_trace(path)
        (process,) = trace.processes
        for account in accounts(process):
            identities = check(account, process_memory(trace, process, account.device))
            assert identities.hold, identities.problem
        return process

    return run


def booked(process: ProcessTrace) -> list[tuple[Action, str, int, str]]:
    """(action, component, bytes, operator) of every event."""
    contexts, scopes_ = process.contexts, process.scopes
    return [
        (
            Action(int(contexts["action"][context])),
            contexts["component"][context],
            int(size),
            scopes_["name"][contexts["scope"][context]],
        )
        for size, context in zip(process.events["bytes"], process.events["context"], strict=True)
    ]


def allocations(process: ProcessTrace) -> list[tuple[str, int]]:
    return [(name, size) for action, _, size, name in booked(process) if action == Action.ALLOC]


def test_views_and_in_place_operators_allocate_nothing(record) -> None:
    def work() -> None:
        x = torch.zeros(8, 8)
        x.t().add_(1)[0].mul_(2)
        x.view(-1).unsqueeze(0).expand(4, 64)
        x.detach().reshape(64)  # contiguous, so a view

    assert allocations(record(work)) == [("aten.zeros.default", 256)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_reshape_that_copies_is_booked_in_every_grad_mode(record, mode) -> None:
    def work() -> None:
        with mode():
            torch.zeros(8, 8).t().reshape(64)

    sizes = [size for _, size in allocations(record(work))]
    assert sizes == [256, 256]


def test_a_composite_operator_shows_its_temporaries_under_inference_mode(record) -> None:
    """linear() of a 3-D input is a matmul and an addition there as elsewhere."""

    def work(mode) -> None:
        with mode():
            weight, bias = torch.zeros(16, 8), torch.zeros(16)
            torch.nn.functional.linear(torch.zeros(2, 4, 8).transpose(0, 1), weight, bias)

    plain = record(lambda: work(torch.no_grad))
    inference = record(lambda: work(torch.inference_mode))
    assert sum(size for _, size in allocations(plain)) == sum(
        size for _, size in allocations(inference)
    )


def test_resizing_in_place_moves_the_bytes(record) -> None:
    def work() -> None:
        x = torch.zeros(4)
        with scopes.component("Temp"):
            torch.add(torch.ones(16), 1, out=x.resize_(0))

    moves = [(a, c, s) for a, c, s, _ in booked(record(work))]
    assert moves[0] == (Action.ALLOC, "other", 16)
    # resize_(0) keeps the storage; out= then enlarges it, and it stays what it was: "other".
    assert (Action.FREE, "other", 16) in moves
    assert (Action.ALLOC, "other", 64) in moves


def test_a_list_of_outputs_and_torch_tensor_are_booked(record) -> None:
    def work() -> None:
        torch.tensor([1.0, 2.0])
        torch.topk(torch.arange(10.0), 3)

    assert [size for _, size in allocations(record(work))] == [8, 40, 12, 24]


def test_meta_tensors_are_booked_on_their_own_device(record) -> None:
    process = record(lambda: torch.zeros(1 << 40, device="meta") + 1)
    (account,) = accounts(process)
    assert (account.device, account.allocated.peak) == ("meta", 2 * 4 << 40)


def test_sparse_tensors_are_reported_as_unseen(record) -> None:
    process = record(lambda: torch.eye(4).to_sparse() * 2)
    assert any("without a storage" in text for text in process.manifest["unseen"])


def test_a_storage_found_later_is_adopted(record) -> None:
    array = np.zeros(1024, dtype=np.float32)
    process = record(lambda: scopes.retag(torch.from_dlpack(array), "Temp"))
    assert booked(process)[0] == (Action.ALLOC, "Temp", 4096, "adopted")


def test_stacks_name_the_users_line(record) -> None:
    def allocate_here() -> torch.Tensor:
        return torch.zeros(4)

    process = record(allocate_here, stacks=2)
    context = process.events["context"][0]
    frames = process.stacks["frames"][process.contexts["stack"][context]]
    assert len(frames) == 2
    assert frames[0].startswith(__file__) and frames[0].endswith("allocate_here")


def test_components_scopes_and_retags(record) -> None:
    def work() -> None:
        with scopes.request("r1", prompt_tokens=7) as request:
            with scopes.phase("prefill"), scopes.layer(3), scopes.component("Act"):
                x = torch.zeros(4)
                with scopes.component("Temp"):
                    y = x + 1
            scopes.retag(x, "KV_res/full")
            scopes.retag(x[1:], "KV_res/full")  # the same storage, already there: no event
            request.first_token()
            request.generated_tokens = 2
        del x, y

    process = record(work)
    actions = [(action, component) for action, component, _, _ in booked(process)]
    assert actions == [
        (Action.ALLOC, "Act"),
        (Action.ALLOC, "Temp"),
        (Action.RETAG, "KV_res/full"),
        (Action.FREE, "KV_res/full"),
        (Action.FREE, "Temp"),
    ]
    assert process.contexts["previous"][process.events["context"][2]] == "Act"
    requests = process.requests
    assert (requests["name"][0], requests["prompt_tokens"][0]) == ("r1", 7)
    assert (requests["generated_tokens"][0], requests["outcome"][0]) == (2, "ok")
    assert requests["start_us"][0] <= requests["first_token_us"][0] <= requests["end_us"][0]


@pytest.mark.parametrize(
    ("error", "outcome"), [(torch.OutOfMemoryError("full"), "oom"), (KeyError("x"), "error")]
)
def test_a_request_that_fails_says_how(record, error, outcome) -> None:
    def work() -> None:
        torch.zeros(1)
        with pytest.raises(type(error)), scopes.request("r"):
            raise error

    assert record(work).requests["outcome"] == [outcome]


def test_a_wrong_component_is_refused_while_recording(record) -> None:
    def work() -> None:
        with pytest.raises(ValueError, match="not a component"):
            scopes.component("KV")
        with pytest.raises(ValueError, match="not a component"):
            scopes.retag(torch.zeros(1), "cache")

    record(work)


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


OPERATIONS: list[Callable[[list[torch.Tensor], int], object]] = [
    lambda pool, n: pool.append(torch.zeros(n + 1)),
    lambda pool, n: pool.append(pool[n % len(pool)] * 2) if pool else None,
    lambda pool, n: pool.append(pool[n % len(pool)][: n % 7]) if pool else None,
    lambda pool, n: pool.pop(n % len(pool)) if pool else None,
    lambda pool, n: pool.append(torch.cat(pool[-3:])) if pool else None,
    lambda pool, n: pool.append(pool[n % len(pool)].view(torch.uint8)) if pool else None,
    lambda pool, n: scopes.retag(pool[n % len(pool)], "KV_res/full") if pool else None,
    lambda pool, n: pool[n % len(pool)].add_(1) if pool else None,
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(OPERATIONS),
            st.integers(0, 400),
            st.sampled_from(["Act", "Temp", "Hidden"]),
        ),
        max_size=40,
    )
)
def test_the_books_equal_the_living_storages_at_every_step(steps) -> None:
    """Σ tensor components = bytes of the distinct storages alive, after each operation."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = []
        with record_here(Path(folder) / "run") as session:
            pool: list[torch.Tensor] = []
            for operation, number, component in steps:
                with scopes.component(component):
                    operation(pool, number)
                alive = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in pool}
                truth.append((session._ledger.position, sum(alive.values())))
            pool.clear()
            gc.collect()
        trace = open_trace(Path(folder) / "run")
        process = trace.processes[0]
        found = accounts(process)
        for account in found:
            identities = check(account, process_memory(trace, process, account.device))
            assert identities.hold, identities.problem
            total = sum(one.levels[-1] for one in account.components.values())
            assert total == account.allocated.levels[-1] == 0
        for position, expected in truth:
            read = sum(one.allocated.read_one(position - 1) for one in found)
            by_component = sum(
                series.read_one(position - 1) for one in found for series in one.components.values()
            )
            assert read == by_component == expected
