"""Beginnings that prompts share: computed once, right, and given up when pages are needed."""

from __future__ import annotations

import pytest

from nmoe_core.engine import Transformer
from tests.core.engine.builders import all_free, greedy, make_generator, prompt_of, rubric_prompts


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
