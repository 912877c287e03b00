"""The pages of the project behind the webserver's own address, made when they are opened: the
pictures of an output, and why outputs are not current."""

import os
import threading
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nmoe_assets.names import PICTURES, WHY
from nmoe_core.base.errors import NmoeError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources

_drawing = threading.Lock()  # matplotlib draws in one thread


def with_pictures(app: ASGIApp) -> ASGIApp:
    """An app that answers requests below `PICTURES` with a page of pictures, and below `WHY` with a
    page of reasons."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith((PICTURES, WHY)):
            await app(scope, receive, send)
            return
        answer = await run_in_threadpool(_answer, unquote(scope["path"]))
        await answer(scope, receive, send)

    return served


def _answer(path: str) -> Response:
    """The page of an output, by its key and, after a colon, its partition."""
    config = os.environ.get("NMOE_CONFIG")
    if config is None:
        text = "NMOE_CONFIG names no run: start the server with it, or use nmoe report --html\n"
        return PlainTextResponse(text, 404)
    content = _pictures if path.startswith(PICTURES) else _reasons
    try:
        with _drawing:
            text = content(Run(config), path.removeprefix(PICTURES).removeprefix(WHY))
    except (NmoeError, OSError) as error:
        return PlainTextResponse(f"{error}\n", 404)
    return HTMLResponse(text, headers={"Cache-Control": "no-store"})


def _pictures(run: Run, name: str) -> str:
    # These draw with matplotlib, which the server loads when somebody opens a picture.
    from nmoe_core.report.html import element, page, paragraph, pictures
    from nmoe_core.tasks.report.pictures import picture_of
    from nmoe_core.tasks.report.sections import sampled_changes

    key, _, partition = name.partition(":")
    shown = pictures(picture_of(run, key, partition)) or paragraph("This output has no pictures.")
    sections = [("pictures", "Pictures", shown)]
    source, _, kind = key.partition("/")
    if kind == "manifest":
        changed = sampled_changes(run, source)
        if changed is not None:
            sections.append(("changed-text", "Samples of changed text", changed))
    return page(name, element("h1", name), sections)


def _reasons(run: Run, key: str) -> str:
    from nmoe_core.report.html import element, page, paragraph, table
    from nmoe_core.tasks.graph.walk import walk
    from nmoe_core.tasks.preview import TOLD, told

    outputs = walk(run, run_sources(run)).not_current()
    own = [state for state in outputs if state.key == key]
    shown = table(TOLD, told(own)) if own else paragraph(f"{key} is current: a run would keep it.")
    every = table(TOLD, told(outputs)) if outputs else paragraph("All outputs are current.")
    sections = [("this", "This asset", shown), ("all", "All outputs that are not current", every)]
    return page(key, element("h1", key), sections)
