"""A chat-completions server on loopback that answers, or misbehaves, as a test tells it to."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nmoe_core.labels.oracles.prompt import DOCUMENT_HEAD, DOCUMENT_TAIL
from nmoe_core.labels.scores import DIMENSIONS

MODEL = "judge-1"


@dataclass
class Reply:
    """What to send: a whole response, some bytes and a reset, or nothing at all."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    resets: bool = False


Behaviour = Callable[[str, int], Reply]


def grades_of(document: str) -> dict[str, int]:
    """The scores this server gives a document: a function of its text alone."""
    return {
        name: (len(document) * 7 + i * len(document[:9])) % 5 for i, name in enumerate(DIMENSIONS)
    }


def completion(content: Any, *, reason: str = "stop", **more: Any) -> Reply:
    """A chat completion with this content."""
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    value = {
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        "usage": {"completion_tokens": 41},
    }
    return Reply(json.dumps(value | more).encode())


def text_completion(text: Any, *, reason: str = "stop", **more: Any) -> Reply:
    """A plain completion with this text."""
    choices = [{"index": 0, "finish_reason": reason, "text": text}]
    value = {"model": MODEL, "choices": choices, "usage": {"completion_tokens": 41}}
    return Reply(json.dumps(value | more).encode())


def answers(document: str, nth: int) -> Reply:
    """The normal behaviour."""
    return completion(json.dumps(grades_of(document)))


class JudgeServer:
    """Runs in a thread of its own; remembers who was asked about and how often."""

    def __init__(self, port: int = 0) -> None:
        self.behave: Behaviour = answers
        self.asked: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.paths: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.most_at_once = self._at_once = 0
        self._wanted_port, self._loop = port, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def settle(self) -> None:
        """Wait until requests that were under way when their client left are done with."""
        before = None
        while (now := (self._at_once, self.asked.total(), self.answered.total())) != before:
            before = now
            time.sleep(0.1)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", self._wanted_port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        # A connection accepted but not yet taken up would be lost unclosed.
        await _turns()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await _turns()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                if not await self._respond(head, await reader.readexactly(length), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _respond(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        request = json.loads(body)
        user = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
        document = user.rpartition(DOCUMENT_HEAD)[2].partition(DOCUMENT_TAIL)[0]
        reply = self.behave(document, self.asked[document])
        self.asked[document] += 1
        self.requests.append(request)
        self.headers.append(head.decode())
        self.paths[head.split()[1].decode()] += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(reply.after_s)
        finally:
            self._at_once -= 1
        lines = [f"HTTP/1.1 {reply.status} X", f"Content-Length: {len(reply.body)}"]
        lines += [f"{key}: {value}" for key, value in reply.headers.items()]
        payload = "\r\n".join([*lines, "", ""]).encode() + reply.body
        if reply.resets:
            writer.write(payload[: len(payload) * 2 // 3] if reply.body else b"")
            await writer.drain()
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        writer.write(payload)
        await writer.drain()
        self.answered[document] += reply.status == 200
        return True


async def _turns() -> None:
    """Let the loop turn: accepted connections get their task, closed ones let go of theirs."""
    for _ in range(5):
        await asyncio.sleep(0)
