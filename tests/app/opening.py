"""Pages as Streamlit runs them, without a browser."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

MAIN = Path(__file__).parents[2] / "app" / "main.py"


def opened(
    monkeypatch: pytest.MonkeyPatch,
    folders: list[str],
    page: str = "overview",
    **query: str | list[str],
) -> AppTest:
    """The page with this ``PATH`` for the runs in ``folders``, at an address with ``query``."""
    monkeypatch.setattr(sys, "argv", [str(MAIN), *folders])
    app = AppTest.from_file(str(MAIN), default_timeout=60)
    app.query_params.update(query)
    app._page_hash = calc_hash(page)  # of a page that is a function AppTest knows no other name
    app.run()
    assert not app.exception
    return app


def figure(app: AppTest, key: str) -> dict[str, Any]:
    """The chart of that key."""
    [chart] = [one for one in app.get("plotly_chart") if one.proto.id.endswith(f"-{key}")]
    return dict(json.loads(chart.proto.spec))


def words(app: AppTest) -> str:
    """All text of the page, without the signs that keep it from being Markdown."""
    return " ".join(part.value for part in app.markdown).replace("\\", "")
