"""A pass launched before the tokens of the one before it are read gives the same completions.

That is how a GPU generates; here the same code runs on a CPU, against reading at once.
"""

from __future__ import annotations

import random

import pytest

from nmoe_core.engine import Request, Sampling, Transformer
from nmoe_core.engine.transfers import Arriving
from tests.core.engine.builders import all_free, greedy, make_generator, prompt_of


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
    at_once, ahead = (
        make_generator(tiny_model, 96, launches_ahead=is_ahead, **options)
        for is_ahead in (False, True)
    )
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
    list(make_generator(tiny_model, 96, launches_ahead=True).complete([Request(prompt, 4)]))
    assert events == ["run", "run", "read", "run", "read", "run", "read", "read"]
    events.clear()
    list(make_generator(tiny_model, 96, launches_ahead=False).complete([Request(prompt, 4)]))
    assert events == ["run", "read"] * 4


def test_a_stop_costs_one_row_that_is_thrown_away(tiny_model: Transformer):
    whole = greedy(tiny_model, prompt_of(33), 18)
    stop = next(t for i, t in enumerate(whole) if i >= 3 and t not in whole[:i])
    decoded = {}
    for is_ahead in (False, True):
        generator = make_generator(tiny_model, 96, launches_ahead=is_ahead)
        request = Request(prompt_of(33), 18, stop_ids=frozenset({stop}))
        (done,) = generator.complete([request])
        assert (done.tokens, done.stop_id) == (whole[: whole.index(stop)], stop)
        decoded[is_ahead] = generator.counts.decoded
    assert decoded[True] == decoded[False] + 1
