"""Configurations changed by one or two fields give transformers' logits, or one refusal."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.base.errors import NmoeError
from nmoe_core.engine import Transformer
from nmoe_core.engine.weights.config import FULL, SLIDING
from tests.core.engine.builders import LOGITS_ATOL, draw_weights
from tests.refusals import refused

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity(transformers.logging.CRITICAL)
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
FAMILIES |= {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}
ABSENT = object()
IDS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 90,
    "pad_token_id": 91,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "qwen3_moe": ROUTED,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
}
LONG = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, LONG: 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[Any] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 2.0},
    {"type": "linear", "rope_type": "yarn", "factor": 2.0, LONG: 32},
    {"rope_type": "linear", "factor": 4},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 4.0},
    LLAMA3,
    LLAMA3 | {LONG: 32},
    LLAMA3 | {LONG: 32, "rope_theta": 5e5},
    YARN,
    {"rope_type": "yarn", "factor": 4.0},
    YARN | {"attention_factor": 1.3, "truncate": False},
    YARN | {"beta_fast": None, "beta_slow": None, "truncate": None},
    YARN | {"attention_factor": None},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    YARN | {"beta_fast": 8, "beta_slow": 2, "rope_theta": 1e5},
    YARN | {"factor": 1.0},
    YARN | {"factor": None},
    YARN | {"partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 1.0},
    {FULL: {"rope_type": "default"}, SLIDING: {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 5e5},
    {"rope_theta": None, "rope_type": "default"},
]
# Fields that are often beside others, or not in the class of the configuration.
SPECIAL: dict[str, list[Any]] = {
    "rope_parameters": [ABSENT, None, {}, "yarn", *ROPES],
    "rope_scaling": [None, {}, "yarn", *ROPES],
    "rope_theta": [None, 5e5, 500_000, "10000", 1.0],
    LONG: [None, 16, 64, 32.0],
    "partial_rotary_factor": [None, 1.0, 1, 0.5],
    "layer_types": [ABSENT, None, [], [FULL, FULL], [SLIDING, FULL], [SLIDING] * 2, [FULL] * 3],
    "use_sliding_window": [ABSENT, None, True, False, 1, "no"],
    "sliding_window": [ABSENT, None, 9, 1, 0, 4096, "9"],
    "max_window_layers": [ABSENT, None, 0, 1, 2, 28],
    "num_key_value_heads": [ABSENT, None, 1, 4],
    "head_dim": [ABSENT, None, 8, 16, 7],
    "attention_bias": [ABSENT, None, True, False],
    "mlp_bias": [None, True, False],
    "hidden_act": [ABSENT, None, "gelu", "relu", "swish", "silu"],
    "hidden_activation": ["gelu", None],
    "tie_word_embeddings": [ABSENT, None, True, False],
    "num_local_experts": [ABSENT, None, 2, 4],
    "num_experts": [ABSENT, None, 2, 4],
    "num_experts_per_tok": [ABSENT, None, 1, 3, 4],
    "experts_per_token": [1, 2, 4],
    "norm_topk_prob": [ABSENT, None, True, False],
    "swiglu_alpha": [ABSENT, None, 1.0, 2],
    "swiglu_limit": [ABSENT, None, 0.5, 7],
    "decoder_sparse_step": [ABSENT, None, 2],
    "mlp_only_layers": [ABSENT, None, [], [0]],
    "is_causal": [True, False],
    "per_layer_config": [None, {"0": {"sliding_window": 4}}],
    "quantization_config": [None, {"quant_method": "fp8"}],
    "attention_chunk_size": [None, 4],
    "pretraining_tp": [1, 2],
    "dtype": ["float32", "bfloat16"],
    "torch_dtype": ["float32", "bfloat16"],
    "initial_context_length": [4096, 32],
    "model_max_length": [64],
    "a_field_of_nobody": [3],
}


def _checkpoint(family: str, directory: Path) -> dict[str, Any]:
    """Write the weights of a small model of transformers; return its `config.json`."""
    sizes = SIZES | OWN.get(family, {})
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**sizes)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config)
    draw_weights(model, 5)
    model.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


def _other_values(value: Any) -> list[Any]:
    """Values that a field may have in place of `value`, of its own and of other types."""
    others = [ABSENT, None, str(value)]
    if isinstance(value, bool):
        return [*others, not value, int(value)]
    if isinstance(value, int):
        return [*others, value + 1, 2 * value, float(value), -value, 0, [value]]
    if isinstance(value, float):
        return [*others, 3 * value, 1, 0.0, -value]
    return [*others, [], {}, 3]


def _changed(raw: dict[str, Any], fields: list[str], rng: random.Random) -> dict[str, Any]:
    """One or two fields and their new values."""
    changes = {}
    for field in rng.sample(fields, rng.choice([1, 2, 2])):
        values = SPECIAL.get(field) or _other_values(raw.get(field))
        changes[field] = rng.choice(values)
    return changes


def _theirs(directory: Path) -> torch.Tensor | None:
    """Logits of transformers, or None if it has none: it fails, or draws weights at random."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if info["missing_keys"] or info["mismatched_keys"]:
            return None
        with torch.no_grad():
            return model.eval()(IDS, use_cache=False).logits
    except Exception:  # noqa: BLE001 (it has no error of its own)
        return None


