"""``memtrace view``: what it checks, what it starts, and how it ends."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import app
from memtrace.cli import main
from tests.app.browsing import serving
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


def test_a_port_that_is_taken_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["view", str(run), "--port", str(port)]) == 1
    said = f"memtrace: port {port} can't be had (Address already in use); use another one\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.8, 1.6, 2.4])
def test_ctrl_c_while_it_starts_ends_it_quietly(seconds: float, run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    page = Path(app.__file__).with_name("server.py")
    options = ["--server.address=127.0.0.1", "--server.headless=true", f"--server.port={port}"]
    words = [sys.executable, "-m", "app", "run", str(page), *options, "--", str(run)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        time.sleep(seconds)
        server.send_signal(signal.SIGINT)
        out, _ = server.communicate(timeout=30)
    assert b"Traceback" not in out


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


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_quietly(sent: signal.Signals, run: Path, tmp_path: Path) -> None:
    with serving(tmp_path, run) as (server, url):
        server.send_signal(sent)
        out, _ = server.communicate(timeout=30)
    assert server.returncode == 0
    assert url in out
    assert "Traceback" not in out


def test_each_page_knows_where_the_server_is(run: Path, tmp_path: Path) -> None:
    with serving(tmp_path, run) as (_, url):
        for path in ("", "/timeline", "/overview?run=tide"):
            with urllib.request.urlopen(url + path) as answer:
                assert b"BACKEND_BASE_URL: location.origin" in answer.read()


def test_a_run_that_only_reading_shows_to_be_damaged_ends_the_server(tmp_path: Path) -> None:
    history = prefill()
    history.rows["scopes"].append((0, "layer", "not a number"))
    run = history.write(tmp_path / "bad")
    done = subprocess.run(
        [sys.executable, "-m", "memtrace", "view", str(run), "--no-browser"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"memtrace: [^\n]+\n", done.stderr)
