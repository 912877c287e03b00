from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nmoe_core.base.errors import CheckpointError
from nmoe_core.config.quality import EngineOracleTable, OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.engine import make_tiny_checkpoint
from nmoe_core.engine.weights.families import GPT_OSS
from nmoe_core.labels.oracle import OracleResult, Question
from nmoe_core.labels.oracles import engine, make_oracle
from nmoe_core.labels.oracles.engine import EngineOracle, model_name
from nmoe_core.labels.oracles.harmony import STOP_IDS, TO_FINAL
from nmoe_core.text.harmony import RETURN
from tests.core.labels.oracles.server import ANALYSIS, FINAL, GOOD, NEXT, SCORES, tokens_of
from tests.refusals import refused

REASONS = {"final_stop", "stop_outside_final", "length", "parser_error"}
TEXTS = ["A short one.", "word " * 3000, "<|end|><|start|>system", "x = 1\n" * 10, "Ünï çødé."]


def settings(**more: Any) -> EngineOracleTable:
    return EngineOracleTable(**{"max_ctx": 900, "max_new": 160, "batch_size": 3} | more)


@pytest.fixture
def make(checkpoint: Path, rubric: Rubric) -> Callable[..., EngineOracle]:
    return lambda **more: EngineOracle(checkpoint, settings(**more), rubric)


def ask(oracle: EngineOracle, texts: list[str]) -> dict[int, OracleResult]:
    results = list(oracle.label(map(Question, texts)))
    assert len(results) == len(dict(results)) == len(texts)
    return dict(results)


def test_failures_do_not_depend_on_batches(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "FINAL_TOKENS", 8)
    oracle = make(max_ctx=764, max_new=24)
    found = ask(oracle, TEXTS)
    results = [found[i] for i in range(len(TEXTS))]
    assert all(r.scores is None and r.finish_reason in REASONS and r.raw for r in results)
    assert [r.is_truncated for r in results] == [False, True, False, False, False]
    # Reasoning ends at its budget.
    assert {r.num_new_tokens for r in results} == {24}
    assert oracle.scorer.scorer_model == "gpt-oss-shaped-2x32x4"
    assert len(oracle.facts["weights"]) == 64
    assert found == ask(make(max_ctx=764, max_new=24, batch_size=1), TEXTS)


class Scripted:
    """A generator whose sequences 'want' to write what a script says, token by token."""

    def __init__(self, scripts: list[list[int]]) -> None:
        self.scripts, self.live, self.written = scripts, {}, {}
        self.cancelled: list[int] = []
        self.most_live = 0

    def add(self, tokens: list[int], max_tokens: int) -> int:
        seq_id = len(self.written)
        self.live[seq_id], self.written[seq_id] = self.scripts[seq_id], []
        self.most_live = max(self.most_live, len(self.live))
        return seq_id

    def step(self) -> tuple[torch.Tensor, list[int]]:
        ids = list(self.live)[:3]
        logits = torch.zeros(len(ids), 201088)
        for row, seq_id in enumerate(ids):
            script, done = self.live[seq_id], len(self.written[seq_id])
            logits[row, script[done] if done < len(script) else 11] = 1.0
        return logits, ids

    def update(self, seq_id: int, token: int, finished: bool) -> None:
        self.written[seq_id].append(token)
        if finished:
            del self.live[seq_id]

    def cancel(self, seq_id: int) -> None:
        self.cancelled.append(seq_id)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    def write(*texts: str) -> Scripted:
        generator = Scripted([tokens_of(text) for text in texts])
        monkeypatch.setattr(engine, "load_generator", lambda *settings: generator)
        return generator

    return write


THINK, ANSWER = f"{ANALYSIS}Let me see.{NEXT}", f"{FINAL}{GOOD}<|return|>"


def test_an_answer_ends_with_its_first_action_stop(make: Callable, scripted: Callable) -> None:
    generator = scripted(
        THINK + ANSWER + "more",
        f"{ANALYSIS}Hm.<|return|>more",
        "<|channel|>commentary to=f<|message|>{}<|call|>more",
    )
    results = ask(make(), ["a", "b", "c"])
    reasons = [results[i].finish_reason for i in range(3)]
    assert reasons == ["final_stop", "stop_outside_final", "stop_outside_final"]
    assert [results[i].scores for i in range(3)] == [SCORES, None, None]
    for written in generator.written.values():
        assert written[-1] in STOP_IDS
        assert sum(token in STOP_IDS for token in written) == 1


@pytest.mark.parametrize("is_answering", [False, True])
def test_reasoning_ends_at_its_budget_but_an_answer_under_way_is_not_interrupted(
    make: Callable, scripted: Callable, is_answering: bool
) -> None:
    room = settings().max_new - engine.FINAL_TOKENS - len(TO_FINAL)
    thoughts = tokens_of(ANALYSIS + "hm " * 400)
    thoughts = thoughts[: room - 10 if is_answering else room]
    generator = scripted("")
    wanted = [*thoughts, *TO_FINAL, *tokens_of(GOOD), RETURN]
    generator.scripts[0] = list(wanted)
    if not is_answering:
        # The model wants to think on; it goes on as one does that finds its final channel opened.
        generator.scripts[0][room] = 11
    result = ask(make(), ["a"])[0]
    assert (result.finish_reason, result.scores) == ("final_stop", SCORES)
    assert generator.written[0] == wanted


def test_free_places_are_filled_until_the_run_is_closed(make: Callable, scripted: Callable) -> None:
    generator = scripted(*[THINK * (i % 3) + ANSWER for i in range(20)])
    taken: list[int] = []

    def questions() -> Iterator[Question]:
        for i in range(20):
            taken.append(i)
            yield Question(f"text {i}")

    results = make().label(questions())
    assert next(results)[1].scores
    assert len(taken) == generator.most_live == 6
    results.close()
    assert sorted(generator.cancelled) == sorted(generator.live)


def test_the_version_is_measured_and_published_shapes_have_their_names(
    make: Callable, checkpoint: Path, rubric: Rubric, tmp_path: Path
) -> None:
    base = make().fingerprint
    assert make(batch_size=7).fingerprint == base
    other = make_tiny_checkpoint(tmp_path, seed=1, num_layers=2, num_experts=4, hidden_size=32)
    changed = [
        EngineOracle(other, settings(), rubric),
        make(max_new=128),
        make(reasoning="none"),
        EngineOracle(checkpoint, settings(), rubric.turned()),
        EngineOracle(checkpoint, settings(), rubric.model_copy(update={"version": "v2"})),
    ]
    assert len({base, *(oracle.fingerprint for oracle in changed)}) == 6
    for layers, experts, name in ((24, 32, "gpt-oss-20b"), (36, 128, "gpt-oss-120b")):
        shape = {"num_hidden_layers": layers, "hidden_size": 2880, "num_experts": experts}
        config = SimpleNamespace(family=GPT_OSS, **shape)
        assert model_name(cast(Any, config)) == name


def test_what_cannot_label_is_not_loaded(rubric: Rubric, checkpoint: Path, tmp_path: Path) -> None:
    small = make_tiny_checkpoint(tmp_path, num_layers=2, vocab_size=512)
    with pytest.raises(CheckpointError, match="vocabulary"):
        EngineOracle(small, settings(), rubric)
    table = OracleTable(kind="engine", engine=settings(checkpoint=str(checkpoint), max_new=800))
    with refused("E-CONFIG-CONTEXT"):
        make_oracle(table, rubric, Path())
