"""What Streamlit runs for each session and after each change: the choice, then the chosen page."""

import sys
from functools import partial
from types import ModuleType

import streamlit as st

from app import views
from app.choice import chosen

st.set_page_config(page_title="memtrace", layout="wide")


def show(view: ModuleType) -> None:
    """Draw one page, where there is something to show."""
    if subjects:
        view.draw(subjects)


pages = [st.Page(partial(show, view), title=view.TITLE, url_path=view.PATH) for view in views.ALL]
page = st.navigation(pages, position="top")
subjects = chosen(sys.argv[1:])
page.run()
