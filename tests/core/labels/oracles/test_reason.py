"""A rubric whose answers begin with a reason: asked for, read strictly, kept, and shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.labels.corrections import correct_label
from nmoe_core.labels.label_files import merge_labels, read_label_file
from nmoe_core.labels.oracle import Question
from nmoe_core.labels.oracles.harmony import read_answer
from nmoe_core.labels.oracles.http import HttpOracle
from nmoe_core.labels.scores import QUALITY
from nmoe_core.labels.slices import write_source_slices
from nmoe_core.quality.grading.examples import look_at_labels
from nmoe_core.tasks.hydra import label_slices
from tests.core.labels.oracles.server import (
    FINAL,
    GOOD,
    MODEL,
    OTHER,
    SCORES,
    JudgeServer,
    completion,
    grades_of,
    tokens_of,
)
from tests.core.small_gradings import RUBRIC

WHY = "It explains {one} thing and is right."
WITH = json.dumps({"reason": WHY, **SCORES})


def with_reason(**more: Any) -> Rubric:
    return Rubric.load(RUBRIC).model_copy(update={"reason": "first", **more})


def ask(server: JudgeServer, answer: str, extract_embedded: bool = False) -> Any:
    server.always(completion(answer))
    oracle = HttpOracle(server.table(), with_reason(), None, extract_embedded)
    ((_, result),) = oracle.label([Question("a document")])
    return result


def test_the_prompt_and_the_schema_ask_for_a_reason_before_the_grades(
    server: JudgeServer, rubric: Rubric
) -> None:
    result = ask(server, WITH)
    assert (result.scores, result.reason, result.raw) == (SCORES, WHY, "")
    (request,) = server.requests
    schema = request["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == schema["required"] == ["reason", *QUALITY.names]
    assert schema["properties"]["reason"] == {"type": "string"}
    prompt = request["messages"][0]["content"]
    assert prompt.startswith(rubric.text())
    assert "one more key, reason" in prompt.removeprefix(rubric.text())


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        json.dumps({**SCORES, "reason": WHY}),
        json.dumps({"reason": " ", **SCORES}),
        json.dumps({"reason": 4, **SCORES}),
        json.dumps({"reason": WHY, "more": "x", **SCORES}),
        f"{WHY} {GOOD}",
        f'{{"reason": "x", {WITH[1:]}',
    ],
)
def test_an_answer_in_another_form_is_no_label(server: JudgeServer, answer: str) -> None:
    result = ask(server, answer)
    assert (result.scores, result.finish_reason, result.raw) == (None, "parse_failed", answer)


def test_a_reason_is_no_label_if_the_rubric_asks_for_none(server: JudgeServer) -> None:
    server.always(completion(WITH))
    assert server.ask_one().finish_reason == "parse_failed"


def test_embedded_and_fenced_answers_and_those_of_the_engine_have_reasons(
    server: JudgeServer,
) -> None:
    plain = json.dumps({"reason": "Short.", **SCORES})
    assert ask(server, f"```json\n{plain}\n```").reason == "Short."
    found = ask(server, f"Here: {plain}", extract_embedded=True)
    assert (found.scores, found.reason, found.is_salvaged) == (SCORES, "Short.", True)
    said = read_answer(tokens_of(FINAL + WITH), True, has_reason=True)
    assert (said.scores, said.reason) == (SCORES, WHY)
    assert read_answer(tokens_of(FINAL + WITH), True).scores is None


def test_a_dimension_of_that_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(
        'name = "n"\nversion = "1"\ninstructions = "i"\nanswer = "a"\nreason = "first"\n'
        '[dimensions.reason]\nquestion = "q"\ngrades = ["no", "yes"]\n'
    )
    with pytest.raises(ConfigError, match="reason"):
        Rubric.load(path)


def test_another_form_is_asked_anew_and_the_way_back_and_corrections_cost_nothing(
    tmp_path: Path, prepared_data: Path, server: JudgeServer
) -> None:
    write_source_slices(Tree.below(tmp_path, data=prepared_data), "web")
    file = tmp_path / "rubric.toml"
    plain = RUBRIC.read_text()

    def run_with(reason: str) -> Run:
        file.write_text(f'reason = "{reason}"\n{plain}')
        config = tmp_path / "run.toml"
        http = f'[oracle.http]\nbase_url = "{server.url}"\nmodel = "{MODEL}"\n'
        config.write_text(
            f'root = "{tmp_path}"\n[oracle]\nkind = "http"\nrubric = "rubric.toml"\n{http}'
        )
        run = Run(config)
        label_slices(run, ["web"], [f"val-0{i}" for i in range(8)])
        merge_labels(run.tree, "val")
        return run

    run = run_with("none")
    first = server.asked.total()
    bytes_of_plain = run.tree.merged_labels("val").read_bytes()
    server.behave = lambda document, nth: completion(
        json.dumps({"reason": WHY} | grades_of(document))
    )
    run = run_with("first")
    assert server.asked.total() == 2 * first > 0
    _, records = read_label_file(run.tree.merged_labels("val"))
    assert {record["reason"] for record in records} == {WHY}
    assert {record["rubric_hash"] for record in records} == {run.rubric.hash}
    assert look_at_labels(run, "val", "sample", 1)[0]["reason"] == WHY
    correct_label(run, records[0]["doc_id"], json.loads(OTHER), "mara")
    run_with("none")
    _, again = read_label_file(run.tree.merged_labels("val"))
    assert again[0]["corrected"]["by"] == "mara"
    assert [json.dumps(r) for r in again[1:]] == [
        json.dumps(json.loads(line)) for line in bytes_of_plain.splitlines()[1:]
    ]
    run_with("first")
    assert server.asked.total() == 2 * first
