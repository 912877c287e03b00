"""Which sequences run: pressure, fairness, cancelling, shared beginnings; nothing is left."""

from __future__ import annotations

import random
import sys

import pytest

from nmoe_core.base.errors import ConfigError, StateError
from nmoe_core.engine import Request, Sampling, Transformer
from nmoe_core.engine.generation.prefixes import Node
from nmoe_core.engine.generation.sampling import sample
from tests.core.engine.builders import all_free, greedy, make_generator, prompt_of, rubric_prompts


def test_few_pages_send_the_youngest_back_and_change_nothing(tiny_model: Transformer):
    prompts = [prompt_of(14, seed) for seed in range(4)]
    generator = make_generator(tiny_model, 48, 4, num_pages=5, max_prefixes=0)
    got = generator.generate_batch(prompts, max_tokens=25)
    assert generator.counts.preemptions > 0
    assert got == [greedy(tiny_model, prompt, 25) for prompt in prompts]
    sampled = [
        make_generator(tiny_model, 48, 4, num_pages=pages).generate_batch(
            prompts, max_tokens=25, sampling=Sampling(0.8, seed=5)
        )
        for pages in (5, 30)
    ]
    assert sampled[0] == sampled[1]
    assert all_free(generator)


def test_cancelled_sequences_free_what_they_have_and_disturb_no_other(tiny_model: Transformer):
    generator = make_generator(tiny_model, 200, 2, max_step_tokens=20)
    prompts = [prompt_of(n, 5) for n in (30, 60, 90)]
    kept, running, waiting = (generator.add(prompt, 8) for prompt in prompts)
    result = generator.step()
    assert result is not None
    assert result[1] == [kept]
    generator.update(kept, int(result[0][0].argmax()))
    generator.cancel(waiting)
    generator.cancel(running)
    got = [int(result[0][0].argmax())]
    while (result := generator.step()) is not None:
        got.append(int(result[0][0].argmax()))
        generator.update(kept, got[-1])
    assert got == greedy(tiny_model, prompts[0], 8)
    assert all_free(generator)
    with pytest.raises(StateError, match="sequence 1 is not there"):
        generator.cancel(running)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_abandoned_run_leaves_the_generator_as_it_was(tiny_model: Transformer, is_ahead: bool):
    generator = make_generator(tiny_model, 200, 2, launches_ahead=is_ahead)
    requests = [Request(prompt_of(n), 3) for n in (10, 20, 30)]
    completions = generator.complete(requests)
    next(completions)
    with pytest.raises(ConfigError, match="under way"):
        generator.generate_batch([[1]], 1)
    completions.close()
    assert all_free(generator)
    assert generator.generate_batch([prompt_of(5)], 4) == [greedy(tiny_model, prompt_of(5), 4)]


def test_a_sequence_waits_for_its_update_and_the_others_go_on(tiny_model: Transformer):
    generator = make_generator(tiny_model, 64, 2)
    slow, quick = generator.add(prompt_of(4), 3), generator.add(prompt_of(6), 3)
    result = generator.step()
    assert result is not None
    assert result[1] == [slow, quick]
    for _ in range(2):
        generator.update(quick, 7)
        again = generator.step()
        assert again is not None
        assert again[1] == [quick]
    with pytest.raises(StateError, match="awaits the token"):
        generator.step()
    generator.update(slow, int(result[0][0].argmax()))
    with pytest.raises(StateError, match="awaits no token"):
        generator.update(slow, 1)


def test_a_long_prompt_does_not_hold_up_those_that_decode(tiny_model: Transformer):
    generator = make_generator(tiny_model, 400, 3, max_step_tokens=16)
    first = generator.add(prompt_of(4), 40)
    result = generator.step()
    long = generator.add(prompt_of(300), 2)
    short = generator.add(prompt_of(9), 2)
    seen: list[list[int]] = []
    while result is not None:
        seen.append(result[1])
        for seq_id in result[1]:
            generator.update(seq_id, 1)
        result = generator.step()
    # A token for the first in every pass, and prompts in order of arrival: 300 / 16 passes.
    assert all(first in ids for ids in seen[:40])
    assert next(i for i, ids in enumerate(seen) if long in ids) == 19
    assert next(i for i, ids in enumerate(seen) if short in ids) == 20


def _num_prompts(node: Node) -> int:
    """Prompts that the tree below `node` still knows."""
    return node.ends + sum(map(_num_prompts, node.children.values()))


