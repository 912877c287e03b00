"""Generation gives what the forward pass gives: in any batch, any chunks, any pages, any order."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nmoe_core.engine import BatchedGenerator, ModelConfig, Request, Sampling, Transformer
from nmoe_core.engine.generation.sampling import drawn_seed
from nmoe_core.engine.transfers import Arriving
from nmoe_core.engine.weights.config import FULL, SLIDING
from tests.core.engine.builders import all_free, greedy, make_generator, prompt_of, rubric_prompts

WINDOW = 16
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 33, 10 * WINDOW)


@pytest.fixture(scope="module")
def expected(tiny_model: Transformer) -> dict[int, list[int]]:
    """Greedy continuations of one prompt of each length, by the twin."""
    return {length: greedy(tiny_model, prompt_of(length), WINDOW + 2) for length in LENGTHS}


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
    generator = make_generator(tiny_model, 200, **({"max_batch": 5} | options))
    got = generator.generate_batch([prompt_of(n) for n in LENGTHS], max_tokens=WINDOW + 2)
    assert got == [expected[n] for n in LENGTHS]
    assert all_free(generator)


def test_bfloat16_generates_what_its_forward_pass_does(tiny_dir: Path):
    model = Transformer.from_checkpoint(tiny_dir, dtype=torch.bfloat16)
    generator = make_generator(model, 200, 4)
    prompts = [prompt_of(n) for n in (5, 40, 100)]
    errors, sizes = [], []
    for tokens, rows in zip(prompts, _logits_along(generator, prompts), strict=True):
        for row in rows:
            expected = model(torch.tensor([tokens]))[0, -1]
            errors.append(float((row - expected).norm()))
            sizes.append(float(expected.norm()))
            tokens.append(int(row.argmax()))
    assert len(errors) == 12
    assert sorted(errors)[6] <= 0.03 * sorted(sizes)[6]


def _logits_along(generator: BatchedGenerator, prompts: list[list[int]]) -> list[list[Tensor]]:
    """Rows of logits that each prompt's sequence was given, four each."""
    rows: dict[int, list[Tensor]] = {generator.add(prompt, 4): [] for prompt in prompts}
    while (result := generator.step()) is not None:
        for row, seq_id in zip(*result):
            rows[seq_id].append(row)
            generator.update(seq_id, int(row.argmax()))
    return list(rows.values())


def test_invariant_logits_have_the_same_bits_in_any_batch(tiny_model: Transformer):
    prompts = [prompt_of(n) for n in (1, 15, 40, 100)] + rubric_prompts()[:3]

    def generator(**options: int) -> BatchedGenerator:
        return make_generator(tiny_model, 200, batch_invariant=True, **options)

    together = _logits_along(generator(max_batch=7), prompts)
    in_pieces = _logits_along(generator(max_batch=3, max_step_tokens=13), prompts)
    pressed = _logits_along(generator(max_batch=4, num_pages=14), prompts)
    for i, prompt in enumerate(prompts):
        (alone,) = _logits_along(generator(max_batch=1), [prompt])
        whole = tiny_model(torch.tensor([prompt]))[0, -1]
        assert torch.equal(alone[0], whole)
        for other in (together[i], in_pieces[i], pressed[i]):
            assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


def test_sampling_depends_on_seed_and_position_not_on_the_batch(tiny_model: Transformer):
    prompts = [prompt_of(n, 4) for n in (3, 20, 50, 90)]

    def made(seed):
        sampling = Sampling(0.9, 0.95, 40, seed)
        return make_generator(tiny_model).generate_batch(prompts, 12, sampling=sampling)

    together = made(3)
    for i, prompt in enumerate(prompts):
        sampling = Sampling(0.9, 0.95, 40, drawn_seed(3, i))
        (alone,) = make_generator(tiny_model, 200, 1).complete([Request(prompt, 12, sampling)])
        assert alone.tokens == together[i]
    assert made(4) != together


def test_equal_prompts_have_other_draws_for_each_place_and_each_neighbouring_seed(
    tiny_model: Transformer,
):
    generator = make_generator(tiny_model)
    draws = [
        tuple(tokens)
        for seed in range(3)
        for tokens in generator.generate_batch(
            [prompt_of(9)] * 4, 12, sampling=Sampling(1.0, seed=seed)
        )
    ]
    assert len(set(draws)) == 12


@pytest.mark.parametrize("is_ahead", [False, True], ids=["at once", "ahead"])
def test_log_probabilities_are_those_of_a_whole_forward(tiny_model: Transformer, is_ahead: bool):
    stops = frozenset(range(0, 300, 12))
    requests = [
        Request(prompt_of(n, n), 9, Sampling(1.5, 0.9, seed=n), stops, logprobs=n != 9)
        for n in (1, 9, 20, 33, 40)
    ]
    generator = make_generator(tiny_model, 64, launches_ahead=is_ahead, num_pages=6)
    reasons = set()
    for done in generator.complete(requests):
        request = requests[done.index]
        reasons.add((done.finish_reason, request.logprobs))
        whole = torch.tensor([[*request.tokens, *done.tokens]])
        expected = torch.log_softmax(tiny_model(whole)[0, len(request.tokens) - 1 : -1], -1)
        expected = expected.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
        found = torch.tensor(done.logprobs)
        assert len(found) == (len(done.tokens) if request.logprobs else 0)
        torch.testing.assert_close(found, expected[: len(found)], atol=1e-4, rtol=0)
    assert reasons >= {("stop", True), ("length", True)}
    assert generator.counts.preemptions > 0


@pytest.mark.parametrize("is_ahead", [False, True], ids=["at once", "ahead"])
def test_a_function_of_the_new_tokens_ends_a_sequence(tiny_model: Transformer, is_ahead: bool):
    whole = greedy(tiny_model, prompt_of(20), 12)
    end = whole[4]
    request = Request(prompt_of(20), 12, is_end=lambda new: new[-1] == end)
    generator = make_generator(tiny_model, launches_ahead=is_ahead)
    (done,) = generator.complete([request])
    assert (done.finish_reason, done.stop_id) == ("stop", None)
    assert done.tokens == whole[: whole.index(end) + 1]
    assert all_free(generator)


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_models_of_one_kind_of_block(small_config: ModelConfig, make_checkpoint, kind: str):
    config = dataclasses.replace(small_config, layer_types=(kind,) * 3)
    model = Transformer.from_checkpoint(make_checkpoint(config))
    prompts = [[token % 101 for token in prompt_of(n)] for n in (1, 7, 8, 40)]
    start = [token % 101 for token in prompt_of(30, 9)]
    prompts += [[*start, i, 5] for i in range(3)]
    got = make_generator(model, 64, 3).generate_batch(prompts, max_tokens=9)
    assert got == [greedy(model, prompt, 9) for prompt in prompts]


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
