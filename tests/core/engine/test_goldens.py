"""Against what transformers computed: logits, hidden states, greedy continuations.

See tests/golden/engine/README.md. Of deliberate faults (no sinks, window off by one, nibbles
swapped, no +1, softmax over all experts, ...) the gate's lower clamp moves the logits least, by
3e-4: tolerances above that would not see it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nmoe_core.engine import Transformer

GOLDEN = Path(__file__).parents[2] / "golden" / "engine"
LOGITS_ATOL = 2e-4
HIDDEN_RTOL = 1e-5
# Median relative error of transformers' own bfloat16 logits, prompt by prompt.
BFLOAT16_MEDIANS = (0.0119, 0.0150, 0.0217, 0.0216, 0.0191, 0.0242)


def _prompts(expected: Path) -> Iterator[dict[str, np.ndarray]]:
    arrays = np.load(expected)
    for n in range(sum(name.endswith("_ids") for name in arrays)):
        prefix = f"p{n}_"
        yield {k.removeprefix(prefix): arrays[k] for k in arrays if k.startswith(prefix)}


def _greedy(model: Transformer, ids: torch.Tensor, num_new: int) -> list[int]:
    """The most likely continuation; every step computes the whole prefix again."""
    for _ in range(num_new):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids[0, -num_new:].tolist()


def _assert_agrees(model: Transformer, prompt: dict[str, np.ndarray]) -> None:
    ids = torch.from_numpy(prompt["ids"].astype(np.int64))[None]
    taps = sorted(int(name.rpartition("_")[2]) for name in prompt if name.startswith("hidden"))
    logits, hidden = model(ids, return_hidden_states=taps)
    assert np.abs(logits[0].numpy() - prompt["logits"]).max() <= LOGITS_ATOL
    for tap in taps:
        expected = prompt[f"hidden_{tap}"]
        error = np.linalg.norm(hidden[tap][0].numpy() - expected) / np.linalg.norm(expected)
        assert error <= HIDDEN_RTOL
    assert _greedy(model, ids, len(prompt["greedy"])) == prompt["greedy"].tolist()


@pytest.fixture(scope="module")
def tiny4() -> Transformer:
    return Transformer.from_checkpoint(GOLDEN / "tiny4")


@pytest.mark.parametrize("n", range(6))
def test_tiny4_equals_transformers(tiny4: Transformer, n: int):
    _assert_agrees(tiny4, list(_prompts(GOLDEN / "tiny4.expected.npz"))[n])


def test_tiny4_final_norm_equals_transformers(tiny4: Transformer):
    prompt = list(_prompts(GOLDEN / "tiny4.expected.npz"))[4]
    ids = torch.from_numpy(prompt["ids"].astype(np.int64))[None]
    _, hidden = tiny4(ids, return_hidden_states=(4,), no_logits=True)
    normed = tiny4.norm(hidden[4])[0].numpy()
    np.testing.assert_allclose(normed, prompt["final_norm"], rtol=1e-4, atol=1e-5)


def test_tiny4_prompts_in_one_padded_batch_equal_transformers(tiny4: Transformer):
    prompts = list(_prompts(GOLDEN / "tiny4.expected.npz"))
    lengths = torch.tensor([len(prompt["ids"]) for prompt in prompts])
    ids = torch.full((len(prompts), int(lengths.max())), -1)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt["ids"])] = torch.from_numpy(prompt["ids"].astype(np.int64))
    logits = tiny4(ids, lengths)
    for got, prompt in zip(logits, prompts, strict=True):
        got = got[: len(prompt["ids"])].numpy()
        assert np.abs(got - prompt["logits"]).max() <= LOGITS_ATOL


def test_tiny4_in_bfloat16_is_as_near_as_transformers_in_bfloat16():
    model = Transformer.from_checkpoint(GOLDEN / "tiny4", dtype=torch.bfloat16)
    prompts = _prompts(GOLDEN / "tiny4.expected.npz")
    for prompt, reference in zip(prompts, BFLOAT16_MEDIANS, strict=True):
        logits = model(torch.from_numpy(prompt["ids"].astype(np.int64))[None])[0].numpy()
        assert logits.dtype == np.float32
        error = np.linalg.norm(logits - prompt["logits"], axis=-1)
        relative = error / np.linalg.norm(prompt["logits"], axis=-1)
        assert np.median(relative) <= 1.5 * reference


def test_deep24_equals_transformers():
    directory = Path(os.environ.get("NMOE_GOLDEN_DIR", ""))
    if not (directory / "deep24").is_dir():
        pytest.skip("NMOE_GOLDEN_DIR does not name a directory with deep24")
    model = Transformer.from_checkpoint(directory / "deep24")
    for prompt in _prompts(directory / "deep24.expected.npz"):
        _assert_agrees(model, prompt)
