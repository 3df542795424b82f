"""The page of the timelines."""

from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from app.views.timeline import PATH
from tests.app.opening import figure, opened
from tests.synthetic import History, prefill


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        str(prefill(scale=9).write(tmp_path / "snapkv.memtrace")),
        str(prefill(scale=1).write(tmp_path / "tide.memtrace")),
    ]


def test_every_run_is_drawn_and_described(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, runs, PATH)
    stacks = {trace.get("stackgroup") for trace in figure(app, "timeline")["data"]}
    assert stacks == {None, "run 0", "run 1"}
    [chart] = app.get("plotly_chart")
    assert "snapkv: allocated bytes peak at 7.7 MiB" in str(chart.proto)
    assert "Of 54 and 54 events" in app.caption[0].value


def test_one_event_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    history.alloc(100, "Act")
    app = opened(monkeypatch, [str(history.write(tmp_path / "one"))], PATH)
    assert figure(app, "timeline")["data"]
