"""The page as Streamlit runs it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from tests.synthetic import History, prefill

MAIN = Path(__file__).parents[2] / "app" / "main.py"


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        str(prefill(scale=9).write(tmp_path / "snapkv.memtrace")),
        str(prefill(scale=1).write(tmp_path / "tide.memtrace")),
    ]


def opened(
    monkeypatch: pytest.MonkeyPatch, folders: list[str], query: tuple[str, ...] = ()
) -> AppTest:
    monkeypatch.setattr(sys, "argv", [str(MAIN), *folders])
    page = AppTest.from_file(str(MAIN), default_timeout=60)
    if query:
        page.query_params["run"] = list(query)
    page.run()
    assert not page.exception
    return page


def figure(page: AppTest) -> dict[str, Any]:
    [chart] = page.get("plotly_chart")
    return dict(json.loads(chart.proto.spec))


def words(page: AppTest) -> str:
    return " ".join(part.value for part in page.markdown).replace("\\", "")


def test_both_runs_are_drawn_with_verdicts_and_tables(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened(monkeypatch, runs)
    assert {trace.get("stackgroup") for trace in figure(page)["data"]} == {None, "run 0", "run 1"}
    assert "tide peaks at 5.4 MiB allocated, 2.3 MiB (30.4 %) below snapkv" in words(page)
    assert "3.7 times less" in words(page)
    at_peak, own_peak, *tops = (table.value for table in page.table)
    assert at_peak.loc["Act"].tolist() == ["2.6 MiB", "300.0 KiB", "-2.3 MiB"]
    assert own_peak.loc[r"KV\_res"].tolist() == ["1.0 MiB", "1.0 MiB", "0 B"]
    assert [len(top) for top in tops] == [5, 5]
    assert len(page.dataframe) == 2
    assert not page.error


def test_the_chart_has_alternative_text_with_numbers(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [chart] = opened(monkeypatch, runs).get("plotly_chart")
    assert "snapkv: allocated bytes peak at 7.7 MiB" in str(chart.proto)


def test_one_run_alone_has_no_verdict(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = opened(monkeypatch, runs[:1])
    assert "peaks at" not in words(page)
    assert list(page.table[0].value.columns) == ["snapkv"]


def test_the_address_says_which_runs_are_shown(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened(monkeypatch, runs, query=("tide",))
    assert page.multiselect[0].value == ["tide"]
    assert {trace.get("stackgroup") for trace in figure(page)["data"]} == {None, "run 0"}
    page.multiselect[0].set_value(["snapkv"]).run()
    assert page.query_params["run"] == "snapkv"


def test_the_address_opens_nothing_but_the_runs_of_the_command_line(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened(monkeypatch, runs, query=("/etc", "tide"))
    assert page.multiselect[0].value == ["tide"]


def test_no_run_chosen_asks_for_one(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = opened(monkeypatch, runs)
    page.multiselect[0].set_value([]).run()
    assert [info.value for info in page.info] == ["Choose a run above."]
    assert not page.get("plotly_chart")


def test_a_run_that_went_bad_is_said_and_the_others_are_shown(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = str(History().write(tmp_path / "empty.memtrace"))
    (Path(runs[0]) / "manifest.json").write_text("{}")
    page = opened(monkeypatch, [*runs, empty])
    assert [error.value.split("/")[-1] for error in page.error] == [
        "manifest.json is not a memtrace manifest",
        "empty saw no tensor, so there is nothing to draw",
    ]
    assert {trace.get("stackgroup") for trace in figure(page)["data"]} == {None, "run 0"}


def test_a_run_that_is_recorded_again_is_read_again(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened(monkeypatch, runs[1:])
    assert "5.4 MiB" in page.table[0].value.loc["allocated"].tolist()
    for path in sorted(Path(runs[1]).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    Path(runs[1]).rmdir()
    prefill(scale=9).write(Path(runs[1]))
    page.run()
    assert "7.7 MiB" in page.table[0].value.loc["allocated"].tolist()


def test_names_in_a_trace_are_not_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    with history.scope("module", "model.*_[x](http://example.org)"):
        history.alloc(100, "Act")
    page = opened(monkeypatch, [str(history.write(tmp_path / "odd"))])
    assert r"\[x\]\(http\://example.org\)" in page.table[2].value.iloc[0, -1]


def test_runs_of_one_name_are_told_apart(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = str(prefill().write(tmp_path / "again" / "tide.memtrace"))
    page = opened(monkeypatch, [runs[1], again])
    assert page.multiselect[0].value == [runs[1], again]
