"""The pages in a real browser."""

import shutil
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from xml.etree import ElementTree

import pytest

pytest.importorskip("streamlit")

from tests.app.browsing import browsing, drag, serving, settle
from tests.synthetic import History, prefill


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        prefill(scale=9).write(tmp_path / "snapkv.memtrace"),
        prefill(scale=1).write(tmp_path / "tide.memtrace"),
    ]


def test_pages_are_drawn_and_charts_are_saved(runs: list[Path], tmp_path: Path) -> None:
    with serving(tmp_path, *runs) as (_, url), browsing(url) as page:
        page.get_by_text("times less").wait_for()
        page.locator(".st-key-equation .js-plotly-plot .bars path").first.wait_for()
        for kind in ("CSV", "SVG", "PNG"):
            with page.expect_download() as started:
                page.get_by_role("button", name=kind).click()
            started.value.save_as(tmp_path / started.value.suggested_filename)
        page.get_by_role("link", name="Timeline").click()
        page.locator(".st-key-timeline .js-plotly-plot .scatterlayer .fills path").first.wait_for()
        assert (
            page.locator(".st-key-timeline .subplot.xy, .st-key-timeline .subplot.x2y2").count()
            == 2
        )
        for peak in ("peak 7.7 MiB", "peak 5.4 MiB"):
            assert page.locator(".st-key-timeline").get_by_text(peak, exact=True).count() == 1
        for address in ("x", "timeline/x/y"):
            with pytest.raises(HTTPError, match="Not Found") as missing:
                urlopen(f"{url}/{address}")
            assert missing.value.read().startswith(f"/{address} is no page of memtrace".encode())
        with pytest.raises(HTTPError, match="Bad Request"):
            urlopen(Request(url, headers={"Host": "example.org"}))
    table = (tmp_path / "memtrace-equation.csv").read_text().splitlines()
    assert table[0] == "run,term,at the peak,own peak"
    drawn = ElementTree.parse(tmp_path / "memtrace-equation.svg").getroot()
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"KV_res", "tide − snapkv"} <= texts
    assert (tmp_path / "memtrace-equation.png").read_bytes().startswith(b"\x89PNG")


def tab_to(page: Any, label: str) -> None:
    """Move the focus on by the keyboard until what has that label has it."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.ariaLabel") == label:
            return
    raise AssertionError(f"no Tab leads to {label}")


@pytest.mark.slow
def test_a_timeline_is_explored_by_keys_alone(runs: list[Path], tmp_path: Path) -> None:
    with serving(tmp_path, *runs) as (_, url), browsing(f"{url}/timeline") as page:
        settle(page)
        for label, typed, address in (
            ("From", "0.01", "from=0.01"),
            ("To", "0.02", "to=0.02"),
            ("Instant A", "0.015", "at=0.015"),
        ):
            tab_to(page, label)
            page.keyboard.type(typed)
            page.keyboard.press("Enter")
            page.wait_for_url(f"**{address}**")
            settle(page)
        page.keyboard.press("ArrowUp")  # by a hundredth of the whole
        page.wait_for_url("**at=0.01553**")
        page.get_by_text("Alive at A").wait_for()
        page.locator(".st-key-timeline").get_by_text("highest here").first.wait_for()


@pytest.mark.slow
def test_a_run_is_followed_while_it_is_recorded(tmp_path: Path) -> None:
    run, history = tmp_path / "live.memtrace", History()
    history.alloc(1 << 20, "model")
    history.write(run, complete=False)
    with serving(tmp_path, run) as (_, url), browsing(url) as page:
        page.get_by_text("live is not complete").wait_for()
        page.get_by_role("link", name="Timeline").click()
        page.get_by_text("Of 1 events").wait_for()
        for complete in (False, True):
            history.alloc(1 << 20, "Act")
            history.write(tmp_path / "next", complete=complete)
            shutil.rmtree(run)
            (tmp_path / "next").rename(run)
            page.get_by_text(f"Of {len(history.live)} events").wait_for()
        page.get_by_role("link", name="Overview").click()
        page.get_by_text("Live at the peak").wait_for()
        assert page.get_by_text("is not complete").count() == 0


@pytest.mark.slow
def test_a_timeline_is_explored_by_drag_click_and_double_click(
    runs: list[Path], tmp_path: Path
) -> None:
    with serving(tmp_path, *runs) as (_, url), browsing(url) as page:
        page.get_by_role("link", name="Timeline").click()
        plot = page.locator(".st-key-timeline .js-plotly-plot")
        x, y = drag(page, -0.25)
        page.wait_for_url("**from=0.01**to=0.02**")
        plot.get_by_text("highest here").first.wait_for()
        page.mouse.move(x, y)
        page.locator(".hoverlayer .hovertext, .hoverlayer .legend").first.wait_for()
        page.mouse.click(x, y)
        page.wait_for_url("**at=0.02**")
        page.get_by_text("Alive at A").wait_for()
        plot.locator(".shapelayer path").first.wait_for(state="attached")
        page.mouse.dblclick(x, y)
        page.wait_for_url(lambda address: "from=" not in address)
        plot.get_by_text("peak 7.7 MiB", exact=True).wait_for()
