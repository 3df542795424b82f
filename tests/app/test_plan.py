"""The page that plans: what it asks ``tidekv plan``, and what it shows of the answers."""

import itertools
import json
import shutil
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

from app.figures.capacity import Curve, capacity, describe
from app.figures.style import LIGHT
from app.frames_plans import peaks, points
from app.plans import METHODS, MODELS
from app.views.plan import PATH
from memtrace.sizes import format_size
from tests.app.opening import figure, opened, words
from tests.synthetic import prefill
from tidekv.loading import PRESETS
from tidekv.plans import planning

GiB = 1 << 30


def probe(prompt: int, allocated: int, reserved: int, *, fits: bool = True) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "fits": fits,
        "allocated_peak": allocated * GiB,
        "reserved_peak": reserved * GiB,
    }


CURVES = [
    Curve("snapkv", "l4-24g", [probe(8192, 16, 18), probe(65536, 21, 21, fits=False)]),
    Curve("tidekv", "l4-24g", [probe(8192, 15, 16), probe(65536, 17, 18)]),
]


@pytest.fixture(autouse=True)
def shelf() -> Iterator[None]:
    """No plans of another test."""
    st.cache_resource.clear()
    yield
    st.cache_resource.clear()


class Tidekv:
    """In place of the process: tells of its progress, answers, and keeps what it was asked."""

    def __init__(self, run: Path, *, code: int = 0, error: str = "") -> None:
        self.run, self.code, self.error = run, code, error
        self.asked: list[list[str]] = []
        self.seconds = 0.0

    def __call__(self, words: list[str], **options: Any) -> "Popen[str]":
        self.asked.append(words)
        given = dict(itertools.pairwise(words))
        answer: dict[str, Any] = {}
        if self.code not in (0, 3):
            pass
        elif "--prompts" in given:
            methods = [{"method": one.method, "probes": one.probes} for one in CURVES]
            answer = {"card": "l4-24g", "methods": methods}
        else:
            shutil.copytree(self.run, Path(given["-o"]) / f"{given['--compare']}.memtrace")
            found = {
                "prompt_tokens": int(given["--prompt"]),
                "card": given["--device"],
                "fits": self.code == 0,
                "headroom": 4 * GiB if self.code == 0 else None,
                "peak": {"allocated": 17 * GiB},
                "reserved": {"peak": 18 * GiB},
            }
            answer = {"plans": [found]}
        steps = [{"doing": "Prefill", "done": done, "total": 32} for done in (0, 16)]
        script = (
            "import sys, time\n"
            f"for line in {[*map(json.dumps, steps), self.error]!r}:\n"
            "    print(line, file=sys.stderr, flush=True)\n"
            f"time.sleep({self.seconds})\n"
            f"print({json.dumps(answer)!r})\n"
            f"sys.exit({self.code})\n"
        )
        return Popen([sys.executable, "-c", script], **options)


@pytest.fixture
def tidekv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tidekv:
    found = Tidekv(prefill().write(tmp_path / "made.memtrace"))
    monkeypatch.setattr("app.making.Popen", found)
    return found


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(prefill(layers=2).write(tmp_path / "other.memtrace"))


def pressed(app: AppTest, label: str) -> AppTest:
    """The page once that button was pressed and what it started has ended."""
    [button] = [one for one in app.button if one.label == label]
    button.click().run()
    deadline = time.monotonic() + 60
    while any(one.label == "Cancel" for one in app.button) and time.monotonic() < deadline:
        time.sleep(0.1)
        app.run()
    return app


def test_each_method_is_planned_and_shown_beside_the_runs(
    run: str, tidekv: Tidekv, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, [run], PATH)
    app.number_input(key="plan prompt").set_value(65536)
    app.selectbox(key="plan conf").select("expandable_segments:True")
    pressed(app, "Plan")
    assert not app.error and not app.exception
    asked = [" ".join(one[4:]) for one in tidekv.asked]
    assert len(asked) == 2
    assert asked[0].startswith(
        "plan --model llama-3.1-8b --chunk-size 2048 --budget 4096 "
        "--allocator expandable_segments:True --compare snapkv --prompt 65536 "
        "--device rtx-4090-24g -o "
    )
    assert asked[0].endswith(" --json")
    names = ["snapkv 65536 rtx-4090-24g", "tidekv 65536 rtx-4090-24g"]
    assert app.multiselect(key="run").value == ["other", *names]
    table = app.table[0].value
    assert table["fits"].tolist() == ["yes", "yes"]
    assert table["reserved at most"].tolist() == ["18.00 GiB"] * 2
    assert table["left"].tolist() == ["4.00 GiB"] * 2
    assert app.code[0].value.splitlines()[1] == (
        "tidekv plan --model llama-3.1-8b --chunk-size 2048 --budget 4096 "
        "--allocator expandable_segments:True --compare tidekv --prompt 65536 "
        "--device rtx-4090-24g -o tidekv-65536-rtx-4090-24g"
    )
    pressed(app, "Plan")  # they are there
    assert len(tidekv.asked) == 2


