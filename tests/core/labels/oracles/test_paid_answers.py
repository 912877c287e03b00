"""What a server answered is kept, and no text is asked about more often than it has to be."""

import gc
import json
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.labels.oracle import OracleResult, Question, is_server_failure
from tests.core.labels.oracles.server import (
    GOOD,
    MODEL,
    JudgeServer,
    Reply,
    answers,
    completion,
    documents_of,
    grades_of,
)
from tests.core.labels.oracles.whole_runs import label, labels, reasons, records, replies
from tests.project import json_lines, said
from tests.refusals import refused

ENDS = {
    "another model": completion(GOOD, model="another"),
    "key": Reply(b"no", 401),
    "quota": Reply(b"no", 402),
    "wait": Reply(b"later", 429, {"Retry-After": "100000"}),
}


@pytest.mark.parametrize("name", ENDS)
def test_answers_under_way_are_kept_when_an_error_ends_the_run(
    server: JudgeServer, tmp_path: Path, name: str
) -> None:
    texts = documents_of(20)

    def behave(document: str, nth: int) -> Reply:
        if document == texts[2]:
            return ENDS[name]
        reply = answers(document, nth)
        reply.after_s = 0.5
        return reply

    server.behave = behave
    assert label(server, tmp_path, texts, "--set=oracle.http.concurrency=8") == 1
    server.settle()
    kept = [reply for reply in replies(tmp_path) if reply["status"] == 200]
    assert len(kept) == 7 + (name == "another model") == server.answered.total()
    server.behave = answers
    assert label(server, tmp_path, texts) == 0
    assert {text: server.asked[text] for text in texts} == {t: 1 + (t == texts[2]) for t in texts}


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("position", [0, 5, 11])
def test_a_document_that_moderation_refuses_gets_a_failed_label(
    server: JudgeServer, tmp_path: Path, position: int, concurrency: int
) -> None:
    texts = documents_of(12)

    def behave(document: str, nth: int) -> Reply:
        reply = answers(document, nth)
        reply.after_s = 0.1
        is_flagged = document == texts[position]
        return Reply(b'{"error": "flagged"}', 403) if is_flagged else reply

    server.behave = behave
    for _ in range(2):
        assert label(server, tmp_path, texts, f"--set=oracle.http.concurrency={concurrency}") == 0
        assert reasons(tmp_path) == {"stop": 11, "http_403": 1}
    assert server.asked.total() == 12
    assert records(tmp_path)[position]["raw"] == '{"error": "flagged"}'


@pytest.mark.parametrize("count", [1, 15])
def test_a_server_that_refuses_every_document_ends_the_run_without_a_label(
    server: JudgeServer, count: int
) -> None:
    server.always(Reply(b"no access", 403))
    with refused("E-LABEL-ORACLE", naming=["no access"]):
        server.ask(documents_of(count))


def test_timeouts_lower_concurrency_until_the_server_keeps_up(server: JudgeServer) -> None:
    free_at = 0.0

    def behave(document: str, nth: int) -> Reply:
        """One after the other, 33 per second, whether the client is there still or not."""
        nonlocal free_at
        now = time.monotonic()
        free_at = max(free_at, now) + 0.03
        reply = answers(document, nth)
        reply.after_s = free_at - now
        return reply

    server.behave = behave
    documents = documents_of(300)
    found = server.ask(documents, concurrency=64, timeout_s=1.0)
    assert {d: r.scores for d, r in found.items()} == {d: grades_of(d) for d in documents}
    # Without a lasting lower limit it is 1.9 for each.
    assert server.asked.total() < 1.6 * len(documents)


def test_the_error_after_timeouts_says_how_many_requests_were_under_way(
    server: JudgeServer,
) -> None:
    server.always(Reply(after_s=60.0))
    naming = ["timeout (0.2 s, 5 requests at once)", "concurrency", "timeout_s"]
    with refused("E-LABEL-ORACLE-DOWN", naming=naming):
        server.ask(documents_of(20), concurrency=5, timeout_s=0.2, max_attempts=1)


def test_a_server_that_hangs_is_given_up_after_the_longest_outage(server: JudgeServer) -> None:
    server.always(Reply(after_s=60.0))
    naming = ["timeout (0.2 s, 32 requests at once)", "an answer within 1 s"]
    with refused("E-LABEL-ORACLE-DOWN", naming=naming):
        server.ask(documents_of(40), concurrency=32, timeout_s=0.2, max_outage_s=1.0)
    assert server.asked.total() < 32 * 4


