"""Run ``memtrace record`` as a user does."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from memtrace.trace.reader import Trace, open_trace

SCRIPTS = Path(__file__).parent / "scripts"
RECORD = [sys.executable, "-m", "memtrace", "record"]
PYTHON = sys.executable
#: Seconds that a program stays to be sampled, on a machine that does other things, too.
LINGER = 1


class Launch:
    """The command line that records ``command`` into the folder ``name`` of a directory."""

    def __init__(
        self, cwd: Path, *command: str | Path, name: str = "run", options: Sequence[str] = ()
    ) -> None:
        self.cwd = cwd
        self.folder = cwd / name
        self.arguments = [*RECORD, "-o", name, *options, "--", *map(str, command)]

    def run(
        self, *, stdin: str = "", environment: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.arguments,
            cwd=self.cwd,
            env={**os.environ, **(environment or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.arguments,
            cwd=self.cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def trace(self) -> Trace:
        return open_trace(self.folder)


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def lines(path: Path) -> list[str]:
    """The whole lines of a file that may not exist yet."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def notices(text: str) -> list[str]:
    """What memtrace itself said on stderr."""
    return [line for line in text.splitlines() if line.startswith("memtrace:")]
