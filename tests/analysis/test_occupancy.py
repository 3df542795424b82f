"""What is looked at of an account over time, held against every event of it."""

from pathlib import Path

import numpy as np
import pytest

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.fragmentation import fragmentation
from memtrace.analysis.occupancy import course, occupancy
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.analysis.simulated import CUDA, MiB, Program
from tests.synthetic import History, prefill


def read(folder: Path) -> Account:
    (process,) = open_trace(folder).processes
    return accounts(process)[0]


@pytest.fixture
def account(tmp_path: Path) -> Account:
    """Segments of 20 MiB, half of each freed, then one that is too large; more streams than one."""
    simulated = Program(200 * MiB)
    blocks = [simulated.alloc(9 * MiB, ("Act", "KV_res")[n % 2]) for n in range(12)]
    for block in blocks[::2]:
        simulated.free(block)
    side = simulated.alloc(12 * MiB, stream=1)
    simulated.free(side, by=2)
    simulated.alloc(150 * MiB)
    for block in blocks[1::2]:
        simulated.free(block)
    return read(simulated.write(tmp_path / "run"))


def test_each_stop_has_the_parts_of_its_event(account: Account) -> None:
    found, exact = course(account, 10), fragmentation(account)
    assert found is not None and exact is not None
    assert len(found.stops) == 10
    for stop in found.stops:
        assert stop.parts == exact.at(stop.event)
        assert stop.time_us == account.time_us[stop.event]
    assert max(stop.parts.hard for stop in found.stops) == exact.hard.peak


def test_the_peak_and_a_failure_are_stops(account: Account) -> None:
    found = course(account, 200)
    assert found is not None
    events = {stop.event for stop in found.stops}
    assert account.allocated.peak_event in events
    assert len(found.ooms) == 1 and set(found.ooms) <= events
    [failed] = account.time_us[found.ooms]
    assert found.stops[found.span_of(int(failed))].event == found.ooms[0]


def test_a_span_without_events_is_as_the_one_before(tmp_path: Path) -> None:
    history = History()
    history.event(Action.SEGMENT_ALLOC, 0, 8, None, device=CUDA)
    history.event(Action.ALLOC, 0, 8, "Act", device=CUDA)
    account = read(history.write(tmp_path / "run"))
    found = course(account, 5)
    assert found is not None
    assert [stop.event for stop in found.stops] == [0, 0, 0, 0, 1]


def test_a_cpu_has_no_segments_to_look_at(tmp_path: Path) -> None:
    assert course(read(prefill().write(tmp_path / "run")), 10) is None


def test_shares_are_means_over_addresses_and_times(account: Account) -> None:
    rows, spans = 7, 11
    found = course(account, spans)
    assert found is not None
    shares = occupancy(account, rows, found.edges_us)
    span, row = np.diff(found.edges_us)[0], shares.edges[1]
    assert account.reserved is not None
    for cells, series in ((shares.reserved, account.reserved), (shares.used, account.active)):
        ends = np.append(account.time_us[series.at], account.time_us[-1])
        np.testing.assert_allclose(
            cells.sum() * span * row, (series.levels[1:] * np.diff(ends)).sum()
        )
    assert (shares.used <= shares.reserved).all()


def test_one_block_covers_just_its_cells(tmp_path: Path) -> None:
    history = History()
    history.event(Action.SEGMENT_ALLOC, 100, 40, None, device=CUDA)
    history.event(Action.SEGMENT_ALLOC, 500, 40, None, device=CUDA)  # a gap is left out
    history.event(Action.ALLOC, 510, 20, "Act", device=CUDA)
    history.event(Action.FREE, 510, 20, "Act", device=CUDA)
    history.event(Action.SEGMENT_FREE, 100, 40, None, device=CUDA)
    account = read(history.write(tmp_path / "run"))
    shares = occupancy(account, 4, np.linspace(1000, 5000, 5))
    assert shares.edges.tolist() == [0, 20, 40, 60, 80]
    assert shares.reserved.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert shares.used.tolist() == [[0] * 4, [0] * 4, [0, 0, 0.5, 0], [0, 0, 0.5, 0]]
