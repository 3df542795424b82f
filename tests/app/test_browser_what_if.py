"""The page that replays, in a real browser."""

from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from tests.app.browsing import browsing, serving
from tests.synthetic import prefill


@pytest.mark.slow
def test_a_replay_is_opened_in_the_other_pages(tmp_path: Path) -> None:
    run = prefill(layers=8).write(tmp_path / "tide.memtrace")
    with serving(tmp_path, run) as (_, url), browsing(url) as page:
        page.get_by_role("link", name="What if").click()
        page.get_by_role("button", name="Replay", exact=True).click()
        page.get_by_text("What came of it").wait_for()
        page.get_by_role("link", name="Fragmentation").click()
        page.get_by_text("No segments were recorded of tide:").wait_for()
        page.locator(".st-key-segments").get_by_text("tide, as recorded").wait_for()
        page.locator(".st-key-unused .heatmaplayer image").wait_for()
