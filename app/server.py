"""What Streamlit serves: its page, which is told where the server is.

Streamlit's own takes ``/timeline`` for a server at ``/timeline/``: it asks there first, which ends
in errors in the browser's console and a wait.
"""

from pathlib import Path

import streamlit as st
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class Elsewhere:
    """Says of an address that is none of ours that nothing is there.

    Streamlit answers with its page, whose parts a browser then looks for in the wrong folder.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/", *others):
            await self.app(scope, receive, send)
            return
        missing = False

        async def answer(message: Message) -> None:
            nonlocal missing
            if message["type"] == "http.response.start":
                missing = "text/html" in Headers(raw=message["headers"]).get("content-type", "")
                if missing:
                    pages = ", ".join(("/", *others))
                    said = f"{scope['path']} is no page of memtrace; its pages are {pages}\n"
                    await PlainTextResponse(said, 404)(scope, receive, send)
            if not missing:
                await send(message)

        await self.app(scope, receive, answer)


app = st.App(
    "main.py",
    routes=[Route(first, _first), *(Route(path, _answer) for path in ("/", *others))],
    middleware=[
        # Else a page of a host whose name leads here would be answered as if it were ours.
        Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
        Middleware(Elsewhere),
    ],
)
