"""What Streamlit runs for each session and after each change: the choice, then the chosen page."""

import sys
import time
from functools import partial
from types import ModuleType

import streamlit as st

from app import live, views
from app.choice import chosen
from app.replays import replays

st.set_page_config(page_title="memtrace", layout="wide")


def show(view: ModuleType) -> None:
    """Draw one page, where there is something to show."""
    if subjects:
        view.draw(subjects)


pages = [st.Page(partial(show, view), title=view.TITLE, url_path=view.PATH) for view in views.ALL]
page = st.navigation(pages, position="top")
began, versions = time.monotonic(), live.recording(sys.argv[1:])
subjects = chosen([*sys.argv[1:], *(str(one.folder) for one in replays())])
page.run()
live.follow(versions, time.monotonic() - began)
