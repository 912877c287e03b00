"""One kept-alive HTTP/1.1 connection that posts one request at a time, for `http`.

A label costs the labelling process less than half a millisecond in all; a general HTTP client would
take most of that time. httptools (the parser of Node.js) reads the responses. There are no
redirects, cookies or proxies.
"""

import asyncio
import select
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools


class Response(NamedTuple):
    """Status, body, and headers by their lower-case names."""

    status: int
    body: bytes
    headers: dict[bytes, bytes]


class CannotConnectError(OSError):
    """No connection to the server could be made."""


class ReplyTooLargeError(OSError):
    """A reply passed the limit, headers and announcements included; the rest was not read."""


class Address:
    """A URL to post to, and the headers that go with each request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if is_secure else 80)
        self.ssl = ssl.create_default_context() if is_secure else None
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode("latin-1")

    def request(self, body: bytes) -> bytes:
        """The bytes of a whole request."""
        return b"%s%d\r\n\r\n%s" % (self._head, len(body), body)


class Connection:
    """Posts to one address; `timeout_s` holds for one request, connecting included."""

    def __init__(self, address: Address, timeout_s: float, max_reply_bytes: int) -> None:
        self._address = address
        self.timeout_s = timeout_s
        self._max_reply_bytes = max_reply_bytes
        self._wire: _Wire | None = None

    async def post(self, body: bytes) -> Response:
        """The response to one request; a connection is opened if there is none.

        The server may close a kept connection just as a request goes out on it. So a request that
        is lost before any byte of its response is sent once more, on a new connection.

        Raises:
            CannotConnectError: There is no connection and none can be made.
            TimeoutError, ReplyTooLargeError: A limit was passed.
            OSError: The connection was lost, or the bytes received are not HTTP.
        """
        request = self._address.request(body)
        async with asyncio.timeout(self.timeout_s):
            if self._wire is not None and self._wire.is_idle():
                try:
                    return await self._wire.exchange(request)
                except OSError:
                    if self._wire.num_received:
                        raise
            self.close()
            where = self._address
            loop = asyncio.get_running_loop()
            try:
                _, self._wire = await loop.create_connection(
                    lambda: _Wire(self._max_reply_bytes), where.host, where.port, ssl=where.ssl
                )
            except OSError as error:
                raise CannotConnectError(*error.args) from error
            return await self._wire.exchange(request)

    def close(self) -> None:
        """Close at once; `post` opens a new connection."""
        if self._wire is not None:
            self._wire.transport.abort()


class _Wire(asyncio.Protocol):
    """One open connection: parses incoming bytes and passes the response to the request under
    way."""

    transport: asyncio.Transport

    def __init__(self, max_reply_bytes: int) -> None:
        self._max_reply_bytes = max_reply_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Response] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._has_head = False
        self.num_received = 0  # Bytes since the last request.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def is_idle(self) -> bool:
        """Whether the connection is open and has no bytes to read.

        The loop may not have run since the last response: a close, or unrequested bytes, may wait
        in the socket, and the next request would mistake them for its response.
        """
        return not self.transport.is_closing() and not self._poll.poll(0)

    async def exchange(self, request: bytes) -> Response:
        self._answer = asyncio.get_running_loop().create_future()
        self.num_received = 0
        self.transport.write(request)
        try:
            return await self._answer
        except asyncio.CancelledError:
            # The response to an abandoned request must not be taken for the next one's.
            self.transport.abort()
            raise

    def data_received(self, data: bytes) -> None:
        self.num_received += len(data)
        if self.num_received > self._max_reply_bytes:
            limit = f"the reply is longer than {self._max_reply_bytes} bytes (max_reply_bytes)"
            self._end(ReplyTooLargeError(limit))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end(ConnectionError("the server switched to another protocol"))
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"not an HTTP response: {error}"))

    def on_message_begin(self) -> None:
        """A response begins; one that no request waits for ends the connection."""
        if self._answer is None or self._answer.done():
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """A response is whole; one of 1xx only announces the response."""
        if self._parser.get_status_code() >= 200:
            self._end(None, keeps_alive=self._parser.should_keep_alive())
        self._headers = {}
        self._parts = []
        self._has_head = False

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closed; that ends a body of no stated length, and breaks off any other."""
        states_length = {b"content-length", b"transfer-encoding"} & self._headers.keys()
        is_whole = exc is None and self._has_head and not states_length
        lost = exc or ConnectionResetError("closed before the response was whole")
        self._end(None if is_whole else lost)

    def _end(self, error: Exception | None, *, keeps_alive: bool = False) -> None:
        """Answer the request with an error, or with the bytes received."""
        if self._answer is not None and not self._answer.done():
            if error is None:
                status = self._parser.get_status_code()
                response = Response(status, b"".join(self._parts), self._headers)
                self._answer.set_result(response)
            else:
                self._answer.set_exception(error)
        if not keeps_alive:
            self.transport.abort()
