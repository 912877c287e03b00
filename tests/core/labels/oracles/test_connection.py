from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest

from nmoe_core.labels.oracles.connection import Address, CannotConnectError, Connection, Response
from tests.core.labels.oracles.loopback import Client, Loopback, Talk

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"


def with_server(talk: Talk, use: Callable[[Connection], Awaitable[Any]]) -> Any:
    """Run `use` on a connection to a server that talks so to each client."""

    async def main(url: str) -> Any:
        address = Address(f"{url}/x?a=1", {"Authorization": "Bearer k"})
        connection = Connection(address, timeout_s=60.0, max_reply_bytes=2**20)
        try:
            return await use(connection)
        finally:
            connection.close()
            await asyncio.sleep(0)

    with closing(Loopback(talk)) as server:
        return asyncio.run(main(server.url))


def says(*parts: bytes) -> Talk:
    async def talk(client: Client) -> None:
        await client.request()
        for part in parts:
            await client.send(part)
            await asyncio.sleep(0.002)

    return talk


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
    response = with_server(says(*FORMS[form]), lambda connection: connection.post(b"{}"))
    assert (response.status, response.body) == (200, b"hello")


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello",),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhel",),
        (b"HTTP/1.1 200 OK\r\nContent-Le",),
        (b"SSH-2.0-OpenSSH_9.6\r\n",),
        (),
    ],
)
def test_a_response_that_breaks_off_is_an_error_and_never_a_short_body(parts: Any) -> None:
    with pytest.raises(OSError) as lost:
        with_server(says(*parts), lambda connection: connection.post(b"{}"))
    assert not isinstance(lost.value, CannotConnectError | TimeoutError)


def test_one_connection_serves_many_requests_and_is_opened_again_when_the_server_closed_it() -> (
    None
):
    seen: list[tuple[int, bytes]] = []

    async def talk(client: Client) -> None:
        for i in range(3):
            head, body = await client.request()
            assert head.startswith(b"POST /v1/x?a=1 HTTP/1.1\r\n")
            assert b"\r\nAuthorization: Bearer k\r\n" in head
            seen.append((client.nth, body))
            more = b"Connection: close\r\n" if client.nth == 1 and i == 1 else b""
            client.writer.write(b"HTTP/1.1 200 OK\r\n%sContent-Length: 1\r\n\r\n%d" % (more, i))
            if more:
                await asyncio.sleep(0.2)

    async def use(connection: Connection) -> list[bytes]:
        bodies = []
        for i in range(7):
            bodies.append((await connection.post(b"%d" % i)).body)
            await asyncio.sleep(0.01)
        return bodies

    assert with_server(talk, use) == [b"0", b"1", b"2", b"0", b"1", b"0", b"1"]
    assert [nth for nth, _ in seen] == [0, 0, 0, 1, 1, 2, 2]
    assert [body for _, body in seen] == [b"%d" % i for i in range(7)]


def test_a_late_answer_to_an_abandoned_request_is_not_the_next_ones() -> None:
    async def talk(client: Client) -> None:
        while True:
            _, body = await client.request()
            await asyncio.sleep(0.1 if body == b"slow" else 0)
            client.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + body)

    async def use(connection: Connection) -> Response:
        task = asyncio.create_task(connection.post(b"slow"))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await connection.post(b"next")

    assert with_server(talk, use).body == b"next"


def test_a_silent_server_and_an_absent_one_are_different_errors() -> None:
    async def silent(client: Client) -> None:
        await asyncio.sleep(600)

    async def use(connection: Connection) -> None:
        connection.timeout_s = 0.05
        await connection.post(b"{}")

    with pytest.raises(TimeoutError):
        with_server(silent, use)
    with pytest.raises(CannotConnectError):
        asyncio.run(Connection(Address("http://127.0.0.1:9/", {}), 60.0, 2**20).post(b""))


@pytest.mark.parametrize("partial", [b"", b"HTTP/1.1 2"])
def test_a_request_lost_on_a_kept_connection_is_sent_once_more_unless_an_answer_had_begun(
    partial: bytes,
) -> None:
    seen: list[tuple[int, bytes]] = []

    async def talk(client: Client) -> None:
        for reply in (OK + b"%d" % client.nth, partial):
            seen.append((client.nth, (await client.request())[1]))
            client.writer.write(reply)

    async def use(connection: Connection) -> bytes:
        await connection.post(b"a")
        return (await connection.post(b"b")).body

    if partial:
        with pytest.raises(ConnectionError):
            with_server(talk, use)
        assert seen == [(0, b"a"), (0, b"b")]
    else:
        assert with_server(talk, use) == b"1"
        assert seen == [(0, b"a"), (0, b"b"), (1, b"b")]


def test_a_request_is_sent_twice_at_most_and_never_on_a_timeout() -> None:
    seen: list[tuple[int, bytes]] = []

    async def talk(client: Client) -> None:
        while True:
            seen.append((client.nth, (await client.request())[1]))
            if seen[-1][1] == b"slow":
                await asyncio.sleep(600)
            if seen[-1][1] == b"lost":
                break
            client.writer.write(OK + b"1")

    async def use(connection: Connection) -> None:
        await connection.post(b"a")
        patience_s, connection.timeout_s = connection.timeout_s, 0.1
        with pytest.raises(TimeoutError):
            await connection.post(b"slow")
        connection.timeout_s = patience_s
        await connection.post(b"b")
        with pytest.raises(ConnectionError):
            await connection.post(b"lost")

    with_server(talk, use)
    assert seen == [(0, b"a"), (0, b"slow"), (1, b"b"), (1, b"lost"), (2, b"lost")]


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
@pytest.mark.parametrize("stray", [OK + b"!", b"HTTP/1.1 200 OK\r\nContent-Le", b"stray"])
def test_bytes_without_a_request_are_never_part_of_the_next_answer(
    stray: bytes, pause_s: float
) -> None:
    async def talk(client: Client) -> None:
        while True:
            _, body = await client.request()
            if pause_s:
                client.writer.write(OK + body)
                await asyncio.sleep(pause_s)
                client.writer.write(stray)
            else:
                client.writer.write(OK + body + stray)

    async def use(connection: Connection) -> list[bytes]:
        bodies = []
        for i in range(3):
            bodies.append((await connection.post(b"%d" % i)).body)
            await asyncio.sleep(2 * pause_s)
        return bodies

    assert with_server(talk, use) == [b"0", b"1", b"2"]


def test_bytes_that_wait_in_the_socket_while_the_loop_stands_still_are_no_answer() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def talk(client: Client) -> None:
        writers.append(client.writer)
        while True:
            _, body = await client.request()
            client.writer.write(OK + body)

    async def use(connection: Connection) -> bytes:
        await connection.post(b"a")
        os.write(writers[0].get_extra_info("socket").fileno(), OK + b"!")
        return (await connection.post(b"b")).body

    assert with_server(talk, use) == b"b"
    assert len(writers) == 2


def test_a_server_that_switches_protocols_is_a_failure_with_its_reason() -> None:
    switching = b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    with pytest.raises(ConnectionError, match="another protocol"):
        with_server(says(switching), lambda connection: connection.post(b"{}"))
