"""Which sequences run: pressure, fairness, cancelling, shared beginnings; nothing is left."""

import random
import sys

import pytest

from nmoe_core.base.errors import ConfigError, StateError
from nmoe_core.engine import Request, Sampling, Transformer
from nmoe_core.engine.generation.sampling import sample
from tests.core.engine.builders import (
    all_free,
    greedy,
    make_generator,
    prompt_of,
    rubric_prompts,
    stepped,
)


def test_cancelled_sequences_free_what_they_have_and_disturb_no_other(tiny_model: Transformer):
    generator = make_generator(tiny_model, 200, 2, max_step_tokens=20)
    prompts = [prompt_of(n, 5) for n in (30, 60, 90)]
    kept, running, waiting = (generator.add(prompt, 8) for prompt in prompts)
    got: list[int] = []
    while (result := generator.step()) is not None:
        assert result[1] == [kept]
        got.append(int(result[0][0].argmax()))
        generator.update(kept, got[-1])
        for cancelled in (waiting, running) if len(got) == 1 else ():
            generator.cancel(cancelled)
    assert got == greedy(tiny_model, prompts[0], 8)
    assert all_free(generator)
    with pytest.raises(StateError, match="sequence 1 does not exist or has ended"):
        generator.cancel(running)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_abandoned_run_leaves_the_generator_as_it_was(tiny_model: Transformer, is_ahead: bool):
    generator = make_generator(tiny_model, 200, 2, launches_ahead=is_ahead)
    requests = [Request(prompt_of(n), 3) for n in (10, 20, 30)]
    completions = generator.complete(requests)
    next(completions)
    with pytest.raises(ConfigError, match="are running"):
        generator.generate_batch([[1]], 1)
    completions.close()
    assert all_free(generator)
    assert generator.generate_batch([prompt_of(5)], 4) == [greedy(tiny_model, prompt_of(5), 4)]


def test_a_sequence_waits_for_its_update_and_other_sequences_continue(tiny_model: Transformer):
    generator = make_generator(tiny_model, 64, 2)
    slow, quick = generator.add(prompt_of(4), 3), generator.add(prompt_of(6), 3)
    logits, ids = stepped(generator)
    assert ids == [slow, quick]
    for _ in range(2):
        generator.update(quick, 7)
        assert stepped(generator)[1] == [quick]
    with pytest.raises(StateError, match="waits for its next token"):
        generator.step()
    generator.update(slow, int(logits[0].argmax()))
    with pytest.raises(StateError, match="does not wait for a token"):
        generator.update(slow, 1)


def test_a_long_prompt_does_not_hold_up_those_that_decode(tiny_model: Transformer):
    generator = make_generator(tiny_model, 400, 3, max_step_tokens=16)
    first = generator.add(prompt_of(4), 40)
    seen = [stepped(generator)[1]]
    long, short = generator.add(prompt_of(300), 2), generator.add(prompt_of(9), 2)
    generator.update(first, 1)
    while (result := generator.step()) is not None:
        seen.append(result[1])
        for seq_id in result[1]:
            generator.update(seq_id, 1)
    # A token for the first in every pass, and prompts in order of arrival: 300 / 16 passes.
    assert all(first in ids for ids in seen[:40])
    assert next(i for i, ids in enumerate(seen) if long in ids) == 19
    assert next(i for i, ids in enumerate(seen) if short in ids) == 20


