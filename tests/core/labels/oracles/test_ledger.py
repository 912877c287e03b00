"""Every reply is kept as it was received, and labels are computed from the replies."""

import json
from pathlib import Path

import pytest

from nmoe_core.labels.oracle import Record, read_records, sha256_of
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
from tests.core.labels.oracles.whole_runs import label, labels, records, replies

SNAPSHOTS = f"{MODEL}-2024-08-06", f"{MODEL}-2024-11-20"


def test_a_reply_is_kept_as_it_was_received(server: JudgeServer, tmp_path: Path) -> None:
    texts = documents_of(3)
    names = {sha256_of(text): text for text in texts}
    usage = {"prompt_tokens": 700, "completion_tokens": 40}
    more = {"usage": usage, "system_fingerprint": "fp_1", "message": {"reasoning": "well"}}
    bodies = {
        texts[0]: completion(json.dumps(grades_of(texts[0])), **more).body,
        texts[1]: completion("no scores at all", **more).body,
    }
    last = completion(GOOD, **more)
    failures = [Reply(b"busy", 503), Reply(b"<html>")]

    def behave(document: str, nth: int) -> Reply:
        if document in bodies:
            return Reply(bodies[document])
        return failures[nth] if nth < 2 else last

    server.behave = behave
    one = "--set=oracle.http.concurrency=1"
    assert label(server, tmp_path, texts, one, "--set=oracle.http.seed=7") == 0
    kept: dict[str, list[Record]] = {}
    for reply in replies(tmp_path):
        kept.setdefault(names[reply["text_sha256"]], []).append(reply)
    for text, body in bodies.items():
        (reply,) = kept[text]
        assert reply["body"].encode() == body
        assert (reply["served"], reply["status"]) == (f"{MODEL} fp_1", 200)
        assert (reply["tokens_in"], reply["tokens_out"], reply["max_new"]) == (700, 40, 2048)
        sent = {"model": MODEL, "max_tokens": 2048, "temperature": 0, "seed": 7}
        url = f"{server.url}/chat/completions"
        sent |= {"reasoning_effort": "low", "response_format": "json_schema"}
        assert reply["sent"] == sent | {"url": url}
    assert [(r["status"], r["body"]) for r in kept[texts[2]][:2]] == [
        (503, "busy"),
        (200, "<html>"),
    ]
    assert len(replies(tmp_path)) == server.asked.total() == 5