def _soak(model: Transformer, num_requests: int, seed: int, compare_every: int) -> None:
    """Random requests, some cancelled, over few pages; answers against those made alone."""
    rng = random.Random(seed)
    generator = make_generator(model, 96, 6, num_pages=9, max_step_tokens=40, max_prefixes=3)
    alone = make_generator(model, 96, 1, max_prefixes=0)
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
                assert next(iter(list(alone.complete([request])))).tokens == tokens
    assert num_cancelled > 0
    assert generator.counts.preemptions > 0
    assert generator.counts.reused > 0
    assert all_free(generator)
    while generator.prefixes.drop():
        pass
    assert len(generator.cache.free_pages) == 9
    assert generator.idle
    assert _num_prompts(generator.prefixes.root) <= 6


def test_sixty_random_requests_leave_nothing_behind(tiny_model: Transformer):
    _soak(tiny_model, 60, seed=1, compare_every=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_random_requests_leave_nothing_behind(tiny_model: Transformer):
    _soak(tiny_model, 1000, seed=2, compare_every=10)


def test_a_pass_costs_the_same_however_many_requests_came_before_or_wait(tiny_model: Transformer):
    """Counted in calls of Python functions, which a busy machine does not change."""
    generator = make_generator(tiny_model, 64, 4)
    costs = []
    for round_ in range(4):
        num_calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        ids = [generator.add(prompt_of(20, 20 + round_), 5)]
        ids += [generator.add(prompt_of(20, 100 + extra), 5) for extra in range(50 * round_)]
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


@pytest.mark.parametrize("prefix", [64, 70])
@pytest.mark.parametrize("max_batch", [2, 9])
@pytest.mark.parametrize("max_step_tokens", [512, 23])
def test_a_shared_beginning_is_prefilled_once_and_the_tokens_are_the_same(
    tiny_model: Transformer, prefix: int, max_batch: int, max_step_tokens: int
):
    prompts = rubric_prompts(prefix)
    generator = make_generator(tiny_model, 200, max_batch, max_step_tokens=max_step_tokens)
    got = generator.generate_batch(prompts, max_tokens=6)
    assert got == [greedy(tiny_model, prompt, 6) for prompt in prompts]
    suffixes = sum(len(prompt) - prefix for prompt in prompts)
    assert generator.counts.prefilled == prefix + suffixes
    assert generator.counts.reused == prefix * (len(prompts) - 1)
    assert all_free(generator, num_prefixes=1)


def test_a_beginning_shared_again_later_is_still_there(tiny_model: Transformer):
    prompts = rubric_prompts()
    generator = make_generator(tiny_model, 200, 2)
    generator.generate_batch(prompts[:3], max_tokens=2)
    before = generator.counts.prefilled
    got = generator.generate_batch(prompts[3:], max_tokens=2)
    assert got == [greedy(tiny_model, prompt, 2) for prompt in prompts[3:]]
    assert generator.counts.prefilled - before == sum(len(p) - 70 for p in prompts[3:])


def test_prompts_added_one_after_another_share_from_the_third_on(tiny_model: Transformer):
    prompts = rubric_prompts()[:5]
    generator = make_generator(tiny_model, 200, 1)
    for prompt in prompts:
        assert generator.generate_batch([prompt], max_tokens=2) == [greedy(tiny_model, prompt, 2)]
    assert generator.counts.reused == 3 * 70


def test_many_samples_of_one_prompt_prefill_it_once(tiny_model: Transformer):
    generator = make_generator(tiny_model, 200, 4)
    got = generator.generate_batch([prompt_of(50)] * 8, max_tokens=5, temperature=1.0)
    assert generator.counts.prefilled == 50 + 7
    assert len({tuple(tokens) for tokens in got}) > 4


def test_beginnings_inside_beginnings_are_each_prefilled_once(tiny_model: Transformer):
    outer, inners = prompt_of(40, 1), [prompt_of(20, seed) for seed in (2, 3)]
    prompts = [[*outer, *inner, i, 9, i] for inner in inners for i in range(4)]
    generator = make_generator(tiny_model, 200, 8)
    got = generator.generate_batch(prompts, max_tokens=3)
    assert got == [greedy(tiny_model, prompt, 3) for prompt in prompts]
    assert generator.counts.prefilled == 40 + 2 * 20 + 8 * 3


def test_nothing_is_shared_when_asked_not_to(tiny_model: Transformer):
    prompts = rubric_prompts()[:3]
    generator = make_generator(tiny_model, 200, 3, max_prefixes=0)
    generator.generate_batch(prompts, max_tokens=2)
    assert generator.counts.prefilled == sum(map(len, prompts))


def test_kept_beginnings_give_way_to_sequences(tiny_model: Transformer):
    generator = make_generator(tiny_model, 128, 2, num_pages=8)
    generator.generate_batch(rubric_prompts()[:2], max_tokens=2)
    assert all_free(generator, num_prefixes=1)
    prompt = prompt_of(100, 3)
    assert generator.generate_batch([prompt], 20) == [greedy(tiny_model, prompt, 20)]
    assert generator.prefixes.kept == {}
    assert all_free(generator)
