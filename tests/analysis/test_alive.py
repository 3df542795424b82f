"""What is alive at an instant."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.alive import change, largest
from memtrace.analysis.peaks import top_allocations
from memtrace.trace.reader import open_trace
from tests.synthetic import History, histories, prefill


def account_of(history: History, folder: Path) -> Account:
    return accounts(open_trace(history.write(folder)).processes[0])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@settings(max_examples=30)
@given(history=histories())
def test_what_is_alive_is_what_was_not_freed(history: History, folder: Path) -> None:
    account = account_of(history, folder / str(len(list(folder.iterdir()))))
    last = len(history.rows["events"]) - 1
    found = [(one.bytes, one.component) for one in largest(account, last, 1000)]
    live = [(size, label) for _, size, label in history.live.values()]
    assert sorted(found) == sorted(live)
    assert [size for size, _ in found] == sorted((size for size, _ in live), reverse=True)


def test_a_storage_keeps_its_age_and_place_when_it_changes_its_component(tmp_path: Path) -> None:
    history = History()
    with history.scope("phase", "prefill"), history.scope("layer", "3"):
        kept = history.alloc(1000, "Temp", op="aten.gather")
    history.retag(kept, "KV_res/compact")
    history.alloc(10, "Act")
    [storage, _] = largest(account_of(history, tmp_path / "run"), 2, 5)
    assert (storage.component, storage.bytes, storage.age_us) == ("KV_res/compact", 1000, 2000)
    assert str(storage.place) == "prefill > layer 3 > aten.gather"


def test_a_change_is_what_one_instant_has_beyond_another(tmp_path: Path) -> None:
    account = account_of(prefill(layers=2), tmp_path / "run")
    events = (3, account.allocated.peak_event or 0)
    before, now = (top_allocations(account, event) for event in events)
    found = change(now, before)
    levels = [account.allocated.read_one(event) for event in events]
    assert sum(group.bytes for group in found) == levels[1] - levels[0]
    assert change(now, now) == []
    reverse = {group.place: group.bytes for group in change(before, now)}
    assert reverse == {group.place: -group.bytes for group in found}