def test_what_does_not_fit_is_a_run_like_another(
    run: str, tidekv: Tidekv, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidekv.code = 3
    app = pressed(opened(monkeypatch, [run], PATH), "Plan")
    assert not app.error
    assert app.table[0].value["fits"].tolist() == ["no", "no"]
    assert app.table[0].value["left"].tolist() == ["none", "none"]
    assert len(app.multiselect(key="run").value) == 3


def test_what_cannot_be_planned_is_said(
    run: str, tidekv: Tidekv, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidekv.code, tidekv.error = 2, "tidekv: There is no model 'x'."
    app = opened(monkeypatch, [run], PATH)
    app.multiselect(key="plan methods").set_value(["tidekv"])
    pressed(app, "Plan")
    assert [one.value for one in app.error] == ["There is no model 'x'."]
    assert not app.table
    assert app.multiselect(key="run").value == ["other"]


def test_a_plan_under_way_says_how_far_it_is_and_is_cancelled(
    run: str, tidekv: Tidekv, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidekv.seconds = 60
    app = opened(monkeypatch, [run], PATH)
    app.multiselect(key="plan methods").set_value(["tidekv"])
    [button] = [one for one in app.button if one.label == "Plan"]
    button.click().run()
    deadline = time.monotonic() + 30
    while app.get("progress")[0].proto.value != 50 and time.monotonic() < deadline:
        time.sleep(0.1)
        app.run()
    [bar] = app.get("progress")
    assert (bar.proto.value, bar.proto.text) == (50, "Making tidekv 131072 rtx-4090-24g")
    [cancel] = [one for one in app.button if one.label == "Cancel"]
    cancel.click().run()
    assert not app.error and not app.table and not app.get("progress")


def test_the_capacity_curve_is_drawn_with_each_card_that_is_chosen(
    run: str, tidekv: Tidekv, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = pressed(opened(monkeypatch, [run], PATH, cards=["l4-24g"]), "Draw the curve")
    assert not app.error
    [asked] = tidekv.asked
    assert " ".join(asked[4:]) == (
        "plan --model llama-3.1-8b --chunk-size 2048 --budget 4096 --compare snapkv,tidekv "
        "--prompts 8192,16384,32768,65536,98304,131072 --json"
    )
    drawn = figure(app, "capacity")
    assert [one["name"] for one in drawn["data"]] == [
        *("snapkv, allocated", "snapkv, reserved"),
        *("tidekv, allocated", "tidekv, reserved"),
    ]
    assert drawn["data"][0]["x"] == [8192]
    assert drawn["data"][2]["y"] == [15.0, 17.0]
    assert [one["text"] for one in drawn["layout"]["annotations"]] == ["l4-24g: 21.99 GiB"]
    assert app.table[0].value.loc["65,536"].tolist() == [
        *("doesn't fit", "doesn't fit", "17.00 GiB", "18.00 GiB")
    ]
    assert app.multiselect(key="run").value == ["other"]
    assert "Planned on NVIDIA L4" in " ".join(one.value for one in app.caption)


def test_the_page_needs_no_run(tidekv: Tidekv, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [], PATH)
    assert "A prefill runs on a card that isn't there" in words(app)
    assert [one.value for one in app.info] == ["No run is open: the page Plan makes some."]
    app.multiselect(key="plan methods").set_value(["tidekv"])
    pressed(app, "Plan")
    assert app.multiselect(key="run").value == ["tidekv 131072 rtx-4090-24g"]


def test_curves_in_words_and_as_data() -> None:
    assert describe(CURVES) == (
        "snapkv, 8,192 to 8,192 tokens: allocated from 16.00 GiB to 16.00 GiB, reserved from "
        "18.00 GiB to 18.00 GiB. 65,536 tokens don't fit l4-24g. "
        "tidekv, 8,192 to 65,536 tokens: allocated from 15.00 GiB to 17.00 GiB, reserved from "
        "16.00 GiB to 18.00 GiB."
    )
    data = points(CURVES)
    assert data["allocated"].tolist() == [size * GiB for size in (16, 21, 15, 17)]
    assert data["fits"].tolist() == [True, False, True, True]
    assert peaks(CURVES).columns.tolist()[0] == "snapkv, allocated"
    none = [Curve("full", "l4-24g", [])]
    assert describe(none) == "full: no prompt that was tried fits l4-24g."
    assert len(capacity(none, {}, LIGHT).data) == 2


def test_cards_whose_lines_lie_on_each_other_are_named_together() -> None:
    cards = {"a": 24 * GiB, "b": 80 * GiB, "c": 24 * GiB + 5}
    drawn = capacity(CURVES, cards, LIGHT)
    assert [one.text for one in drawn.layout.annotations] == [
        f"a, c: {format_size(24 * GiB + 5)}",
        "b: 80.00 GiB",
    ]
    assert len(drawn.layout.shapes) == 3


def test_the_page_knows_what_the_command_line_does() -> None:
    assert set(METHODS) == set(planning.METHODS)
    assert set(PRESETS) <= set(MODELS)
