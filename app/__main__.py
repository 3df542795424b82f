"""The viewer's server: reads the runs, and answers once they are read."""

import signal
import sys
from contextlib import suppress

from click import Abort
from streamlit.web import cli

import app.views  # noqa: F401 - which the first page would wait for
from app.figures.style import DARK, LIGHT
from app.load import prepare
from memtrace.errors import TraceError

#: The page has the colours of the figures on it.
_THEME = [
    f"--theme.{name}.{key}={colour}"
    for name, look in (("light", LIGHT), ("dark", DARK))
    for key, colour in (
        ("backgroundColor", look.background),
        ("secondaryBackgroundColor", look.grid),
        ("textColor", look.ink),
        ("primaryColor", look.accent),
    )
]
#: A button may change what a widget with a default shows, which isn't worth a stack of frames.
_QUIET = "--global.disableWidgetStateDuplicationWarning=true"


def main(words: list[str]) -> None:
    """Become Streamlit; ``words`` are its own, and after ``--`` the runs' folders."""
    end = words.index("--")
    try:
        prepare(words[end + 1 :])
    except TraceError as error:
        sys.exit(f"memtrace: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was replayed is removed
    with suppress(Abort):  # Ctrl-C
        streamlit = [*words[:end], *_THEME, _QUIET, *words[end:]]
        cli.main(streamlit, prog_name="memtrace view", standalone_mode=False)


if __name__ == "__main__":
    main(sys.argv[1:])
