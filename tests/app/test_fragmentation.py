"""The page of segments and free memory: its figures as functions, and as Streamlit runs it."""

from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

pytest.importorskip("streamlit")

from app import frames_fragmentation as frames
from app.figures.fragmentation import (
    ADDRESSES,
    KINDS,
    History,
    Instant,
    describe,
    kinds,
    moments,
    over_time,
    row_bytes,
    segment_map,
)
from app.figures.style import DARK, LIGHT
from app.views.fragmentation import PATH
from memtrace.analysis.accounts import accounts
from memtrace.analysis.fragmentation import parts
from memtrace.analysis.occupancy import course, occupancy
from memtrace.analysis.places import place
from memtrace.analysis.segments import Layout, layout_at
from memtrace.analysis.summary import summarise
from memtrace.components import COLOURS
from memtrace.sizes import format_size
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.analysis.simulated import MiB, Program
from tests.app.opening import figure, opened
from tests.synthetic import History as Rows
from tests.synthetic import prefill


def program(blocks: int = 12, size: int = 9 * MiB) -> Program:
    """Two blocks a segment of 20 MiB, every other one freed; a failure; a block that waits."""
    simulated = Program(200 * MiB)
    found = [simulated.alloc(size - 100, ("Act", "KV_res/full")[n % 2]) for n in range(blocks)]
    for block in found[::2]:
        simulated.free(block)
    simulated.alloc(150 * MiB)
    side = simulated.alloc(12 * MiB, stream=1)
    simulated.free(side, by=2)
    return simulated


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return program().write(tmp_path / "pieces.memtrace")


def history_of(run: Path) -> History:
    (process,) = open_trace(run).processes
    account = accounts(process)[0]
    found = course(account, 200)
    assert found is not None
    marked = {"retries": account.time_us[found.retries], "ooms": account.time_us[found.ooms]}
    return History(run.stem, found, occupancy(account, ADDRESSES, found.edges_us), marked)


def instant_of(run: Path, span: int | None = None) -> Instant:
    """At the end of a span; None: where most is in pieces."""
    (process,) = open_trace(run).processes
    stops = history_of(run).course.stops
    stop = max(stops, key=lambda stop: stop.parts.hard) if span is None else stops[span]
    layout = layout_at(accounts(process)[0], stop.event)
    assert layout is not None
    return Instant(run.stem, stop, layout, place(process, 0), {0: "somewhere"})


def drawn(figure: go.Figure, name: str) -> go.Scatter:
    [trace] = [one for one in figure.data if one.name == name]
    return trace


def area(trace: go.Scatter) -> float:
    """Of rectangles of five points each, in units of x times rows of 0.8."""
    x = np.asarray(trace.x, dtype=float).reshape(-1, 6)
    return float((x[:, 1] - x[:, 0]).sum())


def test_every_byte_of_the_segments_is_of_one_kind(run: Path) -> None:
    for span in (40, 100, 199):
        one = instant_of(run, span)
        found = {
            kind: int((ends[:, 1] - ends[:, 0]).sum()) for kind, ends in kinds(one.layout).items()
        }
        expected = parts(one.layout)
        for kind in ("slack", "pending", "hard", "releasable", "private"):
            assert found[kind] == getattr(expected, kind)
        assert sum(found.values()) == expected.reserved
        everything = np.concatenate(list(kinds(one.layout).values()))
        everything = everything[np.argsort(everything[:, 0])]
        assert everything[0, 0] == 0
        assert (everything[1:, 0] == everything[:-1, 1]).all()


def test_areas_of_the_map_are_bytes(run: Path) -> None:
    one = instant_of(run)
    row = row_bytes(one.stop.parts.reserved)
    figure = segment_map([one], row, LIGHT)
    for kind, ends in kinds(one.layout).items():
        size = int((ends[:, 1] - ends[:, 0]).sum())
        if size > MiB:
            assert area(drawn(figure, kind)) * MiB == pytest.approx(size, rel=0.02)


def test_what_is_no_component_is_told_by_its_pattern(run: Path) -> None:
    figure = segment_map([instant_of(run)], 32 * MiB, DARK)
    assert drawn(figure, "KV_res").fillcolor == COLOURS["KV_res"]
    assert drawn(figure, "KV_res").fillpattern.shape is None
    assert drawn(figure, "hard").fillpattern.shape == "/"
    patterns = [trace.fillpattern.shape for trace in figure.data if trace.fillpattern.shape]
    assert len(set(patterns)) == len(patterns)


def test_blocks_say_what_they_are(run: Path) -> None:
    hovers = drawn(segment_map([instant_of(run)], 32 * MiB, LIGHT), "blocks")
    assert "9.0 MiB allocated KV_res/full<br>somewhere" in set(hovers.text)
    assert any(text.startswith("9.0 MiB free") for text in hovers.text)


def test_instants_share_one_scale_and_one_legend(run: Path, tmp_path: Path) -> None:
    other = program(10).write(tmp_path / "fewer.memtrace")
    figure = segment_map([instant_of(run), instant_of(other)], 32 * MiB, LIGHT)
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range == (0, 32)
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(named) == sorted(set(named))
    ranks = [KINDS.index(trace.name) for trace in figure.data if trace.name in KINDS]
    assert len(ranks) > len(set(ranks))