FAILURES = {
    "http_500": Reply(b"CUDA OOM", 500),
    "not_json": Reply(b"<html>"),
    "error_reply": Reply(b'{"error": "no capacity"}'),
    "connection_lost": Reply(resets=True, body=b"x" * 5000),
    "timeout": Reply(after_s=600.0),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_what_a_server_failed_on_is_asked_again_at_temperature_0_by_the_next_run(
    server: JudgeServer, tmp_path: Path, reason: str
) -> None:
    texts, once = documents_of(12), ("--set=oracle.http.max_attempts=1",)
    once += (f"--set=oracle.http.timeout_s={1.5 if reason == 'timeout' else 60}",)
    bad = set(texts[::3])

    def fails(document: str, nth: int) -> Reply:
        return FAILURES[reason] if document in bad else answers(document, nth)

    server.behave = fails
    assert label(server, tmp_path, texts, *once) == 0
    assert reasons(tmp_path) == {"stop": 8, reason: 4}
    finished = labels(tmp_path)
    # A server that fails again costs a request each, and the labels stay finished.
    assert label(server, tmp_path, texts) == 0 if reason != "timeout" else True
    assert labels(tmp_path) == finished
    server.behave = answers
    asked = server.asked.total()
    assert label(server, tmp_path, texts) == 0
    assert server.asked.total() - asked == 4
    assert {(r["temperature"], r["seed"]) for r in server.requests} == {(0, 0)}
    repaired = (tmp_path / "out" / "scores.jsonl").read_bytes()
    (tmp_path / "out").rename(tmp_path / "repaired")
    assert label(server, tmp_path, texts) == 0
    assert (tmp_path / "out" / "scores.jsonl").read_bytes() == repaired


def test_labels_that_a_server_failed_on_stay_finished_when_it_is_away(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = documents_of(20)
    server.behave = lambda d, nth: Reply(status=500) if d in texts[1:18] else answers(d, nth)
    flags = ("--set=oracle.http.max_attempts=1", "--set=oracle.http.concurrency=3")
    assert label(server, tmp_path, texts[:1] + texts[18:] + texts[1:10], *flags) == 0
    finished = labels(tmp_path)
    places = ["--input-jsonl", tmp_path / "in.jsonl", "--out", tmp_path / "out"]
    places += ["--oracle", "http"]
    places += [
        f"--set=oracle.http.base_url={url_of_no_server()}",
        f"--set=oracle.http.model={MODEL}",
        "--quiet",
    ]
    facts = said(capsys, "hydra", "oracle-label", *places)[str(tmp_path / "out")]
    assert (facts["total"], facts["parsed"]) == (12, 3)
    assert labels(tmp_path) == finished


def test_only_an_answer_that_was_not_accepted_is_asked_for_at_temperature_1(
    server: JudgeServer, tmp_path: Path
) -> None:
    texts = documents_of(3)
    firsts = dict(zip(texts, (completion("no scores"), Reply(b"too long", 400), Reply(status=500))))
    server.behave = lambda d, nth: answers(d, nth) if nth else firsts[d]
    flags = ("--set=oracle.max_retries=1", "--set=oracle.http.max_attempts=1")
    for _ in range(2):
        assert label(server, tmp_path, texts, *flags) == 0
    asked = [(r["temperature"], r["messages"][-1]["content"]) for r in server.requests]
    temperatures = {t: [degree for degree, text in asked if f"{t}\n" in text] for t in texts}
    assert temperatures == dict(zip(texts, ([0, 1], [0, 0], [0, 0])))
    assert [record["attempts"] for record in records(tmp_path)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("more", "is_failure"),
    [
        ({"finish_reason": "http_503"}, True),
        ({"finish_reason": "timeout"}, True),
        ({"finish_reason": "timeout", "num_new_tokens": 3}, False),
        ({"finish_reason": "timeout", "answered": True}, False),
        ({"finish_reason": "http_400"}, False),
        ({"finish_reason": "http_429"}, True),
        ({"finish_reason": "length"}, False),
        ({"finish_reason": "unsupported_script"}, False),
        ({"finish_reason": None}, False),
        ({"finish_reason": "timeout", "ok": True}, False),
    ],
)
def test_labels_of_earlier_versions_show_whose_failure_they_are(
    more: dict[str, Any], is_failure: bool
) -> None:
    assert is_server_failure({"ok": False, "num_new_tokens": None} | more) is is_failure


def test_failures_of_an_earlier_version_are_asked_again_and_nothing_else_is(
    server: JudgeServer, tmp_path: Path
) -> None:
    texts = documents_of(12)
    server.behave = lambda d, nth: Reply(status=500) if d in texts[:2] else answers(d, nth)
    assert label(server, tmp_path, texts, "--set=oracle.http.max_attempts=1") == 0
    rows = records(tmp_path)
    for row in rows[:2]:
        del row["answered"]
        row["attempts"] = 1
    (tmp_path / "out" / "scores.jsonl").write_text(json_lines(rows))
    (tmp_path / "out" / "summary.json").unlink()
    server.behave = answers
    assert label(server, tmp_path, texts) == 0
    assert server.asked.total() == 14
    assert {(r["temperature"], r["seed"]) for r in server.requests} == {(0, 0)}


def test_one_document_that_is_always_too_much_fails_alone(server: JudgeServer) -> None:
    documents = documents_of(30)

    def behave(document: str, nth: int) -> Reply:
        reply = answers(document, nth)
        reply.after_s = 0.05
        return Reply(b"request too large", 429) if document in documents[3:5] else reply

    server.behave = behave
    for alone in (documents[:4] + documents[5:], documents):
        found = server.ask(alone, max_outage_s=1.0)
        failed = {d: r.finish_reason for d, r in found.items() if r.scores is None}
        assert failed == dict.fromkeys(set(alone) & set(documents[3:5]), "http_429")


def test_one_document_that_is_always_too_much_does_not_hold_up_the_others(
    server: JudgeServer,
) -> None:
    documents = documents_of(200)

    def behave(document: str, nth: int) -> Reply:
        reply = answers(document, nth)
        reply.after_s = 0.05
        return Reply(b"request too large", 429) if document == documents[3] else reply

    server.behave = behave
    found = server.ask(documents, max_outage_s=20.0)
    assert [d for d, r in found.items() if r.scores is None] == [documents[3]]
    assert server.asked[documents[3]] < 20


def test_a_server_that_is_busy_for_all_is_waited_for(server: JudgeServer) -> None:
    seen: list[float] = []

    def behave(document: str, nth: int) -> Reply:
        seen.append(time.monotonic())
        is_busy = len(seen) > 10 and seen[-1] - seen[10] < 1.0
        return Reply(status=429) if is_busy else answers(document, nth)

    server.behave = behave
    found = server.ask(documents_of(40))
    assert all(result.scores for result in found.values())


def test_a_text_is_asked_once_and_an_empty_one_never(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [*(f"text {i % 3}" for i in range(60)), "", "  \n"]
    places = ["--input-jsonl", tmp_path / "in.jsonl", "--out", tmp_path / "out"]
    flags = ["--oracle", "http"]
    flags += [
        f"--set=oracle.http.base_url={server.url}",
        f"--set=oracle.http.model={MODEL}",
        "--quiet",
    ]
    (tmp_path / "in.jsonl").write_text(
        json_lines({"id": f"d{i}", "text": text} for i, text in enumerate(texts))
    )
    estimate = said(capsys, "hydra", "oracle-label", "--estimate", *places, *flags)
    assert estimate["all"]["questions"] == 3
    facts = said(capsys, "hydra", "oracle-label", *places, *flags)[str(tmp_path / "out")]
    assert (facts["num_new"], facts["num_reused"], facts["parsed"]) == (3, 57, 60)
    assert server.asked == {f"text {i}": 1 for i in range(3)}
    assert reasons(tmp_path) == {"stop": 60, "empty_text": 2}
    assert {(r["scores"]["density"], r["text_sha256"]) for r in records(tmp_path) if r["ok"]} == {
        (grades_of(r["snippet"])["density"], r["text_sha256"]) for r in records(tmp_path) if r["ok"]
    }


def test_copies_of_a_text_that_fails_are_one_question_too(
    server: JudgeServer, tmp_path: Path
) -> None:
    texts = ["good", *["bad"] * 5, *["worse"] * 5]
    worse = completion("no scores")
    kinds = {"good": completion(GOOD), "bad": Reply(status=500), "worse": worse}
    server.behave = lambda document, nth: kinds[document]
    for num_asked, flags in ((3, ()), (4, ()), (6, ("--set=oracle.max_retries=1",))):
        attempts = ("--set=oracle.http.max_attempts=1",)
        assert label(server, tmp_path, texts, *attempts, *flags) == 0
        assert server.asked.total() == num_asked
        assert reasons(tmp_path) == {"stop": 1, "http_500": 5, "parse_failed": 5}


def test_questions_that_are_drawn_again_have_seeds_of_their_own(server: JudgeServer) -> None:
    texts = documents_of(20)
    questions = [Question(text, attempt) for text in texts for attempt in range(3)]
    questions += [question._replace(is_redrawn=True) for question in questions]
    results: list[tuple[int, OracleResult]] = list(server.oracle(seed=7).label(questions))
    assert len(results) == 120
    drawn = [r for r in server.requests if r["temperature"] == 1.0]
    assert len(drawn) == 100
    by_text = Counter((json.dumps(r["messages"]), r["seed"]) for r in drawn)
    assert set(by_text.values()) == {1}
    seeds = Counter(r["seed"] for r in drawn)
    assert {seed for seed, count in seeds.items() if count > 1} == {8, 9}
    assert all(0 <= seed < 2**31 for seed in seeds)


def url_of_no_server() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def test_a_server_that_is_away_is_told_in_one_line(
    server: JudgeServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = url_of_no_server()
    with refused("E-LABEL-ORACLE-DOWN", naming=["cannot connect"]):
        server.ask(documents_of(8), base_url=url, max_outage_s=0.3)
    gc.collect()
    assert "never retrieved" not in caplog.text
