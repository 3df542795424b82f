"""What runs do, step by step, and how two of them are laid side by side."""

from pathlib import Path

import numpy as np

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.alignment import by_progress, by_time
from memtrace.analysis.steps import Steps, common, steps
from memtrace.trace.reader import open_trace
from tests.synthetic import History, prefill


def account_of(history: History, folder: Path) -> Account:
    return accounts(open_trace(history.write(folder)).processes[0])[0]


def made_up(*names: str) -> Steps:
    """Steps of a second each."""
    start = np.arange(len(names)) * 1_000_000
    return Steps("phase", [(("phase", name),) for name in names], start, start + 1_000_000)


def test_steps_are_phases_layers_and_chunks_in_order(tmp_path: Path) -> None:
    account = account_of(prefill(layers=2, chunks=3), tmp_path / "run")
    assert steps(account, "phase").names() == ["prefill"]
    layers = steps(account, "layer")
    assert layers.keys == [(("phase", "prefill"), ("layer", str(layer))) for layer in range(2)]
    assert (layers.end_us > layers.start_us).all()
    assert steps(account, "chunk").names() == ["chunk 0", "chunk 1", "chunk 2"] * 2


def test_a_phase_inside_a_layer_is_part_of_the_layer(tmp_path: Path) -> None:
    account = account_of(prefill(layers=3), tmp_path / "run")
    names = {name for key in steps(account, "layer").keys for _, name in key}
    assert names == {"prefill", "0", "1", "2"}  # "compress" is inside each


def test_a_step_ends_where_something_is_allocated_outside_of_it(tmp_path: Path) -> None:
    history = History()
    with history.scope("phase", "loading"):
        history.alloc(1, "model")
    history.alloc(1, "other")
    with history.scope("phase", "decode"):
        history.free(history.alloc(1, "Act"))
    found = steps(account_of(history, tmp_path / "run"), "phase")
    assert found.names() == ["loading", "decode"]
    assert found.start_us.tolist() == [1000, 3000]
    assert found.end_us.tolist() == [2000, 4000]


def test_a_run_without_scopes_has_no_steps(tmp_path: Path) -> None:
    history = History()
    history.alloc(1, "model")
    assert steps(account_of(history, tmp_path / "run"), "layer").names() == []


def test_common_steps_are_counted_and_in_one_order() -> None:
    one = made_up("load", "prefill", "decode", "prefill", "decode")
    other = made_up("prefill", "compress", "decode", "load", "prefill")
    numbers = common([one, other])
    assert [one.names()[n] for n in numbers[0]] == ["prefill", "decode", "prefill"]
    assert [found.tolist() for found in numbers] == [[1, 2, 3], [0, 2, 4]]


def test_by_progress_a_step_stands_at_one_place_in_all_runs() -> None:
    one, other = made_up("load", "prefill", "decode"), made_up("prefill", "wait", "decode")
    axes, names = by_progress([(0, 3_000_000), (0, 9_000_000)], [one, other])
    assert names == ["prefill", "decode"]
    for axis, run in zip(axes, (one, other), strict=True):
        at = dict(zip(run.names(), axis.places(run.start_us).tolist(), strict=True))
        assert (at["prefill"], at["decode"]) == (0, 1)
    assert axes[0].places(np.array([0, 3_000_000])).tolist() == [-1, 3]
    assert axes[1].places(np.array([9_000_000])).tolist() == [3]


def test_runs_without_a_common_step_have_no_names_to_stand_at() -> None:
    _, names = by_progress([(0, 1), (0, 1)], [made_up("load"), made_up("decode")])
    assert names == []


def test_places_and_times_are_inverse() -> None:
    axis = by_time(2_000_000, 5_000_000, zero_us=1_000_000)
    times = np.array([2_000_000, 3_456_789, 5_000_000])
    np.testing.assert_allclose(axis.places(times), [1, 2.456789, 4])
    assert axis.times(axis.places(times)).tolist() == times.tolist()
