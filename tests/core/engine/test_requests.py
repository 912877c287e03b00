"""The generator's calls: the loop, where a sequence ends, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.base.errors import ConfigError, TokenizerError
from nmoe_core.engine import BatchedGenerator, Request, Transformer, make_tiny_checkpoint
from tests.core.engine.builders import all_free, greedy, make_generator, prompt_of, stepped
from tests.refusals import refused


def test_a_sequence_ends_with_exactly_max_tokens_or_with_the_room(tiny_model: Transformer):
    generator = make_generator(tiny_model, 32, 4)
    for prompt, max_tokens, num_new in (([1] * 31, None, 1), ([1] * 5, None, 27), ([1], 3, 3)):
        seq_id = generator.add(prompt, max_tokens)
        for count in range(num_new):
            assert not generator.idle, count
            stepped(generator)
            generator.update(seq_id, 5)
        assert generator.idle
    got = generator.generate_batch([prompt_of(3), prompt_of(15)], 17)
    assert [len(tokens) for tokens in got] == [17, 17]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_stop_ids_end_a_sequence_and_are_left_out(tiny_model: Transformer, is_ahead: bool):
    whole = greedy(tiny_model, prompt_of(33), 18)
    stop = next(t for i, t in enumerate(whole) if i >= 3 and t not in whole[:i])
    until = whole.index(stop)
    in_prompt = frozenset(prompt_of(33)) - set(whole)
    generator = make_generator(tiny_model, 200, 2, launches_ahead=is_ahead)
    (done,) = generator.complete([Request(prompt_of(33), 18, stop_ids=in_prompt | {stop})])
    assert (done.tokens, done.finish_reason, done.stop_id) == (whole[:until], "stop", stop)
    # Ahead, the pass that was launched before the stop was read is thrown away.
    assert generator.counts.decoded == until + is_ahead
    (done,) = generator.complete([Request(prompt_of(33), 18, stop_ids=in_prompt)])
    assert (done.tokens, done.finish_reason, done.stop_id) == (whole, "length", None)
    assert generator.generate_batch([prompt_of(33)], 18, stop_ids=[stop]) == [whole[:until]]


def test_the_published_examples_run_line_for_line(tmp_path: Path):
    path = str(make_tiny_checkpoint(tmp_path / "gpt-oss-20b", num_layers=2, hidden_size=32))
    device = torch.device("cpu")
    model = Transformer.from_checkpoint(path, device=device)
    assert (model.config.num_hidden_layers, model.config.num_experts) == (2, 8)
    gen = BatchedGenerator(path, max_seq_len=512, max_batch=1)
    tokens = [976, 3613, 328, 35378, 22990, 382]
    seq_id = gen.add(tokens, max_tokens=12)
    generated: list[int] = []
    while not gen.idle:
        result = gen.step()
        if not result:
            break
        logits, seq_ids = result
        next_token = logits[0].argmax().item()
        generated.append(next_token)
        gen.update(seq_ids[0], next_token, finished=len(generated) >= 12)
    assert seq_id == 0
    assert len(generated) == 12
    gen = BatchedGenerator(checkpoint=path, max_batch=128)
    results = gen.generate_batch([tokens, tokens[:3]], max_tokens=12, temperature=0.0)
    assert results[0] == generated
    assert gen.is_idle()


def test_a_sequence_finished_before_its_last_token_ends_there(tiny_model: Transformer):
    generator = make_generator(tiny_model, 300, 2)
    seq_id = generator.add([1, 2, 3])
    for finished in (False, True):
        generator.update(seq_id, int(stepped(generator)[0].argmax()), finished=finished)
    assert generator.idle
    assert generator.step() is None
    with pytest.raises(ConfigError, match="45 and 256 tokens"):
        generator.add([1] * 45, 256)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_logits_that_are_not_finite_are_an_error_and_no_token(
    tiny_dir: Path, temperature: float, value: float, is_ahead: bool
):
    model = Transformer.from_checkpoint(tiny_dir)
    good = model.unembedding[5].clone()
    model.unembedding[5] = value
    generator = make_generator(model, 32, 2, launches_ahead=is_ahead)
    with refused("E-CHECKPOINT-LOGITS", "not finite"):
        generator.generate_batch([[1, 2], [3]], 4, temperature=temperature)
    assert all_free(generator)
    model.unembedding[5] = good
    assert generator.generate_batch([prompt_of(5)], 4) == [greedy(model, prompt_of(5), 4)]


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
    generator = make_generator(tiny_model, 32, 2)
    with refused("E-CONFIG-GENERATE", message):
        generator.add(*arguments)
    with pytest.raises(ConfigError, match=message):
        generator.generate_batch([[1, 2], arguments[0]], *(arguments[1:] or (1,)))
    assert all_free(generator)
    assert generator.counts.passes == 0


def test_ids_outside_the_vocabulary_are_refused(tiny_model: Transformer):
    generator = make_generator(tiny_model, 32, 2)
    wrong: Any
    for wrong, error in ((300, TokenizerError), (-1, TokenizerError), (2.5, TypeError)):
        with pytest.raises(error, match="float" if wrong == 2.5 else f"found {wrong}"):
            generator.add([1, wrong])
    seq_id = generator.add(torch.tensor([1, 2]))  # pyright: ignore[reportArgumentType]
    generator.step()
    with pytest.raises(TokenizerError, match="found 300"):
        generator.update(seq_id, 300)


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"max_seq_len": 1}, {"max_batch": 0}, {"page_size": 0}, {"num_pages": 3}],
        *[{"max_step_tokens": 0}, {"max_prefixes": -1}],
        {"max_seq_len": 131_073, "num_pages": 8193},
    ],
)
def test_sizes_out_of_range_are_refused(tiny_model: Transformer, wrong: dict[str, int]):
    with refused("E-CONFIG-GENERATE", next(iter(wrong))):
        make_generator(tiny_model, **({"max_seq_len": 64} | wrong))
