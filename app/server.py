"""What Streamlit serves: its page, which is told where the server is.

Streamlit's own takes ``/timeline`` for a server at ``/timeline/``: it asks there first, which ends
in errors in the browser's console and a wait.
"""

from pathlib import Path

import streamlit as st
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Route

from app import views


def _page() -> str:
    own = (Path(st.__file__).parent / "static" / "index.html").read_text()
    told = "<script>window.__streamlit = { BACKEND_BASE_URL: location.origin }</script>"
    return own.replace("<head>", f"<head>{told}", 1)


_PAGE = _page()


async def _answer(_request: Request) -> HTMLResponse:
    return HTMLResponse(_PAGE, headers={"Cache-Control": "no-cache"})


async def _first(request: Request) -> RedirectResponse:
    """The first page has no address of its own."""
    return RedirectResponse(request.url.replace(path="/"))


first, *others = (f"/{view.PATH}" for view in views.ALL)
app = st.App(
    "main.py",
    routes=[Route(first, _first), *(Route(path, _answer) for path in ("/", *others))],
)
