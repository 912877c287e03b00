"""Middleware in front of Dagster's webserver. Without it, the webserver answers every request that
reaches its port."""

import re
import secrets
from collections.abc import Iterable

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
# A page that loads the next page, not a redirect: after a redirect from another site's link, the
# browser would not send a cookie with SameSite=Strict.
_LEADS_ON = '<!doctype html><meta http-equiv="refresh" content="0; url=./"><a href="./">Open</a>'
_NO_TOKEN = "This page needs the token. Open the address that the server printed when it started.\n"


def gated(app: ASGIApp, token: str, hosts: Iterable[str] = LOOPBACK) -> ASGIApp:
    """An app that answers only requests that carry the token, come from its own pages, and name one
    of these hosts.

    `?token=` in an address sets a cookie; a program may send `Authorization: Bearer` instead. Any
    other request gets status 400 (host), 401 (token) or 403 (origin); a GraphQL request by GET gets
    405."""
    return TrustedHostMiddleware(_Gate(app, token), [*hosts], www_redirect=False)


class _Gate:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] in ("http", "websocket")
        answer = self._answer(HTTPConnection(scope)) if is_request else None
        await (answer or self._app)(scope, receive, send)

    def _answer(self, request: HTTPConnection) -> Response | None:
        """The answer with which the gate refuses a request; None if the app may answer."""
        is_get = request.scope.get("method") == "GET"
        # Browsers send a cookie to every port of a host.
        cookie = "nmoe-ui-" + re.sub("[^0-9A-Za-z]", "-", request.headers["host"])
        if is_get and self._is_token(request.query_params.get("token", "")):
            return self._signed_in(cookie, request.url.scheme == "https")
        if _is_foreign(request):
            return _refusal("requests from pages of another origin are refused\n", 403)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not self._is_token(bearer) and not self._is_token(request.cookies.get(cookie, "")):
            return _refusal(_NO_TOKEN, 401)
        # Dagster executes mutations by GET too, except for a browser that asks for its page.
        is_graphql = request.scope["path"].endswith("/graphql")
        if is_get and is_graphql and "text/html" not in request.headers.get("accept", ""):
            return _refusal("send GraphQL requests by POST\n", 405)
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token)

    def _signed_in(self, cookie: str, is_secure: bool) -> Response:
        page = HTMLResponse(_LEADS_ON, headers=_HEADERS)
        value = self._token.decode()
        page.set_cookie(cookie, value, secure=is_secure, httponly=True, samesite="strict")
        return page


def _is_foreign(request: HTTPConnection) -> bool:
    """Whether a page of another origin caused the request, according to the browser's headers.
    Browsers name the origin for POST and WebSockets, and its kind for the rest."""
    origin = request.headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2] != request.headers["host"]
    return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _refusal(text: str, status: int) -> Response:
    return PlainTextResponse(text, status, _HEADERS)
