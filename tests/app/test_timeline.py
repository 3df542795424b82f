"""The page of the timelines."""

from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

import numpy as np
from streamlit.testing.v1 import AppTest

from app.views.timeline import PATH
from memtrace.analysis.document import document
from memtrace.analysis.summary import summarise
from memtrace.sizes import format_size
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.app.opening import figure, opened, words
from tests.synthetic import History, prefill


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        str(prefill(scale=9).write(tmp_path / "snapkv.memtrace")),
        str(prefill(scale=1).write(tmp_path / "tide.memtrace")),
    ]


def layout(app: AppTest) -> dict[str, Any]:
    return dict(figure(app, "timeline")["layout"])


def headings(app: AppTest) -> list[str]:
    return [one.value for one in app.subheader]


def test_every_run_is_drawn_and_described(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, runs, PATH)
    stacks = {trace.get("stackgroup") for trace in figure(app, "timeline")["data"]}
    assert stacks == {None, "run 0", "run 1"}
    assert "snapkv: allocated bytes peak at 7.7 MiB" in str(app.get("plotly_chart")[0].proto)
    assert "Of 54 and 54 events" in app.caption[0].value


def test_one_event_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    history.alloc(100, "Act")
    app = opened(monkeypatch, [str(history.write(tmp_path / "one"))], PATH)
    assert figure(app, "timeline")["data"]
    assert app.table[0].value["size"].tolist() == ["100 B"]


def test_a_run_that_found_no_room_at_all_is_shown_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    history.event(Action.OOM, 0, 40 << 20, None, device="cuda:0")
    app = opened(monkeypatch, [str(history.write(tmp_path / "oom"))], PATH, at="0.1")
    assert "peak at 0 B after 0.00 s, of which nothing" in app.caption[0].value


def test_the_address_says_what_is_in_view(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, runs, PATH, **{"from": "0.01", "to": "0.02"})
    assert layout(app)["xaxis"]["range"] == [0.01, 0.02]
    app.button[0].click().run()
    assert layout(app)["xaxis"]["range"] == [0.001, 0.054]


@pytest.mark.parametrize("ends", [("0.02", "0.01"), ("-5", "99"), ("5", "6")])
def test_a_view_that_is_not_there_is_the_whole(
    ends: tuple[str, str], runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, runs, PATH, **{"from": ends[0], "to": ends[1]})
    assert layout(app)["xaxis"]["range"] == [0.001, 0.054]


def test_at_the_peak_is_alive_what_the_report_says(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = document(summarise(open_trace(runs[0])), top=0)["peak"]
    app = opened(monkeypatch, runs[:1], PATH)
    assert headings(app) == ["Alive at each run's peak"]
    icicle = figure(app, "alive 0")["data"][0]
    sizes = dict(zip(icicle["labels"], icicle["values"], strict=True))
    assert sizes["allocated"] == reported["allocated"]
    assert sizes["Act"] == reported["components"]["Act"]


def test_the_stacks_have_the_numbers_of_the_report(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = figure(opened(monkeypatch, runs, PATH), "timeline")["data"]
    for number, run in enumerate(runs):
        reported = document(summarise(open_trace(run)), top=0)["peak"]
        own = [one for one in drawn if one["xaxis"] == ("x", "x2")[number]]
        lines = {
            one["name"]: np.frombuffer(b64decode(one["y"]["bdata"]), one["y"]["dtype"])
            for one in own
            if one.get("stackgroup") or one["name"] == "allocated"
        }
        top = lines["allocated"].argmax()
        sizes = {name: round(float(line[top]) * 2**20) for name, line in lines.items()}
        expected = {name: size for name, size in reported["components"].items() if name in sizes}
        assert sizes == expected | {"allocated": reported["allocated"]}
        assert sum(expected.values()) == reported["allocated"]
        [peak] = [one for one in own if one["name"] == "peak"]
        assert peak["text"] == [f"peak {format_size(reported['allocated'])}"]


def test_an_instant_lists_what_is_alive_there(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, runs[1:], PATH, at="0.0041")
    assert headings(app) == ["Alive at A"]
    [table] = app.table
    assert table.value["size"].tolist() == ["1.0 MiB"] * 4
    assert table.value["age"].tolist() == ["3.0 ms", "2.0 ms", "1.0 ms", "0 µs"]
    assert "0.004000 s" in words(app)
    app.number_input(key="at").set_value(0.0081).run()
    assert "Hidden" in app.table[0].value.index
    assert [one["x0"] for one in layout(app)["shapes"]] == [0.0081]


def test_two_instants_are_subtracted(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, runs[1:], PATH, at="0.0041", versus="0.0021")
    [table] = app.table
    assert table.value.loc["model"].tolist() == [r"\+2.0 MiB", r"\+2", "aten.empty"]


def test_by_layer_runs_of_different_length_line_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(prefill(chunks=n).write(tmp_path / f"{n} chunks")) for n in (2, 9)]
    app = opened(monkeypatch, runs, PATH, by="layer")
    rulers = [one for one in figure(app, "timeline")["data"] if one["name"] == "layer"]
    assert [one["base"] for one in rulers] == [[0, 1, 2, 3]] * 2


def test_runs_without_a_common_step_are_aligned_by_time_and_it_is_said(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    history.alloc(100, "Act")
    app = opened(monkeypatch, [*runs, str(history.write(tmp_path / "bare"))], PATH, by="chunk")
    assert [one.value for one in app.info] == [
        "These runs have no chunk in common; aligned by time instead."
    ]
    assert layout(app)["xaxis"]["title"]["text"] == "seconds since the run began"


def test_another_alignment_forgets_the_places_on_the_old_axis(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, runs, PATH, at="0.02", **{"from": "0.01", "to": "0.03"})
    app.selectbox(key="by").set_value("layer").run()
    assert layout(app)["xaxis"]["range"] == [-1, 5]
    assert "shapes" not in layout(app)


def test_by_request_each_begins_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    for name in ("q1", "q2"):
        start = history.time_us
        history.free(history.alloc(1 << 20, "Act"))
        history.rows["requests"].append((name, 5, None, start, None, history.time_us, "ok"))
    run = str(history.write(tmp_path / "two"))
    other = str(prefill().write(tmp_path / "other"))
    app = opened(monkeypatch, [run, other], PATH, by="request", request="q2")
    assert [one.value for one in app.info] == ["other didn't serve q2."]
    assert layout(app)["xaxis"]["range"] == [0, 0.002]
    assert layout(app)["xaxis"]["title"]["text"] == "seconds since the request began"
