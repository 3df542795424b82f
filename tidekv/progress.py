"""Progress on stderr: a bar on terminals, lines for a program that asks for them."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

#: The variable that asks for lines, set to anything: ``{"doing": …, "done": 3, "total": 32}``.
LINES = "TIDEKV_PROGRESS"


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of ``total`` steps; the bar goes away at the end."""
    if os.environ.get(LINES):
        yield _lines(description, total)
        return
    console = Console(file=sys.stderr)
    if not console.is_terminal:  # where older versions of rich end a bar by an empty line
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def _lines(description: str, total: int) -> Callable[[], None]:
    done = -1

    def step() -> None:
        nonlocal done
        done += 1
        line = {"doing": description, "done": done, "total": total}
        print(json.dumps(line), file=sys.stderr, flush=True)

    step()
    return step
