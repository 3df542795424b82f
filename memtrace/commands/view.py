"""Show runs in a browser, side by side, from a server that only this machine can reach."""

import argparse
import importlib.util
import os
import socket
import sys
from pathlib import Path

import memtrace
from memtrace.errors import MemtraceError

NAME = "view"
HELP = "look at runs in a browser"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", metavar="RUN", nargs="*", help="runs (none: plan one there)")
    parser.add_argument("--port", type=int, metavar="N", help="default: the first free from 8501")
    parser.add_argument("--no-browser", action="store_true", help="only serve; open no browser")


def run(args: argparse.Namespace) -> int:
    """Check the runs, then become the viewer's server; Ctrl-C ends it.

    Raises:
        MemtraceError: a run is missing or damaged, the port is taken, or the viewer's packages
            aren't installed.
    """
    from memtrace.trace.reader import open_trace

    if args.port is not None:
        _check_port(args.port)
    folders = []
    for path in args.runs:
        folders.append(str(open_trace(path).folder.resolve()))
    need("streamlit", "plotly", "pandas")
    # The server takes this process's place, so a signal to memtrace is a signal to it.
    os.execv(sys.executable, _server(folders, args.port, args.no_browser))


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise MemtraceError(f"{port} is not a port; use one from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise MemtraceError(f"port {port} can't be had ({why}); use another one") from None


def need(*packages: str) -> None:
    """Make sure that what draws is installed.

    Raises:
        MemtraceError: some of it isn't.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MemtraceError(
            f"the viewer needs {' and '.join(missing)}; install it with pip install 'tidekv[app]'"
        )


def _server(folders: list[str], port: int | None, no_browser: bool) -> list[str]:
    """The command line of the server; -P keeps what lies in the current folder out of its way."""
    page = Path(memtrace.__file__).parent.parent / "app" / "server.py"
    options = [
        "--server.address=127.0.0.1",
        "--server.fileWatcherType=none",
        "--server.showEmailPrompt=false",
        "--browser.gatherUsageStats=false",
        "--client.toolbarMode=viewer",
    ]
    if port is not None:
        options.append(f"--server.port={port}")
    if no_browser:
        options.append("--server.headless=true")
    command = [sys.executable, "-P", "-m", "app", "run", str(page), *options]
    return [*command, "--", *folders]
