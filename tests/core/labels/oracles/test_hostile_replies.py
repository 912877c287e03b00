"""Servers that refuse documents, wrap errors, echo the key, or never stop sending."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.errors import LabelError
from nmoe_core.cli import main
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import OracleResult, Question
from nmoe_core.labels.oracles.http import RAW_CHARS, HttpOracle
from nmoe_core.labels.scores import DIMENSIONS
from tests.core.labels.oracles.server import JudgeServer, Reply, answers, completion, grades_of

GOOD = json.dumps({name: i for i, name in enumerate(DIMENSIONS)})
KEY = "sk-s3cret/with+marks"
TOO_LONG = b'{"error": {"message": "maximum context length is 4096 tokens"}}'


def ask(oracle: HttpOracle, documents: list[str]) -> dict[str, OracleResult]:
    results = list(oracle.label(map(Question, documents)))
    assert sorted(i for i, _ in results) == list(range(len(documents)))
    return {documents[i]: result for i, result in results}


def write_documents(path: Path, count: int) -> Path:
    rows = [{"doc_id": f"d{i}", "text": f"document {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def label(server: JudgeServer, path: Path, out: Path, *more: str) -> int:
    flags = ["--oracle", "http", "--base-url", server.url, "--model", "judge-1", "--quiet"]
    places = ["--input-jsonl", str(path), "--out", str(out), "--concurrency", "4"]
    return main(["hydra", "oracle-label", *flags, *places, *more])


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_document_the_server_refuses_for_good_is_a_failed_label_however_many_follow(
    server: JudgeServer, tmp_path: Path, status: int
) -> None:
    path, out = write_documents(tmp_path / "in.jsonl", 60), tmp_path / "out"

    def behave(document: str, nth: int) -> Any:
        is_refused = int(document.split()[1]) < 50
        return Reply(TOO_LONG, status) if is_refused else answers(document, nth)

    server.behave = behave
    assert label(server, path, out) == 0
    rows = records(out)
    assert [row["ok"] for row in rows] == [False] * 50 + [True] * 10
    assert {row["finish_reason"] for row in rows[:50]} == {f"http_{status}"}
    assert all("maximum context length" in row["raw"] for row in rows[:50])
    assert set(server.asked.values()) == {1}
    # What was refused is not asked about again.
    assert label(server, path, out) == 0
    assert server.asked.total() == 60


@pytest.mark.parametrize("status", [401, 402, 403, 404, 407, 410])
def test_a_refusal_that_is_not_about_the_document_is_no_label(
    server: JudgeServer, tmp_path: Path, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behave = lambda document, nth: Reply(b"no", status)
    path = write_documents(tmp_path / "in.jsonl", 40)
    assert label(server, path, tmp_path / "out") == 1
    assert "ERROR [E-LABEL-ORACLE]" in capsys.readouterr().err
    assert records(tmp_path / "out") == []


ERRORS: list[dict[str, Any]] = [
    {"error": {"message": "upstream is overloaded", "code": 502}},
    {"error": "no capacity", "choices": []},
    {"object": "error", "message": "worker died", "code": 50001},
]


@pytest.mark.parametrize("body", ERRORS)
def test_an_error_in_a_reply_of_status_200_is_a_failed_request(
    server: JudgeServer, table: Callable, rubric: Rubric, body: Any
) -> None:
    error = Reply(json.dumps(body).encode())
    server.behave = lambda d, nth: error if nth < 2 else answers(d, nth)
    documents = [f"document {i}" for i in range(20)]
    found = ask(HttpOracle(table(), rubric), documents)
    assert {d: r.scores for d, r in found.items()} == {d: grades_of(d) for d in documents}
    assert set(server.asked.values()) == {3}


@pytest.mark.parametrize("body", ERRORS)
def test_a_server_that_gives_errors_alone_ends_the_run_and_leaves_no_label(
    server: JudgeServer, table: Callable, rubric: Rubric, body: Any
) -> None:
    server.behave = lambda d, nth: Reply(json.dumps(body).encode())
    oracle = HttpOracle(table(max_attempts=1), rubric)
    seen: list[Any] = []
    with pytest.raises(LabelError) as down:
        seen.extend(oracle.label(Question(f"document {i}") for i in range(60)))
    assert (down.value.code, seen) == ("E-LABEL-ORACLE-DOWN", [])


@pytest.mark.parametrize("reason", ["http_error", "http_", "timeouts", "x" * 5000])
def test_a_finish_reason_of_the_servers_own_is_no_failure_of_the_server(
    server: JudgeServer, table: Callable, rubric: Rubric, reason: str
) -> None:
    server.behave = lambda d, nth: completion("no scores", reason=reason)
    found = ask(HttpOracle(table(), rubric), [f"document {i}" for i in range(40)])
    assert {r.finish_reason for r in found.values()} == {reason[:64]}


def echoes() -> dict[str, Callable[[str], dict[str, Any]]]:
    """What a server may say that has the key in it, by the status it says it with."""
    plain = f"Authorization: Bearer {KEY}"
    return {
        "401 plain": lambda text: {"status": 401, "body": f"bad request: {plain}".encode()},
        "500 json": lambda text: {
            "status": 500,
            "body": json.dumps({"headers": {"authorization": f"Bearer {KEY}"}}).encode(),
        },
        "400 escaped": lambda text: {"status": 400, "body": KEY.replace("/", "\\/").encode()},
        "400 another scheme": lambda text: {
            "status": 400,
            "body": b"authorization: Basic " + base64.b64encode(KEY.encode()),
        },
        "400 cut": lambda text: {"status": 400, "body": b"x" * (RAW_CHARS - 10) + KEY.encode()},
        "422 quoted": lambda text: {"status": 422, "body": b"key=sk-s3cret%2Fwith%2Bmarks"},
        "another model": lambda text: {"body": json.dumps({"model": KEY}).encode()},
        "no completion": lambda text: {"body": json.dumps({"model": "judge-1", "k": KEY}).encode()},
        "finish reason": lambda text: {
            "body": json.dumps(
                {"choices": [{"finish_reason": KEY, "message": {"content": "no " + KEY}}]}
            ).encode()
        },
    }


@pytest.mark.parametrize("name", echoes())
def test_the_key_is_in_no_message_and_no_record_when_the_server_echoes_it(
    server: JudgeServer, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr("nmoe_core.labels.oracles.flow.FIRST_PAUSE_S", 0.001)
    server.behave = lambda d, nth: Reply(**echoes()[name](d))
    label(server, write_documents(tmp_path / "in.jsonl", 20), tmp_path / "out",
          "--api-key-env", "JUDGE_KEY")  # fmt: skip
    assert f"Bearer {KEY}" in server.headers[0]
    shown = "".join(capfd.readouterr())
    files = [p.read_text() for p in (tmp_path / "out").rglob("*") if p.is_file()]
    for spelled in ("s3cret", base64.b64encode(KEY.encode()).decode()[:12]):
        assert spelled not in shown
        assert not any(spelled in text for text in files)


@pytest.mark.parametrize("url", ["http://user:s3cret@h/v1", "https://user:s3/c@ret@h:1/v1"])
def test_a_refused_address_is_shown_without_its_password(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_documents(tmp_path / "in.jsonl", 1)
    flags = ["--oracle", "http", "--base-url", url, "--model", "m"]
    places = ["--input-jsonl", str(path), "--out", str(tmp_path / "out")]
    assert main(["hydra", "oracle-label", *flags, *places]) == 1
    line = capsys.readouterr().err
    assert "base_url" in line
    assert "user" not in line
    assert "s3" not in line
    assert "ret@" not in line


async def turns() -> None:
    """Accepted connections get their task, aborted ones let go of their sockets."""
    for _ in range(20):
        await asyncio.sleep(0.001)


@contextmanager
def endless(first: bytes, more: bytes) -> Iterator[tuple[str, list[int]]]:
    """A server that answers every request with `first`, and then `more` for ever."""
    loop, ready, sent = asyncio.new_event_loop(), threading.Event(), [0]
    ports: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(first)
            while True:
                writer.write(more)
                await writer.drain()
                sent[0] += len(more)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def serve() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()
        await turns()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}/v1", sent
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


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
    table: Callable, rubric: Rubric, flood: str
) -> None:
    with endless(*FLOODS[flood]) as (url, sent):
        settings = table(max_attempts=1, concurrency=1, max_reply_bytes=2**20, timeout_s=60.0)
        oracle = HttpOracle(settings.model_copy(update={"base_url": url}), rubric)
        with pytest.raises(LabelError) as down:
            list(oracle.label(Question(f"document {i}") for i in range(40)))
        num_sent = sent[0]
    assert down.value.code == "E-LABEL-ORACLE-DOWN"
    assert "reply_too_large" in str(down.value)
    assert "1048576 bytes" in str(down.value)
    assert len(down.value.line()) < 600
    # Sixteen documents, a try each: the limit, and what the sockets held beside it.
    assert num_sent < 16 * (2**20 + 32 * 2**20)
