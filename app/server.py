"""What Streamlit serves: the pages, each with what its address and its charts make known before.

Streamlit's own page takes ``/timeline`` for a server at ``/timeline/``: it asks there first, which
ends in errors in the browser's console and a wait. And it fetches Plotly when the first chart has
come, where it could have begun with all else.
"""

from pathlib import Path

import streamlit as st
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Route

from app import views

_STATIC = Path(st.__file__).parent / "static"


def _page() -> str:
    """Streamlit's, and what its browser's side reads of where the server is."""
    added = "<script>window.__streamlit = { BACKEND_BASE_URL: location.origin }</script>"
    for script in _STATIC.glob("static/js/PlotlyChart.*.js"):
        address = script.relative_to(_STATIC)
        added += f'<link rel="modulepreload" crossorigin href="./{address}">'
    return (_STATIC / "index.html").read_text().replace("<head>", f"<head>{added}", 1)


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
