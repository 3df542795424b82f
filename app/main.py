"""What Streamlit runs for each session and after each change: the choice, then the chosen page."""

import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType

import streamlit as st

from app import live, views
from app.choice import chosen, named
from app.load import Subject, Unbooked
from app.making import made_runs, settle, welcome
from app.parts import escaped

st.set_page_config(page_title="memtrace", layout="wide")


def show(view: ModuleType) -> None:
    """Draw one page, where there is something to show."""
    shown: Sequence[Subject | Unbooked] = subjects
    if view not in views.WITHOUT_EVENTS:
        shown = [one for one in subjects if isinstance(one, Subject)]
        left_out(one.name for one in subjects if isinstance(one, Unbooked))
    if shown or view in views.WITHOUT_RUNS:
        view.draw(shown)


def left_out(names: Iterable[str]) -> None:
    """Say of which runs a page can show nothing, and which page does."""
    listed = " and ".join(names)
    if listed:
        st.info(
            f"No allocation was booked of {escaped(listed)}, only what memory was like after each "
            "request: the page Requests shows it."
        )


pages = [st.Page(partial(show, view), title=view.TITLE, url_path=view.PATH) for view in views.ALL]
page = st.navigation(pages, position="top")
began, versions = time.monotonic(), live.recording(sys.argv[1:])
runs = named([*sys.argv[1:], *(str(one.folder) for one in made_runs())])
welcome(runs)
subjects = chosen(runs)
page.run()
settle()
live.follow(versions, time.monotonic() - began)
