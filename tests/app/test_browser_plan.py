"""The page that plans, in a real browser, with the real command."""

import platform
import sys
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from tests.app.browsing import browsing, serving
from tests.synthetic import prefill


@pytest.mark.slow
@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="no virtual GPU here"
)
def test_a_plan_is_opened_in_the_other_pages_and_a_curve_drawn(tmp_path: Path) -> None:
    run = prefill(layers=2).write(tmp_path / "recorded.memtrace")
    with serving(tmp_path, run) as (_, url), browsing(url) as page:
        page.set_default_timeout(300_000)  # two methods at once, on a machine that does more
        page.get_by_role("link", name="Plan").click()
        prompt = page.get_by_label("Prompt, tokens")
        prompt.fill("8192")
        page.get_by_role("button", name="Plan", exact=True).click()
        page.get_by_text("Making tidekv 8192 rtx-4090-24g").wait_for()
        page.get_by_text("What came of it").wait_for()
        page.locator("table").get_by_text("tidekv 8192 rtx-4090-24g").wait_for()
        page.locator("table").get_by_text("snapkv 8192 rtx-4090-24g").wait_for()
        page.get_by_label("Prompts of the capacity curve, tokens").fill("8192, 16384")
        page.get_by_role("button", name="Draw the curve").click()
        page.locator(".st-key-capacity .js-plotly-plot .scatterlayer .point").first.wait_for()
        page.locator(".st-key-capacity").get_by_text("rtx-4090-24g: 23.52 GiB").wait_for()
        with page.expect_download() as started:
            page.get_by_role("button", name="CSV").click()
        started.value.save_as(tmp_path / "curve.csv")
        page.get_by_role("link", name="Overview").click()
        page.get_by_text("The runs are known in different ways").wait_for()
        page.get_by_role("link", name="Fragmentation").click()
        page.locator(".st-key-segments").get_by_text("snapkv 8192 rtx-4090-24g").wait_for()
    rows = (tmp_path / "curve.csv").read_text().splitlines()
    assert rows[0] == "method,card,prompt,fits,allocated,reserved"
    assert [row.split(",")[0] for row in rows[1:]] == ["snapkv", "snapkv", "tidekv", "tidekv"]
