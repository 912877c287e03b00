"""Generation: batches, shared beginnings, windows, pressure, and what is refused.

The twin is the model's own forward pass over whole sequences, one by one, without a cache.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from nmoe_core.engine import (
    BatchedGenerator,
    ModelConfig,
    Request,
    Sampling,
    Transformer,
    make_tiny_checkpoint,
)
from nmoe_core.engine.sampling import sample
from nmoe_core.errors import ConfigError, StateError, TokenizerError

WINDOW = 16


def _prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(300), k=length)


_twins: dict[tuple[str, tuple[int, ...]], list[int]] = {}


def _greedy(model: Transformer, prompt: Sequence[int], num_new: int) -> list[int]:
    """Tokens that the forward pass without a cache gives, one at a time."""
    tokens = _twins.setdefault((model.digest, tuple(prompt)), list(prompt))
    while len(tokens) < len(prompt) + num_new:
        logits = model(torch.tensor([tokens]))
        assert isinstance(logits, torch.Tensor)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) : len(prompt) + num_new]


def _all_free(generator: BatchedGenerator, num_prefixes: int = 0) -> bool:
    """Whether nothing is held but kept beginnings."""
    cache, kept = generator._cache, generator._prefixes._kept
    held = {page for node in kept if node.kept for page in node.kept.pages}
    return (
        generator.idle
        and cache.num_free_slots == len(cache.tables)
        and cache.num_free_pages == len(cache._references) - len(held)
        and len(kept) >= num_prefixes
    )


LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 33, 10 * WINDOW)


@pytest.fixture(scope="module")
def expected(tiny_model: Transformer) -> dict[int, list[int]]:
    """Greedy continuations of one prompt of each length, by the twin."""
    return {length: _greedy(tiny_model, _prompt(length), WINDOW + 2) for length in LENGTHS}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 1},
        {"max_batch": 3, "max_step_tokens": 7},
        {"page_size": 64},
        {"page_size": 5, "max_step_tokens": 1},
        {"batch_invariant": True, "max_step_tokens": 50},
        {"max_batch": 3, "num_pages": 13},
    ],
    ids=["plain", "alone", "chunks of 7", "big pages", "odd pages", "invariant", "few pages"],
)
def test_batched_equals_one_by_one_for_mixed_lengths(tiny_model, expected, options):
    generator = BatchedGenerator(tiny_model, 200, **({"max_batch": 5} | options))
    got = generator.generate_batch([_prompt(n) for n in LENGTHS], max_tokens=WINDOW + 2)
    assert got == [expected[n] for n in LENGTHS]
    assert _all_free(generator)


def test_bfloat16_generates_what_its_forward_pass_does(tiny_dir: Path):
    model = Transformer.from_checkpoint(tiny_dir, dtype=torch.bfloat16)
    generator = BatchedGenerator(model, 200, 4)
    prompts = [_prompt(n) for n in (5, 40, 100)]
    sequences = {generator.add(prompt, 3): list(prompt) for prompt in prompts}
    errors, sizes = [], []
    while (result := generator.step()) is not None:
        for row, seq_id in zip(*result):
            expected = model(torch.tensor([sequences[seq_id]]))[0, -1]
            errors.append(float((row - expected).norm()))
            sizes.append(float(expected.norm()))
            sequences[seq_id].append(int(expected.argmax()))
            generator.update(seq_id, sequences[seq_id][-1])
    assert len(errors) == 9
    assert sorted(errors)[4] <= 0.03 * sorted(sizes)[4]


def test_packed_experts_generate_the_same(tiny_dir: Path, expected):
    model = Transformer.from_checkpoint(tiny_dir, experts="packed")
    generator = BatchedGenerator(model, 200, 3)
    got = generator.generate_batch([_prompt(n) for n in LENGTHS[:5]], max_tokens=18)
    assert got == [expected[n] for n in LENGTHS[:5]]


def _rubric_prompts(prefix: int = 70, num: int = 9) -> list[list[int]]:
    """One beginning, then a token of its own each, then up to 40 more."""
    start = _prompt(prefix, seed=7)
    return [[*start, i, *_prompt(1 + 5 * i, seed=i)] for i in range(num)]


@pytest.mark.parametrize("prefix", [64, 70])
@pytest.mark.parametrize("max_batch", [2, 9])
@pytest.mark.parametrize("max_step_tokens", [512, 23])
def test_a_shared_beginning_is_prefilled_once_and_the_tokens_are_the_same(
    tiny_model: Transformer, prefix: int, max_batch: int, max_step_tokens: int
):
    prompts = _rubric_prompts(prefix)
    generator = BatchedGenerator(tiny_model, 200, max_batch, max_step_tokens=max_step_tokens)
    got = generator.generate_batch(prompts, max_tokens=6)
    assert got == [_greedy(tiny_model, prompt, 6) for prompt in prompts]
    suffixes = sum(len(prompt) - prefix for prompt in prompts)
    assert generator.counts.prefilled == prefix + suffixes
    assert generator.counts.reused == prefix * (len(prompts) - 1)
    assert _all_free(generator, num_prefixes=1)


def test_a_beginning_shared_again_later_is_still_there(tiny_model: Transformer):
    prompts = _rubric_prompts()
    generator = BatchedGenerator(tiny_model, 200, 2)
    generator.generate_batch(prompts[:3], max_tokens=2)
    before = generator.counts.prefilled
    got = generator.generate_batch(prompts[3:], max_tokens=2)
    assert got == [_greedy(tiny_model, prompt, 2) for prompt in prompts[3:]]
    assert generator.counts.prefilled - before == sum(len(p) - 70 for p in prompts[3:])


def test_prompts_added_one_after_another_share_from_the_third_on(tiny_model: Transformer):
    prompts = _rubric_prompts()[:5]
    generator = BatchedGenerator(tiny_model, 200, 1)
    for prompt in prompts:
        assert generator.generate_batch([prompt], max_tokens=2) == [_greedy(tiny_model, prompt, 2)]
    assert generator.counts.reused == 3 * 70


def test_many_samples_of_one_prompt_prefill_it_once(tiny_model: Transformer):
    generator = BatchedGenerator(tiny_model, 200, 4)
    got = generator.generate_batch([_prompt(50)] * 8, max_tokens=5, temperature=1.0)
    assert generator.counts.prefilled == 50 + 7
    assert len({tuple(tokens) for tokens in got}) > 4


def test_beginnings_inside_beginnings_are_each_prefilled_once(tiny_model: Transformer):
    outer, inners = _prompt(40, 1), [_prompt(20, seed) for seed in (2, 3)]
    prompts = [[*outer, *inner, i, 9, i] for inner in inners for i in range(4)]
    generator = BatchedGenerator(tiny_model, 200, 8)
    got = generator.generate_batch(prompts, max_tokens=3)
    assert got == [_greedy(tiny_model, prompt, 3) for prompt in prompts]
    assert generator.counts.prefilled == 40 + 2 * 20 + 8 * 3


def test_nothing_is_shared_when_asked_not_to(tiny_model: Transformer):
    prompts = _rubric_prompts()[:3]
    generator = BatchedGenerator(tiny_model, 200, 3, max_prefixes=0)
    generator.generate_batch(prompts, max_tokens=2)
    assert generator.counts.prefilled == sum(map(len, prompts))


def _logits_along(generator: BatchedGenerator, prompts: list[list[int]]) -> dict[int, list]:
    """Rows of logits that each prompt's sequence was given."""
    rows: dict[int, list[torch.Tensor]] = {}
    names = {generator.add(prompt, 4): i for i, prompt in enumerate(prompts)}
    while (result := generator.step()) is not None:
        for row, seq_id in zip(*result):
            rows.setdefault(names[seq_id], []).append(row)
            generator.update(seq_id, int(row.argmax()))
    return rows