@pytest.mark.parametrize(
    ("num_requests", "seed", "compare_every"),
    [(60, 1, 1), pytest.param(1000, 2, 10, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_random_requests_get_what_each_gets_alone_and_leave_nothing_behind(
    tiny_model: Transformer, num_requests: int, seed: int, compare_every: int
):
    """Some are cancelled, and pages run out."""
    rng = random.Random(seed)
    generator = make_generator(tiny_model, 96, 6, num_pages=9, max_step_tokens=40, max_prefixes=3)
    alone = make_generator(tiny_model, 96, 1, max_prefixes=0)
    starts = [prompt_of(n, 11) for n in (0, 20, 37)]
    open_: dict[int, tuple[list[int], Sampling, int, list[int]]] = {}
    num_added = num_cancelled = 0
    while num_added < num_requests or open_:
        while num_added < num_requests and rng.random() < 0.7:
            prompt = rng.choice(starts) + rng.choices(range(300), k=rng.randint(1, 25))
            num_new = rng.randint(1, 12)
            sampling = Sampling(rng.choice([0.0, 0.8]), seed=num_added)
            open_[generator.add(prompt, num_new)] = prompt, sampling, num_new, []
            num_added += 1
        if open_ and rng.random() < 0.02:
            seq_id = rng.choice(list(open_))
            generator.cancel(seq_id)
            del open_[seq_id]
            num_cancelled += 1
        result = generator.step()
        for row, seq_id in zip(*(result or ((), ()))):
            prompt, sampling, num_new, tokens = open_[seq_id]
            tokens.append(sample(row, sampling, len(prompt) + len(tokens)))
            generator.update(seq_id, tokens[-1])
            if len(tokens) == num_new:
                del open_[seq_id]
                if seq_id % compare_every:
                    continue
                request = Request(prompt, num_new, sampling)
                assert [done.tokens for done in alone.complete([request])] == [tokens]
    assert num_cancelled > 0
    assert generator.counts.preemptions > 0
    assert generator.counts.reused > 0
    assert all_free(generator)
    nodes = [generator.prefixes.root]
    for node in nodes:
        nodes += node.children.values()
    assert sum(node.ends for node in nodes) <= 6, "prompts that the tree still knows"
    while generator.prefixes.drop():
        pass
    assert len(generator.cache.free_pages) == 9


def test_a_pass_costs_the_same_however_many_requests_came_before_or_wait(tiny_model: Transformer):
    """Counted in calls of Python functions, which a busy machine does not change."""
    generator = make_generator(tiny_model, 64, 4)
    costs = []
    for round_ in range(4):
        num_calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        seeds = [20 + round_, *range(100, 100 + 50 * round_)]
        ids = [generator.add(prompt_of(20, seed), 5) for seed in seeds]
        generator.step()
        sys.setprofile(count)
        for seq_id in ids[:4]:
            generator.update(seq_id, 1)
        generator.step()
        sys.setprofile(None)
        costs.append(num_calls)
        for seq_id in ids:
            generator.cancel(seq_id)
    assert max(costs[1:]) <= 1.1 * min(costs[1:])


OUTER, INNERS = prompt_of(40, 1), [prompt_of(20, seed) for seed in (2, 3)]
NESTED = [[*OUTER, *inner, i, 9, i] for inner in INNERS for i in range(4)]


@pytest.mark.parametrize("max_step_tokens", [512, 23])
@pytest.mark.parametrize(
    ("prompts", "max_batch", "shared", "num_kept"),
    [
        (rubric_prompts(64), 2, 64 * 8, 1),
        (rubric_prompts(64), 9, 64 * 8, 1),
        (rubric_prompts(70), 2, 70 * 8, 1),
        (rubric_prompts(70), 9, 70 * 8, 1),
        ([prompt_of(50)] * 8, 4, 49 * 7, 1),
        (NESTED, 8, 40 * 7 + 20 * 6, 3),
    ],
)
def test_a_shared_beginning_is_prefilled_once_and_the_tokens_are_the_same(
    tiny_model: Transformer, prompts, max_batch: int, shared: int, num_kept: int, max_step_tokens
):
    generator = make_generator(tiny_model, 200, max_batch, max_step_tokens=max_step_tokens)
    got = generator.generate_batch(prompts, max_tokens=6)
    assert got == [greedy(tiny_model, prompt, 6) for prompt in prompts]
    assert generator.counts.prefilled == sum(map(len, prompts)) - shared
    assert generator.counts.reused == shared
    assert all_free(generator, num_prefixes=num_kept)


@pytest.mark.parametrize(
    ("rounds", "max_prefixes", "reused"),
    [((3, 6), 8, 8 * 70), ((1,) * 5, 8, 3 * 70), ((3,), 0, 0)],
    ids=["shared again later", "one by one, from the third on", "nothing shared if so asked"],
)
def test_beginnings_are_shared_over_calls(
    tiny_model: Transformer, rounds: tuple[int, ...], max_prefixes: int, reused: int
):
    prompts = rubric_prompts()
    generator = make_generator(tiny_model, 200, 2, max_prefixes=max_prefixes)
    for count in rounds:
        batch, prompts = prompts[:count], prompts[count:]
        expected = [greedy(tiny_model, prompt, 2) for prompt in batch]
        assert generator.generate_batch(batch, max_tokens=2) == expected
    assert generator.counts.reused == reused


def test_kept_beginnings_give_way_to_sequences(tiny_model: Transformer):
    generator = make_generator(tiny_model, 128, 2, num_pages=8)
    generator.generate_batch(rubric_prompts()[:2], max_tokens=2)
    assert all_free(generator, num_prefixes=1)
    prompt = prompt_of(100, 3)
    assert generator.generate_batch([prompt], 20) == [greedy(tiny_model, prompt, 20)]
    assert generator.prefixes.kept == {}
    assert all_free(generator)
