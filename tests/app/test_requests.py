"""The page of requests: what it draws and says equals ``memtrace stability``."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from app import views
from app.figures.requests import Workload, beyond_first, cycles, over_requests
from app.figures.style import LIGHT
from app.frames_requests import rows
from app.views.requests import PATH
from memtrace.analysis.boundaries import served
from memtrace.analysis.instants import answered
from memtrace.analysis.instants_document import request_document
from memtrace.analysis.persistence import persistence
from memtrace.analysis.stability_document import stability_document
from memtrace.sizes import STEADY, parse_rate
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import TABLES
from tests.app.opening import figure, opened, words
from tests.synthetic import History

KiB, MiB = 1 << 10, 1 << 20
LENGTHS = (512, 64, 256)


def answering(leak: int = 0, requests: int = 24) -> History:
    """A server that keeps ``leak`` bytes a request; the fifth runs out of memory."""
    history = History()
    history.alloc(4 * MiB, "model")
    for number in range(requests):
        length, name = LENGTHS[number % 3], f"r{number}"
        start = history.time_us - 1  # just after the last event, as below
        with history.scope("request", name), history.scope("phase", "prefill"):
            workspace = history.alloc(length * KiB, "Act")
            if leak:
                history.alloc(leak, "Hidden", op="aten.clone")
            first = history.time_us - 1
            history.free(workspace)
        outcome = "oom" if number == 4 else "ok"
        end = history.time_us - 1
        history.rows["requests"].append((name, length, 3, start, first, end, outcome))
    return history


def unbooked(requests: int = 12) -> History:
    """The same on a GPU, without events: the allocator was asked after each request; the third
    time it had retried once, and from then on it reserves 8 MiB a request more."""
    history = History()
    for number in range(requests):
        name, time_us = f"r{number}", 1000 * number
        history.rows["requests"].append(
            (name, LENGTHS[number % 3], 3, time_us, time_us + 200, time_us + 700, "ok")
        )
        told = dict.fromkeys(TABLES["boundaries"].names) | {
            "request": number,
            "device": "cuda:0",
            "allocated": 16 * MiB,
            "reserved": (20 + 8 * max(number - 3, 0)) * MiB,
            "reserved_peak": (20 + 8 * max(number - 3, 0)) * MiB,
            "retries": int(number >= 2),
            "ooms": 0,
        }
        history.rows["boundaries"].append(tuple(told.values()))
    return history


def workload(run: Path) -> Workload:
    [one] = served(open_trace(run))
    return Workload(run.stem, persistence(one, limit=parse_rate(STEADY)))


def reported(run: Path) -> dict[str, Any]:
    """What ``memtrace stability --json`` says of the process."""
    [one] = stability_document(open_trace(run), [workload(run).judged], top=5)["processes"]
    return dict(one)


def test_what_is_drawn_is_what_stability_says(tmp_path: Path) -> None:
    run = answering(leak=64 * KiB).write(tmp_path / "leaks.memtrace")
    told = reported(run)
    one = workload(run)
    drawn = over_requests([one], "r7", LIGHT)
    found = {trace.name: trace for trace in drawn.data}
    allocated = [row["allocated"] for row in told["boundaries"]]
    assert (found["allocated"].y * MiB).tolist() == allocated
    assert "reserved" not in found, "without a caching allocator it is what is allocated"
    assert found["first token"].y.tolist() == [row["first_token_s"] for row in told["boundaries"]]
    assert found["tokens/s"].y.tolist() == [row["tokens_per_s"] for row in told["boundaries"]]
    slope = told["measures"]["allocated"]["slope"]
    assert slope == 64 * KiB
    line = found["slope"]
    assert len(line.x) == told["counted"]
    assert (line.y[-1] - line.y[0]) * MiB == pytest.approx(slope * (told["counted"] - 1), rel=0.01)
    assert found["out of memory"].x.tolist() == [4]
    marked = {shape.x0 for shape in drawn.layout.shapes if shape.type == "line"}
    assert marked == {7}
    assert "64.0 KiB/request" in {text.text for text in drawn.layout.annotations}
    assert found["allocated"].customdata[7] == "r7"


def test_cycles_fan_out_where_memory_grows_and_lie_on_each_other_where_it_does_not(
    tmp_path: Path,
) -> None:
    leaks = workload(answering(leak=64 * KiB).write(tmp_path / "leaks.memtrace"))
    stays = workload(answering().write(tmp_path / "stays.memtrace"))
    assert beyond_first(stays, "allocated") == {64: [0] * 6, 256: [0] * 7, 512: [0] * 7}
    grown = beyond_first(leaks, "allocated")
    assert grown[512] == [3 * 64 * KiB * cycle for cycle in range(7)]
    drawn = cycles([leaks, stays], "allocated", LIGHT)
    last = [trace for trace in drawn.data if trace.name == "last cycle"]
    assert [list(one.x) for one in last] == [["64", "256", "512"]] * 2
    assert [list(one.y) for one in last][1] == [0, 0, 0]
    assert last[0].y[2] == pytest.approx(grown[512][-1] / KiB)


def test_requests_are_saved_in_bytes(tmp_path: Path) -> None:
    frame = rows([workload(answering(leak=KiB).write(tmp_path / "run"))])
    assert frame["allocated"].tolist()[:2] == [4 * MiB + KiB, 4 * MiB + 2 * KiB]
    assert frame["counted"].tolist()[:5] == [False] * 3 + [True, False]


def test_a_leak_is_judged_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = answering(leak=64 * KiB).write(tmp_path / "leaks.memtrace")
    told = reported(run)
    app = opened(monkeypatch, [str(run)], PATH)
    assert "growing: allocated by 64.0 KiB/request" in words(app)
    measures, growing = (table.value for table in app.table)
    assert measures.loc["allocated"].tolist()[0] == "64.0 KiB"
    assert measures.loc["allocated"].tolist()[-1] == told["measures"]["allocated"]["verdict"]
    assert growing.loc["Hidden", "last"] == "1.5 MiB"
    assert told["growing"][0]["last"] == 24 * 64 * KiB


def test_the_reader_says_how_much_may_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(answering(leak=64 * KiB).write(tmp_path / "leaks.memtrace"))
    app = opened(monkeypatch, [run], PATH, slope="1 MiB/request")
    assert "plateau" in words(app)
    app.text_input(key="slope").set_value("much").run()
    assert "'much' is no rate" in app.error[0].value.replace("\\", "")


def test_one_request_is_told_as_report_does_and_leads_to_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(answering(leak=n * KiB).write(tmp_path / f"run{n}")) for n in (1, 2)]
    trace = open_trace(runs[1])
    told = request_document(trace, answered(trace, "r7"), top=0)
    app = opened(monkeypatch, runs, PATH, which="r7")
    facts, terms = (table.value for table in app.table[:2])
    assert facts.loc["prompt", "run2"] == "64 tokens"
    assert terms.loc["Act", "run2 at its peak"] == "64.0 KiB"
    assert told["peak"]["components"]["Act"] == 64 * KiB
    assert terms.loc["Hidden", "run2 after it"] == "16.0 KiB"
    drawn = figure(app, "request")
    assert drawn["layout"]["xaxis"]["title"]["text"] == "seconds since the request began"
    [link] = app.get("page_link")
    assert link.proto.page == "timeline"
    assert "by=request&request=r7" in link.proto.query_string
    assert "run=run1&run=run2" in link.proto.query_string


def test_a_run_without_events_is_judged_here_and_left_out_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = str(unbooked().write(tmp_path / "bare.memtrace"))
    booked = str(answering().write(tmp_path / "booked.memtrace"))
    app = opened(monkeypatch, [bare, booked], PATH, which="r5")
    assert "bare (cuda:0): growing: reserved by 8.0 MiB/request" in words(app).replace("*", "")
    drawn = figure(app, "requests")["data"]
    [retry] = [trace for trace in drawn if trace["name"] == "retry"]
    assert retry["customdata"] == ["r2"]
    assert app.table[0].value.loc["allocated", "bare"] == "16.0 MiB after it"
    for view in views.ALL:
        if view not in views.WITHOUT_EVENTS:
            other = opened(monkeypatch, [bare, booked], view.PATH)
            said = [one.value.replace("\\", "") for one in other.info]
            assert said[0].startswith("No allocation was booked of bare, only what memory was like")
            alone = opened(monkeypatch, [bare], view.PATH)
            assert not alone.error


def test_a_run_without_requests_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    history.alloc(100, "Act")
    app = opened(monkeypatch, [str(history.write(tmp_path / "none"))], PATH)
    assert app.info[0].value.startswith("none answered no requests: a program names them with")
    assert not app.get("plotly_chart")


def test_one_request_decides_nothing_and_has_no_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, [str(answering(requests=1).write(tmp_path / "one"))], PATH)
    assert "undecided" in words(app)
    assert "No two prompts of one length count" in " ".join(one.value for one in app.caption)
