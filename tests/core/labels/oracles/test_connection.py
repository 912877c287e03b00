import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from typing import Any

import pytest

from nmoe_core.labels.oracles.connection import Connection
from tests.core.labels.oracles.loopback import Client, Loopback, Talk

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"


def with_server(talk: Talk, use: Callable[[Connection], Awaitable[Any]]) -> Any:
    """Run `use` on a connection to a server that talks so to each client."""

    async def main(url: str) -> Any:
        headers = {"Authorization": "Bearer k"}
        connection = Connection(f"{url}/x?a=1", headers, timeout_s=60.0, max_reply_bytes=2**20)
        try:
            return await use(connection)
        finally:
            await connection.close()

    with closing(Loopback(talk)) as server:
        return asyncio.run(main(server.url))


def post_one(*parts: bytes) -> Any:
    """The response of a server that sends these pieces to each request."""

    async def talk(client: Client) -> None:
        await client.request()
        for part in parts:
            await client.send(part)
            await asyncio.sleep(0.002)

    return with_server(talk, lambda connection: connection.post(b"{}"))


FORMS = {
    "stated length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",),
    "in pieces": (b"HTT", b"P/1.1 200 OK\r\nContent-Le", b"ngth: 5\r\n\r", b"\nhe", b"llo"),
    "chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n",
        b"3\r\nllo\r\n0\r\n\r\n",
    ),
    "until closed": (b"HTTP/1.1 200 OK\r\n\r\n", b"hel", b"lo"),
    "old": (b"HTTP/1.0 200 OK\r\nX: 1\r\n\r\nhello",),
    "after an announcement": (
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_response_is_read_whole_in_every_form_a_server_may_send(form: str) -> None:
    response = post_one(*FORMS[form])
    assert (response.status, response.body) == (200, b"hello")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", "without sending comp"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhel",
            "without sending complete",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "without sending a response"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "without sending a response"),
        (b"", "without sending a response"),
        (b"HTTP/1.1 101 X\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", "SWITCH_UPGRADE"),
    ],
)
def test_a_response_that_is_not_whole_is_an_error_with_its_reason(sent: bytes, reason: str) -> None:
    with pytest.raises(ConnectionError, match=reason):
        post_one(*([sent] if sent else []))


def test_a_connection_is_kept_and_a_lost_request_is_sent_once_more() -> None:
    seen: list[tuple[int, bytes]] = []

    async def talk(client: Client) -> None:
        while True:
            head, body = await client.request()
            assert head.startswith(b"POST /v1/x?a=1 HTTP/1.1\r\n")
            assert b"\r\nAuthorization: Bearer k\r\n" in head
            seen.append((client.nth, body))
            if body == b"slow":
                await asyncio.sleep(600)
            if body == b"begun":
                client.writer.write(b"HTTP/1.1 2")
            if body in (b"begun", b"lost") or (client.nth, body) == (0, b"once"):
                break
            closes = b"OK\r\nConnection: close\r\n" if body == b"closes" else b"OK\r\n"
            client.writer.write(OK.replace(b"OK\r\n", closes) + b"1")
            if body == b"closes":
                await asyncio.sleep(0.2)
            if body == b"leaves":
                break

    async def use(connection: Connection) -> None:
        for body, error in (
            *((b"a", None), (b"once", None)),
            *((b"slow", TimeoutError), (b"b", None)),
            *((b"begun", ConnectionError), (b"c", None)),
            *((b"closes", None), (b"leaves", None), (b"d", None)),
            (b"lost", ConnectionError),
        ):
            connection.timeout_s = 0.1 if error is TimeoutError else 60.0
            if error is None:
                assert (await connection.post(body)).body == b"1"
                await asyncio.sleep(0.01)
            else:
                with pytest.raises(error):
                    await connection.post(body)

    with_server(talk, use)
    expected = [(0, b"a"), (0, b"once"), (1, b"once"), (1, b"slow"), (2, b"b"), (2, b"begun")]
    expected += [(3, b"c"), (3, b"closes"), (4, b"leaves"), (5, b"d"), (5, b"lost"), (6, b"lost")]
    assert seen == expected


def test_a_late_answer_to_an_abandoned_request_is_not_the_next_ones() -> None:
    async def talk(client: Client) -> None:
        while True:
            _, body = await client.request()
            await asyncio.sleep(0.1 if body == b"s" else 0)
            client.writer.write(OK + body)

    async def use(connection: Connection) -> bytes:
        task = asyncio.create_task(connection.post(b"s"))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return (await connection.post(b"n")).body

    assert with_server(talk, use) == b"n"


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
@pytest.mark.parametrize("stray", [OK + b"!", b"HTTP/1.1 200 OK\r\nContent-Le", b"stray"])
def test_stray_bytes_are_no_part_of_the_next_answer(stray: bytes, pause_s: float) -> None:
    async def talk(client: Client) -> None:
        while True:
            _, body = await client.request()
            for piece in (OK + body, stray) if pause_s else (OK + body + stray,):
                client.writer.write(piece)
                await asyncio.sleep(pause_s)

    async def use(connection: Connection) -> list[bytes]:
        bodies = []
        while len(bodies) < 3:
            with suppress(ConnectionError):  # a failed try: labelling asks again
                bodies.append((await connection.post(b"%d" % len(bodies))).body)
            await asyncio.sleep(2 * pause_s)
        return bodies

    assert with_server(talk, use) == [b"0", b"1", b"2"]


def test_bytes_that_wait_in_the_socket_while_the_loop_is_blocked_are_no_answer() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def talk(client: Client) -> None:
        writers.append(client.writer)
        while True:
            client.writer.write(OK + (await client.request())[1])

    async def use(connection: Connection) -> bytes:
        await connection.post(b"a")
        os.write(writers[0].get_extra_info("socket").fileno(), OK + b"!")
        return (await connection.post(b"b")).body

    assert with_server(talk, use) == b"b"
    assert len(writers) == 2
