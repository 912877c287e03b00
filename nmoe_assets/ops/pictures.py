"""The address below which the webserver draws the pictures of outputs, when they are opened."""

import os
import threading
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nmoe_assets.names import PICTURES
from nmoe_core.base.errors import NmoeError
from nmoe_core.config.run import Run

_drawing = threading.Lock()  # matplotlib draws in one thread


def with_pictures(app: ASGIApp) -> ASGIApp:
    """An app that answers requests below `PICTURES` with a page of pictures."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PICTURES):
            await app(scope, receive, send)
            return
        answer = await run_in_threadpool(_answer, unquote(scope["path"]).removeprefix(PICTURES))
        await answer(scope, receive, send)

    return served


def _answer(name: str) -> Response:
    """The page of an output's pictures, by its key and, after a colon, its partition."""
    config = os.environ.get("NMOE_CONFIG")
    if config is None:
        text = "NMOE_CONFIG names no run: start the server with it, or use nmoe report --html\n"
        return PlainTextResponse(text, 404)
    # These draw with matplotlib, which the server loads when somebody opens a picture.
    from nmoe_core.report.html import element, page, paragraph, pictures
    from nmoe_core.tasks.report.pictures import picture_of

    key, _, partition = name.partition(":")
    try:
        with _drawing:
            drawn = picture_of(Run(config), key, partition)
    except (NmoeError, OSError) as error:
        return PlainTextResponse(f"{error}\n", 404)
    shown = pictures(drawn) or paragraph("This output has no pictures.")
    text = page(name, element("h1", name), [("pictures", "Pictures", shown)])
    return HTMLResponse(text, headers={"Cache-Control": "no-store"})
