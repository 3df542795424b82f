"""Which runs, devices and processes the pages show, and how the address says so."""

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from app import load, views
from app.choice import named
from memtrace.sizes import format_size
from memtrace.trace import SCHEMA
from memtrace.trace.manifest import read_manifest, write_manifest
from tests.app.opening import figure, opened, words
from tests.synthetic import History, prefill


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        str(prefill(scale=9).write(tmp_path / "snapkv.memtrace")),
        str(prefill(scale=1).write(tmp_path / "tide.memtrace")),
    ]


def titles(app: object) -> list[str]:
    """Of the panels of the timeline: the subjects."""
    annotations = figure(app, "timeline")["layout"]["annotations"]  # type: ignore[arg-type]
    return [one["text"] for one in annotations]


def test_every_page_opens_by_its_address(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [view.PATH for view in views.ALL]
    assert len(set(paths)) == len(paths)
    for path in paths:
        app = opened(monkeypatch, runs, path)
        assert app.get("plotly_chart") or app.info or app.markdown, path
        assert not app.error


def test_the_address_says_which_runs_are_shown(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, runs, "timeline", run="tide")
    assert titles(app) == ["tide"]
    app.multiselect(key="run").set_value(["snapkv"]).run()
    assert titles(app) == ["snapkv"]


def test_the_address_opens_nothing_but_the_runs_of_the_command_line(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, runs, "timeline", run=["/etc", "tide"])
    assert titles(app) == ["tide"]


def test_no_run_chosen_asks_for_one(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, runs)
    app.multiselect(key="run").set_value([]).run()
    assert [info.value for info in app.info] == ["Choose a run above."]
    assert not app.get("plotly_chart")


def test_a_run_that_went_bad_is_said_and_the_others_are_shown(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = str(History().write(tmp_path / "empty.memtrace"))
    newer = prefill().write(tmp_path / "newer.memtrace")
    body = read_manifest(newer)
    write_manifest(newer, body | {"schema": SCHEMA + 1})
    (Path(runs[0]) / "manifest.json").write_text("{}")
    app = opened(monkeypatch, [*runs, empty, str(newer)], "timeline")
    said = [error.value.replace("\\", "").split("/")[-1] for error in app.error]
    assert said == [
        "manifest.json is not a memtrace manifest",
        "empty saw no tensor, so there is nothing to draw",
        f"newer.memtrace has trace schema {SCHEMA + 1} and this memtrace reads up to {SCHEMA}; "
        "upgrade memtrace to read it",
    ]
    assert titles(app) == ["tide"]


def test_a_run_that_is_recorded_again_is_read_again(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, runs[1:])
    assert "5.4 MiB" in app.table[0].value.loc["allocated"].tolist()
    for path in sorted(Path(runs[1]).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    Path(runs[1]).rmdir()
    prefill(scale=9).write(Path(runs[1]))
    app.run()
    assert "7.7 MiB" in app.table[0].value.loc["allocated"].tolist()


def test_a_run_is_read_once_for_all_sessions(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(monkeypatch, runs)
    monkeypatch.setattr(load, "open_trace", None)
    opened(monkeypatch, runs, "timeline")


def test_runs_of_one_name_are_told_apart(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [str(prefill().write(tmp_path / name / "tide.memtrace")) for name in ("one", "two")]
    app = opened(monkeypatch, [runs[0], *both], "timeline")
    assert titles(app) == ["snapkv", "one/tide", "two/tide"]


def test_long_names_are_shortened_and_told_apart_by_number() -> None:
    names = named([f"/runs/{'x' * 100}{number}{'y' * 100}.memtrace" for number in range(2)])
    assert [name.replace("x", "").replace("y", "") for name in names] == ["… (1)", "… (2)"]
    assert max(map(len, names)) < 50


def test_signs_that_nobody_sees_are_marked() -> None:
    assert list(named(["/runs/a\u202eb\n.memtrace"])) == ["a\ufffdb\ufffd"]


def test_a_run_named_twice_is_there_twice() -> None:
    assert list(named(["/runs/a", "/runs/a"])) == ["a (1)", "a (2)"]


@pytest.mark.parametrize("path", [view.PATH for view in views.ALL])
def test_a_run_that_goes_while_it_is_looked_at_is_said(
    path: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, runs, path)
    [events] = Path(runs[1]).rglob("events*")
    events.unlink()
    app.run()
    assert not app.exception
    shutil.rmtree(runs[1])
    app.run()
    assert not app.exception
    assert [error.value.replace("\\", "") for error in app.error] == [f"{runs[1]} doesn't exist"]
    prefill(scale=5).write(Path(runs[1]))
    app.run()
    assert not app.exception and not app.error


def two_devices() -> History:
    history = History()
    history.alloc(3 << 30, "Act", "cuda:0")
    history.alloc(2 << 30, "KV_res", "cuda:1")
    return history


def test_the_device_with_the_largest_peak_is_shown_until_another_is_chosen(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(two_devices().write(tmp_path / "two.memtrace"))
    app = opened(monkeypatch, [*runs, run], "timeline")
    assert titles(app) == ["snapkv", "tide", "two"]
    places = app.multiselect(key="in two")
    assert places.options == ["process 4711, cuda:0", "process 4711, cuda:1"]
    places.set_value(places.options).run()
    both = ["two, process 4711, cuda:0", "two, process 4711, cuda:1"]
    assert titles(app) == ["snapkv", "tide", *both]


def test_the_address_says_which_device_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(two_devices().write(tmp_path / "two.memtrace"))
    app = opened(monkeypatch, [run], **{"in two": "process 4711, cuda:1"})
    assert app.table[0].value.loc["allocated"].tolist() == ["2.00 GiB"]


def four_ranks(folder: Path) -> str:
    """A run of four processes that hold 1 to 4 GiB."""
    history = History()
    history.alloc(1 << 30, "Act")
    run = history.write(folder / "ranks.memtrace", complete=False, process={"rank": 0})
    for rank in range(1, 4):
        history = History()
        history.alloc((1 + rank) << 30, "Act")
        other = history.write(folder / f"rank{rank}", process={"rank": rank, "pid": 4711 + rank})
        (other / "4711").rename(run / str(4711 + rank))
    return str(run)


def test_of_several_ranks_any_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, [four_ranks(tmp_path)], "timeline")
    assert titles(app) == ["ranks"]
    app.multiselect(key="in ranks").set_value([f"rank {rank}, cpu" for rank in range(4)]).run()
    assert titles(app) == [f"ranks, rank {rank}, cpu" for rank in range(4)]
    app = opened(monkeypatch, [four_ranks(tmp_path / "again")])
    assert app.table[0].value.loc["allocated"].tolist() == [format_size(4 << 30)]


def test_eight_runs_are_shown_and_a_ninth_can_be_chosen_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(prefill(scale=n).write(tmp_path / f"run{n}")) for n in range(1, 10)]
    app = opened(monkeypatch, folders, "timeline")
    assert titles(app) == [f"run{n}" for n in range(1, 9)]
    assert "run9" in app.multiselect(key="run").options
    assert "run2 peaks at" in words(opened(monkeypatch, folders))
    assert len(sys.argv) == 10
