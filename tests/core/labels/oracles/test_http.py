import base64
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.config.quality import OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import Question, read_records
from nmoe_core.labels.oracles import make_oracle
from nmoe_core.labels.oracles.http import RAW_CHARS
from nmoe_core.labels.oracles.replies import retry_after_s
from tests.core.labels.oracles.loopback import Client, Loopback
from tests.core.labels.oracles.server import (
    GOOD,
    MODEL,
    JudgeServer,
    Reply,
    answers,
    completion,
    documents_of,
    grades_of,
    text_completion,
)
from tests.growth import growth
from tests.project import json_lines, read_rows
from tests.refusals import refused


def labelling(url: str, root: Path, count: int, *more: str) -> list[str]:
    """`nmoe hydra oracle-label` of some documents, into `root/out`."""
    rows = [{"doc_id": f"d{i}", "text": text} for i, text in enumerate(documents_of(count))]
    (root / "in.jsonl").write_text(json_lines(rows))
    flags = ["--oracle", "http"]
    flags += [f"--set=oracle.http.base_url={url}", f"--set=oracle.http.model={MODEL}", "--quiet"]
    places = ["--input-jsonl", str(root / "in.jsonl"), "--out", str(root / "out")]
    return ["hydra", "oracle-label", *flags, *places, "--set=oracle.http.concurrency=4", *more]


def label(url: str, root: Path, count: int, *more: str) -> int:
    return main(labelling(url, root, count, *more))


def scores_of(server: JudgeServer, documents: list[str], **more: Any) -> None:
    """Ask, and check that each document got the scores that the server has for it."""
    found = server.ask(documents, **more)
    assert {d: r.scores for d, r in found.items()} == {d: grades_of(d) for d in documents}


def late(reply: Reply, after_s: float) -> Reply:
    reply.after_s = after_s
    return reply


