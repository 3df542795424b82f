"""The page of segments in a real browser."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("streamlit")

from tests.app.browsing import browsing, serving
from tests.app.test_fragmentation import program


@pytest.mark.slow
def test_the_slider_moves_the_map_and_charts_are_saved(tmp_path: Path) -> None:
    run = program().write(tmp_path / "pieces.memtrace")
    with serving(tmp_path, run) as (_, url), browsing(url) as page:
        page.get_by_role("link", name="Fragmentation").click()
        bars = page.locator(".st-key-segments .js-plotly-plot .scatterlayer .fills path")
        bars.first.wait_for()
        page.locator(".st-key-unused .heatmaplayer image").wait_for()
        said = page.get_by_text("66.0 MiB free in pieces")
        page.get_by_role("button", name="Most in pieces").click()
        said.wait_for()
        for _ in range(30):
            page.get_by_role("slider").first.press("ArrowLeft")
        said.wait_for(state="detached")
        assert "instant=" in page.url
        line = page.locator(".st-key-unused .js-plotly-plot line.memtrace-mark").first
        where = line.get_attribute("x1")
        page.get_by_role("slider").first.press("ArrowLeft")
        page.wait_for_function(
            "old => Number(document.querySelector('line.memtrace-mark').getAttribute('x1')) < old",
            arg=float(where),
        )
        page.get_by_role("button", name="Most in pieces").click()
        said.wait_for()
        for number, key in enumerate(("segments", "unused")):
            for kind in ("CSV", "SVG", "PNG"):
                with page.expect_download() as started:
                    page.get_by_role("button", name=kind).nth(number).click()
                started.value.save_as(tmp_path / started.value.suggested_filename)
            assert (tmp_path / f"memtrace-{key}.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "memtrace-segments.csv").read_text().splitlines()
    assert table[0] == "run,segment,stream,address,bytes,requested,state,component,made in"
    saved = (tmp_path / "memtrace-segments.svg").read_text()
    assert (tmp_path / "memtrace-unused.svg").read_text().count("memtrace-mark") == 3
    names = "{http://www.w3.org/2000/svg}"
    drawn = ElementTree.fromstring(saved)
    assert "KV_res" in {text.text for text in drawn.iter(f"{names}text")}
    patterns = {one.get("id") for one in drawn.iter(f"{names}pattern")}
    assert any(f"#{name}" in saved for name in patterns), "patterns are part of the picture"
