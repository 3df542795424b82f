"""``memtrace export --to html``: the page, what it needs, and what it says."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("plotly")

from app.figures import fragmentation
from app.figures.style import DARK, LIGHT
from app.offline import page
from memtrace.analysis.document import document
from memtrace.analysis.summary import summarise
from memtrace.cli import main
from memtrace.sizes import format_size
from memtrace.trace.reader import open_trace
from tests.app.test_fragmentation import program
from tests.app.test_requests import unbooked
from tests.synthetic import History, prefill


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        prefill(scale=9).write(tmp_path / "snapkv.memtrace"),
        prefill(scale=1).write(tmp_path / "tide.memtrace"),
    ]


def made(*runs: Path) -> str:
    return page([summarise(open_trace(run)) for run in runs])


def figure(text: str, key: str) -> dict[str, Any]:
    """The data of one of the page's charts."""
    [found] = re.findall(rf'<figure id="{key}">.*?<script[^>]*>(.*?)</script>', text, re.DOTALL)
    return dict(json.loads(found))


def sentences(text: str) -> str:
    return html.unescape(" ".join(re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", text, re.DOTALL)))


def test_its_numbers_are_those_of_the_report(runs: list[Path]) -> None:
    text = made(*runs)
    bars = [one for one in figure(text, "equation")["data"] if one["type"] == "bar"]
    for run, drawn in zip(runs, bars, strict=False):  # the last bars are the difference
        peak = document(summarise(open_trace(run)), top=0)["peak"]
        sizes = dict(zip(drawn["y"], drawn["x"], strict=True))
        assert round(sizes["Act"] * 2**20) == peak["components"]["Act"]
        assert round(sizes["process"] * 2**20) == peak["process"]
        assert f"{run.stem}: allocated bytes peak at {format_size(peak['allocated'])}" in text
    assert "<td>7.7 MiB</td>" in text
    assert "tide peaks at 5.4 MiB allocated, 2.3 MiB (30.4 %) below snapkv" in sentences(text)
    names = {one["name"] for one in figure(text, "timeline")["data"]}
    assert {"KV_res", "Act", "allocated", "peak", "process (RSS)"} <= names


def test_segments_are_drawn_where_the_run_failed_or_peaked(tmp_path: Path) -> None:
    text = made(program().write(tmp_path / "pieces.memtrace"))
    [account] = summarise(open_trace(tmp_path / "pieces.memtrace")).accounts
    course = fragmentation.History.of("pieces", account.account)
    assert course is not None
    stop = course.course.stops[course.telling]
    assert stop.event == (account.ooms[-1].event if account.ooms else account.peak.event)
    assert {one["name"] for one in figure(text, "segments")["data"]} >= {"KV_res", "hard"}
    assert {one["name"] for one in figure(text, "unused")["data"]} >= {"used", "inactive split"}
    for size in (stop.parts.reserved, stop.parts.hard):
        assert f"<td>{format_size(size)}</td>" in text


def test_nothing_is_loaded_and_a_name_stays_a_name(tmp_path: Path) -> None:
    history = History()
    with history.scope("module", "</script><img src=http://example.org>"):
        history.alloc(100, "Act")
    text = made(history.write(tmp_path / "<b>odd"))
    ours = re.sub(r"<script>.*?</script>", "", text, count=1, flags=re.DOTALL)  # plotly.js
    assert "Plotly.react" in ours
    assert not re.search(r"<[^>]*\b(src|href)=|<link|@import|url\(", ours)
    assert "default-src 'none'" in ours
    assert "<b>odd" not in ours


def test_what_is_not_there_is_said(runs: list[Path], tmp_path: Path) -> None:
    bare = unbooked().write(tmp_path / "bare.memtrace")
    text = made(runs[0], bare)
    assert "No allocation was booked of bare, so it isn't shown here." in sentences(text)
    assert "No segments were recorded of snapkv: only the caching allocator" in sentences(text)


def test_one_event_and_eight_runs_are_bounded(tmp_path: Path) -> None:
    history = History()
    history.alloc(100, "Act")
    one = history.write(tmp_path / "one")
    eight = [program().write(tmp_path / f"run{number}") for number in range(7)]
    assert "of its" not in sentences(made(one))
    assert len(made(one, *eight).encode()) < 10e6


def test_the_command_writes_it_once(
    runs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["export", *map(str, runs), "--to", "html"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("snapkv.html: snapkv, tide, ")
    assert main([*words, "--json"]) == 1
    assert "snapkv.html is there already" in json.loads(capsys.readouterr().out)["error"]
    assert main([*words, "--json", "-o", "both.html"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"] == ["snapkv", "tide"]
    assert told["bytes"] == Path("both.html").stat().st_size


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["empty", "--to", "html"], "no allocation was booked, so there is nothing to draw"),
        (["empty"] * 9 + ["--to", "html"], "a page shows up to 8 runs, and 9 are given"),
        (["empty", "--to", "html", "--pid", "1"], "--pid chooses the process of a snapshot"),
        (["empty", "empty", "--to", "torch-snapshot"], "a snapshot is of one run, and 2 are given"),
        (["empty", "--to", "html", "-o", "no/such.html"], "no allocation was booked"),
    ],
)
def test_what_can_not_be_exported_gets_a_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    History().write(Path("empty"))
    assert main(["export", *words]) == 1
    assert capsys.readouterr().err.startswith(f"memtrace: {sentence}")


def test_a_page_that_can_not_be_written_gets_a_sentence(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "no" / "such.html"
    assert main(["export", str(runs[0]), "--to", "html", "-o", str(file)]) == 1
    assert capsys.readouterr().err == (
        f"memtrace: {file} can't be written: No such file or directory\n"
    )


@pytest.mark.slow
def test_it_opens_without_a_network_in_the_reader_s_colours(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api")
    file = tmp_path / "page.html"
    runs = [prefill().write(tmp_path / "tide"), program().write(tmp_path / "pieces")]
    file.write_text(made(*runs))
    asked: list[str] = []
    said: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        opened = browser.new_context(offline=True, color_scheme="dark").new_page()
        opened.on("request", lambda request: asked.append(request.url))
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.goto(file.as_uri())
        for key in ("equation", "timeline", "segments", "unused"):
            opened.locator(f"#{key} .main-svg").first.wait_for()
        assert background(opened) == DARK.background
        opened.emulate_media(color_scheme="light")
        opened.wait_for_function(f"document.body.innerHTML.includes('{LIGHT.accent}')")
        assert background(opened) == LIGHT.background
        with opened.expect_download() as saved:
            opened.locator("#equation .plot-container").hover()
            opened.locator('#equation [data-title="Download plot as a PNG"]').click()
        saved.value.save_as(tmp_path / "equation.png")
        tables = [
            pd.DataFrame(rows)
            for rows in opened.eval_on_selector_all(
                "table",
                "found => found.map(one => [...one.rows].map(row => "
                "[...row.cells].map(cell => cell.innerText)))",
            )
        ]
        browser.close()
    assert asked[:1] == [file.as_uri()]
    assert [url for url in asked[1:] if not url.startswith(("data:", "blob:"))] == []
    assert said == []
    assert (tmp_path / "equation.png").read_bytes().startswith(b"\x89PNG")
    peak = document(summarise(open_trace(runs[0])), top=0)["peak"]
    shown = dict(tables[0].iloc[1:, :2].to_numpy().tolist())
    for name, size in peak["components"].items():
        assert shown[name] == format_size(size)


def background(opened: Any) -> str:
    """Of the first chart, as ``#RRGGBB``."""
    colour = opened.locator("#equation .main-svg").first.evaluate(
        "chart => getComputedStyle(chart).backgroundColor"
    )
    return "#" + "".join(f"{int(part):02X}" for part in re.findall(r"\d+", colour))
