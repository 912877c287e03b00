"""Posts requests to one URL, for `http`.

httpx speaks HTTP and TLS, to the server or to a proxy, and decompresses replies. Its transport is
used without its client, so it follows no redirects, stores no cookies and reads no files of logins.
Each request has its own connection: on a connection that is kept alive, httpx takes bytes that were
left after one answer as the next answer, which would label another document.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.request import getproxies, proxy_bypass

import httpx

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.quality import is_loopback

_ENCODINGS = ("gzip", "deflate", "identity")
_HEADERS = {"Accept-Encoding": "gzip, deflate", "Connection": "close"}


class Response(NamedTuple):
    """Status, decompressed body, and headers."""

    status: int
    body: bytes
    headers: httpx.Headers


class CannotConnectError(OSError):
    """No connection to the server could be made. `is_permanent`: because its certificate is not
    accepted, its name does not exist, or a proxy refuses."""

    is_permanent = False


class ReplyTooLargeError(OSError):
    """The body of a reply is longer than the limit, after decompression. The rest was not read."""


class Endpoint:
    """Posts to one URL.

    Args:
        url: The URL; a host name may have letters of any script.
        headers: Headers of each request.
        timeout_s: Limit for one request, including connecting.
        max_reply_bytes: Limit of a reply's body, after decompression.
        ca_file: File of certificates that are accepted too, beside those of this machine.
        proxy: URL of a proxy; an empty text for no proxy. By default the environment names the
            proxy (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) if the URL is on another machine.

    Raises:
        ConfigError: The URL, the proxy's URL or the file of certificates cannot be used.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_s: float,
        max_reply_bytes: int,
        ca_file: Path | None = None,
        proxy: str | None = None,
    ) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(str(error), where="[oracle.http] base_url") from error
        self._headers = {**_HEADERS, **headers}
        self._timeout_s = timeout_s
        self._max_reply_bytes = max_reply_bytes
        self._tls = ssl.create_default_context()
        if ca_file is not None:
            try:
                self._tls.load_verify_locations(ca_file)
            except OSError as error:
                raise ConfigError(
                    "no certificates can be read",
                    where=ca_file,
                    found=error.strerror or str(error),
                    expected="a file of certificates in PEM form",
                    do="correct [oracle.http] ca_file",
                ) from error
        self._proxy = _proxy(self._url, proxy, self._tls)

    async def post(self, body: bytes) -> Response:
        """The response to one request.

        Raises:
            CannotConnectError: No connection can be made.
            TimeoutError, ReplyTooLargeError: The time limit or the size limit was exceeded.
            OSError: The connection was lost, or the bytes received are not HTTP.
        """
        request = httpx.Request("POST", self._url, headers=self._headers, content=body)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncHTTPTransport(verify=self._tls, proxy=self._proxy) as transport,
            ):
                response = await transport.handle_async_request(request)
                content = await self._content(response)
                return Response(response.status_code, content, response.headers)
        except (httpx.ConnectError, httpx.ProxyError) as error:
            raise self._cannot_connect(error) from error
        except httpx.HTTPError as error:
            raise ConnectionError(str(error)) from error

    async def _content(self, response: httpx.Response) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        # httpx decompresses 64 KiB at once. Other encodings than these have no limit to what such a
        # piece may become.
        if encoding not in _ENCODINGS:
            raise ConnectionError(f"the reply has an encoding that nobody asked for: {encoding}")
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > self._max_reply_bytes:
                limit = f"{self._max_reply_bytes} bytes (max_reply_bytes)"
                raise ReplyTooLargeError(f"the reply is longer than {limit}")
        return bytes(content)

    def _cannot_connect(self, error: httpx.TransportError) -> CannotConnectError:
        through = f"through the proxy {self._proxy.url.netloc.decode()}: " if self._proxy else ""
        found = CannotConnectError(f"{through}{error}")
        # A proxy's refusal begins with its status.
        found.is_permanent = isinstance(error, httpx.ProxyError) and str(error).startswith("4")
        cause: BaseException | None = error
        while cause is not None:
            is_unknown = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME
            found.is_permanent |= is_unknown or isinstance(cause, ssl.SSLCertVerificationError)
            cause = cause.__cause__ or cause.__context__
        return found


def _proxy(url: httpx.URL, proxy: str | None, tls: ssl.SSLContext) -> httpx.Proxy | None:
    if proxy is None:
        host = url.raw_host.decode()
        if is_loopback(host) or proxy_bypass(url.netloc.decode()):
            return None
        named = getproxies()
        proxy = named.get(url.scheme) or named.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    is_https = proxy.startswith("https:")
    if is_https or proxy.startswith("http:"):
        with suppress(httpx.InvalidURL):
            return httpx.Proxy(proxy, ssl_context=tls if is_https else None)
    # The message does not show the URL, because it may hold a password.
    raise ConfigError(
        "the URL of the proxy cannot be used",
        where="[oracle.http] proxy, or the variable HTTPS_PROXY, HTTP_PROXY or ALL_PROXY",
        expected="http://host:port or https://host:port",
    )
