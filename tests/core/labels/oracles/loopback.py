"""A server on loopback that talks to each client as a test tells it to."""

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass
class Client:
    """The server's side of its nth connection."""

    nth: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return head, await self.reader.readexactly(length)

    async def send(self, payload: bytes) -> None:
        self.writer.write(payload)
        await self.writer.drain()


Talk = Callable[[Client], Awaitable[None]]


class Loopback:
    """Runs `talk` once per connection, in a thread of its own, until `close`."""

    def __init__(self, talk: Talk, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._talk_to, self._wanted_port, self._count = talk, port, 0
        self._tls = tls
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the server does not start"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        place = ("127.0.0.1", self._wanted_port)
        server = await asyncio.start_server(self._accept, *place, ssl=self._tls)
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

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nth, self._count = self._count, self._count + 1
        try:
            await self._talk_to(Client(nth, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()


async def _turns() -> None:
    """Let the loop turn: accepted connections get their task, closed ones let go of theirs."""
    for _ in range(10):
        await asyncio.sleep(0.001)