def test_invariant_logits_have_the_same_bits_in_any_batch(tiny_model: Transformer):
    prompts = [_prompt(n) for n in (1, 15, 40, 100)] + _rubric_prompts()[:3]

    def generator(**options: int) -> BatchedGenerator:
        return BatchedGenerator(tiny_model, 200, batch_invariant=True, **options)

    together = _logits_along(generator(max_batch=7), prompts)
    in_pieces = _logits_along(generator(max_batch=3, max_step_tokens=13), prompts)
    pressed = _logits_along(generator(max_batch=4, num_pages=14), prompts)
    for i, prompt in enumerate(prompts):
        alone = _logits_along(generator(max_batch=1), [prompt])[0]
        whole = tiny_model(torch.tensor([prompt]))[0, -1]
        assert torch.equal(alone[0], whole)
        for other in (together[i], in_pieces[i], pressed[i]):
            assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


def test_few_pages_send_the_youngest_back_and_change_nothing(tiny_model: Transformer):
    prompts = [_prompt(14, seed) for seed in range(4)]
    generator = BatchedGenerator(tiny_model, 48, 4, num_pages=5, max_prefixes=0)
    got = generator.generate_batch(prompts, max_tokens=25)
    assert generator.counts.preemptions > 0
    assert got == [_greedy(tiny_model, prompt, 25) for prompt in prompts]
    sampled = [
        BatchedGenerator(tiny_model, 48, 4, num_pages=pages).generate_batch(
            prompts, max_tokens=25, temperature=0.8, seed=5
        )
        for pages in (5, 30)
    ]
    assert sampled[0] == sampled[1]
    assert _all_free(generator)


