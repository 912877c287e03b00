"""`oracle-label --show` prints what labelling would send, and sends nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.labels.oracles.harmony import fenced
from tests.core.labels.oracles.server import MODEL, JudgeServer, document_in
from tests.project import contents, json_lines, said
from tests.refusals import refused_line

TEXTS = [f"document {i}, which has some words" for i in range(4)]


@pytest.fixture
def command(tmp_path: Path, server: JudgeServer) -> list[str]:
    """Labels a file of four documents with the server."""
    documents = tmp_path / "documents.jsonl"
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    documents.write_text(json_lines(rows))
    flags = ["--input-jsonl", str(documents), "--out", str(tmp_path / "out"), "--oracle", "http"]
    http = [f"base_url={server.url}?v=1", f"model={MODEL}", "api_key_env=ORACLE_KEY"]
    flags += [f"--set=oracle.http.{pair}" for pair in http]
    return ["hydra", "oracle-label", *flags]


def shown(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[str, Any]:
    ((doc_id, request),) = said(capsys, *argv).items()
    return doc_id, request


def test_the_request_that_is_shown_is_the_one_that_is_sent(
    command: list[str],
    server: JudgeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = [shown(capsys, *command, "--show", f"d{i}") for i in range(4)]
    assert shown(capsys, *command, "--show") == before[0]
    assert not server.asked
    for doc_id, request in before:
        assert (doc_id, request["method"]) == (f"d{before.index((doc_id, request))}", "POST")
        assert request["headers"]["Authorization"] == "Bearer [hidden]"
        assert request["url"] == f"{server.url}/chat/completions?v=1"
    monkeypatch.setenv("ORACLE_KEY", "s3cret")
    assert "s3cret" not in str(shown(capsys, *command, "--show"))
    assert main(command) == 0
    sent = {document_in(body["messages"][-1]["content"]): body for body in server.requests}
    assert [sent[text] for text in TEXTS] == [request["body"] for _, request in before]


def test_the_first_open_question_is_shown_and_nothing_is_written(
    command: list[str],
    server: JudgeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ORACLE_KEY", "s3cret")
    assert main(command) == 0
    text = "a document that is new"
    with (tmp_path / "documents.jsonl").open("a") as file:
        file.write(json.dumps({"id": "new", "text": text}) + "\n")
    before = contents(tmp_path)
    doc_id, request = shown(capsys, *command, "--show")
    assert doc_id == "new"
    assert request["body"]["messages"][-1]["content"] == text.join(fenced(text))
    assert contents(tmp_path) == before
    assert main(command) == 0
    assert "nothing would be asked" in refused_line(capsys, *command, "--show", code="E-CONFIG")
    assert "d9" in refused_line(capsys, *command, "--show", "d9", code="E-CONFIG")
    heuristic = [*command, "--oracle=heuristic", "--show"]
    assert "sends no request" in refused_line(capsys, *heuristic, code="E-CONFIG")


def test_the_engine_shows_its_prompt_and_ids_without_loading_the_model(
    command: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--oracle=engine", f"--checkpoint={checkpoint}", "--show", "d1"]
    doc_id, request = shown(capsys, *command[:6], *flags)
    assert doc_id == "d1"
    assert TEXTS[1].join(fenced(TEXTS[1])) in request["prompt"]
    assert request["prompt"].endswith("<|start|>assistant")
    assert len(request["ids"]) > 100
    assert (request["temperature"], request["max_new"]) == (0, 2048)
