"""The figures, without Streamlit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from app.figures.style import LIGHT
from app.figures.timeline import SPANS, Panel, describe, highest, timelines
from app.frames import equations, points
from memtrace.analysis.compare import compare
from memtrace.analysis.summary import Summary, summarise
from memtrace.analysis.timeline import timeline
from memtrace.components import COLOURS
from memtrace.trace.reader import open_trace
from tests.synthetic import History, prefill

MIB = 1 << 20


def summary_of(history: History, folder: Path, name: str) -> Summary:
    return summarise(open_trace(history.write(folder / f"{name}.memtrace")))


def panel_of(summary: Summary) -> Panel:
    one = summary.primary
    assert one is not None
    drawn = timeline(one.account, one.memory)
    return Panel(summary.name, drawn, one.peak, one.memory.source)


@pytest.fixture
def panels(tmp_path: Path) -> list[Panel]:
    histories = {"snapkv": prefill(scale=9), "tide": prefill(scale=1)}
    return [panel_of(summary_of(one, tmp_path, name)) for name, one in histories.items()]


def traces(figure: go.Figure, axis: str) -> dict[str, go.Scatter]:
    return {trace.name: trace for trace in figure.data if (trace.xaxis or "x") == axis}


def stack(figure: go.Figure, axis: str) -> Sequence[go.Scatter]:
    return [trace for trace in traces(figure, axis).values() if trace.stackgroup]


def test_components_are_stacked_in_their_own_colours_and_add_up(panels: list[Panel]) -> None:
    figure = timelines(panels, LIGHT)
    for axis, panel in zip(("x", "x2"), panels, strict=True):
        bands = stack(figure, axis)
        assert [band.name for band in bands] == ["model", "KV_res", "Hidden", "Act", "Temp"]
        assert [band.fillcolor for band in bands] == [COLOURS[band.name] for band in bands]
        total = traces(figure, axis)["allocated"]
        sums = np.sum([band.y for band in bands], axis=0)
        np.testing.assert_allclose(sums, total.y, rtol=1e-6)
        assert max(total.y) == np.float32(panel.peak.allocated / MIB)


def test_runs_share_one_scale_and_one_legend(panels: list[Panel]) -> None:
    figure = timelines(panels, LIGHT)
    assert figure.layout.yaxis2.matches == "y"
    assert figure.layout.yaxis.title.text == "MiB"
    assert "seconds" in figure.layout.xaxis.title.text
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(named) == sorted(set(named))
    assert "Act" in named


def test_the_peak_is_marked_and_labelled_where_it_was(panels: list[Panel]) -> None:
    marker = traces(timelines(panels, LIGHT), "x")["peak"]
    assert list(marker.text) == ["peak 7.7 MiB"]
    assert list(marker.x) == [panels[0].peak.time_us / 1e6]
    assert list(marker.y) == [panels[0].peak.allocated / MIB]


def test_process_memory_is_a_line_and_absent_where_it_is_unknown(
    panels: list[Panel], tmp_path: Path
) -> None:
    line = traces(timelines(panels, LIGHT), "x")["process (RSS)"]
    assert line.stackgroup is None
    assert max(line.y) == np.float32(85 + 9 * 300 / 1024)

    history = History()
    history.alloc(3 * MIB, "Act")
    alone = timelines([panel_of(summary_of(history, tmp_path, "alone"))], LIGHT)
    assert "process (RSS)" not in traces(alone, "x")


def test_nothing_is_drawn_with_webgl_and_few_points_are(tmp_path: Path) -> None:
    panel = panel_of(summary_of(prefill(layers=30, chunks=40), tmp_path, "long"))
    figure = timelines([panel], LIGHT)
    assert {trace.type for trace in figure.data} == {"scatter"}
    assert {trace.line.shape for trace in stack(figure, "x")} == {"hv"}
    assert max(len(trace.x) for trace in figure.data) <= 2 * SPANS


def test_a_spike_of_one_event_is_as_tall_as_it_was(tmp_path: Path) -> None:
    history = prefill(layers=30, chunks=40)
    history.free(history.alloc(1 << 40, "Temp"))
    for _ in range(1000):
        history.free(history.alloc(1, "Act"))
    panel = panel_of(summary_of(history, tmp_path, "spike"))
    assert panel.timeline.allocated[highest(panel.timeline)].max() == panel.peak.allocated
    assert max(traces(timelines([panel], LIGHT), "x")["Temp"].y) == 1024  # GiB


def test_units_grow_with_the_bytes(tmp_path: Path) -> None:
    for size, unit in ((100, "B"), (5 << 10, "KiB"), (5 << 20, "MiB"), (5 << 30, "GiB")):
        history = History()
        history.alloc(size, "model")
        figure = timelines([panel_of(summary_of(history, tmp_path, unit))], LIGHT)
        assert figure.layout.yaxis.title.text == unit


def test_a_panel_is_described_in_numbers(panels: list[Panel]) -> None:
    assert describe(panels[1]) == (
        "tide: allocated bytes peak at 5.4 MiB after 0.04 s, of which model 75 %, KV_res 16 %, "
        "Hidden 4 %, Act 5 %."
    )


def test_the_table_under_a_chart_holds_what_the_chart_draws(panels: list[Panel]) -> None:
    both = points(panels)
    assert both["run"].unique().tolist() == ["snapkv", "tide"]
    table = both[both["run"] == "snapkv"]
    total = traces(timelines(panels, LIGHT), "x")["allocated"]
    assert (table["allocated"] / MIB).astype(np.float32).tolist() == list(total.y)
    assert (table.iloc[:, 4:].sum(axis=1) == table["allocated"]).all()


def test_the_equations_show_each_run_and_the_difference(tmp_path: Path) -> None:
    first = summary_of(prefill(scale=9), tmp_path, "snapkv")
    second = summary_of(prefill(scale=1), tmp_path, "tide")
    table = equations(compare([first, second]), own=False)
    assert list(table.columns) == ["snapkv", "tide", "tide - snapkv"]
    assert table.loc["Act"].tolist() == ["2.6 MiB", "300.0 KiB", "-2.3 MiB"]
    assert table.loc["process (2)"].tolist() == ["87.6 MiB", "85.3 MiB", "-2.3 MiB"]
    own = equations(compare([first, second]), own=True)
    assert own.loc["KV_res"].tolist() == ["1.0 MiB", "1.0 MiB", "0 B"]
