"""The page of all allocations."""

from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from app.figures.hot_spots import describe, hot_spots
from app.figures.style import LIGHT
from app.frames_allocations import data
from app.views.allocations import PATH
from memtrace.analysis.accounts import accounts
from memtrace.analysis.catalogue import Catalogue, Query
from memtrace.components import COLOURS
from memtrace.trace.reader import open_trace
from tests.app.opening import figure, opened
from tests.synthetic import History, prefill


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return prefill(layers=8).write(tmp_path / "tide.memtrace")


def catalogue(run: Path) -> Catalogue:
    (process,) = open_trace(run).processes
    return Catalogue(accounts(process)[0])


def test_bars_are_as_long_as_size_times_lifetime(run: Path) -> None:
    found = catalogue(run)
    spots = found.hot_spots(found.find(Query()), 3)
    bars = hot_spots(spots, LIGHT)
    lengths = {y: x for bar in bars.data for y, x in zip(bar.y, bar.x, strict=True)}
    assert lengths == {n: spot.byte_seconds / 2**10 for n, spot in enumerate(spots)}
    assert bars.layout.xaxis.title.text == "KiB x seconds"
    colours = {bar.name: bar.marker.color for bar in bars.data}
    assert colours == {name: COLOURS[name] for name in colours}
    assert describe(spots).startswith("model in aten.empty: 770.0 KiB x seconds in 8 allocations.")


def test_the_csv_holds_bytes(run: Path) -> None:
    found = catalogue(run)
    table = data(found.read(found.find(Query(components=("Temp",)))))
    assert table.empty
    table = data(found.read(found.find(Query(components=("KV_res/compact",)))))
    assert table["bytes"].tolist() == [128 << 10] * 8
    assert table["place"][0] == "request q1 > compress > layer 0 > aten.gather"


def test_filters_are_in_the_address(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [str(run)], PATH, search="layer, mm", least="1 KiB", longest="0.5")
    assert app.caption[0].value == "24 of 51 allocations."
    table = app.table[0].value
    assert set(table.index) == {"Act"}
    assert set(table["size"]) == {"300.0 KiB"}
    assert set(table["lifetime, s"]) == {"0.001000"}
    assert len(figure(app, "hot-spots")["data"]) == 1


def test_filters_narrow_what_is_listed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [str(run)], PATH)
    assert len(app.table[0].value) == 25
    app.number_input(key="page").set_value(3).run()
    assert len(app.table[0].value) == 1
    app.multiselect(key="component").set_value(["KV_res"]).run()  # and there is no page 3 any more
    assert not app.exception
    assert app.caption[0].value == "16 of 51 allocations."
    app.checkbox(key="kept").check().run()
    assert app.caption[0].value == "8 of 51 allocations."
    app.text_input(key="search").set_value("nowhere").run()
    assert app.info[0].value == "No allocation is as the filters say."
    assert not app.table


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("least", "much", "'much' is not a size; write it as 300 MiB, 1.5 GiB or 4096"),
        ("longest", "soon", "'soon' is not a time; write seconds, such as 0.5"),
        ("shortest", "1e999", "'1e999' is not a time; write seconds, such as 0.5"),
        ("shortest", "nan", "'nan' is not a time; write seconds, such as 0.5"),
    ],
)
def test_what_cannot_be_read_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, key: str, text: str, said: str
) -> None:
    app = opened(monkeypatch, [str(run)], PATH)
    app.text_input(key=key).set_value(text).run()
    assert [error.value.replace("\\", "") for error in app.error] == [said]


def test_another_run_can_be_listed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    history.alloc(100, "Act")
    one = history.write(tmp_path / "one.memtrace")
    app = opened(monkeypatch, [str(run), str(one)], PATH)
    app.selectbox(key="of").select("one").run()
    assert app.caption[0].value == "1 of 1 allocations."
    assert app.table[0].value["lifetime, s"].tolist() == ["0.000000, kept"]
