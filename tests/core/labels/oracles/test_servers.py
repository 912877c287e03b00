"""What servers of other families want in requests, and write into replies."""

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.labels.oracle import Question
from tests.core.labels.oracles.server import (
    GOOD,
    MODEL,
    OTHER,
    SCORES,
    JudgeServer,
    Reply,
    answers,
    completion,
    documents_of,
)
from tests.core.labels.oracles.whole_runs import label, reasons
from tests.refusals import refused

DRAFT = f"<think>maybe {OTHER}"
QUOTED = f"It says <think>{OTHER}"
PARTS = [{"type": "thinking", "text": OTHER}, {"type": "text", "text": GOOD[:9]}]
CHAT: dict[str, tuple[Reply, str, str]] = {
    # name: (the reply, the finish reason, the answer of a failure)
    "thoughts": (completion(f"<think>\nmaybe {OTHER}\n</think>\n\n{GOOD}"), "stop", ""),
    "thoughts that the prompt opened": (completion(f"maybe {OTHER}</think>{GOOD}"), "stop", ""),
    "thoughts alone": (
        completion(f"<think>maybe {OTHER}"),
        "reasoning_only",
        f"<think>maybe {OTHER}",
    ),
    "a quotation": (
        completion(f"It says <think>{OTHER}"),
        "parse_failed",
        f"It says <think>{OTHER}",
    ),
    "parts": (completion([*PARTS, {"type": "text", "text": GOOD[9:]}]), "stop", ""),
    "a refusal": (completion(None, message={"refusal": "I cannot."}), "refusal", "I cannot."),
}


@pytest.mark.parametrize("extract_embedded", [False, True])
@pytest.mark.parametrize("name", CHAT)
def test_a_grade_is_read_from_the_answer_and_never_from_the_thoughts(
    server: JudgeServer, name: str, extract_embedded: bool
) -> None:
    reply, reason, raw = CHAT[name]
    server.always(reply)
    ((_, result),) = server.oracle(extract_embedded).label([Question("a document")])
    if name == "a quotation" and extract_embedded:
        assert (result.scores, result.is_salvaged) == (json.loads(OTHER), True)
        return
    assert result.scores == (SCORES if reason == "stop" else None)
    assert (result.finish_reason, result.raw, result.is_salvaged) == (reason, raw, False)


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""])
def test_a_byte_order_mark_and_a_broken_character_cost_no_answer(
    server: JudgeServer, mark: bytes
) -> None:
    body = completion(f"<think>caf\u00e9</think>{GOOD}").body.replace(b"\\u00e9", b"\xe9")
    server.always(Reply(mark + body))
    assert server.ask_one().scores == SCORES
    assert server.asked.total() == 1


def test_any_field_can_be_left_out_and_headers_be_added(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ORACLE_KEY", "s3cret")
    flags = [
        '--set=oracle.http.omit=["reasoning_effort", "seed", "response_format", "max_tokens"]',
        "--set=oracle.http.headers.X-Team=data",
        "--set=oracle.http.api_key_header=api-key",
        "--set=oracle.http.api_key_env=ORACLE_KEY",
        f"--set=oracle.http.base_url={server.url}/deployments/a?api-version=1",
    ]
    assert label(server, tmp_path, documents_of(1), *flags) == 0
    (request,) = server.requests
    assert set(request) == {"model", "messages", "temperature"}
    assert list(server.paths) == ["/v1/deployments/a/chat/completions?api-version=1"]
    assert "X-Team: data\r\n" in server.headers[0]
    assert "api-key: s3cret\r\n" in server.headers[0]
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("omit", ["messages"]),
        ("headers", {"Authorization": "x"}),
        ("headers", {"X": "a\r\nY: b"}),
        ("headers", {"a b": "c"}),
        ("api_key_header", "a: b"),
    ],
)
def test_fields_and_headers_that_cannot_work_are_refused(
    server: JudgeServer, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=name):
        server.table(**{name: value})


def test_an_outage_of_any_kind_is_waited_for_and_no_label_fails(
    server: JudgeServer, tmp_path: Path
) -> None:
    """502, 529 and 500 for everybody are an outage; so is a load that sheds most requests."""
    texts = documents_of(60)
    count = [0]

    def behave(document: str, nth: int) -> Reply:
        count[0] += 1
        if 10 < count[0] <= 60:
            return Reply(b"down", (500, 502, 529)[count[0] % 3])
        return answers(document, nth)

    server.behave = behave
    assert label(server, tmp_path, texts, "--set=oracle.http.max_attempts=2") == 0
    assert reasons(tmp_path) == {"stop": 60}


def test_an_account_without_credit_ends_the_run_in_the_servers_words(server: JudgeServer) -> None:
    quota = {"message": "You exceeded your current quota", "code": "insufficient_quota"}
    server.always(Reply(json.dumps({"error": quota}).encode(), 429))
    with refused("E-LABEL-ORACLE", naming=["You exceeded your current quota", "add credit"]):
        server.ask(documents_of(40))
    assert server.asked.total() <= 8


def test_a_name_that_does_not_exist_ends_the_run_at_once(server: JudgeServer) -> None:
    with refused("E-LABEL-ORACLE", naming=["cannot connect", "base_url"]):
        server.ask(documents_of(4), base_url=f"https://{MODEL}.invalid/v1")


def test_many_documents_that_always_fail_are_no_outage_if_others_are_answered(
    server: JudgeServer, tmp_path: Path
) -> None:
    texts = documents_of(60)
    bad = set(texts[:40])

    def behave(document: str, nth: int) -> Reply:
        return Reply(b"<html>") if document in bad else answers(document, nth)

    server.behave = behave
    flags = ["--set=oracle.http.max_attempts=2", "--set=oracle.http.max_outage_s=60"]
    assert label(server, tmp_path, texts, *flags) == 0
    assert reasons(tmp_path) == {"stop": 20, "not_json": 40}
    assert max(server.asked.values()) <= 2 * 2
