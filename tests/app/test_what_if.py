"""The page that replays a run under another allocator."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

pytest.importorskip("streamlit")

import streamlit as st
from streamlit.testing.v1 import AppTest

from app.load import Subject
from app.making import made_runs
from app.replays import Replay, of
from app.views.fragmentation import PATH as FRAGMENTATION
from app.views.what_if import PATH
from tests.analysis.simulated import MiB, Program
from tests.app.opening import opened, words
from tests.synthetic import prefill


def replayed(app: AppTest) -> AppTest:
    """The page once the button was pressed and what it started has ended."""
    app.button[0].click().run()
    deadline = time.monotonic() + 60
    while any(one.label == "Cancel" for one in app.button) and time.monotonic() < deadline:
        time.sleep(0.1)
        app.run()
    return app


@pytest.fixture(autouse=True)
def shelf() -> Iterator[None]:
    """No replays of another test."""
    st.cache_resource.clear()
    yield
    st.cache_resource.clear()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Fails on its card: two blocks of 8 MiB in each segment of 20, then a larger one."""
    simulated = Program(100 * MiB)
    for _ in range(10):
        simulated.alloc(8 * MiB)
    simulated.alloc(16 * MiB)
    return simulated.write(tmp_path / "pieces.memtrace")


def test_a_replay_is_shown_beside_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [str(run)], PATH)
    app.selectbox(key="conf").select("expandable_segments:True")
    replayed(app)
    assert not app.error and not app.exception
    table = app.table[0].value
    assert table.index.str.replace("\\", "").tolist() == ["as recorded", "expandable_segments:True"]
    assert table["failed"].tolist() == ["1", "0"]
    assert table["reserved at most"].tolist() == ["100.0 MiB", "100.0 MiB"]
    name = "pieces, expandable_segments:True"
    assert app.multiselect(key="run").value == ["pieces", name]
    assert "memtrace replay" in app.code[0].value
    assert app.code[0].value.endswith(f"-o '{name}.memtrace'")
    beside = opened(monkeypatch, [str(run)], FRAGMENTATION)
    assert len(beside.table[0].value.columns) == 2
    assert "0 B allocated" not in words(beside)


def test_a_replay_is_made_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [str(run)], PATH)
    app.selectbox(key="device").select("l4-24g")
    replayed(app)
    replayed(app)
    assert [one.change.device for one in made_runs() if isinstance(one, Replay)] == ["l4-24g"]
    assert app.table[0].value["failed"].tolist() == ["1", "0"]


def test_a_replay_under_way_says_how_far_it_is_and_is_cancelled(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = "import time; print('{\"done\": 5}', flush=True); time.sleep(60)"

    def stand_in(_words: list[str], **options: Any) -> Popen[str]:
        return Popen([sys.executable, "-c", started], **options)

    monkeypatch.setattr("app.making.Popen", stand_in)
    app = opened(monkeypatch, [str(run)], PATH)
    app.button[0].click().run()
    [bar] = app.get("progress")
    assert bar.proto.text == "Making pieces, as recorded"
    [cancel] = [one for one in app.button if one.label == "Cancel"]
    cancel.click().run()
    assert not app.error and not app.table and not app.get("progress")
    assert app.multiselect(key="run").value == ["pieces"]


def test_a_replay_that_ends_while_the_page_is_drawn_is_added(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(subject: Subject) -> list[Replay]:
        while any(one.running for one in of(subject)):
            time.sleep(0.1)
        return of(subject)

    monkeypatch.setattr("app.views.what_if.of", late)
    app = opened(monkeypatch, [str(run)], PATH)
    app.button[0].click().run()
    assert app.multiselect(key="run").value == ["pieces", "pieces, as recorded"]


def test_a_run_of_a_cpu_is_replayed_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = prefill().write(tmp_path / "tide.memtrace")
    app = opened(monkeypatch, [str(cpu)], PATH)
    replayed(app)
    table = app.table[0].value
    assert table["reserved at most"].tolist() == ["no allocator", "6.0 MiB"]
    app = opened(monkeypatch, [str(cpu)], FRAGMENTATION)
    assert list(app.table[0].value.columns) == ["tide, as recorded"]


def test_what_cannot_be_replayed_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [str(run)], PATH)
    app.selectbox(key="conf").select("large_segment_size_mb:32")
    app.selectbox(key="torch").select("2.1")
    replayed(app)
    [said] = [error.value.replace("\\", "") for error in app.error]
    assert said.startswith("'large_segment_size_mb' is no setting of torch 2.1's allocator")
    assert not made_runs() and not app.table


def test_of_several_runs_one_is_replayed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = prefill().write(tmp_path / "tide.memtrace")
    app = opened(monkeypatch, [str(run), str(cpu)], PATH, replay="tide")
    assert app.selectbox(key="replay").value == "tide"
    replayed(app)
    assert app.multiselect(key="run").value == ["pieces", "tide", "tide, as recorded"]