def test_kept_beginnings_give_way_to_sequences(tiny_model: Transformer):
    generator = BatchedGenerator(tiny_model, 128, 2, num_pages=8)
    generator.generate_batch(_rubric_prompts()[:2], max_tokens=2)
    assert _all_free(generator, num_prefixes=1)
    prompt = _prompt(100, 3)
    assert generator.generate_batch([prompt], 20) == [_greedy(tiny_model, prompt, 20)]
    assert generator._prefixes._kept == []
    assert _all_free(generator)


def test_the_documented_loop_of_add_step_update(tiny_model: Transformer):
    prompt = _prompt(20)
    generator = BatchedGenerator(tiny_model, max_seq_len=64, max_batch=1)
    assert generator.step() is None
    seq_id = generator.add(prompt, max_tokens=9)
    generated: list[int] = []
    while not generator.idle:
        result = generator.step()
        if not result:
            break
        logits, seq_ids = result
        assert (logits.shape, logits.dtype, seq_ids) == ((1, 300), torch.float32, [seq_id])
        generated.append(int(logits[0].argmax()))
        generator.update(seq_ids[0], generated[-1], finished=len(generated) >= 9)
    assert generated == _greedy(tiny_model, prompt, 9)
    assert generator.is_idle()


def test_a_sequence_ends_with_exactly_max_tokens_or_with_the_room(tiny_model: Transformer):
    generator = BatchedGenerator(tiny_model, 32, 4)
    for prompt, max_tokens, num_new in (([1] * 31, None, 1), ([1] * 5, None, 27), ([1], 3, 3)):
        seq_id = generator.add(prompt, max_tokens)
        for count in range(num_new):
            assert not generator.idle, count
            result = generator.step()
            assert result is not None
            generator.update(seq_id, 5)
        assert generator.idle
    for max_tokens in (1, 2, 17):
        got = generator.generate_batch([_prompt(3), _prompt(15)], max_tokens)
        assert [len(tokens) for tokens in got] == [max_tokens] * 2


def test_stop_ids_end_a_sequence_and_are_left_out(tiny_model: Transformer, expected):
    whole = expected[33]
    stop = next(t for i, t in enumerate(whole) if i >= 3 and t not in whole[:i])
    generator = BatchedGenerator(tiny_model, 200, 2)
    request = Request(_prompt(33), 18, stop_ids=frozenset({stop, 299}))
    (done,) = generator.complete([request])
    assert done.tokens == whole[: whole.index(stop)]
    assert (done.finish_reason, done.stop_id) == ("stop", stop)
    (done,) = generator.complete([Request(_prompt(33), 18)])
    assert (done.tokens, done.finish_reason, done.stop_id) == (whole, "length", None)
    assert generator.generate_batch([_prompt(33)], 18, stop_ids=[stop]) == [
        whole[: whole.index(stop)]
    ]


