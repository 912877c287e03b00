"""The families of decoders that the engine supports, described by their differences.

All are pre-norm decoders with rotary grouped-query attention and a gated feed-forward: gpt-oss,
Llama (arXiv 2407.21783), Mistral (arXiv 2310.06825), Qwen2 (arXiv 2407.10671) and Qwen3, dense and
as a mixture of experts (arXiv 2505.09388).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmoe_core.base.errors import CheckpointError

RECIPE_KEY = "nmoe_recipe"  # key of a `config.json` with random weights (weights.tiny)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders, with its names in `config.json`.

    has_sinks: Each head's softmax has a learned sink. has_qkv_biases: Queries, keys and values have
    biases, and the output of attention has none. has_head_norms: Queries and keys are
    normalised by head before they are rotated. has_router: The feed-forward is a mixture of
    experts. has_feed_forward_biases: Router and experts have biases.
    """

    model_type: str
    architecture: str
    has_sinks: bool = False
    has_qkv_biases: bool = False
    has_head_norms: bool = False
    has_router: bool = False
    has_feed_forward_biases: bool = False


GPT_OSS = Family(
    "gpt_oss", "GptOssForCausalLM", has_sinks=True, has_router=True, has_feed_forward_biases=True
)
LLAMA = Family("llama", "LlamaForCausalLM")
MISTRAL = Family("mistral", "MistralForCausalLM")
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", has_qkv_biases=True)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", has_head_norms=True)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", has_head_norms=True, has_router=True)
FAMILIES = (GPT_OSS, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family that a `config.json` names; a file without a name is gpt-oss in the form of
    `original/`. Raises CheckpointError if the family is not supported (E-CHECKPOINT-ARCH)."""
    listed = raw.get("architectures")
    name = raw.get("model_type") or (listed[0] if isinstance(listed, list) and listed else listed)
    if name is None and "model_type" not in raw and "architectures" not in raw:
        return GPT_OSS
    for family in FAMILIES:
        if name in (family.model_type, family.architecture):
            return family
    raise CheckpointError(
        "the engine does not support this architecture",
        where="config.json model_type",
        found=repr(name),
        expected=f"one of {', '.join(family.model_type for family in FAMILIES)}",
        code="E-CHECKPOINT-ARCH",
    )
