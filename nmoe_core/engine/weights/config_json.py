"""Reads the two published forms of a gpt-oss `config.json` into the fields of `ModelConfig`.

A field that changes the mathematics and is missing, of the wrong type, or set to a variant that
the engine does not compute is refused by name: a default that differs from what the weights were
trained with would give plausible wrong numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmoe_core.base.errors import CheckpointError

SLIDING = "sliding_attention"
FULL = "full_attention"
MXFP4 = "mxfp4"
PUBLISHED_VOCAB_SIZE = 201_088
PUBLISHED_EOS_TOKEN_ID = 200_002
PUBLISHED_PAD_TOKEN_ID = 199_999
MAX_LAYERS = 4096
LARGEST = 2**53

# Integers that both forms have under the names of `ModelConfig`.
SAME_INTEGERS = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window"),
)
_ROPE_KEYS = {
    *("beta_fast", "beta_slow", "factor", "original_max_position_embeddings"),
    *("rope_theta", "rope_type", "truncate", "type"),
}


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK-by-parts scaling of the rotary frequencies (YaRN, arXiv 2309.00071).

    `truncate` rounds the ends of the blending range to whole dimensions; gpt-oss does not.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = False

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise bad_field(f"rope_scaling.{name}", getattr(self, name), "above 0")


def config_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ModelConfig` from either form; raises as `ModelConfig.from_dict`."""
    is_hf = "model_type" in raw or "architectures" in raw
    if is_hf:
        _require_gpt_oss(raw)
    fields: dict[str, Any] = {name: _take(raw, int, name) for name in SAME_INTEGERS}
    num_layers = fields["num_hidden_layers"]
    # So few that each block's tensors can be named before any file is read.
    if not 0 < num_layers <= MAX_LAYERS:
        raise bad_field("num_hidden_layers", num_layers, f"1 to {MAX_LAYERS}")
    fields |= {
        "num_experts": _take(raw, int, "num_local_experts", "num_experts"),
        "experts_per_token": _take(raw, int, "num_experts_per_tok", "experts_per_token"),
        "swiglu_limit": _take(raw, float, "swiglu_limit"),
        "layer_types": tuple(FULL if i % 2 else SLIDING for i in range(num_layers)),
    }
    return fields | (_hf_fields(raw) if is_hf else _original_fields(raw))


def _hf_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that only the Hugging Face form has, of any transformers version."""
    fields: dict[str, Any] = {
        "max_position_embeddings": _take(raw, int, "max_position_embeddings"),
        "rms_norm_eps": _take(raw, float, "rms_norm_eps"),
        **{name: _first_id(raw, name) for name in ("eos_token_id", "pad_token_id")},
    }
    fields["rope_theta"], fields["rope_scaling"] = _hf_rope(raw)
    if raw.get("layer_types") is not None:
        fields["layer_types"] = tuple(_take(raw, list, "layer_types"))
    if "swiglu_alpha" in raw:
        fields["swiglu_alpha"] = _take(raw, float, "swiglu_alpha")
    if raw.get("quantization_config") is not None:
        method = _take(_take(raw, dict, "quantization_config"), str, "quant_method")
        if method != MXFP4:
            raise _variant("quantization_config.quant_method", method, repr(MXFP4))
        fields["quant_method"] = method
    return fields


def _original_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that only `original/` has, and the facts that its file leaves out."""
    scaling = YarnScaling(
        factor=_take(raw, float, "rope_scaling_factor"),
        original_max_position=_take(raw, int, "initial_context_length"),
        beta_fast=_take(raw, float, "rope_ntk_beta"),
        beta_slow=_take(raw, float, "rope_ntk_alpha"),
    )
    is_published = raw["vocab_size"] == PUBLISHED_VOCAB_SIZE
    return {
        "rope_theta": _take(raw, float, "rope_theta"),
        "rope_scaling": scaling if scaling.factor > 1 else None,
        "max_position_embeddings": int(scaling.original_max_position * max(scaling.factor, 1.0)),
        "eos_token_id": PUBLISHED_EOS_TOKEN_ID if is_published else None,
        "pad_token_id": PUBLISHED_PAD_TOKEN_ID if is_published else None,
        "quant_method": MXFP4,
    }


def _require_gpt_oss(raw: Mapping[str, Any]) -> None:
    """Refuse other architectures, and settings of this one that change what is computed."""
    listed = raw.get("architectures")
    name = raw.get("model_type") or (listed[0] if isinstance(listed, list) and listed else listed)
    if name not in ("gpt_oss", "GptOssForCausalLM"):
        raise CheckpointError(
            "not a gpt-oss checkpoint",
            where="config.json model_type",
            found=repr(name),
            expected="'gpt_oss'",
            code="E-CHECKPOINT-ARCH",
        )
    fixed = {"hidden_act": "silu", "attention_bias": True, "tie_word_embeddings": False}
    for field, value in fixed.items():
        if raw.get(field, value) != value:
            raise _variant(field, raw[field], repr(value))


def _hf_rope(raw: Mapping[str, Any]) -> tuple[float, YarnScaling | None]:
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = _take(raw, dict, field)
    theta = _take({**raw, **rope}, float, "rope_theta")
    if unknown := sorted(set(rope) - _ROPE_KEYS):
        raise _variant(f"{field}.{unknown[0]}", rope[unknown[0]], "no such key")
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise _variant(f"{field}.rope_type", kind, "'yarn' or 'default'")
    return theta, YarnScaling(
        factor=_take(rope, float, "factor"),
        original_max_position=_take(rope, int, "original_max_position_embeddings"),
        beta_fast=_take(rope, float, "beta_fast"),
        beta_slow=_take(rope, float, "beta_slow"),
        truncate=_take(rope, bool, "truncate"),
    )


def _first_id(raw: Mapping[str, Any], name: str) -> int | None:
    """A token id or None; of a list, the first (the others are a chat's own stop ids)."""
    value = raw.get(name)
    if isinstance(value, list) and value:
        return _take({name: value[0]}, int, name)
    return None if value is None else _take(raw, int, name)


def _take(raw: Mapping[str, Any], kind: type, *names: str) -> Any:
    """The field under the first of `names` that is there; an int serves as a float."""
    name = next((name for name in names if raw.get(name) is not None), None)
    if name is None:
        raise CheckpointError(
            f"the field {' or '.join(names)} is missing",
            where="config.json",
            code="E-CHECKPOINT-CONFIG",
        )
    value = raw[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not abs(value) <= LARGEST:
        raise bad_field(name, value, f"a number of at most {LARGEST}")
    if kind is float and is_number:
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_field(name, value, f"a value of type {kind.__name__}")
    return value


def bad_field(field: str, found: object, expected: str) -> CheckpointError:
    """The error for a field whose value no model of this kind can have."""
    return CheckpointError(
        "the field does not fit",
        where=f"config.json {field}",
        found=repr(found)[:80],
        expected=expected,
        code="E-CHECKPOINT-CONFIG",
    )


def _variant(field: str, found: object, expected: str) -> CheckpointError:
    return CheckpointError(
        "this variant of gpt-oss is not computed by the engine",
        where=f"config.json {field}",
        found=repr(found)[:80],
        expected=expected,
        code="E-CHECKPOINT-ARCH",
    )
