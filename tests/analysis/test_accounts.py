"""The books against a replay of the history in plain Python, storage by storage."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.identities import check
from memtrace.analysis.process import process_memory
from memtrace.analysis.timeline import timeline
from memtrace.components import LIVE_COMPONENTS, TENSOR_COMPONENTS, base
from memtrace.trace.reader import ProcessTrace, Trace, open_trace
from memtrace.trace.schema import Action
from tests.synthetic import History, histories, prefill, seeded_history


def replay(process: ProcessTrace, device: str) -> list[dict[str, int]]:
    """Bytes by component after each event, from a dictionary of live storages."""
    live: dict[int, tuple[str, int]] = {}
    found = []
    contexts = process.contexts
    for number, size, context in zip(
        *(process.events[name].tolist() for name in ("id", "bytes", "context")), strict=True
    ):
        if contexts["device"][context] == device:
            if contexts["action"][context] == Action.FREE:
                assert live.pop(number)[1] == size
            else:
                live[number] = (contexts["component"][context], size)
        totals = dict.fromkeys(TENSOR_COMPONENTS, 0)
        for component, held in live.values():
            totals[base(component)] += held
        found.append(totals)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def written(history: History, folder: Path) -> Trace:
    return open_trace(history.write(folder / f"{len(list(folder.iterdir()))}.memtrace"))


@settings(max_examples=60)
@given(history=histories(devices=2))
def test_components_are_those_of_a_replay_at_every_event(history: History, folder: Path) -> None:
    trace = written(history, folder)
    for account in accounts(trace.processes[0]):
        expected = replay(account.process, account.device)
        events = np.arange(len(expected))
        for name in TENSOR_COMPONENTS:
            found = account.components[name].read(events).tolist()
            assert found == [totals[name] for totals in expected]
        sums = [sum(totals.values()) for totals in expected]
        assert account.allocated.read(events).tolist() == sums
        assert account.allocated.peak == max(sums)
        if account.allocated.peak:
            assert account.allocated.peak_event == sums.index(max(sums))
        lives = [sum(totals[name] for name in LIVE_COMPONENTS) for totals in expected]
        assert account.live.peak == max(lives)


@settings(max_examples=60)
@given(history=histories(devices=2))
def test_identities_hold_on_every_consistent_history(history: History, folder: Path) -> None:
    trace = written(history, folder)
    for account in accounts(trace.processes[0]):
        verdict = check(account, process_memory(trace, account.process, account.device))
        assert verdict.problem is None
        assert verdict.events == len(history.rows["events"])


@settings(max_examples=30)
@given(history=histories())
def test_every_drawn_point_adds_up_and_the_peak_is_drawn(history: History, folder: Path) -> None:
    trace = written(history, folder)
    account = accounts(trace.processes[0])[0]
    drawn = timeline(account, process_memory(trace, account.process), bins=4)
    assert np.array_equal(np.sum(list(drawn.components.values()), axis=0), drawn.allocated)
    assert drawn.allocated.max() == account.allocated.peak
    assert len(drawn.events) <= 2 * 4 + 2
    assert (np.diff(drawn.time_us) >= 0).all()


@settings(max_examples=30)
@given(history=histories(), ends=st.tuples(st.integers(-5, 70), st.integers(0, 70)))
def test_a_part_of_the_timeline_has_its_own_peak_and_begins_with_what_was_held(
    history: History, ends: tuple[int, int], folder: Path
) -> None:
    trace = written(history, folder)
    account = accounts(trace.processes[0])[0]
    begin, end = 1000 * ends[0], 1000 * (ends[0] + ends[1])
    memory = process_memory(trace, account.process)
    drawn = timeline(account, memory, span_us=(begin, end), bins=4)
    first, last = (
        int((account.time_us < begin).sum()) - 1,
        int((account.time_us <= end).sum()) - 1,
    )
    within = account.allocated.read(np.arange(max(first, 0), max(last, 0) + 1))
    assert drawn.allocated.max() == within.max()
    assert drawn.allocated[0] == within[0]
    assert drawn.total_events == len(within)
    assert ((drawn.process_time_us >= begin) & (drawn.process_time_us <= end)).all()


def test_a_timeline_has_the_highest_between_each_two_of_its_bins(tmp_path: Path) -> None:
    history = seeded_history(seed=2, length=2000)
    trace = open_trace(history.write(tmp_path / "run"))
    account = accounts(trace.processes[0])[0]
    edges = np.array([0, 100_000, 110_000, 1_500_000, 3_000_000])
    drawn = timeline(account, process_memory(trace, account.process), bins=edges)
    for start, stop in pairwise(edges):
        among = (account.time_us >= start) & (account.time_us < stop)
        kept = (drawn.time_us >= start) & (drawn.time_us < stop)
        whole = account.allocated.read(np.flatnonzero(among))
        assert drawn.allocated[kept].max(initial=0) == whole.max(initial=0)


def test_reserved_memory_is_part_of_a_timeline_and_its_spikes_too(tmp_path: Path) -> None:
    history = History()
    for number in range(500):
        size = 1 << 40 if number == 250 else 1 << 20
        history.event(Action.SEGMENT_ALLOC, number, size, None, device="cuda:0")
        history.event(Action.ALLOC, number, 100, "Act", device="cuda:0")
        history.event(Action.FREE, number, 100, "Act", device="cuda:0")
        history.event(Action.SEGMENT_FREE, number, size, None, device="cuda:0")
    trace = open_trace(history.write(tmp_path / "run"))
    account = accounts(trace.processes[0])[0]
    drawn = timeline(account, process_memory(trace, account.process, "cuda:0"), bins=10)
    assert drawn.reserved.max() == 1 << 40
    assert len(drawn.reserved) <= 22
    span = timeline(account, process_memory(trace, account.process), span_us=(2000, 9000))
    assert span.reserved[0] == 1 << 20


def test_timeline_keeps_a_spike_of_one_event_among_many(tmp_path: Path) -> None:
    history = seeded_history(seed=1, length=3000)
    spike = history.alloc(1 << 40, "Temp")
    history.free(spike)
    for _ in range(500):
        history.free(history.alloc(1, "Act"))
    account = accounts(open_trace(history.write(tmp_path / "run")).processes[0])[0]
    drawn = timeline(account, process_memory(open_trace(tmp_path / "run"), account.process), bins=8)
    assert drawn.allocated.max() == account.allocated.peak >= 1 << 40
    assert drawn.components["Temp"][drawn.allocated.argmax()] >= 1 << 40
    assert len(drawn.events) <= 18
    assert (drawn.events[0], drawn.events[-1]) == (0, len(history.rows["events"]) - 1)


def break_rows(history: History, kind: str) -> str:
    """Append something that can't be, and return how it must be reported."""
    number = history.alloc(100, "Act")
    at = len(history.rows["events"])
    if kind == "double free":
        history.free(number)
        history.event(Action.FREE, number, 100, "Act")
        return f"storage {number} is freed or retagged while it isn't live at event {at + 1}"
    if kind == "free of an unknown storage":
        history.event(Action.FREE, 999, 100, "Act")
        return f"storage 999 is freed or retagged while it isn't live at event {at}"
    if kind == "double allocation":
        history.event(Action.ALLOC, number, 100, "Act")
        return f"storage {number} is allocated while it is live at event {at}"
    if kind == "free of other bytes":
        history.event(Action.FREE, number, 60, "Act")
        return f"storage {number} changes its size while it is live at event {at}"
    if kind == "free from another component":
        history.event(Action.FREE, number, 100, "Temp")
        return f"storage {number} leaves a component it isn't in at event {at}"
    if kind == "retag from another component":
        history.event(Action.RETAG, number, 100, "Hidden", "Temp")
        return f"storage {number} leaves a component it isn't in at event {at}"
    history.event(Action.ALLOC, 999, -1, "Act")
    return f"storage 999 has a negative size at event {at}"


