"""When allocations lived, held against a walk through the events."""

from pathlib import Path

import pytest

from memtrace.analysis.accounts import accounts
from memtrace.analysis.lifetimes import Lifetimes
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.synthetic import History, seeded_history

CUDA = "cuda:0"


def of(history: History, folder: Path) -> Lifetimes:
    (process,) = open_trace(history.write(folder / "run")).processes
    return accounts(process)[0].lives


@pytest.mark.parametrize("seed", range(4))
def test_lives_are_as_a_walk_finds_them(tmp_path: Path, seed: int) -> None:
    found = of(seeded_history(seed, 300), tmp_path)
    process = found.process
    live: dict[int, int] = {}  # storage → its allocation
    freed: dict[int, int] = {}
    labels: dict[int, int] = {}
    for event, (number, context) in enumerate(
        zip(process.events["id"].tolist(), process.events["context"].tolist(), strict=True)
    ):
        action = process.contexts["action"][context]
        if action == Action.ALLOC:
            live[number] = labels[event] = event
        elif action == Action.RETAG:
            labels[live[number]] = event
        else:
            freed[live.pop(number)] = event
        expected, alive = sorted(live.values()), found.alive(event)
        assert found.born[alive].tolist() == expected
        assert found.allocated(event).tolist() == alive.tolist()
        assert found.labels_at(event)[alive].tolist() == [labels[one] for one in expected]
    born = found.born.tolist()
    assert born == sorted(labels)
    ends = found.labels_at(len(process.events["id"])).tolist()
    assert ends == [labels[one] for one in born]
    assert found.freed.tolist() == [freed.get(one, len(process.events["id"])) for one in born]
    assert found.gone.tolist() == found.freed.tolist()


def moves(history: History, *steps: tuple[Action, int]) -> History:
    for action, address in steps:
        previous = "Temp" if action == Action.RETAG else None
        history.event(action, address, 512, "Act", previous, device=CUDA)
    return history


def test_a_block_that_waits_for_a_stream_is_gone_when_that_is_done(tmp_path: Path) -> None:
    history = moves(
        History(),
        (Action.ALLOC, 0),
        (Action.ALLOC, 512),
        (Action.FREE_REQUESTED, 0),
        (Action.FREE_REQUESTED, 512),
        (Action.FREE_COMPLETED, 512),
        (Action.ALLOC, 512),
        (Action.FREE_COMPLETED, 0),
    )
    found = of(history, tmp_path)
    assert found.born.tolist() == [0, 1, 5]
    assert found.freed.tolist() == [2, 3, 7]
    assert found.gone.tolist() == [6, 4, 7]
    assert found.alive(3).tolist() == [0, 1]
    assert found.allocated(3).tolist() == []


def test_a_free_that_is_missing_was_before_the_address_came_again(tmp_path: Path) -> None:
    history = moves(History(), (Action.ALLOC, 0), (Action.RETAG, 0), (Action.ALLOC, 0))
    found = of(history, tmp_path)
    assert found.gone.tolist() == [2, 3]


def test_frees_of_what_is_not_there_are_left_out(tmp_path: Path) -> None:
    history = moves(
        History(),
        (Action.FREE, 0),
        (Action.RETAG, 512),
        (Action.ALLOC, 512),
        (Action.FREE, 512),
        (Action.FREE, 512),
    )
    found = of(history, tmp_path)
    assert (found.born.tolist(), found.freed.tolist()) == ([2], [3])
    assert found.retags.tolist() == []


def test_what_outlives_a_stretch_of_events_is_found_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memtrace.analysis.lifetimes._STRETCH", 4)
    history = seeded_history(1, 60)
    found = of(history, tmp_path)
    for event in range(60):
        expected = [
            row
            for row, (born, gone) in enumerate(zip(found.born, found.gone, strict=True))
            if born <= event < gone
        ]
        assert found.alive(event).tolist() == expected
