"""Checkpoints on disk: where they are found, both layouts, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine import Transformer, checkpoint_digest
from nmoe_core.engine.weights.weight_files import find_checkpoint
from tests.refusals import refused


@pytest.fixture
def one_file(tiny_dir: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint in a single writable file without an index."""
    directory = tmp_path / "one"
    directory.mkdir()
    shutil.copy(tiny_dir / "config.json", directory)
    files = tiny_dir.glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def _edit(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("below", ["", "original", "original/original"])
def test_a_checkpoint_is_found_at_its_path_or_below(tiny_dir: Path, tmp_path: Path, below: str):
    (tmp_path / "root" / below).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tiny_dir, tmp_path / "root" / below)
    assert find_checkpoint(tmp_path / "root") == tmp_path / "root" / below
    with refused("E-CHECKPOINT-MISSING", "no checkpoint at this path"):
        find_checkpoint(tmp_path)


def test_weights_do_not_change_with_their_file(one_file: Path, tiny_model: Transformer):
    model, file = Transformer.from_checkpoint(one_file), one_file / "model.safetensors"
    with open(file, "r+b") as handle:
        handle.write(bytes(file.stat().st_size))
    ids = torch.arange(60)[None]
    assert torch.equal(model(ids), tiny_model(ids))


def test_the_digest_names_config_and_weights_wherever_they_lie(one_file: Path, tmp_path: Path):
    digest = checkpoint_digest(one_file)
    assert Transformer.from_checkpoint(one_file).digest == digest
    copied = shutil.copytree(one_file, tmp_path / "elsewhere" / "original")
    (copied / "README.md").write_text("not a part of it")
    assert checkpoint_digest(tmp_path / "elsewhere") == digest
    _edit(one_file, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert checkpoint_digest(one_file) != digest
    with open(copied / "config.json", "a") as config:
        config.write("\n")
    assert checkpoint_digest(tmp_path / "elsewhere") != digest


SCALES = "model.layers.1.mlp.experts.gate_up_proj_scales"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.2.self_attn.sinks", None, "layers.2.self_attn.sinks is missing"),
        ("model.layers.0.mlp.experts.down_proj_scales", None, "down_proj_scales is missing"),
        ("lm_head.weight", None, "lm_head.weight is missing"),
        ("model.embed_tokens.weight", None, "no embedding table"),
        (
            "model.layers.4.self_attn.sinks",
            torch.ones(4),
            "layers.4.*is not a tensor of this model",
        ),
        ("model.norm.weight", torch.ones(65), r"norm.weight is F32 \[65\], expected.*\[64\]"),
        ("model.norm.weight", torch.ones(64).byte(), r"norm.weight is U8 \[64\], expected"),
        (SCALES, torch.ones(8, 128, 2), r"proj_scales is F32 .* expected U8 \[8, 128, 2\]"),
        (SCALES, torch.full((8, 128, 2), 255).byte(), "255 makes its weights NaN"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    one_file: Path, name: str, tensor: torch.Tensor | None, message: str
):
    _edit(one_file, lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
    with refused("E-CHECKPOINT-TENSOR", message):
        Transformer.from_checkpoint(one_file)


def test_many_misfits_are_one_short_error_and_a_tensor_stored_twice_is_one(one_file: Path):
    config = json.loads((one_file / "config.json").read_text())
    config |= {"num_hidden_layers": 6, "layer_types": None}
    (one_file / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers.4.*is missing.*and \d+ more") as caught:
        Transformer.from_checkpoint(one_file)
    assert len(caught.value.line()) < 800
    save_file({"model.norm.weight": torch.ones(64)}, one_file / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"norm.weight is stored twice"):
        Transformer.from_checkpoint(one_file)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("model.safetensors", "", "E-CHECKPOINT-FILE"),
        ("model.safetensors", "not safetensors, far too long a header", "E-CHECKPOINT-FILE"),
        ("config.json", "{", "E-CHECKPOINT-FILE"),
        ("model.safetensors", None, "E-CHECKPOINT-FILE"),  # cut by a byte
        *[(INDEX, text, "E-CHECKPOINT-FILE") for text in ("{", "[]", "{}")],
        (INDEX, "pytorch_model.bin", "E-CHECKPOINT-PICKLE"),
        (INDEX, "../model.safetensors", "E-CHECKPOINT-FILE"),
        (INDEX, "absent.safetensors", "E-CHECKPOINT-MISSING"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(one_file: Path, file, content, code):
    named, path = file, one_file / file
    if content is None:
        path.write_bytes(path.read_bytes()[:-1])
    elif content.endswith((".bin", ".safetensors")):
        named = content
        path.write_text(json.dumps({"weight_map": {"model.norm.weight": content}}))
    else:
        path.write_text(content)
    with refused(code, re.escape(named)):
        Transformer.from_checkpoint(one_file)


def test_pickles_are_refused(one_file: Path):
    (one_file / "model.safetensors").unlink()
    (one_file / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    for path in (one_file, one_file / "pytorch_model.bin", one_file / "weights.pt"):
        with refused("E-CHECKPOINT-PICKLE", "pickled"):
            Transformer.from_checkpoint(path)
