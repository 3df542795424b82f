"""A recorded device with something changed."""

from pathlib import Path

import pytest

from memtrace.allocator.requests import requests_of
from memtrace.allocator.simulation import ENDLESS, Setup
from memtrace.analysis.accounts import accounts
from memtrace.analysis.what_if import Change, conditions, replayed
from memtrace.devices import catalogue
from memtrace.errors import MemtraceError
from memtrace.trace.reader import open_trace
from tests.analysis.simulated import MiB, Program
from tests.synthetic import prefill


def test_what_is_not_changed_is_as_recorded() -> None:
    recorded = Setup(total=100 * MiB, outside=3)
    assert Change().of(recorded) == recorded
    assert str(Change()) == "as recorded"


def test_changes_are_made_together() -> None:
    setup = Change("max_split_size_mb:64", "l4-24g", "2.8").of(Setup())
    card = catalogue()["l4-24g"]
    assert (setup.torch, setup.settings.max_split_size) == ((2, 8), 64 * MiB)
    assert (setup.total, setup.outside) == (card.total, card.context or 0)
    assert Change(device="512 MiB").of(Setup()).total == 512 * MiB
    assert str(Change("", "l4-24g", "2.8")) == "no settings, l4-24g, torch 2.8"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change(device="l5"), "'l5' is neither a card of memtrace devices nor a size such as 24"),
        (Change(device="0"), "'0' is neither"),
        (Change(torch="two"), "'two' is not a version of torch; write it as 2.13"),
        (Change("magic:True"), "'magic' is no setting of torch"),
        (Change("backend:cudaMallocAsync"), "cudaMallocAsync can't be replayed"),
    ],
)
def test_what_cannot_be_changed_is_said(change: Change, said: str) -> None:
    with pytest.raises(MemtraceError, match=said):
        change.of(Setup())


def test_a_replay_under_other_settings_is_a_run(tmp_path: Path) -> None:
    simulated = Program(100 * MiB)
    for _ in range(10):
        simulated.alloc(8 * MiB)
    simulated.alloc(16 * MiB)
    trace = open_trace(simulated.write(tmp_path / "run"))
    account = accounts(trace.processes[0])[0]
    done: list[int] = []
    own, notes = replayed(trace, account, Change(), tmp_path / "own", done.append)
    assert (own.failures, own.reserved_peak) == (1, 100 * MiB)
    assert notes == ["By the rules of torch 2.15, on a device of 100.0 MiB."]
    assert sum(done) > 0
    change = Change("expandable_segments:True")
    other, _ = replayed(trace, account, change, tmp_path / "other")
    assert (other.failures, other.reserved_peak) == (0, 100 * MiB)
    [process] = open_trace(tmp_path / "other").processes
    assert process.manifest["replayed"] == "expandable_segments:True"


def test_what_ran_on_a_cpu_has_no_limit(tmp_path: Path) -> None:
    trace = open_trace(prefill().write(tmp_path / "run"))
    account = accounts(trace.processes[0])[0]
    _, notes = replayed(trace, account, Change(), tmp_path / "out")
    assert notes[0].endswith("; without a limit, since the size of the device isn't known.")
    requests = requests_of(account.process, account.device)
    assert conditions(requests, Setup(), "--memory")[0].endswith("isn't known (--memory).")
    assert Setup().total == ENDLESS
    newer = conditions(requests, Setup(torch=(9, 9)))[0]
    assert newer.startswith("By the rules of torch 2.15, the newest that was checked, and not of")