@pytest.mark.parametrize(
    "kind",
    [
        "double free",
        "free of an unknown storage",
        "double allocation",
        "free of other bytes",
        "free from another component",
        "retag from another component",
        "negative size",
    ],
)
def test_an_inconsistent_history_is_named_by_its_first_bad_event(kind: str, tmp_path: Path) -> None:
    history = prefill()
    expected = break_rows(history, kind)
    trace = written(history, tmp_path)
    account = accounts(trace.processes[0])[0]
    assert check(account, process_memory(trace, account.process)).problem == expected


def test_the_recorders_own_count_is_held_against_the_events(tmp_path: Path) -> None:
    history = prefill()
    history.sample("allocated:cpu", 4 * 128 * 1024)
    trace = written(history, tmp_path)
    account = accounts(trace.processes[0])[0]
    assert check(account, process_memory(trace, account.process)).hold

    history.sample("allocated:cpu", 4 * 128 * 1024 + 1)
    trace = written(history, tmp_path)
    account = accounts(trace.processes[0])[0]
    problem = check(account, process_memory(trace, account.process)).problem
    assert problem is not None
    assert "512.0 KiB were counted" in problem


def test_a_storage_number_may_be_used_again_after_its_free(tmp_path: Path) -> None:
    history = History()
    for size in (100, 200):
        history.event(Action.ALLOC, 7, size, "Act")
        history.event(Action.FREE, 7, size, "Act")
    trace = written(history, tmp_path)
    account = accounts(trace.processes[0])[0]
    assert check(account, process_memory(trace, account.process)).hold
    assert account.allocated.peak == 200


def segment_account(tmp_path: Path, with_segments: bool) -> Account:
    history = History()
    if with_segments:
        history.event(Action.SEGMENT_ALLOC, 1, 2 << 20, None, device="cuda:0")
    history.alloc(512, "Act", device="cuda:0")
    if with_segments:
        history.event(Action.SEGMENT_MAP, 2, 1 << 20, None, device="cuda:0")
    return accounts(written(history, tmp_path).processes[0])[0]


def test_reserved_is_read_from_the_segments_of_a_caching_allocator(tmp_path: Path) -> None:
    account = segment_account(tmp_path, with_segments=True)
    assert account.allocated.peak == 512
    assert account.reserved is not None
    assert account.reserved.peak == 3 << 20
    assert account.allocator_peak == (3 << 20) - 512


def test_reserved_is_unknown_without_segments_and_allocated_on_a_cpu(tmp_path: Path) -> None:
    account = segment_account(tmp_path, with_segments=False)
    assert account.reserved is None
    assert account.allocator_peak is None
    on_cpu = accounts(written(prefill(), tmp_path).processes[0])[0]
    assert on_cpu.reserved is on_cpu.allocated
    assert on_cpu.allocator_peak == 0


def test_the_device_with_the_largest_peak_comes_first_and_meta_last(tmp_path: Path) -> None:
    history = History()
    history.alloc(10, "model", device="cpu")
    history.alloc(30, "model", device="cuda:0")
    history.alloc(50, "model", device="meta")
    found = accounts(written(history, tmp_path).processes[0])
    assert [(one.device, one.allocated.peak) for one in found] == [
        ("cuda:0", 30),
        ("cpu", 10),
        ("meta", 50),
    ]
