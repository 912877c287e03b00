"""A pass launched before the tokens of the one before it are read gives the same completions.

That is how a GPU generates; here the same code runs on a CPU, against reading at once.
"""

from __future__ import annotations

import random

import pytest
import torch

from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine import BatchedGenerator, Request, Sampling, Transformer
from nmoe_core.engine.transfers import Arriving
from tests.core.engine.builders import all_free, greedy, make_generator, prompt_of


def _generator(model: Transformer, is_ahead: bool, **options: int) -> BatchedGenerator:
    generator = make_generator(model, **({"max_seq_len": 96, "max_batch": 4} | options))
    assert not generator.launches_ahead
    generator.launches_ahead = is_ahead
    return generator


def _requests(seed: int) -> list[Request]:
    """Greedy and sampled, most with stop ids that come early, some with a shared beginning."""
    rng = random.Random(seed)
    starts = [[], prompt_of(20, 11), prompt_of(37, 11)]
    return [
        Request(
            rng.choice(starts) + rng.choices(range(300), k=rng.randint(1, 25)),
            rng.randint(1, 24),
            Sampling(rng.choice([0.0, 0.9]), rng.choice([0.9, 1.0]), rng.choice([0, 40]), seed=i),
            frozenset(rng.sample(range(300), rng.choice([0, 10, 40]))),
        )
        for i in range(12)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_pages": 6, "max_step_tokens": 24}, {"max_batch": 1, "max_prefixes": 0}],
    ids=["plain", "few pages", "alone"],
)
def test_completions_are_those_of_reading_at_once(tiny_model: Transformer, options: dict[str, int]):
    requests = _requests(seed=1)
    at_once, ahead = (_generator(tiny_model, is_ahead, **options) for is_ahead in (False, True))
    expected = sorted(at_once.complete(requests), key=lambda done: done.index)
    got = sorted(ahead.complete(requests), key=lambda done: done.index)
    assert got == expected
    reasons = [done.finish_reason for done in expected]
    assert min(reasons.count("stop"), reasons.count("length")) >= 3
    assert all_free(ahead)
    assert ahead.counts.preemptions > 0 or "num_pages" not in options
    assert list(ahead.complete(requests[:3]))  # and goes on as if new


def test_a_pass_is_launched_before_the_tokens_of_the_last_are_read(
    tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    extend, tolist = Transformer.extend, Arriving.tolist
    monkeypatch.setattr(Transformer, "extend", lambda *a: events.append("run") or extend(*a))
    monkeypatch.setattr(Arriving, "tolist", lambda a: events.append("read") or tolist(a))
    prompt = prompt_of(12)
    list(_generator(tiny_model, True).complete([Request(prompt, 4)]))
    assert events == ["run", "run", "read", "run", "read", "run", "read", "read"]
    events.clear()
    list(_generator(tiny_model, False).complete([Request(prompt, 4)]))
    assert events == ["run", "read"] * 4


def test_a_stop_costs_one_row_that_is_thrown_away(tiny_model: Transformer):
    whole = greedy(tiny_model, prompt_of(33), 18)
    stop = next(t for i, t in enumerate(whole) if i >= 3 and t not in whole[:i])
    decoded = {}
    for is_ahead in (False, True):
        generator = _generator(tiny_model, is_ahead)
        request = Request(prompt_of(33), 18, stop_ids=frozenset({stop}))
        (done,) = generator.complete([request])
        assert (done.tokens, done.stop_id) == (whole[: whole.index(stop)], stop)
        decoded[is_ahead] = generator.counts.decoded
    assert decoded[True] == decoded[False] + 1


def test_an_abandoned_run_and_one_without_finite_logits_leave_nothing(tiny_dir):
    model = Transformer.from_checkpoint(tiny_dir)
    generator = _generator(model, True, max_batch=2)
    completions = generator.complete([Request(prompt_of(n), 3) for n in (10, 20, 30)])
    next(completions)
    completions.close()
    assert all_free(generator)
    assert generator.generate_batch([prompt_of(5)], 4) == [greedy(model, prompt_of(5), 4)]
    good = model.unembedding[5].clone()
    model.unembedding[5] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(CheckpointError, match="not finite"):
            generator.generate_batch([[1, 2], [3]], 4, temperature=temperature)
        assert all_free(generator)
    model.unembedding[5] = good
    assert generator.generate_batch([prompt_of(5)], 4) == [greedy(model, prompt_of(5), 4)]
