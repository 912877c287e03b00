"""The configuration of a model, and its conversion from and to `config.json`.

This module does not import torch, so a command can read a backbone's shape quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmoe_core.engine.weights.config_json import FULL, MXFP4, SAME_INTEGERS, SLIDING, config_fields
from nmoe_core.engine.weights.families import GPT_OSS, MISTRAL, Family
from nmoe_core.engine.weights.fields import bad_field
from nmoe_core.engine.weights.rope import RopeScaling, YarnScaling, write_rope

__all__ = ["FULL", "GROUP_SIZE", "MXFP4", "SLIDING", "ModelConfig", "YarnScaling", "tap_layers"]

# Number of weights in an MXFP4 group, which share a scale.
GROUP_SIZE = 32
# Other fields that have the same name in the Hugging Face form and in `ModelConfig`.
_SAME_IN_HF = ("max_position_embeddings", "rms_norm_eps", "eos_token_id", "pad_token_id")
_GPT_OSS_ONLY = ("experts_per_token", "swiglu_alpha", "swiglu_limit")


def tap_layers(num_hidden_layers: int) -> tuple[int, int]:
    """The two blocks whose residual the heads read: round(depth * 18 / 24), and depth.

    The probe reads block 18 of a 24-layer backbone; other depths keep the proportion (8 layers: 6
    and 8).
    """
    return max(1, round(num_hidden_layers * 18 / 24)), num_hidden_layers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one model.

    `layer_types[i]` is `sliding_attention` or `full_attention`; `sliding_window` counts the query
    itself; `quant_method` is `mxfp4` if the config says that the experts are MXFP4, else None. (How
    experts are read depends only on the tensors in the files.) A dense model has one expert and no
    router; If `swiglu_limit` is None, SwiGLU has no clamp. With `norm_topk_prob`, the softmax is
    over the chosen experts of a token, otherwise over all experts.
    """

    num_hidden_layers: int
    num_experts: int
    experts_per_token: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    head_dim: int
    num_attention_heads: int
    num_key_value_heads: int
    sliding_window: int
    layer_types: tuple[str, ...]
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    swiglu_limit: float | None = 7.0
    swiglu_alpha: float = 1.702
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    quant_method: str | None = None
    family: Family = GPT_OSS
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        names = (*SAME_INTEGERS, "num_experts", "experts_per_token", "max_position_embeddings")
        names += ("rms_norm_eps", "swiglu_alpha")
        names += () if self.swiglu_limit is None else ("swiglu_limit",)
        grouped = ("hidden_size", "intermediate_size") if self.quant_method == MXFP4 else ()
        heads = self.num_attention_heads
        divisor = max(1, self.num_key_value_heads)
        experts = self.num_experts
        layers = self.num_hidden_layers
        are_kinds = all(kind in (SLIDING, FULL) for kind in self.layer_types)
        conditions = [
            *[(name, getattr(self, name) > 0, "above 0") for name in names],
            ("rope_theta", self.rope_theta > 1, "above 1"),
            ("experts_per_token", self.experts_per_token <= experts, f"at most {experts} experts"),
            ("head_dim", self.head_dim % 2 == 0, "an even number"),
            (
                "num_key_value_heads",
                heads % divisor == 0,
                f"a divisor of the {heads} attention heads",
            ),
            *[
                (name, getattr(self, name) % GROUP_SIZE == 0, f"a multiple of {GROUP_SIZE} (MXFP4)")
                for name in grouped
            ],
            ("layer_types", len(self.layer_types) == layers, f"{layers} entries"),
            ("layer_types", are_kinds, f"entries of {SLIDING} or {FULL}"),
        ]
        for field, is_valid, expected in conditions:
            if not is_valid:
                raise bad_field(field, getattr(self, field), expected)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the query, key and value parts of the fused projection, in this order."""
        kv_size = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, kv_size, kv_size

    def window(self, layer: int) -> int | None:
        """Number of positions that block `layer` (0-based) sees, including the query's own."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the Hugging Face form of any family, or gpt-oss in the form of `original/`.

        The file of `original/` lacks some fields, for which fixed values are used: alternating
        layers of which the first has a sliding window, epsilon 1e-5, MXFP4 experts, and the special
        ids of the published vocabulary. Raises CheckpointError if the architecture or a variant of
        it is not supported (E-CHECKPOINT-ARCH), or a field is missing or out of range
        (E-CHECKPOINT-CONFIG).
        """
        return cls(**config_fields(raw))

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `config.json` of this model, keys in alphabetical order."""
        family = self.family
        scaling = self.rope_scaling
        raw: dict[str, Any] = {
            **{name: getattr(self, name) for name in (*SAME_INTEGERS, *_SAME_IN_HF)},
            "architectures": [family.architecture],
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "layer_types": list(self.layer_types),
            "model_type": family.model_type,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        if family.has_router:
            raw["num_experts_per_tok"] = self.experts_per_token
            raw["num_local_experts"] = self.num_experts
        if family is MISTRAL:
            del raw["layer_types"]
            raw["sliding_window"] = self.window(0)
        elif family is GPT_OSS:
            raw |= {name: getattr(self, name) for name in _GPT_OSS_ONLY}
        else:
            raw["use_sliding_window"] = SLIDING in self.layer_types
            raw["norm_topk_prob"] = self.norm_topk_prob
            raw["moe_intermediate_size"] = self.intermediate_size
        if self.quant_method is not None:
            raw["quantization_config"] = {
                "modules_to_not_convert": [
                    *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                    *("model.embed_tokens", "lm_head"),
                ],
                "quant_method": self.quant_method,
            }
        if scaling is None:
            raw["rope_parameters"] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        else:
            if isinstance(scaling, YarnScaling):
                raw["initial_context_length"] = scaling.original_max_position
            raw["rope_theta"] = self.rope_theta
            raw["rope_scaling"] = write_rope(scaling)
        return dict(sorted(raw.items()))
