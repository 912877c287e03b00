"""The form of the answer that a server takes is found out once, and later runs ask for it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.labels.jobs import Sampled
from tests.core.labels.oracles.server import JudgeServer, Reply, answers, documents_of
from tests.core.labels.oracles.whole_runs import label, records, replies

REFUSALS = {
    "OpenAI": "Invalid parameter: 'response_format' of type 'json_schema' is not supported",
    "DeepSeek": "This response_format type is unavailable now",
    "Groq": "This model does not support response format `json_schema`.",
    "vLLM": "Grammar error: Unsupported schema",
    "TGI": "Structured outputs are not supported by this backend",
}


def _form(request: dict[str, Any]) -> str:
    return request.get("response_format", {"type": "text"})["type"]


def _forms(server: JudgeServer) -> Counter[str]:
    return Counter(map(_form, server.requests))


def _refuse(server: JudgeServer, forms: set[str], message: str = REFUSALS["OpenAI"]) -> None:
    """Let the server refuse requests for these forms of answers."""
    body = json.dumps({"error": {"message": message, "code": 400}}).encode()

    def behave(document: str, nth: int) -> Reply:
        is_refused = _form(server.requests[-1]) in forms
        return Reply(body, 400) if is_refused else answers(document, nth)

    server.behave = behave


@pytest.mark.parametrize("who", REFUSALS)
def test_a_form_that_the_server_refuses_is_left_and_later_runs_ask_for_the_next(
    server: JudgeServer, tmp_path: Path, who: str
) -> None:
    texts = documents_of(24)
    _refuse(server, {"json_schema"}, REFUSALS[who])
    assert label(server, tmp_path, texts[:20], "--set=oracle.http.concurrency=4") == 0
    assert _forms(server)["json_schema"] <= 4
    assert _forms(server)["json_object"] == 20
    server.requests.clear()
    assert label(server, tmp_path, texts) == 0
    assert _forms(server) == {"json_object": 4}
    assert all(record["ok"] for record in records(tmp_path))
    kept = {(r["sent"]["response_format"], r["request_digest"]) for r in replies(tmp_path)}
    assert sorted(form for form, _ in kept) == ["json_object", "json_schema"]


def test_a_server_that_refuses_all_forms_is_asked_for_free_text(
    server: JudgeServer, tmp_path: Path
) -> None:
    _refuse(server, {"json_schema", "json_object"})
    texts = documents_of(12)
    flags = ["--set=oracle.http.concurrency=2"]
    assert label(server, tmp_path, texts, *flags) == 0
    assert _forms(server)["text"] == 12
    assert len(server.requests) <= 16
    assert all(record["ok"] for record in records(tmp_path))
    assert label(server, tmp_path, texts, *flags) == 0
    assert _forms(server)["text"] == 12


def test_a_form_that_is_set_is_asked_for_and_no_other(server: JudgeServer, tmp_path: Path) -> None:
    _refuse(server, {"json_schema"})
    texts = documents_of(20)
    assert label(server, tmp_path, texts, "--set=oracle.http.answer_format=json_schema") == 1
    assert set(_forms(server)) == {"json_schema"}
    server.requests.clear()
    assert label(server, tmp_path, texts, "--set=oracle.http.answer_format=text") == 0
    assert _forms(server) == {"text": 20}


@pytest.mark.parametrize("message", ["The prompt is too long", "no such parameter: seed"])
def test_another_refusal_changes_no_form(server: JudgeServer, tmp_path: Path, message: str) -> None:
    _refuse(server, {"json_schema", "json_object", "text"}, message)
    assert label(server, tmp_path, documents_of(20)) == 1
    assert set(_forms(server)) == {"json_schema"}


def test_after_an_answer_a_refusal_is_about_its_document(
    server: JudgeServer, tmp_path: Path
) -> None:
    texts = documents_of(12)
    refusal = Reply(REFUSALS["vLLM"].encode(), 400)
    server.behave = lambda text, nth: refusal if text == texts[5] else answers(text, nth)
    assert label(server, tmp_path, texts, "--set=oracle.http.concurrency=1") == 0
    assert _forms(server) == {"json_schema": 12}
    assert [record["ok"] for record in records(tmp_path)].count(False) == 1


def test_answers_of_every_form_count_for_the_most_that_labels_may_cost(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _refuse(server, {"json_schema"})
    prices = {"input_price": 0.0, "output_price": 10_000.0, "max_cost": 500.0, "max_new": 4}
    flags = [f"--set=oracle.http.{name}={value}" for name, value in prices.items()]
    # 41 tokens of an answer cost 0.41.
    assert label(server, tmp_path, documents_of(12), *flags) == 0
    lower = [flag.replace("max_cost=500.0", "max_cost=1.0") for flag in flags]
    assert label(server, tmp_path, documents_of(14), *lower) == 1
    assert "E-LABEL-COST" in capsys.readouterr().err
    assert _forms(server)["json_object"] == 12


def test_answers_that_are_drawn_again_have_the_form_of_the_first(server: JudgeServer) -> None:
    oracle = server.oracle()
    schema, form, _ = oracle.request_digests
    drawn = Sampled(oracle)
    drawn.settle(lambda digest: {schema: False, form: True}.get(digest))
    assert oracle.request_digest == form
    assert drawn.request_digest == drawn.request_digests[1]


@pytest.mark.parametrize(
    "more",
    [
        {"omit": ["response_format"]},
        {"extra_body": {"response_format": {"type": "text"}}},
        {"api": "completions"},
    ],
)
def test_a_form_that_another_key_sets_cannot_be_set_twice(
    server: JudgeServer, more: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="answer_format"):
        server.table(answer_format="json_object", **more)
