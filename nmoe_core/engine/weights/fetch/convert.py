"""Writes a Llama model of a GGUF file as a directory of the hub's form: bfloat16 safetensors,
`config.json`, `tokenizer.json` and the chat template.

The numbers are those of transformers, which decodes GGUF to float32, rounded to bfloat16. Rows of
queries and keys are put back from llama.cpp's order of rotary pairs. The tokenizer is built from
the file's own tokens and merges, with the splitting that its name means in llama.cpp. Memory is the
model in bfloat16, twice, and one tensor in float32.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.atomic import write_bytes, write_json
from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine.weights.fetch.gguf import Gguf
from nmoe_core.engine.weights.weight_files import CONFIG_NAME

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TABLES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# How text is split before merges, by llama.cpp's name of the tokenizer.
_SPLITS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTES,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES],
    },
}
_CONTROL = 3  # a kind of token: stands for no text
_USER_DEFINED = 4


def convert_gguf(source: Path, directory: Path) -> None:
    """Write the files of a model to an existing directory. Equal files give equal bytes.

    Raises CheckpointError as `Gguf`, if a value is missing (E-CHECKPOINT-FILE), if the model or its
    tokenizer is not of a supported kind (E-CHECKPOINT-ARCH), and if tensors do not fit the sizes
    (E-CHECKPOINT-TENSOR).
    """
    import torch
    from safetensors.torch import save

    from nmoe_core.engine.weights.checkpoint import open_checkpoint

    with Gguf(source) as file:
        config = _config(file)
        tokenizer = _tokenizer(file)
        tensors: dict[str, torch.Tensor] = {}
        for name in file.tensors:
            values = file.read(name)
            head_counts = {
                "attn_q": config["num_attention_heads"],
                "attn_k": config["num_key_value_heads"],
            }
            part = name.removesuffix(".weight").rpartition(".")[2]
            if part in head_counts:
                values = _in_halves(values, head_counts[part], file)
            tensors[_name(name, file)] = torch.from_numpy(values).to(torch.bfloat16)
    write_bytes(directory / "model.safetensors", save(tensors, {"format": "pt"}))
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", _tokenizer_config(file))
    write_json(directory / CONFIG_NAME, config)
    with open_checkpoint(directory):
        pass  # compares the shapes with the sizes


def _config(file: Gguf) -> dict[str, Any]:
    architecture = _value(file, "general.architecture", str)
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if architecture != "llama" or scaling != "none":
        found = architecture if scaling == "none" else f"rope scaling {scaling}"
        raise _unsupported(file, found, "llama, without rope scaling")
    hidden = _value(file, "llama.embedding_length", int)
    num_heads = _value(file, "llama.attention.head_count", int)
    epsilon = _value(file, "llama.attention.layer_norm_rms_epsilon", float)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(_value(file, "tokenizer.ggml.tokens", list)),
        "hidden_size": hidden,
        "intermediate_size": _value(file, "llama.feed_forward_length", int),
        "num_hidden_layers": _value(file, "llama.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _value(file, "llama.attention.head_count_kv", int, num_heads),
        "head_dim": _value(file, "llama.attention.key_length", int, hidden // max(num_heads, 1)),
        "hidden_act": "silu",
        "max_position_embeddings": _value(file, "llama.context_length", int),
        "rms_norm_eps": float(f"{epsilon:.7g}"),  # 1e-05, not its nearest float32
        "rope_theta": _value(file, "llama.rope.freq_base", float, 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": _value(file, "tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _value(file, "tokenizer.ggml.eos_token_id", int),
    }


def _tokenizer(file: Gguf) -> dict[str, Any]:
    """The content of tokenizer.json."""
    model = _value(file, "tokenizer.ggml.model", str)
    split = _value(file, "tokenizer.ggml.pre", str)
    if model != "gpt2" or split not in _SPLITS:
        raise _unsupported(file, f"tokenizer {model}, {split}", f"gpt2, {' or '.join(_SPLITS)}")
    tokens = _value(file, "tokenizer.ggml.tokens", list)
    merges = [merge.split(" ") for merge in _value(file, "tokenizer.ggml.merges", list)]
    kinds = _value(file, "tokenizer.ggml.token_type", np.ndarray).tolist()
    if len(set(tokens)) < len(tokens) or len(kinds) != len(tokens):
        raise file.error(f"{len(set(tokens)):,} different tokens of {len(tokens):,}")
    known = set(tokens)
    for merge in merges:
        if len(merge) != 2 or not known.issuperset((*merge, "".join(merge))):
            raise file.error(f"merge {' '.join(merge)!r}", "two tokens that form a token")
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _SPLITS[split],
        "post_processor": None,
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _tokenizer_config(file: Gguf) -> dict[str, Any]:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        number = _value(file, f"tokenizer.ggml.{name}_token_id", int)
        if not 0 <= number < len(tokens):
            raise file.error(f"{name} {number}", f"below {len(tokens)}")
        found[f"{name}_token"] = tokens[number]
    template = _value(file, "tokenizer.chat_template", str, "")
    return found | ({"chat_template": template} if template else {})


def _in_halves(values: np.ndarray, num_heads: int, file: Gguf) -> np.ndarray:
    """Rows of queries or keys in the hub's order: per head the first halves of all rotary pairs,
    then the second halves; llama.cpp stores pair by pair."""
    if values.ndim != 2 or num_heads < 1 or len(values) % (2 * num_heads):
        raise file.error(f"queries or keys of shape {list(values.shape)}", f"{num_heads} heads")
    pairs = values.reshape(num_heads, -1, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _name(name: str, file: Gguf) -> str:
    """The hub's name of a tensor."""
    if name in _TABLES:
        return _TABLES[name]
    block, _, part = name.removesuffix(".weight").removeprefix("blk.").partition(".")
    if part not in _PARTS or name != f"blk.{block}.{part}.weight":
        raise _unsupported(file, f"tensor {name}", "the tensors of a dense Llama without biases")
    return f"model.layers.{block}.{_PARTS[part]}.weight"


def _value(file: Gguf, key: str, kind: type, default: Any = None) -> Any:
    value = file.metadata.get(key, default)
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    if not isinstance(value, kind) or isinstance(value, bool) or is_infinite:
        raise file.error(f"{key} {str(value)[:80]}", f"a value of type {kind.__name__}")
    return value


def _unsupported(file: Gguf, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "this GGUF file holds a model that cannot be converted",
        where=file.path,
        found=found,
        expected=expected,
        do="use the safetensors files of this model",
        code="E-CHECKPOINT-ARCH",
    )
