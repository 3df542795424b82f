"""A real server, and the pages in a real browser: Debian's Chromium, headless."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest


@contextmanager
def serving(folder: Path, *runs: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real server on a free port, started where another package is called ``app``."""
    (folder / "app.py").write_text("raise SystemExit('the wrong app')")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "memtrace", "view", *map(str, runs), "--no-browser", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    server = subprocess.Popen(
        [sys.executable, "-P", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/_stcore/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield server, url
    finally:
        server.kill()
        server.wait()


@contextmanager
def browsing(url: str, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """A page of Playwright's, of so many pixels, opened at ``url``.

    At the end nothing was asked of another host, and the console holds no error.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api")
    asked: list[str] = []
    errors: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(url)
        yield page
        browser.close()
    host = urlsplit(url).netloc
    local = (f"http://{host}/", f"ws://{host}/", "data:", "blob:")
    assert [address for address in asked if not address.startswith(local)] == []
    assert errors == []


#: Nothing has been on its way for half a second: the script has run, no box says that a part is
#: loading, and each chart is drawn. Between two of these there may be a moment of peace.
_STILL = """() => {
    const moving = !document.querySelector("[data-test-script-state=notRunning]")
        || document.querySelector(
            "[data-testid=stSkeleton], [data-testid=stAppSkeleton], [data-testid=stSpinner], "
            + "[data-testid=stStatusWidget], [data-stale=true], .stPlotlyChart:not(:has(.main-svg))"
        );
    if (moving || !window.stillSince) window.stillSince = performance.now();
    return performance.now() > window.stillSince + 500;
}"""


def settle(page: Any) -> None:
    """Wait until the page is whole."""
    page.evaluate("window.stillSince = 0")
    page.wait_for_function(_STILL)


def drag(page: Any, share: float) -> tuple[float, float]:
    """Drag over the timeline, from its middle by a share of its width; the middle, in pixels."""
    plot = page.locator(".st-key-timeline .js-plotly-plot")
    plot.locator(".scatterlayer .fills path").first.wait_for()
    area = plot.locator('.nsewdrag[data-subplot="xy"]').bounding_box()
    assert area is not None
    x, y = area["x"] + area["width"] / 2, area["y"] + area["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + share * area["width"], y + 10, steps=5)
    page.mouse.up()
    return x, y
