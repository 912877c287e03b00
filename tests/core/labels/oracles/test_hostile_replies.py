"""Servers that refuse documents, wrap errors, echo the key, or never stop sending."""

from __future__ import annotations

import base64
import json
from contextlib import closing
from pathlib import Path

import pytest

from nmoe_core.cli import main
from nmoe_core.labels.oracle import Question, read_records
from nmoe_core.labels.oracles.http import RAW_CHARS
from tests.core.labels.oracles.loopback import Client, Loopback
from tests.core.labels.oracles.server import (
    MODEL,
    JudgeServer,
    Reply,
    answers,
    completion,
    documents_of,
    write_documents,
)
from tests.refusals import refused

KEY = "sk-s3cret/with+marks"
TOO_LONG = b'{"error": {"message": "maximum context length is 4096 tokens"}}'


def label(url: str, root: Path, count: int, *more: str) -> int:
    """The exit status of `nmoe hydra oracle-label` on some documents, into `root/out`."""
    write_documents(root / "in.jsonl", count)
    flags = ["--oracle", "http", "--base-url", url, "--model", MODEL, "--quiet"]
    places = ["--input-jsonl", str(root / "in.jsonl"), "--out", str(root / "out")]
    return main(["hydra", "oracle-label", *flags, *places, "--concurrency", "4", *more])


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_document_the_server_refuses_for_good_is_a_failed_label_however_many_follow(
    server: JudgeServer, tmp_path: Path, status: int
) -> None:
    refusal, documents = Reply(TOO_LONG, status), documents_of(50)
    server.behave = lambda d, nth: refusal if d in documents else answers(d, nth)
    assert label(server.url, tmp_path, 60) == 0
    rows = list(read_records(tmp_path / "out" / "scores.jsonl"))
    assert [row["ok"] for row in rows] == [False] * 50 + [True] * 10
    assert {row["finish_reason"] for row in rows[:50]} == {f"http_{status}"}
    assert all("maximum context length" in row["raw"] for row in rows[:50])
    assert set(server.asked.values()) == {1}
    # What was refused is not asked about again.
    assert label(server.url, tmp_path, 60) == 0
    assert server.asked.total() == 60


@pytest.mark.parametrize(
    ("status", "api", "advice"),
    [
        *((status, "chat", "check base_url") for status in (401, 402, 403, 407, 410)),
        *((404, "chat", 'set api = "completions"'), (404, "completions", 'set api = "chat"')),
    ],
)
def test_a_refusal_that_is_not_about_the_document_ends_the_run_at_once_and_is_no_label(
    server: JudgeServer, tmp_path: Path, status: int, api: str, advice: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    server.always(Reply(b"no", status))
    assert label(server.url, tmp_path, 40, "--api", api) == 1
    line = capsys.readouterr().err
    assert "ERROR [E-LABEL-ORACLE]" in line
    assert advice in line
    assert (tmp_path / "out" / "scores.jsonl").read_bytes() == b""
    assert server.asked.total() <= 4


@pytest.mark.parametrize("reason", ["http_error", "http_500", "timeout", "x" * 5000])
def test_a_finish_reason_of_the_servers_own_is_no_failure_of_the_server(
    server: JudgeServer, reason: str
) -> None:
    server.always(completion("no scores", reason=reason))
    found = server.ask(documents_of(40))
    assert {r.finish_reason for r in found.values()} == {reason[:64]}


# What a server may say that has the key in it, by the status it says it with.
ECHOES = {
    "401 plain": Reply(f"bad request: Authorization: Bearer {KEY}".encode(), 401),
    "500 json": Reply(json.dumps({"headers": {"authorization": f"Bearer {KEY}"}}).encode(), 500),
    "400 escaped": Reply(KEY.replace("/", "\\/").encode(), 400),
    "400 another scheme": Reply(
        b"authorization: Basic " + base64.b64encode(KEY.encode()), status=400
    ),
    "400 cut": Reply(b"x" * (RAW_CHARS - 10) + KEY.encode(), 400),
    "422 quoted": Reply(b"key=sk-s3cret%2Fwith%2Bmarks", 422),
    "another model": Reply(json.dumps({"model": KEY}).encode()),
    "no completion": Reply(json.dumps({"model": MODEL, "k": KEY}).encode()),
    "finish reason": completion(f"no {KEY}", reason=KEY),
}


@pytest.mark.parametrize("name", ECHOES)
def test_the_key_is_in_no_message_and_no_record_when_the_server_echoes_it(
    server: JudgeServer,
    tmp_path: Path,
    name: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr("nmoe_core.labels.oracles.replies.FIRST_PAUSE_S", 0.001)
    server.always(ECHOES[name])
    label(server.url, tmp_path, 20, "--api-key-env", "JUDGE_KEY")
    assert f"Bearer {KEY}" in server.headers[0]
    shown = "".join(capfd.readouterr())
    files = [p.read_text() for p in (tmp_path / "out").rglob("*") if p.is_file()]
    for spelled in ("s3cret", base64.b64encode(KEY.encode()).decode()[:12]):
        assert not any(spelled in text for text in (shown, *files))


@pytest.mark.parametrize("url", ["http://user:s3cret@h/v1", "https://user:s3/c@ret@h:1/v1"])
def test_a_refused_address_is_shown_without_its_password(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert label(url, tmp_path, 1) == 1
    line = capsys.readouterr().err
    assert "base_url" in line
    assert not any(part in line for part in ("user", "s3", "ret@"))


OK = b"HTTP/1.1 200 OK\r\n"
FLOODS = {
    "body of no length": (OK + b"\r\n", b"x" * 65536),
    "body of a stated length": (OK + b"Content-Length: 99999999999\r\n\r\n", b"x" * 65536),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"8\r\nxxxxxxxx\r\n" * 5000),
    "headers": (OK, b"X-A: yyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 2000),
    "one header": (OK + b"X-A: ", b"y" * 65536),
    "announcements": (b"", b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * 2000),
}  # fmt: skip


@pytest.mark.parametrize("flood", FLOODS)
def test_a_reply_that_does_not_end_is_cut_at_its_limit_and_ends_the_run_in_one_line(
    server: JudgeServer, flood: str
) -> None:
    first, more = FLOODS[flood]
    num_sent = 0

    async def flood_it(client: Client) -> None:
        nonlocal num_sent
        await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write(first)
        while True:
            await client.send(more)
            num_sent += len(more)

    with closing(Loopback(flood_it)) as flooding:
        limits = {"max_attempts": 1, "concurrency": 1, "max_reply_bytes": 2**20}
        oracle = server.oracle(base_url=flooding.url, **limits)
        naming = ["reply_too_large", "1048576 bytes"]
        with refused("E-LABEL-ORACLE-DOWN", naming=naming) as down:
            list(oracle.label(map(Question, documents_of(40))))
    assert len(down.value.line()) < 600
    # Sixteen documents, a try each: the limit, and what the sockets held beside it.
    assert num_sent < 16 * (2**20 + 32 * 2**20)