def test_nothing_reserved_is_an_empty_map(run: Path) -> None:
    one = instant_of(run, 0)
    empty = Instant("none", one.stop, Layout.none(), one.place, {})
    assert kinds(empty.layout)["hard"].size == 0
    assert segment_map([empty], 32 * MiB, LIGHT).data


def test_curves_are_the_parts_at_each_stop(run: Path) -> None:
    history = history_of(run)
    figure = over_time([history], LIGHT, [3])
    stops = history.course.stops
    for kind in ("hard", "pending"):
        expected = [getattr(stop.parts, kind) / MiB for stop in stops]
        np.testing.assert_allclose(drawn(figure, kind).y, expected, rtol=1e-6)
    ratio = [100 * stop.parts.ratio for stop in stops]
    np.testing.assert_allclose(drawn(figure, "fragmentation ratio").y, ratio)
    [failed] = drawn(figure, "out of memory").x
    assert failed == history.time_us["ooms"][0] / 1e6
    assert {shape.x0 for shape in figure.layout.shapes} == {stops[3].time_us / 1e6}
    assert moments(figure, [history], [3]) == dict.fromkeys(
        ("xaxis", "xaxis2", "xaxis3"), stops[3].time_us / 1e6
    )


def test_what_is_freed_in_the_end_doesnt_dwarf_what_is_unused_before(tmp_path: Path) -> None:
    simulated = Program(200 * MiB)
    found = [simulated.alloc(20 * MiB) for _ in range(5)]
    simulated.free(found.pop())
    simulated.alloc(15 * MiB)
    for block in found:
        simulated.free(block)
    history = history_of(simulated.write(tmp_path / "ends.memtrace"))
    figure = over_time([history], LIGHT)
    assert max(drawn(figure, "releasable").y) >= 80
    assert figure.layout.yaxis2.range[1] == pytest.approx(1.08 * 20)


def test_the_map_over_time_is_blank_where_nothing_was_reserved(run: Path) -> None:
    history = history_of(run)
    share = drawn(over_time([history], LIGHT), "used").z
    assert np.isnan(share[-1, 0]) and not np.isnan(share[0, -1])
    assert np.nanmax(share) == pytest.approx(100)


def test_eight_runs_have_three_parts_each(run: Path) -> None:
    history = history_of(run)
    eight = [History(f"run{n}", *list(vars(history).values())[1:]) for n in range(8)]
    figure = over_time(eight, LIGHT, [0] * 8)
    assert len(figure.layout.shapes) == 24
    assert sum(trace.type == "heatmap" for trace in figure.data) == 8


def test_an_instant_is_described_in_numbers(run: Path) -> None:
    assert "120.0 MiB reserved in 6 segments, 54.0 MiB allocated" in describe(instant_of(run))


def test_the_tables_hold_bytes(run: Path) -> None:
    one, history = instant_of(run), history_of(run)
    assert frames.blocks([one])["bytes"].sum() == one.stop.parts.reserved
    table = frames.courses([history])
    assert table["hard"].tolist() == [stop.parts.hard for stop in history.course.stops]
    assert frames.unused([one]).loc["hard", "pieces"] == "66.0 MiB"


# -- the page --------------------------------------------------------------------------------------


def test_the_slider_moves_the_map(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [str(run)], PATH, instant="20")
    before = figure(app, "segments")
    assert app.slider(key="instant").value == 20
    app.slider(key="instant").set_value(150).run()
    assert figure(app, "segments") != before
    expected = history_of(run).course.stops[149].parts
    table = app.table[0].value
    assert table.loc["hard"].tolist() == [format_size(expected.hard)]
    assert table.loc["fragmentation ratio"].tolist() == [f"{100 * expected.ratio:.1f} %"]


def test_the_buttons_go_where_they_say(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [str(run)], PATH)
    reported = summarise(open_trace(run)).primary
    assert reported is not None
    buttons = {button.label: button for button in app.button}
    buttons["Peak of allocated"].click().run()
    assert app.table[0].value.loc["allocated"].tolist() == [format_size(reported.peak.allocated)]
    buttons["Out of memory"].click().run()
    assert f"after {reported.ooms[0].time_us / 1e6:.3f} s" in app.caption[0].value


def test_a_run_of_a_cpu_is_left_out_in_a_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = prefill().write(tmp_path / "tide.memtrace")
    app = opened(monkeypatch, [str(run), str(cpu)], PATH)
    assert "No segments were recorded of tide" in app.info[0].value
    assert list(app.table[0].value.columns) == ["pieces"]
    alone = opened(monkeypatch, [str(cpu)], PATH)
    assert not alone.get("plotly_chart") and not alone.error


@pytest.mark.parametrize("events", [1, 2, 3])
def test_a_few_events_are_enough(
    events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = Rows()
    actions = (Action.ALLOC, Action.SEGMENT_ALLOC, Action.OOM)
    for action in actions[:events]:
        component = "Act" if action == Action.ALLOC else None
        history.event(action, 1 << 21, 1 << 21, component, device="cuda:0")
    app = opened(monkeypatch, [str(history.write(tmp_path / "few"))], PATH)
    assert not app.error
    assert bool(app.info) == (events == 1)
