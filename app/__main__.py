"""The viewer's server: reads the runs, and answers once they are read."""

import signal
import sys
from contextlib import suppress

#: A button may change what a widget with a default shows, which isn't worth a stack of frames.
_QUIET = "--global.disableWidgetStateDuplicationWarning=true"


def main(words: list[str]) -> None:
    """Become Streamlit; ``words`` are its own, and after ``--`` the runs' folders."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it starts, Ctrl-C has nothing to clean up
    from click import Abort
    from streamlit.web import cli

    import app.views  # noqa: F401 - which the first page would wait for
    from app.load import prepare
    from memtrace.errors import TraceError

    end = words.index("--")
    try:
        prepare(words[end + 1 :])
    except TraceError as error:
        sys.exit(f"memtrace: {error}")
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.default_int_handler)  # what was replayed is removed
    with suppress(Abort):  # Ctrl-C
        streamlit = [*words[:end], *_theme(), _QUIET, *words[end:]]
        cli.main(streamlit, prog_name="memtrace view", standalone_mode=False)


def _theme() -> list[str]:
    """The page has the colours of the figures on it."""
    from app.figures.style import DARK, LIGHT

    return [
        f"--theme.{name}.{key}={colour}"
        for name, look in (("light", LIGHT), ("dark", DARK))
        for key, colour in (
            ("backgroundColor", look.background),
            ("secondaryBackgroundColor", look.grid),
            ("textColor", look.ink),
            ("primaryColor", look.accent),
        )
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