def _ours(directory: Path) -> torch.Tensor | None:
    """Logits of the engine, or None if it refuses the checkpoint."""
    try:
        model = Transformer.from_checkpoint(directory)
    except NmoeError:
        return None
    logits = model(IDS)
    assert isinstance(logits, torch.Tensor)
    return logits


def _outcomes(family: str, directory: Path, num_cases: int) -> dict[str, list[Any]]:
    """Changes of configurations, by how the engine and transformers answered."""
    raw = _checkpoint(family, directory)
    config_class = getattr(transformers, f"{FAMILIES[family]}Config")
    fields = {field.name for field in dataclasses.fields(config_class)} - {"transformers_version"}
    # Half of the draws are of fields that change the computation.
    drawn = sorted(fields | set(SPECIAL)) + 2 * ["rope_parameters", "rope_scaling"]
    outcomes: dict[str, list[Any]] = {}
    for case in range(num_cases):
        changes = _changed(raw, drawn, random.Random(f"{family} {case}"))
        changed = {k: v for k, v in (raw | changes).items() if v is not ABSENT}
        (directory / "config.json").write_text(json.dumps(changed))
        ours = _ours(directory)
        theirs = _theirs(directory)
        if ours is None:
            outcome = "refused"
        elif theirs is None:
            outcome = "only the engine reads it"
        elif ours.shape == theirs.shape and (ours - theirs).abs().max() <= LOGITS_ATOL:
            outcome = "equal"
        else:
            outcome = "different"
        outcomes.setdefault(outcome, []).append(changes)
    return outcomes


def _assert_none_differs(family: str, directory: Path, num_cases: int) -> None:
    outcomes = _outcomes(family, directory, num_cases)
    assert outcomes.get("different", []) == []
    assert outcomes["equal"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_field_gives_the_logits_of_transformers_or_is_refused(
    tmp_path: Path, family: str
):
    _assert_none_differs(family, tmp_path, 12)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_hundreds_of_changed_fields_give_the_logits_of_transformers_or_are_refused(
    tmp_path: Path, family: str
):
    _assert_none_differs(family, tmp_path, 300)


def test_experts_of_a_token_under_the_name_of_the_original_form_are_refused(tmp_path: Path):
    raw = _checkpoint("gpt_oss", tmp_path)
    del raw["num_experts_per_tok"]
    for extra in ({}, {"experts_per_token": 2}):
        (tmp_path / "config.json").write_text(json.dumps(raw | extra))
        with refused("E-CHECKPOINT-CONFIG", "num_experts_per_tok is missing"):
            Transformer.from_checkpoint(tmp_path)
