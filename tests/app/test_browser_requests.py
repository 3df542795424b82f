"""The page of requests in a real browser."""

from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from tests.app.browsing import browsing, serving
from tests.app.test_requests import answering, unbooked


@pytest.mark.slow
def test_a_click_on_a_request_opens_its_part_of_the_timeline(tmp_path: Path) -> None:
    run = answering(leak=64 << 10).write(tmp_path / "leaks.memtrace")
    bare = unbooked().write(tmp_path / "bare.memtrace")
    with serving(tmp_path, run, bare) as (_, url), browsing(url) as page:
        page.get_by_text("No allocation was booked of bare").wait_for()
        page.get_by_role("link", name="Requests").click()
        plot = page.locator(".st-key-requests .js-plotly-plot")
        plot.get_by_text("64.0 KiB/request").first.wait_for()
        area = plot.locator('.nsewdrag[data-subplot="xy"]').bounding_box()
        assert area is not None
        # the line of the run's sixth request or so
        page.mouse.move(area["x"] + area["width"] / 4, area["y"] + area["height"] / 2)
        page.mouse.down()
        page.mouse.up()
        page.wait_for_url("**which=r**")
        page.locator(".st-key-request .js-plotly-plot .fills path").first.wait_for()
        chosen = page.url.rpartition("which=")[2].partition("&")[0]
        assert page.get_by_role("heading", name=f"Request {chosen}").count() == 1
        page.get_by_role("link", name="Open it in the Timeline").press("Enter")
        page.wait_for_url(f"**/timeline?**by=request&request={chosen}**")
        page.get_by_text("seconds since the request began").first.wait_for()
        assert page.locator(".st-key-request input").input_value() == chosen


@pytest.mark.slow
def test_requests_are_chosen_by_keys_alone_and_charts_are_saved(tmp_path: Path) -> None:
    run = answering(leak=64 << 10).write(tmp_path / "leaks.memtrace")
    with serving(tmp_path, run) as (_, url), browsing(url) as page:
        page.get_by_role("link", name="Requests").press("Enter")
        box = page.locator(".st-key-which input")
        box.press_sequentially("r7")
        box.press("Enter")
        page.wait_for_url("**which=r7**")
        page.get_by_role("heading", name="Request r7").wait_for()
        page.locator(".st-key-cycles .js-plotly-plot .scatterlayer .points path").first.wait_for()
        for kind in ("CSV", "SVG", "PNG"):
            with page.expect_download() as started:
                page.get_by_role("button", name=kind).first.click()
            started.value.save_as(tmp_path / started.value.suggested_filename)
    lines = (tmp_path / "memtrace-requests.csv").read_text().splitlines()
    assert len(lines) == 1 + 24
    assert lines[0].startswith("run,counted,request,name,prompt_tokens")
    assert (tmp_path / "memtrace-requests.png").read_bytes().startswith(b"\x89PNG")
