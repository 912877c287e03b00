"""Against transformers on seeded random shapes and every way a checkpoint can be stored.

Each case draws a shape (depth, experts and how many run, grouped heads, window, kinds of layers,
rotary scaling and how it is written) and weights, writes it in one layout with MXFP4 or bfloat16
experts over one or several files, and writes the Hugging Face twin that transformers can read.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.engine import ModelConfig, Transformer
from nmoe_core.engine.weights.config import FULL, MXFP4, SLIDING, YarnScaling
from nmoe_core.engine.weights.layout import HUGGING_FACE, ORIGINAL
from tests.core.engine.builders import SMALL, assert_equals_transformers, random_tensors
from tests.golden.engine.recipe import write_checkpoint

transformers = pytest.importorskip("transformers")
NUM_SHAPES = 16
LAYOUTS = ("hugging face", "original")
FORMS = (MXFP4, "bfloat16")


def load_reference(directory: Path) -> Any:
    """The float32 model of transformers."""
    return transformers.GptOssForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _config(rng: random.Random, layout: str, form: str) -> ModelConfig:
    num_layers, num_experts = rng.randint(1, 4), rng.choice([1, 3, 5, 8])
    num_kv = rng.choice([1, 2, 3])
    kinds = [(SLIDING, FULL)[i % 2] for i in range(num_layers)]
    if layout != "original":  # its config has no field for either
        kinds = [rng.choice([SLIDING, FULL]) for _ in kinds]
    scaling = YarnScaling(
        factor=rng.choice([4.0, 32.0]),
        original_max_position=rng.choice([16, 64]),
        beta_fast=rng.choice([8.0, 32.0]),
        truncate=layout != "original" and rng.random() < 0.3,
    )
    return ModelConfig(
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        experts_per_token=rng.randint(1, num_experts),
        vocab_size=rng.randint(50, 300),
        hidden_size=32 * rng.randint(1, 3),
        intermediate_size=32 * rng.randint(1, 3),
        head_dim=rng.choice([8, 16, 32]),
        num_attention_heads=num_kv * rng.choice([1, 2, 4]),
        num_key_value_heads=num_kv,
        sliding_window=rng.randint(1, 20),
        layer_types=tuple(kinds),
        rope_theta=rng.choice([10_000.0, 150_000.0]),
        rope_scaling=None if layout != "original" and rng.random() < 0.2 else scaling,
        max_position_embeddings=int(scaling.original_max_position * scaling.factor),
        swiglu_limit=rng.choice([0.7, 7.0]),
        quant_method=MXFP4 if form == MXFP4 else None,
    )


def _raw_config(config: ModelConfig, layout: str, rope_field: str) -> dict[str, Any]:
    raw = config.to_hf()
    if layout == "original":
        shared = "num_hidden_layers vocab_size hidden_size intermediate_size head_dim swiglu_limit"
        shared += " num_attention_heads num_key_value_heads sliding_window rope_theta"
        assert config.rope_scaling is not None
        return {name: raw[name] for name in shared.split()} | {
            "num_experts": config.num_experts,
            "experts_per_token": config.experts_per_token,
            "initial_context_length": config.rope_scaling.original_max_position,
            "rope_scaling_factor": config.rope_scaling.factor,
            "rope_ntk_alpha": config.rope_scaling.beta_slow,
            "rope_ntk_beta": config.rope_scaling.beta_fast,
        }
    if rope_field == "rope_parameters" and "rope_scaling" in raw:
        raw["rope_parameters"] = raw.pop("rope_scaling") | {"rope_theta": raw.pop("rope_theta")}
    return raw


@pytest.mark.parametrize("seed", range(NUM_SHAPES))
def test_a_random_shape_equals_transformers(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    layout, form = LAYOUTS[seed % 2], FORMS[seed // 2 % 2]
    config = _config(rng, layout, form)
    names = ORIGINAL if layout == "original" else HUGGING_FACE
    rope_field = ("rope_scaling", "rope_parameters")[seed // 4 % 2]
    below = "" if layout == "hugging face" else "original"
    raw = _raw_config(config, layout, rope_field)
    tensors = random_tensors(config, seed, names, form == MXFP4)
    write_checkpoint(tmp_path / "ours" / below, raw, tensors, rng.randint(1, 3))
    twin = _raw_config(config, "hugging face", rope_field)
    twin.pop("quantization_config", None)
    write_checkpoint(tmp_path / "twin", twin, random_tensors(config, seed, HUGGING_FACE, False), 1)
    ours, theirs = Transformer.from_checkpoint(tmp_path / "ours"), load_reference(tmp_path / "twin")
    generator = torch.Generator().manual_seed(45)
    ids = torch.randint(0, config.vocab_size, (2, 45), generator=generator)
    assert_equals_transformers(ours, theirs, ids)


def test_what_transformers_saves_can_be_loaded(make_checkpoint, tmp_path: Path):
    written = make_checkpoint(SMALL)
    load_reference(written).bfloat16().save_pretrained(tmp_path / "saved")
    ids = torch.arange(50)[None]
    saved = Transformer.from_checkpoint(tmp_path / "saved")
    assert torch.equal(saved(ids), Transformer.from_checkpoint(written)(ids))
