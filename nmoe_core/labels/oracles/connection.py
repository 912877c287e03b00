"""One kept-alive HTTP/1.1 connection that posts one request at a time, for `http`.

httpcore, the transport of httpx, speaks HTTP and TLS. A connection follows no redirects, stores no
cookies, decompresses no bodies, and reads neither proxies nor logins from the environment.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpcore

_ERRORS = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)


class Response(NamedTuple):
    """Status, body, and headers by their lower-case names."""

    status: int
    body: bytes
    headers: dict[bytes, bytes]


class CannotConnectError(OSError):
    """No connection to the server could be made. `is_permanent`: because its certificate is not
    accepted, or its name does not exist."""

    is_permanent = False


class ReplyTooLargeError(OSError):
    """A reply is longer than the limit. The limit counts all received bytes, including headers; the
    rest was not read."""


class Connection:
    """Posts to one URL; `timeout_s` is the limit for one request, including connecting.

    `tls` checks the server's certificate if the URL is an https URL.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_s: float,
        max_reply_bytes: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url = httpcore.URL(url)
        self._headers = [("Host", urlsplit(url).netloc), *headers.items()]
        self.timeout_s = timeout_s
        self._tls = tls
        self._network = _Network(max_reply_bytes)
        self._open: httpcore.AsyncHTTPConnection | None = None

    async def post(self, body: bytes) -> Response:
        """The response to one request; a connection is opened if there is none.

        The server may close a kept-alive connection while a request is being sent. So if a
        connection is lost before any byte of the response, the request is sent once more, on a new
        connection.

        Raises:
            CannotConnectError: No connection can be made.
            TimeoutError, ReplyTooLargeError: The time limit or the size limit was exceeded.
            OSError: The connection was lost, or the bytes received are not HTTP.
        """
        network = self._network
        async with asyncio.timeout(self.timeout_s):
            while True:
                connection = self._open
                if connection is None or not connection.is_idle() or connection.has_expired():
                    await self.close()
                    connection = httpcore.AsyncHTTPConnection(
                        self._url.origin, self._tls, network_backend=network
                    )
                network.num_received = 0
                is_new = connection is not self._open
                self._open = connection
                try:
                    response = await connection.request(
                        "POST", self._url, headers=self._headers, content=body
                    )
                except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                    raise _cannot_connect(error) from error
                except _ERRORS as error:
                    if is_new or network.num_received:
                        raise ConnectionError(*error.args) from error
                    continue
                if network.num_received:
                    headers = {name.lower(): value for name, value in response.headers}
                    return Response(response.status, response.content, headers)
                # Bytes were received after the last response, so they do not belong to a request.
                await self.close()

    async def close(self) -> None:
        """Close at once; `post` opens a new connection."""
        if self._open is not None:
            await self._open.aclose()
            self._open = None


def _cannot_connect(error: BaseException) -> CannotConnectError:
    found = CannotConnectError(*error.args)
    cause: BaseException | None = error
    while cause is not None:
        is_unknown = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME
        found.is_permanent |= is_unknown or isinstance(cause, ssl.SSLCertVerificationError)
        cause = cause.__cause__ or cause.__context__
    return found


class _Network(httpcore.AsyncNetworkBackend):
    """Opens connections, and counts the bytes that they receive."""

    def __init__(self, max_reply_bytes: int) -> None:
        self._backend: Any = httpcore.AnyIOBackend()
        self._max_reply_bytes = max_reply_bytes
        self.num_received = 0  # since the last request

    def count(self, num_bytes: int) -> None:
        self.num_received += num_bytes
        if self.num_received > self._max_reply_bytes:
            limit = f"the reply is longer than {self._max_reply_bytes} bytes (max_reply_bytes)"
            raise ReplyTooLargeError(limit)

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._backend.connect_tcp(*args, **options), self)


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, stream: httpcore.AsyncNetworkStream, network: _Network) -> None:
        self._stream = stream
        self._network = network
        self.write = stream.write
        self.aclose = stream.aclose
        self.get_extra_info = stream.get_extra_info

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        received = await self._stream.read(max_bytes, timeout)
        self._network.count(len(received))
        return received

    async def start_tls(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(*args, **options), self._network)
