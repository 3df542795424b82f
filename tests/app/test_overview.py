"""The page of both equations."""

from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from app.frames import terms
from app.views.overview import PATH
from memtrace.analysis.compare import compare
from memtrace.analysis.document import document
from memtrace.analysis.summary import summarise
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


def test_two_runs_are_judged_drawn_and_listed(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, runs, PATH)
    assert "tide peaks at 5.4 MiB allocated, 2.3 MiB (30.4 %) below snapkv" in words(app)
    assert "3.7 times less" in words(app)
    at_peak, own_peak, *tops, recorded = (table.value for table in app.table)
    assert at_peak.loc["Act"].tolist() == ["2.6 MiB", "300.0 KiB", "-2.3 MiB"]
    assert own_peak.loc[r"KV\_res"].tolist() == ["1.0 MiB", "1.0 MiB", "0 B"]
    assert [len(top) for top in tops] == [5, 5]
    assert recorded.loc["events", "tide"] == "54, none dropped"
    assert recorded.loc["known", "tide"].startswith("measured, on cpu")
    assert not app.error


def test_the_waterfall_has_the_numbers_of_the_report(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = document(summarise(open_trace(runs[0])), top=0)["peak"]
    bars = figure(opened(monkeypatch, runs, PATH), "equation")["data"][0]
    mib = dict(zip(bars["y"], bars["x"], strict=True))
    expected = reported["components"] | {
        name: reported[name] for name in ("allocated", "allocator", "external", "process")
    }
    assert {name: round(size * 2**20) for name, size in mib.items()} == expected


def test_the_chart_has_alternative_text_with_numbers(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [chart] = opened(monkeypatch, runs, PATH).get("plotly_chart")
    assert "snapkv at its peak: model 4.0 MiB, KV_res 896.0 KiB" in str(chart.proto)


def test_one_run_alone_has_no_verdict(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, runs[:1], PATH)
    assert "peaks at" not in words(app)
    assert list(app.table[0].value.columns) == ["snapkv"]


def test_names_in_a_trace_are_not_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    with history.scope("module", "model.*_[x](http://example.org)"):
        history.alloc(100, "Act")
    app = opened(monkeypatch, [str(history.write(tmp_path / "odd"))], PATH)
    assert r"\[x\]\(http:color[\:]{}//example.org\)" in app.table[2].value.iloc[0, -1]


def test_one_event_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    history.alloc(100, "Act")
    app = opened(monkeypatch, [str(history.write(tmp_path / "one"))], PATH)
    assert app.table[0].value.loc["Act"].tolist() == ["100 B"]
    assert app.table[0].value.loc[r"process \(2\)"].tolist() == ["unknown"]


def test_a_run_that_was_killed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prefill().write(tmp_path / "killed", complete=False)
    app = opened(monkeypatch, [str(run)], PATH)
    assert [one.value.replace("\\", "") for one in app.warning] == [
        "killed is not complete: its recorder was killed or still runs."
    ]


def test_a_run_that_ran_out_of_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    history.event(Action.SEGMENT_ALLOC, 1 << 20, 20 << 20, None, device="cuda:0")
    history.event(Action.ALLOC, 1 << 20, 20 << 20, "Act", device="cuda:0")
    history.event(Action.OOM, 0, 40 << 20, None, device="cuda:0")
    app = opened(monkeypatch, [str(history.write(tmp_path / "oom"))], PATH)
    [said] = [one.value.replace("\\", "") for one in app.error]
    assert said.startswith(
        "oom ran out of memory: 40.0 MiB were asked for and 40.0 MiB are missing"
    )


def test_the_csv_holds_the_bytes(runs: list[str]) -> None:
    frame = terms(compare([summarise(open_trace(run)) for run in runs]))
    found = frame[(frame["run"] == "tide") & (frame["term"] == "Act")]
    assert found["at the peak"].tolist() == [300 << 10]
