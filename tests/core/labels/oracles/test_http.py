from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.errors import LabelError
from nmoe_core.base.result import Result
from nmoe_core.config.quality import OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.documents import JsonlTexts, jsonl_documents
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.oracle import Question
from nmoe_core.labels.oracles import make_oracle
from nmoe_core.labels.oracles.http import HttpOracle
from nmoe_core.labels.oracles.replies import retry_after_s
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.labels.oracles.server import (
    GOOD,
    MODEL,
    JudgeServer,
    Reply,
    answers,
    completion,
    documents_of,
    grades_of,
    write_documents,
)
from tests.core.quality import RUBRIC
from tests.refusals import refused


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
    "reset": ({"resets": True}, ""),  # a request lost like this is sent twice in one try
    "reset in the body": ({"resets": True, "body": b"x" * 5000}, "connection_lost"),
    "slow": ({"after_s": NEVER_S}, "timeout"),
    "408": ({"status": 408}, "http_408"),
    "500": ({"status": 500, "body": b"boom"}, "http_500"),
    "502": ({"status": 502, "body": b"<html>bad gateway</html>"}, "http_502"),
    "503": ({"status": 503}, ""),
    "429": ({"status": 429}, ""),
    "html": ({"body": b"<html>hello</html>"}, "not_json"),
    "a list": ({"body": b"[1]"}, "not_json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_a_try_and_one_that_stays_a_failed_label(
    server: JudgeServer, fault: str
) -> None:
    reply, reason = FAULTS[fault]
    documents, rng = documents_of(30), random.Random(0)
    hit, poison = set(documents[::3]), {documents[4], documents[29]} if reason else set()

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
def test_when_every_document_fails_the_run_ends_and_no_label_is_made(
    server: JudgeServer, fault: Any
) -> None:
    server.always(Reply(**fault))
    seen: list[Any] = []
    with refused("E-LABEL-ORACLE-DOWN"):
        seen.extend(server.oracle(max_attempts=2).label(map(Question, documents_of(100))))
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


def test_a_server_that_is_not_there_ends_the_run_and_one_that_comes_back_does_not(
    server: JudgeServer,
) -> None:
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


def test_another_model_in_the_reply_is_refused_and_a_dated_snapshot_is_not(
    server: JudgeServer,
) -> None:
    server.always(completion(GOOD, model=f"{MODEL}-2026-01-31"))
    assert server.ask_one().scores
    server.always(completion(GOOD, model=f"{MODEL}-mini"))
    with refused("E-LABEL-MIXED"):
        server.ask_one()
    assert server.ask_one(accept_model=(f"{MODEL}-mini",)).scores
    named = server.oracle(accept_model=(f"{MODEL}-mini",))
    assert named.scorer == server.oracle().scorer


def test_the_key_comes_from_the_environment_and_is_in_no_fact_version_or_message(
    server: JudgeServer, rubric: Rubric, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = OracleTable(kind="http", http=server.table(api_key_env="JUDGE_KEY"))
    for missing in ("", " \n"):
        monkeypatch.setenv("JUDGE_KEY", missing)
        with refused("E-CONFIG-MISSING", match="JUDGE_KEY"):
            make_oracle(table, rubric, Path)
    monkeypatch.setenv("JUDGE_KEY", " s3cret\r\n")
    oracle = make_oracle(table, rubric, Path)
    assert len(list(oracle.label([Question("a")]))) == 1
    assert "Authorization: Bearer s3cret\r\n" in server.headers[0]
    assert "s3cret" not in json.dumps([oracle.facts, oracle.scorer])
    for value in ("s3 cret", "s3\ncret", "s3\x7fcret", "s3\u00a0cret", "schlüssel"):
        monkeypatch.setenv("JUDGE_KEY", value)
        with refused("E-CONFIG", match="JUDGE_KEY") as unusable:
            make_oracle(table, rubric, Path)
        assert "cret" not in str(unusable.value)


def label(path: Path, out: Path, oracle: HttpOracle, **more: Any) -> Result:
    documents = jsonl_documents(JsonlTexts(path), load_tokenizer(), 2048)
    return label_shard(documents, out, oracle, **more)


def test_an_outage_keeps_what_was_labelled_and_the_next_run_asks_only_for_the_rest(
    server: JudgeServer, tmp_path: Path
) -> None:
    path, out, oracle = tmp_path / "in.jsonl", tmp_path / "out", server.oracle(max_attempts=1)
    texts = write_documents(path, 80)

    def behave(document: str, nth: int) -> Reply:
        is_down = server.answered.total() >= 30
        return Reply(status=500) if is_down else answers(document, nth)

    server.behave = behave
    with pytest.raises(LabelError):
        label(path, out, oracle)
    assert not (out / "summary.json").exists()
    server.settle()
    answered = server.answered.total()
    server.behave = answers
    facts = label(path, out, oracle).facts
    assert (facts["total"], facts["parsed"]) == (80, 80)
    # What was answered has its label, but for answers still on their way when the run ended.
    resumed_from = facts["resumed_from"]
    assert answered - 8 <= resumed_from <= answered
    assert sum(server.answered[text] - 1 for text in texts) == answered - resumed_from


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_kills_lose_no_label_ask_for_none_again_and_leave_the_same_bytes(
    server: JudgeServer, tmp_path: Path, kills: int
) -> None:
    path, out, whole = tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "whole"
    texts, oracle = write_documents(path, 60 * kills), server.oracle()
    server.behave = lambda d, nth: late(answers(d, nth), 0.02)
    code = "import sys; from nmoe_core.cli import main; sys.exit(main(sys.argv[1:]))"
    flags = ["--oracle", "http", "--base-url", server.url, "--model", MODEL, "--quiet"]
    flags += ["--input-jsonl", path, "--out", out, "--rubric", RUBRIC, "--concurrency", "4"]
    command = [sys.executable, "-c", code, "hydra", "oracle-label", *map(str, flags)]
    for kill in range(kills):
        process = subprocess.Popen(command)
        while server.answered.total() < 30 * (kill + 1):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open(out / "scores.jsonl", "ab") as file:
            file.write(b'{"doc_id": "d0", "sou')
    before = server.asked.total()
    label(path, out, oracle)
    assert before < server.asked.total()
    # Only what was under way at a kill is asked about again: of each of the four places, an
    # answer that was not yet written and the request after it.
    assert server.asked.total() - len(texts) <= 8 * kills
    label(path, whole, oracle)
    for name in ("scores.jsonl", "summary.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert len((out / "scores.jsonl").read_bytes().splitlines()) == len(texts)
