"""``memtrace view``: what it checks, what it starts, and the page in a real browser."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from memtrace.cli import main
from tests.synthetic import prefill


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return prefill().write(tmp_path / "tide.memtrace")


class Started(Exception):
    """Stands in for the process that becomes the server."""


def command(monkeypatch: pytest.MonkeyPatch, *argv: object) -> list[str]:
    def started(_program: str, words: list[str]) -> None:
        raise Started(words)

    monkeypatch.setattr(os, "execv", started)
    with pytest.raises(Started) as caught:
        main(["view", *map(str, argv)])
    return list(caught.value.args[0])


def test_the_server_listens_here_only_and_sends_nothing_home(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command(monkeypatch, run)
    assert "--server.address=127.0.0.1" in words
    assert "--browser.gatherUsageStats=false" in words
    assert words[words.index("--") + 1 :] == [str(run)]
    assert Path(words[words.index("run") + 1]).is_file()


def test_options_reach_the_server(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [w for w in command(monkeypatch, run) if "port" in w or "headless" in w]
    words = command(monkeypatch, run, "--port", 8600, "--no-browser")
    assert "--server.port=8600" in words
    assert "--server.headless=true" in words


def test_runs_are_passed_on_as_absolute_paths(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    assert command(monkeypatch, "tide")[-1] == str(run)


def test_an_impossible_port_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run), "--port", "70000"]) == 1
    assert capsys.readouterr().err == "memtrace: 70000 is not a port; use one from 1 to 65535\n"


def test_a_missing_viewer_is_said_with_the_command_that_installs_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "streamlit" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert main(["view", str(run)]) == 1
    assert capsys.readouterr().err == (
        "memtrace: the viewer needs streamlit; install it with pip install 'tidekv[app]'\n"
    )


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


def test_ctrl_c_ends_the_server_quietly(run: Path, tmp_path: Path) -> None:
    with serving(tmp_path, run) as (server, url):
        server.send_signal(signal.SIGINT)
        out, _ = server.communicate(timeout=30)
    assert server.returncode == 0
    assert url in out
    assert "Traceback" not in out


def test_a_real_browser_draws_both_runs(run: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api")
    other = prefill(scale=9).write(tmp_path / "snapkv.memtrace")
    with serving(tmp_path, other, run) as (_, url), playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        elsewhere: list[str] = []
        page.on("request", lambda request: elsewhere.append(request.url))
        page.goto(url)
        page.wait_for_selector(".js-plotly-plot .scatterlayer .fills path", timeout=60_000)
        page.get_by_text("times less").wait_for()
        assert (
            page.locator(".js-plotly-plot .subplot.xy, .js-plotly-plot .subplot.x2y2").count() == 2
        )
        assert page.get_by_text("peak 7.7 MiB", exact=True).count() == 1
        assert page.get_by_text("peak 5.4 MiB", exact=True).count() == 1
        assert "run=snapkv&run=tide" in page.url
        browser.close()
    local = (url, url.replace("http", "ws"), "data:", "blob:")
    assert [address for address in elsewhere if not address.startswith(local)] == []
