"""The figures, without Streamlit."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from app.figures import icicle
from app.figures.style import LIGHT
from app.figures.timeline import SPANS, Instant, Panel, Scale, describe, highest, timelines
from app.figures.waterfall import waterfall
from app.frames import equations, points
from memtrace.analysis.alignment import by_progress, by_time
from memtrace.analysis.compare import compare
from memtrace.analysis.peaks import top_allocations
from memtrace.analysis.steps import steps
from memtrace.analysis.summary import Summary, summarise
from memtrace.analysis.timeline import timeline
from memtrace.components import COLOURS, TENSOR_COMPONENTS
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.synthetic import History, prefill

MIB = 1 << 20


def summary_of(history: History, folder: Path, name: str) -> Summary:
    return summarise(open_trace(history.write(folder / f"{name}.memtrace")))


def panel_of(summary: Summary) -> Panel:
    one = summary.primary
    assert one is not None
    begin, *_, end = one.account.time_us if len(one.account.time_us) > 1 else (1000, 1000)
    rulers = [steps(one.account, kind) for kind in ("phase", "layer")]
    drawn = timeline(one.account, one.memory)
    axis = by_time(int(begin), int(end))
    return Panel(summary.name, drawn, one.peak, one.memory.source, axis, rulers)


def whole(*panels: Panel) -> Scale:
    """All of the time."""
    ends = [end for panel in panels for end in (panel.axis.at[0], panel.axis.at[-1])]
    return Scale("seconds since the run began", (min(ends), max(ends)))


def drawn(*panels: Panel) -> go.Figure:
    return timelines(panels, whole(*panels), LIGHT)


@pytest.fixture
def panels(tmp_path: Path) -> list[Panel]:
    histories = {"snapkv": prefill(scale=9), "tide": prefill(scale=1)}
    return [panel_of(summary_of(one, tmp_path, name)) for name, one in histories.items()]


def traces(figure: go.Figure, axis: str) -> dict[str, go.Scatter]:
    """Of one panel, without its rulers."""
    lines = [trace for trace in figure.data if trace.type == "scatter"]
    return {trace.name: trace for trace in lines if (trace.xaxis or "x") == axis}


def stack(figure: go.Figure, axis: str) -> Sequence[go.Scatter]:
    return [trace for trace in traces(figure, axis).values() if trace.stackgroup]


def test_components_are_stacked_in_their_own_colours_and_add_up(panels: list[Panel]) -> None:
    figure = drawn(*panels)
    for axis, panel in zip(("x", "x2"), panels, strict=True):
        bands = stack(figure, axis)
        assert [band.name for band in bands] == ["model", "KV_res", "Hidden", "Act", "Temp"]
        assert [band.fillcolor for band in bands] == [COLOURS[band.name] for band in bands]
        total = traces(figure, axis)["allocated"]
        sums = np.sum([band.y for band in bands], axis=0)
        np.testing.assert_allclose(sums, total.y, rtol=1e-6)
        assert max(total.y) == np.float32(panel.peak.allocated / MIB)


def test_runs_share_one_scale_and_one_legend(panels: list[Panel]) -> None:
    figure = drawn(*panels)
    assert figure.layout.yaxis2.matches == "y"
    assert figure.layout.yaxis.title.text == "MiB"
    assert "seconds" in figure.layout.xaxis.title.text
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(named) == sorted(set(named))
    assert "Act" in named


def test_the_peak_is_marked_and_labelled_where_it_was(panels: list[Panel]) -> None:
    marker = traces(drawn(*panels), "x")["peak"]
    assert list(marker.text) == ["peak 7.7 MiB"]
    assert list(marker.x) == [panels[0].peak.time_us / 1e6]
    assert list(marker.y) == [panels[0].peak.allocated / MIB]


def test_process_memory_is_a_line_and_absent_where_it_is_unknown(
    panels: list[Panel], tmp_path: Path
) -> None:
    line = traces(drawn(*panels), "x")["process (RSS)"]
    assert line.stackgroup is None
    assert max(line.y) == np.float32(85 + 9 * 300 / 1024)

    history = History()
    history.alloc(3 * MIB, "Act")
    alone = drawn(panel_of(summary_of(history, tmp_path, "alone")))
    assert "process (RSS)" not in traces(alone, "x")


def test_nothing_is_drawn_with_webgl_and_few_points_are(tmp_path: Path) -> None:
    panel = panel_of(summary_of(prefill(layers=30, chunks=40), tmp_path, "long"))
    figure = drawn(panel)
    assert {trace.type for trace in figure.data} == {"scatter", "bar"}
    assert {trace.line.shape for trace in stack(figure, "x")} == {"hv"}
    assert max(len(trace.x) for trace in figure.data) <= 2 * SPANS


def test_a_spike_of_one_event_is_as_tall_as_it_was(tmp_path: Path) -> None:
    history = prefill(layers=30, chunks=40)
    history.free(history.alloc(1 << 40, "Temp"))
    for _ in range(1000):
        history.free(history.alloc(1, "Act"))
    panel = panel_of(summary_of(history, tmp_path, "spike"))
    assert panel.timeline.allocated[highest(panel, whole(panel))].max() == panel.peak.allocated
    assert max(traces(drawn(panel), "x")["Temp"].y) == 1024  # GiB


def rulers(figure: go.Figure, axis: str = "x") -> dict[str, go.Bar]:
    bars = [trace for trace in figure.data if trace.type == "bar"]
    return {bar.name: bar for bar in bars if bar.xaxis == axis}


def test_rulers_of_one_kind_are_in_one_row_in_every_panel(panels: list[Panel]) -> None:
    first, second = panels[0], replace(panels[1], rulers=panels[1].rulers[:1])
    figure = drawn(second, first)
    for axis in (figure.layout.yaxis101, figure.layout.yaxis102):
        assert axis.categoryarray == axis.tickvals == ("phase", "layer")
        assert axis.range == (1.5, -0.5)
    assert figure.layout.barmode == "overlay"  # or else bars leave their row


def test_rulers_are_named_beside_a_run_without_steps_too(panels: list[Panel]) -> None:
    figure = drawn(replace(panels[0], rulers=()), panels[1])
    [bar] = [one for one in figure.data if one.yaxis == "y101"]
    assert list(bar.y) == ["phase", "layer"] and not any(bar.x)


def test_rulers_above_a_stack_say_what_the_program_did(panels: list[Panel]) -> None:
    found = rulers(drawn(*panels))
    assert list(found["phase"].text) == ["prefill"]
    assert list(found["layer"].text) == ["0", "1", "2", "3"]
    start, width = (np.array(one, float) for one in (found["layer"].base, found["layer"].x))
    np.testing.assert_allclose(start[:-1] + width[:-1], start[1:])
    assert (start * 1e6).round().tolist() == panels[0].rulers[1].start_us.tolist()


def test_steps_too_narrow_to_be_told_apart_wait_for_a_zoom(tmp_path: Path) -> None:
    panel = panel_of(summary_of(prefill(layers=250), tmp_path, "deep"))
    assert list(rulers(drawn(panel))["layer"].text) == ["249"]  # whose end isn't seen
    start, end = panel.axis.at
    near = Scale("seconds", (start + 0.5 * (end - start), start + 0.6 * (end - start)))
    assert len(rulers(timelines([panel], near, LIGHT))["layer"].text) > 20


def test_by_progress_a_layer_stands_at_one_place_in_both_runs(tmp_path: Path) -> None:
    summaries = [
        summary_of(prefill(chunks=chunks), tmp_path, f"{chunks} chunks") for chunks in (2, 9)
    ]
    panels = [panel_of(summary) for summary in summaries]
    ends = [(int(panel.axis.time_us[0]), int(panel.axis.time_us[-1])) for panel in panels]
    axes, names = by_progress(ends, [panel.rulers[1] for panel in panels])
    aligned = [replace(panel, axis=axis) for panel, axis in zip(panels, axes, strict=True)]
    figure = timelines(aligned, Scale("progress", (-1, 5), names), LIGHT)
    for axis in ("x", "x2"):
        assert list(rulers(figure, axis)["layer"].base) == [0, 1, 2, 3]
    assert list(figure.layout.xaxis.ticktext) == ["layer 0", "layer 1", "layer 2", "layer 3"]
    for axis in ("x", "x2"):
        [peak] = traces(figure, axis)["peak"].x
        assert 3 <= peak < 4  # in the last layer


def test_where_the_peak_is_not_in_view_the_highest_that_is_is_marked(panels: list[Panel]) -> None:
    summary_end = panels[0].axis.at[-1]
    late = Scale("seconds", (summary_end - 0.006, summary_end))
    edges = panels[0].axis.times(late.edges)
    after = panels[0].timeline.time_us >= edges[0]
    part = replace(
        panels[0].timeline,
        events=panels[0].timeline.events[after],
        time_us=panels[0].timeline.time_us[after],
        allocated=panels[0].timeline.allocated[after],
        components={n: v[after] for n, v in panels[0].timeline.components.items()},
    )
    figure = timelines([replace(panels[0], timeline=part)], late, LIGHT)
    [text] = traces(figure, "x")["peak"].text
    assert text.startswith("highest here ")


def test_chosen_instants_are_marked_in_every_panel(panels: list[Panel]) -> None:
    figure = timelines(panels, whole(*panels), LIGHT, [Instant("A", 0.01), Instant("B", 0.02)])
    assert [(one.xref, one.x0, one.label.text) for one in figure.layout.shapes] == [
        ("x", 0.01, "A"),
        ("x", 0.02, "B"),
        ("x2", 0.01, "A"),
        ("x2", 0.02, "B"),
    ]


def test_reserved_memory_is_a_line(tmp_path: Path) -> None:
    history = History()
    history.event(Action.SEGMENT_ALLOC, 1 << 20, 20 << 20, None, device="cuda:0")
    history.event(Action.ALLOC, 1 << 20, 2 << 20, "Act", device="cuda:0")
    panel = panel_of(summary_of(history, tmp_path, "gpu"))
    assert max(traces(drawn(panel), "x")["reserved"].y) == 20
    assert drawn(panel).layout.yaxis.autorange, "what the legend hides makes room"


def test_an_icicle_holds_all_bytes_and_each_part_lies_in_its_component(tmp_path: Path) -> None:
    account = summary_of(prefill(), tmp_path, "run").accounts[0]
    groups = top_allocations(account.account, account.peak.event)
    [drawn_] = icicle.icicle(groups, LIGHT).data
    sizes = dict(zip(drawn_.ids, drawn_.values, strict=True))
    held: dict[str, int] = {}
    for part, parent in zip(drawn_.ids, drawn_.parents, strict=True):
        held[parent] = held.get(parent, 0) + sizes[part]
    assert held[""] == account.peak.allocated
    assert all(size <= sizes[part] for part, size in held.items() if part)
    colours = dict(zip(drawn_.ids, drawn_.marker.colors, strict=True))
    assert colours["KV_res/full"] == COLOURS["KV_res"]
    assert "5.4 MiB" in icicle.describe("run", groups)


def test_units_grow_with_the_bytes(tmp_path: Path) -> None:
    for size, unit in ((100, "B"), (5 << 10, "KiB"), (5 << 20, "MiB"), (5 << 30, "GiB")):
        history = History()
        history.alloc(size, "model")
        figure = drawn(panel_of(summary_of(history, tmp_path, unit)))
        assert figure.layout.yaxis.title.text == unit


def test_a_panel_is_described_in_numbers(panels: list[Panel]) -> None:
    assert describe(panels[1]) == (
        "tide: allocated bytes peak at 5.4 MiB after 0.04 s, of which model 75 %, KV_res 16 %, "
        "Hidden 4 %, Act 5 %."
    )


def test_the_table_under_a_chart_holds_what_the_chart_draws(panels: list[Panel]) -> None:
    both = points(panels, whole(*panels))
    assert both["run"].unique().tolist() == ["snapkv", "tide"]
    table = both[both["run"] == "snapkv"]
    total = traces(drawn(*panels), "x")["allocated"]
    assert (table["allocated"] / MIB).astype(np.float32).tolist() == list(total.y)
    assert (table.iloc[:, 4:].sum(axis=1) == table["allocated"]).all()


def test_names_are_text_and_not_html(tmp_path: Path) -> None:
    history = History()
    with history.scope("phase", "<b>fill</b>"):
        history.alloc(1 << 20, "Act", op="a<br>b\u202e")
    one = summary_of(history, tmp_path, "<i>&<i>")
    [title] = waterfall(compare([one]), LIGHT).layout.annotations
    assert title.text == "&lt;i&gt;&amp;&lt;i&gt;"
    figure = drawn(panel_of(one))
    assert figure.layout.annotations[0].text == title.text
    account = one.accounts[0]
    groups = top_allocations(account.account, account.peak.event)
    [boxes] = icicle.icicle(groups, LIGHT).data
    assert {"&lt;b&gt;fill&lt;/b&gt;", "a&lt;br&gt;b\ufffd"} <= set(boxes.labels)


def test_a_long_difference_is_called_one(tmp_path: Path) -> None:
    both = [summary_of(prefill(), tmp_path, letter * 30) for letter in "ab"]
    titles = [title.text for title in waterfall(compare(both), LIGHT).layout.annotations]
    assert titles == ["a" * 30, "b" * 30, "difference"]


def test_many_runs_have_a_row_each(tmp_path: Path) -> None:
    runs = [summary_of(prefill(scale=n), tmp_path, f"run{n}") for n in (1, 2, 3)]
    table = equations(compare(runs), own=False)
    assert list(table.index) == ["run1", "run2", "run3", "run2 - run1", "run3 - run1"]
    assert table.loc["run3 - run1", "Act"] == "+600.0 KiB"


def test_neighbours_in_a_stack_differ_in_lightness() -> None:
    light = [_luminance(COLOURS[name]) + 0.05 for name in TENSOR_COMPONENTS[:-1]]
    contrasts = [max(pair) / min(pair) for pair in pairwise(light)]
    assert min(contrasts) >= 3, "as WCAG asks of parts of a picture"


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    coded = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_the_equations_show_each_run_and_the_difference(tmp_path: Path) -> None:
    first = summary_of(prefill(scale=9), tmp_path, "snapkv")
    second = summary_of(prefill(scale=1), tmp_path, "tide")
    table = equations(compare([first, second]), own=False)
    assert list(table.columns) == ["snapkv", "tide", "tide - snapkv"]
    assert table.loc["Act"].tolist() == ["2.6 MiB", "300.0 KiB", "-2.3 MiB"]
    assert table.loc["process (2)"].tolist() == ["87.6 MiB", "85.3 MiB", "-2.3 MiB"]
    own = equations(compare([first, second]), own=True)
    assert own.loc["KV_res"].tolist() == ["1.0 MiB", "1.0 MiB", "0 B"]
