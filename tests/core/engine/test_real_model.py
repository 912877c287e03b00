"""The engine and the tokenizer against transformers on SmolLM2-135M as `nmoe fetch smollm2` writes
it, if it is in the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.cache import model_dir
from nmoe_core.engine import BatchedGenerator, Transformer
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.engine.builders import LOGITS_ATOL
from tests.core.engine.real_texts import TEXTS

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NUM_NEW = 64


@pytest.fixture(scope="module")
def directory() -> Path:
    path = model_dir("smollm2")
    if not path.is_dir():
        pytest.skip("`nmoe fetch smollm2` gets the model")
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(directory: Path) -> Transformer:
    return Transformer.from_checkpoint(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> dict[str, list[int]]:
    tokenizer = load_tokenizer(TokenizerSettings(str(directory), needs_eos=False))
    return {name: tokenizer.encode_batch([text]).ids.tolist() for name, text in TEXTS.items()}


def test_its_tokenizer_gives_the_ids_of_transformers(
    directory: Path, prompts: dict[str, list[int]]
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert {name: tokenizer(text)["input_ids"] for name, text in TEXTS.items()} == prompts


@torch.inference_mode()
def test_its_logits_are_those_of_transformers(
    model: Transformer, reference: Any, prompts: dict[str, list[int]]
) -> None:
    worst = 0.0
    for ids in prompts.values():
        row = torch.tensor([ids])
        worst = max(worst, float((model(row) - reference(row).logits).abs().max()))
    print(f"{sum(map(len, prompts.values())):,} positions, worst {worst:.1e}")
    assert worst <= LOGITS_ATOL


@torch.inference_mode()
def test_its_likeliest_continuations_are_those_of_transformers(
    model: Transformer, reference: Any, prompts: dict[str, list[int]]
) -> None:
    """Each new token is transformers' likeliest one after the tokens before it."""
    chosen = [ids for name, ids in prompts.items() if name.endswith((" 1", "python"))]
    generator = BatchedGenerator(model, 256, len(chosen))
    made = generator.generate_batch(chosen, NUM_NEW)
    for ids, new in zip(chosen, made, strict=True):
        logits = reference(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == new
        assert len(new) == NUM_NEW
