"""Checkpoints on disk: where they are found, both layouts, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine import Transformer, checkpoint_digest
from nmoe_core.engine.weights import mxfp4
from nmoe_core.engine.weights.checkpoint import find_checkpoint

ORIGINAL_NAMES = {
    "input_layernorm.weight": "attn.norm.scale",
    "self_attn.sinks": "attn.sinks",
    "self_attn.o_proj.weight": "attn.out.weight",
    "self_attn.o_proj.bias": "attn.out.bias",
    "post_attention_layernorm.weight": "mlp.norm.scale",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.bias",
    "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
    "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks",
    "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
}
IDS = torch.arange(60)[None]


def _load_all(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _to_original(tensors: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    converted = {
        "embedding.weight": tensors["model.embed_tokens.weight"],
        "norm.scale": tensors["model.norm.weight"],
        "unembedding.weight": tensors["lm_head.weight"],
    }
    for i in range(num_layers):
        source, target = f"model.layers.{i}.", f"block.{i}."
        for kind in ("weight", "bias"):
            parts = [tensors[f"{source}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            converted[f"{target}attn.qkv.{kind}"] = torch.cat(parts)
        for name, original in ORIGINAL_NAMES.items():
            converted[target + original] = tensors[source + name]
    return converted


@pytest.fixture
def one_file(tiny_dir: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint in a single writable file without an index."""
    directory = tmp_path / "one"
    directory.mkdir()
    shutil.copy(tiny_dir / "config.json", directory)
    save_file(_load_all(tiny_dir), directory / "model.safetensors")
    return directory


def _edit(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def _write_original(tiny_dir: Path, directory: Path) -> None:
    raw = json.loads((tiny_dir / "config.json").read_text())
    names = "num_hidden_layers experts_per_token vocab_size hidden_size intermediate_size head_dim"
    names += " num_attention_heads num_key_value_heads sliding_window initial_context_length"
    names += " rope_theta swiglu_limit"
    config = {name: raw[name] for name in names.split()}
    config |= {"num_experts": raw["num_local_experts"], "rope_scaling_factor": 32.0}
    config |= {"rope_ntk_alpha": 1.0, "rope_ntk_beta": 32.0}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    converted = _to_original(_load_all(tiny_dir), raw["num_hidden_layers"])
    save_file(converted, directory / "model.safetensors")


@pytest.mark.parametrize("below", ["", "original", "original/original"])
def test_the_original_layout_gives_the_same_bits(
    tiny_dir: Path, tiny_model: Transformer, tmp_path: Path, below: str
):
    _write_original(tiny_dir, tmp_path / "root" / below)
    model = Transformer.from_checkpoint(tmp_path / "root")
    assert torch.equal(model(IDS), tiny_model(IDS))


def test_unquantised_experts_of_the_original_layout_are_output_major(
    tiny_dir: Path, tiny_model: Transformer, tmp_path: Path
):
    _write_original(tiny_dir, tmp_path / "root")

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [f"block.{i}.mlp.mlp{n}_weight" for i in range(4) for n in (1, 2)]:
            blocks, scales = tensors.pop(f"{name}.blocks"), tensors.pop(f"{name}.scales")
            tensors[name] = mxfp4.decode(blocks, scales, torch.bfloat16)

    _edit(tmp_path / "root", unpack)
    assert torch.equal(Transformer.from_checkpoint(tmp_path / "root")(IDS), tiny_model(IDS))


def test_one_file_without_an_index_gives_the_same_bits(one_file: Path, tiny_model: Transformer):
    assert torch.equal(Transformer.from_checkpoint(one_file)(IDS), tiny_model(IDS))


def test_weights_do_not_change_with_the_file_they_came_from(one_file: Path):
    model = Transformer.from_checkpoint(one_file, dtype=torch.bfloat16)
    before = model(IDS)
    file = one_file / "model.safetensors"
    with open(file, "r+b") as handle:
        handle.write(bytes(file.stat().st_size))
    assert torch.equal(model(IDS), before)


def test_the_digest_names_config_and_weights_wherever_they_lie(one_file: Path, tmp_path: Path):
    digest = checkpoint_digest(one_file)
    assert Transformer.from_checkpoint(one_file).digest == digest
    shutil.copytree(one_file, tmp_path / "elsewhere" / "original")
    (tmp_path / "elsewhere" / "original" / "README.md").write_text("not a part of it")
    assert checkpoint_digest(tmp_path / "elsewhere") == digest

    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][0] += 1

    _edit(one_file, nudge)
    assert checkpoint_digest(one_file) != digest
    config = tmp_path / "elsewhere" / "original" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert checkpoint_digest(tmp_path / "elsewhere") != digest


