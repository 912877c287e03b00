"""A store with the interface of S3 in memory, behind a network of a stated speed.

It has what the product asks of a store: conditional writes, uploads in parts, ranges and listings.
All connections share one rate per direction. A connection and a request each take one round trip
before the first byte of the answer. It checks no signature, and TCP's slow start is not imitated.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from itertools import count
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

_READ_BYTES = 2**18
_BUFFER_BYTES = 2**20
_PAGE = 1000
_BURST_S = 0.01  # timers are late, and what they lose is made up for


class Object(NamedTuple):
    """A stored object."""

    content: bytes
    tag: str
    modified: datetime


class Request(NamedTuple):
    """A request whose body was read."""

    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """Status, headers and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


class Rate:
    """The time at which bytes of all connections have passed one direction of a network."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` have passed."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)


class Server:
    """The objects, and the network in front of them."""

    def __init__(self, mb_per_s: float, rtt_s: float) -> None:
        self._in = Rate(mb_per_s * 1e6)
        self._out = Rate(mb_per_s * 1e6)
        self._rtt_s = rtt_s
        self._objects: dict[str, Object] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._tags = count(1)
        self.counts: Counter[str] = Counter()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        await asyncio.sleep(self._rtt_s)
        try:
            while (request := await self._read(reader)) is not None:
                await asyncio.sleep(self._rtt_s)
                await self._write(writer, request, self._answer(request))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {}
        for line in filter(None, lines):
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        waiting = int(headers.get("content-length", 0))
        parts = []
        while waiting:
            part = await reader.read(min(waiting, _READ_BYTES))
            if not part:
                raise asyncio.IncompleteReadError(b"", waiting)
            await self._in.take(len(part))
            parts.append(part)
            waiting -= len(part)
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True)
        return Request(method, unquote(url.path).strip("/"), query, headers, b"".join(parts))

    async def _write(self, writer: asyncio.StreamWriter, request: Request, answer: Answer) -> None:
        headers = {"Content-Length": str(len(answer.body)), **answer.headers}
        lines = [f"HTTP/1.1 {answer.status} x", *(f"{key}: {one}" for key, one in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if request.method != "HEAD":
            body = memoryview(answer.body)
            for start in range(0, len(body), _READ_BYTES):
                part = body[start : start + _READ_BYTES]
                await self._out.take(len(part))
                writer.write(part)
                await writer.drain()
        await writer.drain()

    def _answer(self, request: Request) -> Answer:
        kind = request.method
        if "list-type" in request.query:
            kind = "LIST"
        self.counts[kind] += 1
        self.counts["received_bytes"] += len(request.body)
        match kind:
            case "LIST":
                answer = self._listed(request)
            case "PUT":
                answer = self._put(request)
            case "POST" if "delete" in request.query:
                keys = re.findall("<Key>(.*?)</Key>", request.body.decode())
                for key in keys:
                    self._objects.pop(f"{request.key}/{unescape(key)}", None)
                gone = b"".join(_xml("Deleted", Key=unescape(key)) for key in keys)
                answer = Answer(200, {}, b"<DeleteResult>" + gone + b"</DeleteResult>")
            case "POST":
                answer = self._post(request)
            case _:
                answer = self._get(request)
        if kind != "HEAD":
            self.counts["sent_bytes"] += len(answer.body)
        return answer

    def _put(self, request: Request) -> Answer:
        if "uploadId" in request.query:
            number = int(request.query["partNumber"][0])
            self._uploads[request.query["uploadId"][0]][number] = request.body
            return Answer(200, {"ETag": f'"{number}"'})
        there = self._objects.get(request.key)
        wanted = request.headers.get("if-match")
        is_kept = request.headers.get("if-none-match") == "*" and there is not None
        if is_kept or (wanted is not None and (there is None or there.tag != wanted)):
            return Answer(412, {}, b"<Error><Code>PreconditionFailed</Code></Error>")
        return Answer(200, {"ETag": self._keep(request.key, request.body)})

    def _post(self, request: Request) -> Answer:
        if "uploads" in request.query:
            name = str(next(self._tags))
            self._uploads[name] = {}
            return Answer(200, {}, _xml("InitiateMultipartUploadResult", UploadId=name))
        parts = self._uploads.pop(request.query["uploadId"][0])
        tag = self._keep(request.key, b"".join(parts[number] for number in sorted(parts)))
        return Answer(200, {}, _xml("CompleteMultipartUploadResult", ETag=tag))

    def _keep(self, key: str, content: bytes) -> str:
        tag = f'"{next(self._tags):032x}"'
        self._objects[key] = Object(content, tag, datetime.now(UTC))
        return tag

    def _get(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if found is None:
            return Answer(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": found.tag, "Last-Modified": format_datetime(found.modified, usegmt=True)}
        body = found.content
        if "range" not in request.headers:
            return Answer(200, {**headers, "Content-Length": str(len(body))}, body)
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        stop = min(int(last) + 1 if last else len(body), len(body))
        headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(body)}"
        return Answer(206, headers, body[int(first) : stop])

    def _listed(self, request: Request) -> Answer:
        bucket = request.key
        prefix = f"{bucket}/{request.query.get('prefix', [''])[0]}"
        after = request.query.get("continuation-token", [""])[0]
        keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
        page = keys[:_PAGE]
        rows = []
        for key in page:
            found = self._objects[key]
            rows.append(
                _xml(
                    "Contents",
                    Key=key[len(bucket) + 1 :],
                    Size=str(len(found.content)),
                    ETag=found.tag,
                    LastModified=found.modified.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
                )
            )
        if len(keys) > _PAGE:
            rows.append(
                f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>".encode()
            )
        return Answer(200, {}, b"<ListBucketResult>" + b"".join(rows) + b"</ListBucketResult>")


def _xml(name: str, **values: str) -> bytes:
    inner = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in values.items())
    return f"<{name}>{inner}</{name}>".encode()


@contextmanager
def serving(mb_per_s: float, rtt_ms: float) -> Iterator[tuple[Server, int]]:
    """A server in a thread of this process, and its port."""
    server = Server(mb_per_s, rtt_ms / 1e3)
    loop = asyncio.new_event_loop()
    opening = asyncio.start_server(server.connection, "127.0.0.1", 0, limit=_BUFFER_BYTES)
    opened = loop.run_until_complete(opening)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server, opened.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
