"""Expected grades: from known probabilities of the digits, at the places of the grades."""

import json
import math
import re
from typing import Any

import pytest
from pydantic import ValidationError

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import OracleResult, Question, Shown, label_record
from nmoe_core.labels.oracles.http import HttpOracle
from nmoe_core.labels.scores import QUALITY
from tests.core.labels.oracles.server import JudgeServer, Reply, completion
from tests.core.labels.oracles.test_paid_answers import label, records
from tests.core.small_gradings import RUBRIC

CHANCES = {
    "helpfulness": {"3": 0.6, "4": 0.3, "2": 0.1},
    "correctness": {"4": 0.97, " 4": 0.02, "n": 0.01},
    "coherence": {"0": 0.5, "1": 0.5},
    "complexity": {"2": 0.4, "7": 0.3, "22": 0.2, '"': 0.1},
    "density": {"1": 0.3, "2": 0.3, "null": 0.4},
}
EXPECTED = {
    "helpfulness": 3.2,
    "correctness": 4.0,
    "coherence": 0.5,
    "complexity": 2.0,
    "density": 1.5,
}


def entry(token: str | bytes, chance: float) -> dict[str, Any]:
    payload = token.encode() if isinstance(token, str) else token
    text = payload.decode("utf-8", "replace")
    return {"token": text, "bytes": list(payload), "logprob": math.log(chance)}


def tokens_of(content: str, chances: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The tokens of an object of scores: the digits with their chances; other text in pieces of
    three bytes, which cut characters."""
    entries = []
    for part in re.split(r'("\w+": \d)', content):
        name, mark, _ = part.partition('": ')
        if mark and name[1:] in chances:
            entries.append(entry(f"{name}{mark}"[:-1], 0.99))
            entries.append(entry(" ", 1.0))
            top = [entry(token, chance) for token, chance in chances[name[1:]].items()]
            entries.append(top[0] | {"top_logprobs": top})
        else:
            payload = part.encode()
            entries += [entry(payload[i : i + 3], 0.9) for i in range(0, len(payload), 3)]
    return entries


def reply(content: str, logprobs: Any) -> Reply:
    value = json.loads(completion(content).body)
    value["choices"][0]["logprobs"] = logprobs
    return Reply(json.dumps(value).encode())


WRITTEN = json.dumps({name: int(next(iter(chances))) for name, chances in CHANCES.items()})


def ask(server: JudgeServer, rubric: Rubric | None = None, **more: Any) -> OracleResult:
    table = server.table(grades="expected", **more)
    oracle = HttpOracle(table, rubric or Rubric.load(RUBRIC))
    ((_, result),) = oracle.label([Question("a document")])
    return result


def test_grades_are_the_means_of_the_digits_by_their_probability(server: JudgeServer) -> None:
    server.always(reply(WRITTEN, {"content": tokens_of(WRITTEN, CHANCES)}))
    result = ask(server, min_grade_mass=0.39)
    assert result.scores == EXPECTED
    assert list(result.scores) == list(QUALITY.names)
    (request,) = server.requests
    assert (request["logprobs"], request["top_logprobs"]) == (True, 20)
    oracle = server.oracle(grades="expected")
    record = label_record(("d", "web"), Shown("", "0" * 64, False), result, 1, oracle)
    assert record["scores"] == EXPECTED
    assert record["aggregated"] == pytest.approx(sum(EXPECTED.values()) / 20)


def test_a_reason_that_quotes_grades_moves_no_place(server: JudgeServer) -> None:
    said = {"reason": 'Its "helpfulness": 0, they "say \\" : 1" … naïve', **json.loads(WRITTEN)}
    content = json.dumps(said, ensure_ascii=False)
    head, mark, tail = content.rpartition('"helpfulness": ')
    entries = tokens_of(head, {}) + tokens_of(mark + tail, CHANCES)
    server.always(reply(f"<think>x</think>{content}", {"content": tokens_of("x", {}) + entries}))
    rubric = Rubric.load(RUBRIC).model_copy(update={"reason": "first"})
    result = ask(server, rubric, min_grade_mass=0.39)
    assert (result.scores, result.reason) == (EXPECTED, said["reason"])


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {},
        {"content": None},
        {"content": []},
        {"content": [{"token": WRITTEN}]},
        {"content": tokens_of("another answer", {})},
        {"tokens": ["4"], "top_logprobs": [{"4": -0.1}]},
    ],
)
def test_a_reply_without_the_probabilities_of_its_answer_is_no_label(
    server: JudgeServer, logprobs: Any
) -> None:
    server.always(reply(WRITTEN, logprobs))
    result = ask(server)
    assert (result.scores, result.finish_reason, result.raw) == (None, "no_logprobs", WRITTEN)


def test_a_model_that_would_rather_write_no_grade_gives_none_and_the_bound_asks_nothing(
    server: JudgeServer, tmp_path: Any
) -> None:
    server.always(reply(WRITTEN, {"content": tokens_of(WRITTEN, CHANCES)}))
    texts = ["a document"]
    flags = ["--set=oracle.http.grades=expected"]
    assert label(server, tmp_path, texts, *flags) == 0
    (record,) = records(tmp_path)
    assert (record["ok"], record["finish_reason"]) == (False, "low_grade_mass")
    assert label(server, tmp_path, texts, *flags, "--set=oracle.http.min_grade_mass=0.39") == 0
    (record,) = records(tmp_path)
    assert (record["ok"], record["scores"]) == (True, EXPECTED)
    assert server.asked.total() == 1
    assert label(server, tmp_path, texts) == 0
    assert label(server, tmp_path, texts, *flags) == 0
    assert server.asked.total() == 2


def test_settings_of_expected_grades_that_cannot_work_are_refused(server: JudgeServer) -> None:
    with pytest.raises(ValidationError, match="needs api"):
        server.table(grades="expected", api="completions")
    with pytest.raises(ValidationError, match="has no effect"):
        server.table(min_grade_mass=0.39)
    rubric = Rubric.load(RUBRIC)
    long = rubric.dimensions["density"].model_copy(update={"lowest": 6})
    wide = rubric.model_copy(update={"dimensions": {"density": long}})
    with pytest.raises(ConfigError, match="grades of one digit"):
        ask(server, wide)