def test_two_snapshots_behind_one_name_are_not_mixed(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither within a run, nor in a later one, nor by their fingerprints alone."""
    texts = documents_of(40)
    first = set(texts[:10])

    def behave(document: str, nth: int) -> Reply:
        grades = json.dumps(grades_of(document))
        return completion(grades, model=SNAPSHOTS[document not in first])

    server.behave = behave
    assert label(server, tmp_path, texts[:10]) == 0
    for _ in range(2):
        assert label(server, tmp_path, texts, "--set=oracle.http.concurrency=4") == 1
        assert "E-LABEL-MIXED" in (line := capsys.readouterr().err)
        assert all(name in line for name in (*SNAPSHOTS, "[oracle.http] served"))
    assert server.asked.total() < 10 + 3 * 8
    # One of them: what the other answered is asked again, of a server that runs it.
    first.update(texts)
    assert label(server, tmp_path, texts, f"--set=oracle.http.served={SNAPSHOTS[0]}") == 0
    assert all(row["ok"] for row in records(tmp_path))
    served = [r["served"] for r in replies(tmp_path)]
    assert served.count(SNAPSHOTS[0]) == 40
    # Both: nothing is asked.
    asked = server.asked.total()
    assert label(server, tmp_path, texts, "--set=oracle.http.served=any") == 0
    assert server.asked.total() == asked


def test_a_server_with_another_fingerprint_is_another_rater(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = documents_of(20)
    server.behave = lambda d, nth: completion(GOOD, system_fingerprint="fp_1")
    assert label(server, tmp_path, texts[:5]) == 0
    server.behave = lambda d, nth: completion(GOOD, system_fingerprint="fp_2")
    assert label(server, tmp_path, texts) == 1
    line = capsys.readouterr().err
    assert f"{MODEL} fp_1" in line
    assert f"{MODEL} fp_2" in line
    chosen = f"--set=oracle.http.served={MODEL} fp_1"
    assert label(server, tmp_path, texts, chosen) == 1
    assert "runs another model than [oracle.http] served" in capsys.readouterr().err


def test_a_run_ends_when_its_answers_cost_more_than_allowed_and_keeps_them(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = documents_of(60)
    usage = {"prompt_tokens": 10**6, "completion_tokens": 10**6}
    server.always(completion(GOOD, usage=usage))
    prices = ("--set=oracle.http.input_price=1", "--set=oracle.http.output_price=2")
    limit = (*prices, "--set=oracle.http.max_cost=30", "--set=oracle.http.concurrency=2")
    assert label(server, tmp_path, texts, *limit) == 1
    assert "E-LABEL-COST" in (line := capsys.readouterr().err)
    assert "found 33.00" in line or "found 36.00" in line
    assert 11 <= server.asked.total() == len(replies(tmp_path)) <= 12
    # With what was spent before, the rest is too much: no request is sent.
    assert label(server, tmp_path, texts, *limit) == 1
    assert "so far" in capsys.readouterr().err
    assert len(replies(tmp_path)) == server.asked.total() <= 12
    assert label(server, tmp_path, texts, *limit, "--set=oracle.http.max_cost=1000") == 0
    assert server.asked.total() == 60


def test_a_better_parser_reads_the_replies_that_are_there(
    server: JudgeServer, tmp_path: Path
) -> None:
    texts = documents_of(10)
    server.always(completion(f"My scores are {GOOD}"))
    assert label(server, tmp_path, texts) == 0
    assert {row["ok"] for row in records(tmp_path)} == {False}
    before = labels(tmp_path)
    assert label(server, tmp_path, texts, "--set=oracle.extract_embedded=true") == 0
    assert {(row["ok"], row["salvaged"]) for row in records(tmp_path)} == {(True, True)}
    assert label(server, tmp_path, texts) == 0
    assert labels(tmp_path) == before
    assert server.asked.total() == 10


def test_an_accepted_name_counts_for_the_answers_that_were_paid_before(
    server: JudgeServer, tmp_path: Path
) -> None:
    texts = documents_of(10)
    server.always(completion(GOOD, model="judge:latest"))
    one = "--set=oracle.http.concurrency=1"
    assert label(server, tmp_path, texts, one) == 1
    paid = server.asked.total()
    assert (
        label(server, tmp_path, texts, one, '--set=oracle.http.accept_model=["judge:latest"]') == 0
    )
    assert server.asked.total() == paid + 10 - len(replies(tmp_path)[:paid]) == 10
    assert all(row["ok"] for row in read_records(tmp_path / "out" / "scores.jsonl"))


def test_documents_that_a_server_always_fails_on_do_not_hold_up_a_resumed_run(
    server: JudgeServer, tmp_path: Path
) -> None:
    """Even if nothing else is left to ask: that is no outage."""
    texts = documents_of(60)
    bad = set(texts[::2])
    error = Reply(b"CUDA OOM", 500)
    stop = Reply(b"no key", 401)
    flags = ("--set=oracle.http.max_attempts=2", "--set=oracle.http.concurrency=4")

    def behave(document: str, nth: int) -> Reply:
        return error if document in bad else answers(document, nth)

    server.behave = lambda d, nth: stop if d == texts[-1] else behave(d, nth)
    assert label(server, tmp_path, texts, *flags) == 1  # its answers are kept
    failed = {r["text_sha256"] for r in replies(tmp_path) if r["status"] == 500}
    assert len(failed) > 20
    server.behave = behave
    asked = server.asked.total()
    assert label(server, tmp_path, texts, *flags) == 0
    assert server.asked.total() - asked < 2 * len(bad)
    assert [row["ok"] for row in records(tmp_path)] == [text not in bad for text in texts]


@pytest.mark.parametrize("reply", [Reply(b"boom", 500), Reply(resets=True), Reply(b"<html>")])
def test_a_server_that_answers_nothing_gives_no_label_however_few_the_documents(
    server: JudgeServer, tmp_path: Path, reply: Reply
) -> None:
    server.always(reply)
    flags = ("--set=oracle.http.max_attempts=1", "--set=oracle.http.max_outage_s=0")
    assert label(server, tmp_path, documents_of(3), *flags) == 1
    assert not (tmp_path / "out" / "scores.jsonl").exists()
    server.behave = answers
    assert label(server, tmp_path, documents_of(3)) == 0
    assert all(row["ok"] for row in records(tmp_path))