def _drop(name: str):
    return lambda tensors: tensors.pop(name)


def _put(name: str, tensor: torch.Tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("model.layers.2.self_attn.sinks"), "layers.2.self_attn.sinks is missing"),
        (_drop("model.layers.0.mlp.experts.down_proj_scales"), "down_proj_scales is missing"),
        (_drop("lm_head.weight"), "lm_head.weight is missing"),
        (_drop("model.embed_tokens.weight"), "no embedding table"),
        (_put("model.layers.4.self_attn.sinks", torch.ones(4)), "layers.4.*belongs to no part"),
        (_put("model.norm.weight", torch.ones(65)), r"norm.weight is F32 \[65\], expected.*\[64\]"),
        (_put("model.norm.weight", torch.ones(64).byte()), r"norm.weight is U8 \[64\], expected"),
        (
            _put("model.layers.1.mlp.experts.gate_up_proj_scales", torch.ones(8, 128, 2)),
            r"gate_up_proj_scales is F32 .* expected U8 \[8, 128, 2\]",
        ),
        (
            _put(
                "model.layers.1.mlp.experts.gate_up_proj_scales",
                torch.full((8, 128, 2), 255, dtype=torch.uint8),
            ),
            "255 makes its weights NaN",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(one_file: Path, change, message: str):
    _edit(one_file, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        Transformer.from_checkpoint(one_file)
    assert caught.value.code == "E-CHECKPOINT-TENSOR"


def test_many_misfits_are_one_short_error(one_file: Path):
    config = json.loads((one_file / "config.json").read_text())
    config |= {"num_hidden_layers": 6, "layer_types": None}
    (one_file / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers.4.*is missing.*and \d+ more") as caught:
        Transformer.from_checkpoint(one_file)
    assert len(caught.value.line()) < 800


def test_a_tensor_stored_twice_is_refused(one_file: Path):
    save_file({"model.norm.weight": torch.ones(64)}, one_file / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"norm.weight is stored twice"):
        Transformer.from_checkpoint(one_file)


@pytest.mark.parametrize("damage", ["empty", "other", "cut"])
def test_a_file_that_is_not_safetensors_is_refused(one_file: Path, damage: str):
    file = one_file / "model.safetensors"
    whole = file.read_bytes()
    damaged = {"empty": b"", "other": b"not safetensors, far too long a header", "cut": whole[:-1]}
    file.write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cannot be used") as caught:
        Transformer.from_checkpoint(one_file)
    assert caught.value.code == "E-CHECKPOINT-FILE"


def test_pickles_are_refused(one_file: Path):
    (one_file / "model.safetensors").unlink()
    (one_file / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    for path in (one_file, one_file / "pytorch_model.bin", one_file / "weights.pt"):
        with pytest.raises(CheckpointError, match="pickled") as caught:
            Transformer.from_checkpoint(path)
        assert caught.value.code == "E-CHECKPOINT-PICKLE"


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("pytorch_model.bin", "E-CHECKPOINT-PICKLE"),
        ("../model.safetensors", "E-CHECKPOINT-FILE"),
        ("absent.safetensors", "E-CHECKPOINT-MISSING"),
    ],
)
def test_an_index_may_only_name_safetensors_beside_it(one_file: Path, file: str, code: str):
    index = {"weight_map": {"model.norm.weight": file}}
    (one_file / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        checkpoint_digest(one_file)
    assert caught.value.code == code


def test_an_index_or_config_that_is_not_json_is_refused(one_file: Path):
    index = one_file / "model.safetensors.index.json"
    for text in ("{", "[]", "{}"):
        index.write_text(text)
        with pytest.raises(CheckpointError) as caught:
            checkpoint_digest(one_file)
        assert caught.value.code == "E-CHECKPOINT-FILE"
    index.unlink()
    (one_file / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Transformer.from_checkpoint(one_file)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no checkpoint here") as caught:
        find_checkpoint(tmp_path / "nothing")
    assert caught.value.code == "E-CHECKPOINT-MISSING"
