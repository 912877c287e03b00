"""Reads a `config.json` into the fields of `ModelConfig`: the two published forms of gpt-oss, and
the Hugging Face form of the other families."""

from collections.abc import Mapping
from typing import Any

from nmoe_core.engine.weights.families import (
    GPT_OSS,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    Family,
    family_of,
)
from nmoe_core.engine.weights.fields import bad_field, first_id, missing, take, variant
from nmoe_core.engine.weights.rope import YarnScaling, read_rope

SLIDING = "sliding_attention"
FULL = "full_attention"
MXFP4 = "mxfp4"
PUBLISHED_VOCAB_SIZE = 201_088
PUBLISHED_EOS_TOKEN_ID = 200_002
PUBLISHED_PAD_TOKEN_ID = 199_999
MAX_LAYERS = 4096

# Integers that both forms have under the names of `ModelConfig`.
SAME_INTEGERS = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window"),
)
# The defaults of transformers for fields that a file of another family may omit.
_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "layer_types": [],
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "rope_scaling": {},
    "rope_theta": 10_000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}
# Settings that change the computation, at the only values supported here: of all families, of
# gpt-oss, and of the others.
_FIXED = {"hidden_act": "silu", "is_causal": True, "partial_rotary_factor": 1.0}
_FIXED |= {"per_layer_config": None}
_FIXED_GPT_OSS = _FIXED | {"attention_bias": True, "tie_word_embeddings": False}
_FIXED_OTHERS = _FIXED | {"mlp_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
_FIXED_OTHERS |= {"quantization_config": None}


def config_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ModelConfig` from a `config.json` of any form; raises as
    `ModelConfig.from_dict`."""
    family = family_of(raw)
    if family is not GPT_OSS:
        if family is MISTRAL and "sliding_window" not in raw:  # transformers: 4096; null: none
            raise missing("sliding_window")
        return _decoder_fields({**_DEFAULTS, **_set(raw)}, family)
    is_hf = "model_type" in raw or "architectures" in raw
    fields: dict[str, Any] = {name: take(raw, int, name) for name in SAME_INTEGERS}
    fields |= {
        "num_experts": take(raw, int, "num_local_experts", "num_experts"),
        "experts_per_token": take(
            raw, int, "num_experts_per_tok" if is_hf else "experts_per_token"
        ),
        "swiglu_limit": take(raw, float, "swiglu_limit"),
        "layer_types": tuple(FULL if i % 2 else SLIDING for i in range(_depth(raw))),
    }
    return fields | (_hf_fields(raw) if is_hf else _original_fields(raw))


def _decoder_fields(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """Fields of the families that exist only in the Hugging Face form."""
    _require(raw, _FIXED_OTHERS)
    # Fields of other families, without effect in these.
    if family in (MISTRAL, QWEN2):
        raw = raw | {"attention_bias": False}
    heads, hidden = (take(raw, int, name) for name in ("num_attention_heads", "hidden_size"))
    if family is LLAMA:
        raw = {"num_key_value_heads": heads} | raw
    # The heads of Qwen3 are 128 wide by default, and in every published file.
    if family is not QWEN3:
        raw = {"head_dim": hidden // max(1, heads)} | raw
    same = ("num_hidden_layers", "vocab_size", "head_dim", "num_key_value_heads")
    inner = "moe_intermediate_size" if family.has_router else "intermediate_size"
    kinds = _window_kinds(raw, family)
    theta, scaling = read_rope(raw, _DEFAULTS)
    fields: dict[str, Any] = {name: take(raw, int, name) for name in same}
    fields |= {"num_experts": 1, "experts_per_token": 1}
    if family.has_router:
        fields["num_experts"] = take(raw, int, "num_experts", "num_local_experts")
        fields["experts_per_token"] = take(raw, int, "num_experts_per_tok")
        fields["norm_topk_prob"] = take(raw, bool, "norm_topk_prob")
    return fields | {
        **{name: take(raw, bool, name) for name in ("attention_bias", "tie_word_embeddings")},
        **{name: first_id(raw, name) for name in ("eos_token_id", "pad_token_id")},
        "family": family,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "intermediate_size": take(raw, int, inner),
        "max_position_embeddings": take(raw, int, "max_position_embeddings"),
        "rms_norm_eps": take(raw, float, "rms_norm_eps"),
        "sliding_window": take(raw, int, "sliding_window") if SLIDING in kinds else 1,
        "layer_types": kinds,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "swiglu_limit": None,
    }


def _window_kinds(raw: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """The kind of every block, in a family that exists only in the Hugging Face form."""
    depth = _depth(raw)
    full = (FULL,) * depth
    listed = take(raw, list, "layer_types")
    if family is MISTRAL:
        if listed:
            raise variant("layer_types", listed, "no layer_types: all blocks have the same window")
        return full if raw.get("sliding_window") is None else (SLIDING,) * depth
    is_on = take(raw, bool, "use_sliding_window")
    if family not in (QWEN2, QWEN3):
        if is_on:
            raise variant("use_sliding_window", True, "False")
        return full
    if not is_on:
        if any(kind != FULL for kind in listed):
            expected = f"only {FULL}, since use_sliding_window is not true"
            raise variant("layer_types", listed, expected)
        return full
    if listed:
        return tuple(listed)
    first = take(raw, int, "max_window_layers")
    return tuple(SLIDING if layer >= first else FULL for layer in range(depth))


def _depth(raw: Mapping[str, Any]) -> int:
    """Number of blocks; refused above `MAX_LAYERS`, because all tensor names are listed before any
    file is read."""
    depth = take(raw, int, "num_hidden_layers")
    if not 0 < depth <= MAX_LAYERS:
        raise bad_field("num_hidden_layers", depth, f"1 to {MAX_LAYERS}")
    return depth


def _set(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _require(raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a setting differs from its value in `fixed`; such settings change
    the computation."""
    for field, value in fixed.items():
        if raw.get(field, value) != value:
            raise variant(field, raw[field], repr(value))


def _hf_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that only the Hugging Face form has, of any transformers version."""
    _require(_set(raw), _FIXED_GPT_OSS)
    fields: dict[str, Any] = {
        "max_position_embeddings": take(raw, int, "max_position_embeddings"),
        "rms_norm_eps": take(raw, float, "rms_norm_eps"),
        **{name: first_id(raw, name) for name in ("eos_token_id", "pad_token_id")},
    }
    fields["rope_theta"], fields["rope_scaling"] = read_rope(raw, {})
    if raw.get("layer_types") is not None:
        fields["layer_types"] = tuple(take(raw, list, "layer_types"))
    if "swiglu_alpha" in raw:
        fields["swiglu_alpha"] = take(raw, float, "swiglu_alpha")
    if raw.get("quantization_config") is not None:
        method = take(take(raw, dict, "quantization_config"), str, "quant_method")
        if method != MXFP4:
            raise variant("quantization_config.quant_method", method, repr(MXFP4))
        fields["quant_method"] = method
    return fields


def _original_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that only a file of `original/` has, and values of the fields that it omits."""
    scaling = YarnScaling(
        factor=take(raw, float, "rope_scaling_factor"),
        original_max_position=take(raw, int, "initial_context_length"),
        beta_fast=take(raw, float, "rope_ntk_beta"),
        beta_slow=take(raw, float, "rope_ntk_alpha"),
    )
    is_published = raw["vocab_size"] == PUBLISHED_VOCAB_SIZE
    return {
        "rope_theta": take(raw, float, "rope_theta"),
        "rope_scaling": scaling if scaling.factor > 1 else None,
        "max_position_embeddings": int(scaling.original_max_position * max(scaling.factor, 1.0)),
        "eos_token_id": PUBLISHED_EOS_TOKEN_ID if is_published else None,
        "pad_token_id": PUBLISHED_PAD_TOKEN_ID if is_published else None,
        "quant_method": MXFP4,
    }