# A server that keeps silent, and how long is waited for it; every other answer may take its time.
NEVER_S, SILENCE_S, PATIENCE_S = 600.0, 1.5, 60.0
ERRORS: dict[str, dict[str, Any]] = {
    "an error": {"body": b'{"error": {"message": "upstream is overloaded", "code": 502}}'},
    "an error and no choices": {"body": b'{"error": "no capacity", "choices": []}'},
    "an error object": {"body": b'{"object": "error", "message": "worker died", "code": 50001}'},
}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    # name: (the reply, the reason of a document that always gets it, if it is a failure)
    **{name: (reply, "error_reply") for name, reply in ERRORS.items()},
    "reset": ({"resets": True}, "connection_lost"),
    "reset in the body": ({"resets": True, "body": b"x" * 5000}, "connection_lost"),
    "slow": ({"after_s": NEVER_S}, "timeout"),
    "408": ({"status": 408}, "http_408"),
    "500": ({"status": 500, "body": b"boom"}, "http_500"),
    "aborted": ({"body": completion("{", reason="abort").body}, "error_reply"),
    "502": ({"status": 502, "body": b"<html>bad gateway</html>"}, ""),
    "503": ({"status": 503}, ""),
    "529": ({"status": 529, "headers": {"Retry-After": "0.01"}}, ""),
    "429": ({"status": 429}, ""),
    "html": ({"body": b"<html>hello</html>"}, "not_json"),
    "a list": ({"body": b"[1]"}, "not_json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_a_try_and_one_that_stays_a_label(server: JudgeServer, fault: str) -> None:
    reply, reason = FAULTS[fault]
    documents, rng = documents_of(30), random.Random(0)
    # Timeouts lower concurrency, so each of them takes its time.
    every = 10 if fault == "slow" else 3
    hit, poison = set(documents[::every]), {documents[4], documents[29]} if reason else set()

    def behave(document: str, nth: int) -> Reply:
        is_hit = document in poison or (document in hit and nth < 2)
        return Reply(**reply) if is_hit else late(answers(document, nth), rng.random() * 0.05)

    server.behave = behave
    timeout_s = SILENCE_S if fault == "slow" else PATIENCE_S
    found = server.ask(documents, timeout_s=timeout_s, max_attempts=3)
    for document, result in found.items():
        assert result.scores == (None if document in poison else grades_of(document))
        assert result.finish_reason == (reason if document in poison else "stop")
        assert server.asked[document] == (3 if document in hit | poison else 1)
        assert result.num_new_tokens == (None if document in poison else 41)
    # A server that keeps silent still holds the requests that were given up.
    assert 4 <= server.most_at_once <= (8 if fault != "slow" else 90)


@pytest.mark.parametrize("fault", [{"status": 500}, {"resets": True}, *ERRORS.values()])
def test_a_run_of_failures_alone_ends_without_a_label(server: JudgeServer, fault: Any) -> None:
    server.always(Reply(**fault))
    seen: list[Any] = []
    with refused("E-LABEL-ORACLE-DOWN"):
        oracle = server.oracle(max_attempts=2, max_outage_s=0.5)
        seen.extend(oracle.label(map(Question, documents_of(100))))
    assert seen == []


def test_a_refusal_that_names_a_wait_holds_all_requests_back_for_it(server: JudgeServer) -> None:
    times: list[float] = []

    def behave(document: str, nth: int) -> Reply:
        times.append(time.monotonic())
        wait = Reply(status=429, headers={"Retry-After": "0.3"})
        return wait if len(times) == 1 else answers(document, nth)

    server.behave = behave
    scores_of(server, documents_of(8), concurrency=1)
    assert len(times) == 9
    assert times[1] - times[0] >= 0.3


def test_retry_after_is_read_as_seconds_or_a_date() -> None:
    seconds = {"3": 3, "0.5": 0.5, "-1": 0, "nan": 0, "soon": 0, "": 0}
    assert {header: retry_after_s(header) for header in seconds} == seconds
    assert 1e9 <= retry_after_s("Fri, 31 Dec 2199 23:59:59 GMT") <= 1e11
    assert retry_after_s("Fri, 31 Dec 1999 23:59:59 GMT") == 0
    for year, zone in (("9" * 10, "GMT"), ("9" * 30, "GMT"), ("1999", "-" + "9" * 30)):
        assert retry_after_s(f"Fri, 31 Dec {year} 23:59:59 {zone}") == 0


@pytest.mark.parametrize("ahead", [-1, 1])
def test_a_date_to_wait_for_is_taken_by_the_servers_clock(server: JudgeServer, ahead: int) -> None:
    now = datetime.now(UTC) + ahead * timedelta(days=365)
    asked_for = {"Date": format_datetime(now), "Retry-After": format_datetime(now)}

    def behave(document: str, nth: int) -> Reply:
        return answers(document, nth) if nth else Reply(status=429, headers=asked_for)

    server.behave = behave
    scores_of(server, documents_of(8), concurrency=2)
    later = format_datetime(now + timedelta(seconds=7))
    assert retry_after_s(later, asked_for["Date"]) == 7


def test_a_storm_of_refusals_lowers_concurrency_and_it_recovers(server: JudgeServer) -> None:
    seen: list[int] = []

    def behave(document: str, nth: int) -> Reply:
        seen.append(server.at_once)
        if len(seen) < 30 and server.at_once >= 2:
            return Reply(status=429)
        return late(answers(document, nth), 0.03)

    server.behave = behave
    scores_of(server, documents_of(200))
    assert max(seen[-50:]) >= 6


def test_a_server_that_is_gone_ends_the_run_unless_it_comes_back(server: JudgeServer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    with refused("E-LABEL-ORACLE-DOWN"):
        server.ask(["a"], base_url=url, max_outage_s=0.5)
    started_later: list[JudgeServer] = []
    timer = threading.Timer(0.5, lambda: started_later.append(JudgeServer(port)))
    timer.start()
    scores_of(server, documents_of(20), base_url=url, max_outage_s=20.0)
    timer.join()
    assert set(started_later[0].asked.values()) == {1}
    started_later[0].close()


def test_another_model_is_refused_and_a_dated_snapshot_is_not(server: JudgeServer) -> None:
    server.always(completion(GOOD, model=f"{MODEL}-2026-01-31"))
    assert server.ask_one().scores
    server.always(completion(GOOD, model=f"{MODEL}-mini"))
    with refused("E-LABEL-MIXED"):
        server.ask_one()
    assert server.ask_one(accept_model=(f"{MODEL}-mini",)).scores
    named = server.oracle(accept_model=(f"{MODEL}-mini",))
    assert named.scorer == server.oracle().scorer


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_extra_fields_reach_every_request_and_the_version(server: JudgeServer, api: str) -> None:
    server.behave = lambda document, nth: text_completion("") if api != "chat" else completion(GOOD)
    nested = {"chat_template_kwargs": {"enable_thinking": False}, "stop": ["\n\n"]}
    extra = {"max_completion_tokens": 99, "temperature": 1, **nested}
    oracle, plain = (server.oracle(api=api, extra_body=body) for body in (extra, {}))
    list(oracle.label([Question("a"), Question("b", attempt=1)]))
    for request in server.requests:
        assert extra.items() <= request.items()
        assert "max_tokens" not in request
    assert oracle.facts["extra_body"] == extra
    assert "extra_body" not in plain.facts
    assert oracle.scorer != plain.scorer
    assert plain.scorer == server.oracle(api=api).scorer
    list(plain.label([Question("a")]))
    assert server.requests[-1]["max_tokens"] == server.table().max_new


def test_the_key_comes_from_the_environment_and_is_in_no_fact_version_or_message(
    server: JudgeServer, rubric: Rubric, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = OracleTable(kind="http", http=server.table(api_key_env="JUDGE_API_KEY"))
    for missing in ("", " \n"):
        monkeypatch.setenv("JUDGE_API_KEY", missing)
        with refused("E-CONFIG-MISSING", match="JUDGE_API_KEY"):
            make_oracle(table, rubric, Path())
    monkeypatch.setenv("JUDGE_API_KEY", " s3cret\r\n")
    oracle = make_oracle(table, rubric, Path())
    assert len(list(oracle.label([Question("a")]))) == 1
    assert "Authorization: Bearer s3cret\r\n" in server.headers[0]
    assert "s3cret" not in json.dumps([oracle.facts, oracle.scorer])
    for value in ("s3 cret", "s3\ncret", "s3\x7fcret", "s3\u00a0cret", "schlüssel"):
        monkeypatch.setenv("JUDGE_API_KEY", value)
        with refused("E-CONFIG", match="JUDGE_API_KEY") as unusable:
            make_oracle(table, rubric, Path())
        assert "cret" not in str(unusable.value)


def label_with_key(url: str, root: Path, name: str, *more: str) -> int:
    return label(url, root, 1, f"--set=oracle.http.api_key_env={name}", *more)


@pytest.mark.parametrize(
    "name", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DATABASE_URL", "API_KEY_ID", "SSH_KEY"]
)
def test_a_variable_that_is_not_named_as_an_api_key_is_not_sent(
    server: JudgeServer,
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, "s3cret")
    assert label_with_key(server.url, tmp_path, name) == 1
    line = capsys.readouterr().err
    assert all(part in line for part in ("[E-CONFIG", "api_key_env", name, "ends in API_KEY"))
    assert "s3cret" not in line
    assert server.headers == []


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "API_KEY", "ORACLE_KEY", "my_api_key"])
def test_a_variable_that_is_named_as_an_api_key_is_sent(
    server: JudgeServer, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "s3cret")
    assert label_with_key(server.url, tmp_path, name) == 0
    assert "Authorization: Bearer s3cret\r\n" in server.headers[0]


def test_a_key_goes_over_plain_http_to_another_machine_only_if_the_run_allows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_KEY", "s3cret")
    allowed = ("--set", "oracle.http.allow_key_over_http=true")
    no_outage = ("--set", "oracle.http.max_outage_s=0")
    for host in ("judge.invalid", "127.0.0.1.judge.invalid", "[2001:db8::1]"):
        assert label_with_key(f"http://{host}/v1", tmp_path, "ORACLE_KEY", *no_outage) == 1
        line = capsys.readouterr().err
        assert "allow_key_over_http" in line
        assert "https" in line
    for url, more in (
        ("http://judge.invalid/v1", allowed),
        ("https://judge.invalid/v1", ()),
        ("http://localhost:9/v1", ()),
        ("http://[::1]:9/v1", ()),
    ):
        assert label_with_key(url, tmp_path, "ORACLE_KEY", *no_outage, *more) == 1
        assert "cannot connect" in capsys.readouterr().err


def test_after_an_outage_only_the_rest_is_asked_for(server: JudgeServer, tmp_path: Path) -> None:
    scores, once = tmp_path / "out" / "scores.jsonl", ("--set=oracle.http.max_attempts=1",)
    once += ("--set=oracle.http.max_outage_s=0.5",)

    def behave(document: str, nth: int) -> Reply:
        is_down = server.answered.total() >= 30
        return Reply(status=500) if is_down else answers(document, nth)

    server.behave = behave
    assert label(server.url, tmp_path, 80, *once) == 1
    assert not scores.with_name("summary.json").exists()
    server.settle()
    replies = read_rows(tmp_path / "out" / "answers" / "labels.jsonl")
    kept = sum(reply["status"] == 200 for reply in replies)
    answered = server.answered.total()
    server.behave = answers
    assert label(server.url, tmp_path, 80, *once) == 0
    summary = json.loads(scores.with_name("summary.json").read_text())
    assert (summary["total"], summary["parsed"]) == (80, 80)
    # What was answered has its label, but for answers still on their way when the run ended.
    assert answered - 4 <= kept <= answered
    assert server.answered.total() - 80 == answered - kept


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_kills_end_in_the_same_bytes(server: JudgeServer, tmp_path: Path, kills: int) -> None:
    count, out = 60 * kills, tmp_path / "out"
    server.behave = lambda d, nth: late(answers(d, nth), 0.02)
    for kill in range(kills):
        command = labelling(server.url, tmp_path, count)
        process = subprocess.Popen([sys.executable, "-m", "nmoe_core", *command])
        while server.answered.total() < 30 * (kill + 1) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open(out / "answers" / "labels.jsonl", "ab") as file:
            file.write(b'{"text_sha256": "d0')
    before = server.asked.total()
    assert label(server.url, tmp_path, count) == 0
    assert before < server.asked.total()
    # Only what was under way at a kill is asked about again: of each of the four places, an
    # answer that was not yet written and the request after it.
    assert server.asked.total() - count <= 8 * kills
    killed = out.rename(tmp_path / "killed")
    assert label(server.url, tmp_path, count) == 0
    for name in ("scores.jsonl", "summary.json"):
        assert (killed / name).read_bytes() == (out / name).read_bytes()
    assert len((out / "scores.jsonl").read_bytes().splitlines()) == count


KEY = "sk-s3cret/with+marks"
TOO_LONG = b'{"error": {"message": "maximum context length is 4096 tokens"}}'


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_document_gets_no_label(server: JudgeServer, tmp_path: Path, status: int) -> None:
    refusal, documents = Reply(TOO_LONG, status), documents_of(60)[10:]
    server.behave = lambda d, nth: refusal if d in documents else answers(d, nth)
    assert label(server.url, tmp_path, 60) == 0
    rows = list(read_records(tmp_path / "out" / "scores.jsonl"))
    assert [row["ok"] for row in rows] == [True] * 10 + [False] * 50
    assert {row["finish_reason"] for row in rows[10:]} == {f"http_{status}"}
    assert all("maximum context length" in row["raw"] for row in rows[10:])
    assert set(server.asked.values()) == {1}
    # What was refused is not asked about again.
    assert label(server.url, tmp_path, 60) == 0
    assert server.asked.total() == 60


@pytest.mark.parametrize("count", [1, 15, 40])
def test_a_server_that_refuses_every_request_ends_the_run(
    server: JudgeServer, tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.always(Reply(b"Unrecognized request argument: reasoning_effort", 400))
    assert label(server.url, tmp_path, count) == 1
    assert "Unrecognized request argument" in capsys.readouterr().err
    assert server.asked.total() <= 16 + 4
    # These refusals do not become labels, once the server takes such requests.
    server.behave = answers
    assert label(server.url, tmp_path, count) == 0
    assert all(row["ok"] for row in read_records(tmp_path / "out" / "scores.jsonl"))


def test_a_long_refusal_costs_what_its_length_says(server: JudgeServer) -> None:
    def ask(num_bytes: int) -> None:
        refusal = Reply(b"://a:" * (num_bytes // 5), 400)
        server.behave = lambda d, nth: refusal if d == "long" else answers(d, nth)
        result = server.ask(["short", "long"], concurrency=1)["long"]
        assert (result.scores, result.raw) == (None, ("://a:" * RAW_CHARS)[:RAW_CHARS])

    assert growth(ask, 2**16, 2**19) < 24


@pytest.mark.parametrize("status", [200, 301, 302, 303, 307, 308])
def test_no_server_but_the_configured_one_is_asked(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    asked: list[int] = []

    async def note(client: Client) -> None:
        asked.append(client.nth)

    with closing(Loopback(note)) as other:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, other.url)
            monkeypatch.setenv(name.upper(), other.url)
        headers = {"Location": other.url, "Refresh": f"0; url={other.url}", "Alt-Svc": "h2"}
        server.always(Reply(completion(GOOD).body, status, headers))
        if status == 200:
            assert server.ask_one().scores is not None
        else:
            with refused("E-LABEL-ORACLE"):
                server.ask_one()
    assert asked == []


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
    assert label(server.url, tmp_path, 40, f"--set=oracle.http.api={api}") == 1
    line = capsys.readouterr().err
    assert "ERROR [E-LABEL-ORACLE]" in line
    assert advice in line
    assert not (tmp_path / "out" / "scores.jsonl").exists()
    # With 403 the server may mean the document: others are asked, but not all.
    assert server.asked.total() <= (4 if status != 403 else 16 + 4)


@pytest.mark.parametrize("reason", ["http_error", "http_500", "timeout", "x" * 5000])
def test_a_finish_reason_of_the_servers_own_is_no_failure(server: JudgeServer, reason: str) -> None:
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
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setattr("nmoe_core.labels.oracles.replies.FIRST_PAUSE_S", 0.001)
    server.always(ECHOES[name])
    flags = ("--set=oracle.http.api_key_env=JUDGE_API_KEY", "--set=oracle.http.max_outage_s=0")
    label(server.url, tmp_path, 20, *flags)
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
}  # fmt: skip


# The parser of these is slow, and takes seconds for a megabyte.
SLOW_FLOODS = ("chunks",)
TRIED_FLOODS = [
    pytest.param(flood, marks=[pytest.mark.long] * (flood in SLOW_FLOODS)) for flood in FLOODS
]


@pytest.mark.parametrize("flood", TRIED_FLOODS)
def test_a_reply_without_end_is_cut_at_its_limit(server: JudgeServer, flood: str) -> None:
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
        limits["max_outage_s"] = 0
        oracle = server.oracle(base_url=flooding.url, **limits)
        is_head = flood in ("headers", "one header")
        naming = ["too long"] if is_head else ["reply_too_large", "1048576 bytes"]
        with refused("E-LABEL-ORACLE-DOWN", naming=naming) as down:
            list(oracle.label(map(Question, documents_of(40))))
    assert len(down.value.line()) < 600
    # Sixteen documents, a try each: the limit, and what the sockets held beside it.
    assert num_sent < 16 * (2**20 + 32 * 2**20)
