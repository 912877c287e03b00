"""Requests as a file, and answers from one: the same ledger, in any order, twice, in parts."""

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.tasks.hydra import label_slices
from tests.core.labels.oracles.server import MODEL, JudgeServer, completion, document_in, grades_of
from tests.project import contents, json_lines, jsonl_source, read_rows, said, write_project
from tests.refusals import refused_line

SLICES = ["val-00", "val-01"]


@pytest.fixture
def config(tmp_path: Path, server: JudgeServer) -> Path:
    """A project of one source, with slices, whose oracle is the server."""
    texts = [f"document {i} has {i * 7} words" + " and more" * 20 for i in range(90)]
    source = jsonl_source("web", [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)])
    http = {"base_url": server.url, "model": MODEL}
    oracle = {"kind": "http", "relabel": 2, "http": http}
    config = write_project(tmp_path, [source], {"oracle": oracle}).config
    for verb in ("prep-mixture", "hydra slices"):
        assert main([*verb.split(), "--config", str(config), "--quiet"]) == 0
    return config


def requests_of(config: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    path = config.with_name("requests.jsonl")
    command = ["hydra", "requests", "-o", path, "--slices", *SLICES, "--config", config]
    facts = said(capsys, *command)[str(path)]
    rows = read_rows(path)
    assert facts["requests"] == len(rows)
    return rows


def results_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a batch endpoint makes of the requests."""
    results = []
    for row in rows:
        document = document_in(row["body"]["messages"][-1]["content"])
        body = json.loads(completion(json.dumps(grades_of(document))).body)
        response = {"status_code": 200, "request_id": "r", "body": body}
        results.append(
            {"id": "b", "custom_id": row["custom_id"], "response": response, "error": None}
        )
    return results


def add(config: Path, results: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Any:
    path = config.with_name("results.jsonl")
    path.write_text(json_lines(results))
    return said(capsys, "hydra", "answers", path, "--config", config)[str(path)]


def test_answers_from_a_file_make_the_labels_that_a_server_makes(
    config: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = requests_of(config, capsys)
    assert server.asked.total() == 0
    assert all(len(row["custom_id"]) <= 64 for row in rows)
    assert {(row["method"], row["url"]) for row in rows} == {("POST", "/v1/chat/completions")}
    results = results_of(rows)
    half = len(results) // 2
    # The second half first, then all, then all again.
    expected = [(len(results) - half, 0), (half, len(results) - half), (0, len(results))]
    for part, (added, known) in zip((results[half:], results, results), expected):
        assert add(config, part, capsys) == {"added": added, "known": known, "failed": 0}
    assert requests_of(config, capsys) == []
    label_slices(Run(config), ["web"], SLICES)
    assert server.asked.total() == 0
    labels = Run(config).tree.labels
    from_file = contents(labels / "val")
    labels.rename(labels.with_name("from_file"))
    label_slices(Run(config), ["web"], SLICES)
    assert contents(labels / "val") == from_file
    # The requests are those that the run itself sends.
    sent = sorted(json.dumps(request, sort_keys=True) for request in server.requests)
    assert sent == sorted(json.dumps(row["body"], sort_keys=True) for row in rows)


def test_what_failed_in_a_batch_is_asked_again(
    config: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = requests_of(config, capsys)
    results = results_of(rows)
    results[0] |= {"response": None, "error": {"code": "batch_expired"}}
    results[1]["response"] = {"status_code": 500, "body": {"error": "no capacity"}}
    results[2]["response"] = {"status_code": 400, "body": {"error": "content filter"}}  # for good
    assert add(config, results, capsys)["failed"] == 1
    again = {row["custom_id"] for row in requests_of(config, capsys)}
    assert again == {row["custom_id"] for row in rows[:2]}


@pytest.mark.parametrize(
    "line", ['{"custom_id": "mine", "response": {}}', '{"response": {}}', "[]", "{"]
)
def test_a_line_that_is_no_result_is_refused_before_anything_is_added(
    config: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of(requests_of(config, capsys))
    path = config.with_name("results.jsonl")
    path.write_text(json_lines(results[:1]) + line + "\n")
    command = ["hydra", "answers", str(path), "--config", str(config)]
    assert "results.jsonl:2" in refused_line(capsys, *command, code="E-LABEL-ANSWERS")
    assert not list(Run(config).tree.labels.rglob("*.jsonl"))


def test_an_oracle_that_is_no_server_has_no_requests(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text().replace('"http"', '"heuristic"'))
    command = ["hydra", "requests", "-o", str(config.with_name("r")), "--config", str(config)]
    assert "found heuristic, expected http" in refused_line(capsys, *command, code="E-CONFIG")
    assert main([*command, "--slices", "no-00"]) == 1
