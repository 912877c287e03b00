"""ModelConfig: both published forms, and every refusal by name."""

import dataclasses

import pytest

from nmoe_core.engine.weights.config import FULL, SLIDING, ModelConfig, YarnScaling, tap_layers
from tests.refusals import refused

ORIGINAL_20B = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}


@pytest.fixture
def published() -> ModelConfig:
    return ModelConfig.from_dict(ORIGINAL_20B)


def test_the_original_form_gives_the_published_model(published: ModelConfig):
    assert published.rope_scaling == YarnScaling(32.0, 4096, 32.0, 1.0, truncate=False)
    assert published.max_position_embeddings == 131_072
    assert published.layer_types[:3] == (SLIDING, FULL, SLIDING)
    assert (published.window(0), published.window(1)) == (128, None)
    assert (published.eos_token_id, published.pad_token_id) == (200_002, 199_999)
    assert published.qkv_sizes == (4096, 512, 512)


def test_the_hugging_face_form_is_read_back_as_written(published: ModelConfig):
    raw = published.to_hf()
    assert raw["model_type"] == "gpt_oss"
    assert raw["quantization_config"]["quant_method"] == "mxfp4"
    plain = dataclasses.replace(published, rope_scaling=None, quant_method=None)
    assert "quantization_config" not in plain.to_hf()
    types = (FULL, FULL, *[SLIDING] * 22)  # layers need not alternate
    for config in (published, plain, dataclasses.replace(published, layer_types=types)):
        assert ModelConfig.from_dict(config.to_hf()) == config
    assert [config.window(layer) for layer in range(4)] == [None, None, 128, 128]
    unscaled = ModelConfig.from_dict({**ORIGINAL_20B, "rope_scaling_factor": 1.0})
    assert unscaled.rope_scaling is None


def test_newer_names_of_fields_mean_the_same(published: ModelConfig):
    raw = published.to_hf()
    rope = raw.pop("rope_scaling") | {"rope_theta": raw.pop("rope_theta")}
    raw["rope_parameters"] = rope
    raw["num_experts"] = raw.pop("num_local_experts")
    del raw["experts_per_token"], raw["layer_types"]
    assert ModelConfig.from_dict(raw) == published


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"mscale": 2.0, "rope_type": "yarn"}},
    ],
    ids=str,
)
def test_another_architecture_or_variant_is_refused(published: ModelConfig, change):
    (field, value), *_ = change.items()
    named = next(iter(value)) if isinstance(value, dict) else field
    with refused("E-CHECKPOINT-ARCH", named):
        ModelConfig.from_dict(published.to_hf() | change)


HUGE = 10**400
WRONG = [
    *[("num_hidden_layers", value) for value in (None, 10**9, -1)],
    *[("vocab_size", None), ("vocab_size", True), ("sliding_window", 0)],
    *[("rope_theta", value) for value in (None, 1, HUGE)],
    *[("swiglu_limit", value) for value in (None, 0, -7.0)],
    *[("head_dim", None), ("head_dim", 63), ("num_experts_per_tok", 33), ("swiglu_alpha", 0)],
    *[("num_key_value_heads", 7), ("num_key_value_heads", 0), ("rope_scaling", None)],
    *[("layer_types", [SLIDING]), ("layer_types", ["chunked_attention"] * 24)],
    *[("hidden_size", 2881), ("hidden_size", "2880"), ("rms_norm_eps", 0), ("rms_norm_eps", -1e-5)],
    *[
        (f"rope_scaling.{key}", value)
        for key in ("factor", "beta_fast", "beta_slow")
        for value in (0, -1, HUGE)
    ],
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: str(value)[:40])
def test_a_field_that_is_missing_or_that_no_model_can_have_is_named(published, field: str, value):
    raw = published.to_hf()
    table, _, key = field.rpartition(".")
    raw |= {table: raw[table] | {key: value}} if table else {key: value}
    with refused("E-CHECKPOINT-CONFIG", key.replace("num_experts_per_tok", "experts_per")):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, 0) for name in ("rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta")],
        *[("initial_context_length", -1), ("num_hidden_layers", 10**9), ("rope_ntk_beta", None)],
    ],
)
def test_a_field_of_the_original_form_that_no_model_can_have_is_refused(field: str, value: object):
    with refused("E-CHECKPOINT-CONFIG"):
        ModelConfig.from_dict({**ORIGINAL_20B, field: value})


def test_of_several_stop_ids_the_first_is_the_end_of_a_document(published: ModelConfig):
    config = ModelConfig.from_dict(published.to_hf() | {"eos_token_id": [200_002, 200_012]})
    assert config.eos_token_id == 200_002
    assert ModelConfig.from_dict(published.to_hf() | {"eos_token_id": None}).eos_token_id is None


def test_heads_tap_three_quarters_and_the_end():
    assert [tap_layers(depth) for depth in (24, 8, 36, 1)] == [(18, 24), (6, 8), (27, 36), (1, 1)]