def test_sampling_depends_on_seed_and_position_not_on_the_batch(tiny_model: Transformer):
    prompts = [_prompt(n, 4) for n in (3, 20, 50, 90)]
    options = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.95, "top_k": 40}
    together = BatchedGenerator(tiny_model, 200, 4).generate_batch(prompts, seed=3, **options)
    for i, prompt in enumerate(prompts):
        alone = BatchedGenerator(tiny_model, 200, 1).generate_batch([prompt], seed=3 + i, **options)
        assert alone == [together[i]]
    again = BatchedGenerator(tiny_model, 200, 4).generate_batch(prompts, seed=4, **options)
    assert again != together


def test_cancelled_sequences_free_what_they_have_and_disturb_no_other(tiny_model: Transformer):
    generator = BatchedGenerator(tiny_model, 200, 2, max_step_tokens=20)
    prompts = [_prompt(n, 5) for n in (30, 60, 90)]
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
    assert got == _greedy(tiny_model, prompts[0], 8)
    assert _all_free(generator)
    with pytest.raises(StateError, match="sequence 1 is not there"):
        generator.cancel(running)


def test_an_abandoned_run_leaves_the_generator_as_it_was(tiny_model: Transformer):
    generator = BatchedGenerator(tiny_model, 200, 2)
    requests = [Request(_prompt(n), 3) for n in (10, 20, 30)]
    completions = generator.complete(requests)
    next(completions)
    with pytest.raises(ConfigError, match="under way"):
        generator.generate_batch([[1]], 1)
    completions.close()
    assert _all_free(generator)


def test_a_sequence_waits_for_its_update_and_the_others_go_on(tiny_model: Transformer):
    generator = BatchedGenerator(tiny_model, 64, 2)
    slow, quick = generator.add(_prompt(4), 3), generator.add(_prompt(6), 3)
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
    generator = BatchedGenerator(tiny_model, 400, 3, max_step_tokens=16)
    first = generator.add(_prompt(4), 40)
    result = generator.step()
    long = generator.add(_prompt(300), 2)
    short = generator.add(_prompt(9), 2)
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


def test_results_are_in_the_order_of_the_prompts(tiny_model: Transformer):
    prompts = [_prompt(n, 8) for n in (60, 1, 30, 2, 45, 3)]
    generator = BatchedGenerator(tiny_model, 200, 2)
    got = generator.generate_batch(prompts, max_tokens=3)
    assert got == [_greedy(tiny_model, prompt, 3) for prompt in prompts]
    assert generator.generate_batch([], max_tokens=3) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "the prompt is empty"),
        (([1] * 33,), "33 and 1 tokens"),
        (([1] * 32,), "32 and 1 tokens"),
        (([1] * 20, 13), "20 and 13 tokens"),
        (([1], 0), "max_tokens"),
    ],
)
def test_what_cannot_fit_is_refused_when_it_is_added(tiny_model, arguments, message: str):
    generator = BatchedGenerator(tiny_model, 32, 2)
    with pytest.raises(ConfigError, match=message) as caught:
        generator.add(*arguments)
    assert caught.value.code == "E-CONFIG-GENERATE"
    with pytest.raises(ConfigError, match=message):
        generator.generate_batch([[1, 2], arguments[0]], *(arguments[1:] or (1,)))
    assert _all_free(generator)
    assert generator.counts.passes == 0


def test_ids_outside_the_vocabulary_are_refused(tiny_model: Transformer):
    generator = BatchedGenerator(tiny_model, 32, 2)
    for token in (300, -1):
        with pytest.raises(TokenizerError, match=f"found {token}"):
            generator.add([1, token])
    seq_id = generator.add([1])
    generator.step()
    with pytest.raises(TokenizerError, match="found 300"):
        generator.update(seq_id, 300)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_seq_len": 1},
        {"max_batch": 0},
        {"page_size": 0},
        {"num_pages": 3},
        {"max_step_tokens": 0},
        {"max_prefixes": -1},
        {"max_seq_len": 131_073, "num_pages": 8193},
    ],
)
def test_sizes_out_of_range_are_refused(tiny_model: Transformer, wrong: dict[str, int]):
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        BatchedGenerator(tiny_model, **({"max_seq_len": 64} | wrong))
    assert caught.value.code == "E-CONFIG-GENERATE"


