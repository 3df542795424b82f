"""Verdicts on persistent processes, of histories whose slopes are known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.analysis.boundaries import served
from memtrace.analysis.growth import growing_allocations
from memtrace.analysis.persistence import Persistence, persistence
from memtrace.analysis.stability import Stability
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import TABLES, Action
from tests.analysis.simulated import MiB, Program
from tests.synthetic import History

KiB = 1 << 10
LIMIT = 10 * KiB
LENGTHS = (512, 64, 256)


def judge(history: History, folder: Path, **options: Any) -> Persistence:
    [one] = served(open_trace(history.write(folder)))
    return persistence(one, limit=LIMIT, **options)


def workload(
    leak: Callable[[History, int], object] = lambda history, number: None, requests: int = 30
) -> History:
    """Requests of three lengths, whose workspace is as long as they are."""
    history = History()
    history.alloc(4 * MiB, "model")
    for number in range(requests):
        length = LENGTHS[number % 3]
        with history.scope("request", f"r{number}"), history.scope("phase", "prefill"):
            work = history.alloc(length * KiB, "Act")
            leak(history, number)
            history.free(work)
        history.request(f"r{number}", prompt_tokens=length)
    return history


def test_memory_that_stays_put(tmp_path: Path) -> None:
    one = judge(workload(), tmp_path / "run")
    assert one.verdict is Stability.PLATEAU
    assert (one.warmup, len(one.counted), one.answered) == (3, 27, 30)
    assert one.growing == ()
    allocated = next(m for m in one.measures if m.name == "allocated")
    assert (allocated.change, allocated.highest) == (0, 4 * MiB)


@given(
    component=st.sampled_from(["Hidden", "KV_res/compact", "other"]),
    size=st.integers(65536, 1 << 24),
)
def test_a_leak_is_named(
    tmp_path_factory: pytest.TempPathFactory, component: str, size: int
) -> None:
    def leak(history: History, number: int) -> None:
        with history.scope("layer", str(number % 4)):
            history.alloc(size, component, op="aten.clone")

    one = judge(workload(leak), tmp_path_factory.mktemp("runs") / "run")
    assert one.verdict is Stability.GROWING
    assert one.cause is not None
    assert one.cause.name == "allocated"
    assert one.cause.slope.value == size
    first = one.growing[0]
    assert (first.component, first.where) == (component, "prefill > aten.clone")
    # 30 requests, of which the first three are the warm-up
    assert (first.first, first.last, first.count) == (4 * size, 30 * size, 30)


def test_a_leak_of_long_prompts_only(tmp_path: Path) -> None:
    """Neither grows the rest nor is it hidden by it."""

    def leak(history: History, number: int) -> None:
        if LENGTHS[number % 3] == 512:
            history.alloc(MiB, "KV_res/compact")

    one = judge(workload(leak), tmp_path / "run")
    assert one.verdict is Stability.GROWING
    assert one.growing[0].component == "KV_res/compact"


def test_a_leak_that_begins_late(tmp_path: Path) -> None:
    """A robust slope over all requests takes it for outliers."""

    def leak(history: History, number: int) -> None:
        if number >= 75:
            history.alloc(64 * KiB, "Hidden")

    one = judge(workload(leak, requests=99), tmp_path / "run")
    assert one.verdict is Stability.GROWING
    assert one.cause is not None
    assert one.cause.since == 48
    assert one.cause.slope.value > LIMIT
    assert one.growing[0].component == "Hidden"


def test_memory_that_steps_up_once_doesn_t_grow(tmp_path: Path) -> None:
    def step(history: History, number: int) -> None:
        if number == 70:
            history.alloc(64 * MiB, "Hidden")

    assert judge(workload(step, requests=99), tmp_path / "run").verdict is not Stability.GROWING


def test_where_nothing_was_booked_nothing_is_decided(tmp_path: Path) -> None:
    history = History()
    for number in range(20):
        history.sample("rss", 100 * MiB)
        history.request(f"r{number}", prompt_tokens=64)
    one = judge(history, tmp_path / "run")
    assert (one.verdict, one.wanting, one.judged) == (Stability.UNDECIDED, None, ())
    assert judge(history, tmp_path / "again", rss=True).verdict is Stability.PLATEAU


def test_each_gpu_is_judged(tmp_path: Path) -> None:
    """A leak on another card than the fullest; the host's tensors aren't all seen then."""
    history = History()
    history.alloc(64 * MiB, "model", device="cuda:0")
    history.alloc(MiB, "other")
    for number in range(20):
        history.alloc(64 * KiB, "Hidden", device="cuda:1")
        history.request(f"r{number}", prompt_tokens=64)
    found = served(open_trace(history.write(tmp_path / "run")))
    assert [(one.device, persistence(one, limit=LIMIT).verdict) for one in found] == [
        ("cuda:0", Stability.PLATEAU),
        ("cuda:1", Stability.GROWING),
    ]


def test_requests_whose_memory_is_lost_don_t_count(tmp_path: Path) -> None:
    """As of a killed process that only the allocator was asked of."""
    history = History()
    for number in range(20):
        history.sample("rss", MiB)
        history.request(f"r{number}", prompt_tokens=64)
        if number < 15:
            history.rows["boundaries"].append(boundary(number, allocated=number * MiB))
    one = judge(history, tmp_path / "run")
    assert (one.verdict, len(one.counted)) == (Stability.GROWING, 14)


def boundary(request: int, allocated: int) -> tuple[Any, ...]:
    """A row of what the allocator says after a request."""
    known = {"request": request, "device": "cuda:0", "allocated": allocated, "reserved": allocated}
    known["reserved_peak"] = allocated
    return tuple(known.get(name) for name in TABLES["boundaries"].names)


def test_what_changes_its_component_grows_as_what_it_is(tmp_path: Path) -> None:
    def leak(history: History, number: int) -> None:
        history.retag(history.alloc(MiB, "Temp"), "KV_res/compact")

    one = judge(workload(leak), tmp_path / "run")
    assert [row.component for row in one.growing] == ["KV_res/compact"]


def test_what_is_freed_later_doesn_t_grow(tmp_path: Path) -> None:
    held: list[int] = []

    def window(history: History, number: int) -> None:
        held.append(history.alloc(MiB, "KV_res/compact"))
        if len(held) > 2:
            history.free(held.pop(0))

    assert judge(workload(window), tmp_path / "run").verdict is Stability.PLATEAU


def test_failed_requests_don_t_count(tmp_path: Path) -> None:
    history = workload(requests=9)
    history.request("r9", prompt_tokens=64, outcome="oom")
    one = judge(history, tmp_path / "run")
    assert (len(one.counted), one.answered, len(one.served.boundaries)) == (6, 9, 10)


def test_few_requests_decide_nothing(tmp_path: Path) -> None:
    one = judge(workload(requests=6), tmp_path / "run")
    assert (one.verdict, one.wanting) == (Stability.UNDECIDED, 2)


def test_the_warm_up_lasts_until_every_length_and_the_longest_came(tmp_path: Path) -> None:
    history = History()
    for number, length in enumerate([64, 256, 64, 4096, 256, 64, 256, 64]):
        history.alloc(1, "other")
        history.request(f"r{number}", prompt_tokens=length)
    [one] = served(open_trace(history.write(tmp_path / "run")))
    assert [persistence(one, limit=0, warmup_cycles=n).warmup for n in (0, 1, 2, 3)] == [0, 4, 5, 6]


def test_lengths_that_never_repeat_are_compared_with_all(tmp_path: Path) -> None:
    history = History()
    for number in range(40):
        history.alloc(64 * KiB, "Hidden")
        history.request(f"r{number}", prompt_tokens=1000 - 7 * number)
    one = judge(history, tmp_path / "run")
    assert (one.grouped, one.warmup, one.verdict) == (False, 4, Stability.GROWING)


def test_segments_that_pile_up_are_named(tmp_path: Path) -> None:
    """Each request is a little larger than what the allocator has cached."""
    program = Program(16 << 30)
    for number in range(20):
        with program.history.scope("phase", "prefill"):
            program.free(program.alloc((20 + 4 * number) * MiB))
        program.history.request(f"r{number}", prompt_tokens=64)
    [one] = served(open_trace(program.write(tmp_path / "run")))
    found = persistence(one, limit=LIMIT)
    assert found.verdict is Stability.GROWING
    assert found.cause is not None
    assert found.cause.name == "reserved"
    [row] = found.growing
    assert (row.component, row.where, row.count) == ("allocator", "segments taken in prefill", 20)
    assert row.last == one.boundaries[-1].reserved


def test_the_resident_set_decides_only_where_it_is_asked_to(tmp_path: Path) -> None:
    history = History()
    for number in range(20):
        history.free(history.alloc(KiB, "Act"))
        history.sample("rss", (100 + number) * MiB)
        history.request(f"r{number}", prompt_tokens=64)
    [one] = served(open_trace(history.write(tmp_path / "run")))
    assert persistence(one, limit=LIMIT).verdict is Stability.PLATEAU
    told = persistence(one, limit=LIMIT, rss=True)
    assert told.verdict is Stability.GROWING
    assert told.cause is not None
    assert told.cause.name == "process"
    assert told.growing == ()


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    every=st.integers(1, 5),
)
def test_growing_bytes_are_those_that_are_alive(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], every: int
) -> None:
    """Whatever comes and goes, the groups add up to what is allocated after each request."""
    history, live = History(), []
    for number, size in enumerate(sizes):
        if size == 0 and live:
            history.free(live.pop())
        else:
            live.append(history.alloc(1000 * size + 1, ("Act", "Hidden")[size % 2]))
        if number % every == 0:
            history.request(f"r{number}", prompt_tokens=1)
    [one] = served(open_trace(history.write(tmp_path_factory.mktemp("runs") / "run")))
    assert one.account is not None
    events = [row.event for row in one.boundaries if row.event is not None]
    grown = growing_allocations(one.account, events, [0] * len(events))
    alive = [row.allocated or 0 for row in one.boundaries]
    assert sum(row.last for row in grown) <= alive[-1]
    if len(grown) == 2:
        assert sum(row.last for row in grown) == alive[-1]
    assert Action.ALLOC in one.process.contexts["action"]
