"""The page of all allocations in a real browser."""

from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from tests.app.browsing import browsing, serving
from tests.synthetic import prefill


@pytest.mark.slow
def test_a_search_narrows_the_table_and_is_saved(tmp_path: Path) -> None:
    run = prefill(layers=8).write(tmp_path / "tide.memtrace")
    with serving(tmp_path, run) as (_, url), browsing(url) as page:
        page.get_by_role("link", name="Allocations").click()
        page.get_by_text("51 of 51 allocations.").wait_for()
        page.locator(".st-key-hot-spots .js-plotly-plot .bars path").first.wait_for()
        search = page.get_by_role("textbox", name="Search")
        search.fill("layer, gather")
        search.press("Enter")
        page.get_by_text("8 of 51 allocations.").wait_for()
        assert "search=layer" in page.url
        assert page.locator("table").get_by_text("KV_res/compact").count() == 8
        with page.expect_download() as started:
            page.get_by_role("button", name="CSV").first.click()
        started.value.save_as(tmp_path / "found.csv")
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 9