def test_a_checkpoint_directory_does_as_well_as_a_model(tiny_dir: Path, expected):
    generator = BatchedGenerator(str(tiny_dir), max_seq_len=64, max_batch=2)
    assert generator.generate_batch([_prompt(17)], max_tokens=18) == [expected[17]]


@pytest.mark.parametrize(
    "layer_types",
    [("full_attention",) * 3, ("sliding_attention",) * 3],
    ids=["no windows", "windows only"],
)
def test_models_of_one_kind_of_block(small_config: ModelConfig, make_checkpoint, layer_types):
    config = dataclasses.replace(small_config, layer_types=layer_types)
    model = Transformer.from_checkpoint(make_checkpoint(config))
    prompts = [[token % 101 for token in _prompt(n)] for n in (1, 7, 8, 40)]
    start = [token % 101 for token in _prompt(30, 9)]
    prompts += [[*start, i, 5] for i in range(3)]
    got = BatchedGenerator(model, 64, 3).generate_batch(prompts, max_tokens=9)
    assert got == [_greedy(model, prompt, 9) for prompt in prompts]


def test_greedy_equals_transformers_generate(small_config: ModelConfig, make_checkpoint):
    transformers = pytest.importorskip("transformers")
    directory = make_checkpoint(small_config)
    theirs = transformers.GptOssForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [[token % 99 for token in _prompt(n)] for n in (1, 6, 7, 8, 30, 70)]
    # Token 99 pads, so that transformers takes none of the prompt for padding.
    got = BatchedGenerator(Transformer.from_checkpoint(directory), 128, 4).generate_batch(
        prompts, max_tokens=20
    )
    for prompt, tokens in zip(prompts, got):
        ids = torch.tensor([prompt])
        expected = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=None,
            pad_token_id=99,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def _soak(model: Transformer, num_requests: int, seed: int, compare_every: int) -> None:
    """Random requests, some cancelled, over few pages; answers against those made alone."""
    rng = random.Random(seed)
    generator = BatchedGenerator(model, 96, 6, num_pages=9, max_step_tokens=40, max_prefixes=3)
    alone = BatchedGenerator(model, 96, 1, max_prefixes=0)
    starts = [_prompt(n, 11) for n in (0, 20, 37)]
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
    assert _all_free(generator)
    while generator._prefixes.drop_oldest():
        pass
    assert generator._cache.num_free_pages == 9
    assert generator._active == {}
    assert len(generator._finished) <= 6


def test_sixty_random_requests_leave_nothing_behind(tiny_model: Transformer):
    _soak(tiny_model, 60, seed=1, compare_every=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_random_requests_leave_nothing_behind(tiny_model: Transformer):
    _soak(tiny_model, 1000, seed=2, compare_every=10)


def test_a_pass_costs_the_same_however_many_requests_came_before_or_wait(tiny_model: Transformer):
    """Counted in calls of Python functions, which a busy machine does not change."""
    generator = BatchedGenerator(tiny_model, 64, 4)
    costs = []
    for round_ in range(4):
        num_calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        ids = [generator.add(_prompt(20, 20 + round_), 5) for _ in range(1)]
        for extra in range(50 * round_):
            ids.append(generator.add(_prompt(20, 100 + extra), 5))
        generator.step()
        sys.setprofile(count)
        for seq_id in list(generator._active)[:4]:
            generator.update(seq_id, 1)
        generator.step()
        sys.setprofile(None)
        costs.append(num_calls)
        for seq_id in list(generator._active):
            generator.cancel(seq_id)
    assert max(costs[1:]) <= 1.1 * min(costs[1:])


def test_tiny_checkpoints_generate_with_the_published_vocabulary(tmp_path: Path):
    directory = make_tiny_checkpoint(tmp_path / "checkpoint", num_layers=2, hidden_size=32)
    (tokens,) = BatchedGenerator(directory, 32, 1).generate_batch([[199_998, 5]], max_tokens=3)
    assert len(tokens) == 3
