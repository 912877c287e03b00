import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from typing import Any

import pytest

from nmoe_core.labels.oracles.connection import Endpoint
from tests.core.labels.oracles.loopback import Client, Loopback, Talk

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"


def with_server(talk: Talk, use: Callable[[Endpoint], Awaitable[Any]]) -> Any:
    """Run `use` on a server that talks so to each client."""

    async def main(url: str) -> Any:
        return await use(Endpoint(f"{url}/x?a=1", {}, timeout_s=60.0, max_reply_bytes=2**20))

    with closing(Loopback(talk)) as server:
        return asyncio.run(main(server.url))


def post_one(*parts: bytes) -> Any:
    """The response of a server that sends these pieces to each request."""

    async def talk(client: Client) -> None:
        await client.request()
        for part in parts:
            await client.send(part)
            await asyncio.sleep(0.002)

    return with_server(talk, lambda endpoint: endpoint.post(b"{}"))


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


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
@pytest.mark.parametrize("stray", [OK + b"!", b"HTTP/1.1 200 OK\r\nContent-Le", b"stray"])
def test_stray_bytes_are_no_part_of_the_next_answer(stray: bytes, pause_s: float) -> None:
    async def talk(client: Client) -> None:
        while True:
            _, body = await client.request()
            for piece in (OK + body, stray) if pause_s else (OK + body + stray,):
                client.writer.write(piece)
                await asyncio.sleep(pause_s)

    async def use(endpoint: Endpoint) -> list[bytes]:
        bodies = []
        while len(bodies) < 3:
            with suppress(ConnectionError):  # a failed try: labelling asks again
                bodies.append((await endpoint.post(b"%d" % len(bodies))).body)
            await asyncio.sleep(2 * pause_s)
        return bodies

    assert with_server(talk, use) == [b"0", b"1", b"2"]
