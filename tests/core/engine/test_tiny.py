"""The tiny checkpoint: the same bytes always, whole or absent, and of use to a head."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine import Transformer, checkpoint_digest
from nmoe_core.engine.weights.tiny import make_tiny_checkpoint
from tests.refusals import refused

SIZES = {"vocab_size": 300, "num_layers": 4, "sliding_window": 16}
# Of the tensors that SIZES and seed 0 give, whatever the machine and the libraries' versions.
WEIGHTS = "a1f3ffc7f88680447d7c7c36589d3ec2407a0116c17f022be64e57f8c26f1441"


def _hashes(directory: Path) -> dict[str, str]:
    files = sorted(directory.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_weights_are_those_of_the_recipe_and_the_config_says_so(tiny_dir: Path):
    tensors = {k: v for file in tiny_dir.glob("*.safetensors") for k, v in load_file(file).items()}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS
    raw = json.loads((tiny_dir / "config.json").read_text())
    assert raw["nmoe_recipe"]["seed"] == 0
    assert "not trained" in raw["nmoe_recipe"]["weights"]
    assert raw["architectures"] == ["GptOssForCausalLM"]
    index = json.loads((tiny_dir / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2


def _make_in_process(directory: Path, **environment: str) -> int:
    """Exit status of another process, with three threads, that makes the checkpoint."""
    code = "import sys, torch; from nmoe_core.engine import make_tiny_checkpoint as make; "
    code += f"torch.set_num_threads(3); make(sys.argv[1], **{SIZES!r})"
    command = [sys.executable, "-c", code, directory]
    return subprocess.run(command, check=False, env=os.environ | environment).returncode


def test_another_process_with_more_threads_writes_the_same_bytes(tiny_dir: Path, tmp_path: Path):
    assert _make_in_process(tmp_path / "t", OMP_NUM_THREADS="3") == 0
    assert _hashes(tmp_path / "t") == _hashes(tiny_dir)


def test_a_second_run_does_no_work_and_another_recipe_replaces_all(tmp_path: Path):
    directory = make_tiny_checkpoint(tmp_path / "t", **SIZES)
    first = {path.name: path.stat().st_mtime_ns for path in directory.glob("m*.*")}
    make_tiny_checkpoint(directory, **SIZES)
    assert {path.name: path.stat().st_mtime_ns for path in directory.glob("m*.*")} == first
    digest = checkpoint_digest(directory)
    make_tiny_checkpoint(directory, **SIZES, seed=1)
    assert checkpoint_digest(directory) != digest
    make_tiny_checkpoint(directory, **SIZES)
    assert checkpoint_digest(directory) == digest


@pytest.mark.parametrize(
    "call", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long), 4]
)
def test_a_killed_run_leaves_no_checkpoint_and_the_next_completes_it(
    tiny_dir: Path, tmp_path: Path, call: int
):
    directory = make_tiny_checkpoint(tmp_path / "t", **SIZES, seed=1)
    assert _make_in_process(directory, NMOE_FAILPOINT=f"rename:{call}:kill") == -9
    with pytest.raises(CheckpointError, match="no checkpoint at this path"):
        Transformer.from_checkpoint(directory)
    make_tiny_checkpoint(directory, **SIZES)
    assert checkpoint_digest(directory) == checkpoint_digest(tiny_dir)
    assert not list(directory.glob("*.tmp.*"))


def test_a_checkpoint_of_another_origin_is_left_alone(tmp_path: Path):
    (stranger := tmp_path / "stranger").mkdir()
    (stranger / "config.json").write_text('{"model_type": "gpt_oss"}')
    (stranger / "model.safetensors").write_bytes(b"weights")
    before = _hashes(stranger)
    with refused("E-CHECKPOINT-FOREIGN", "this command did not make"):
        make_tiny_checkpoint(stranger, **SIZES)
    (stranger / "config.json").unlink()
    with pytest.raises(CheckpointError, match="this command did not make"):
        make_tiny_checkpoint(stranger, **SIZES)
    assert sorted(path.name for path in stranger.iterdir()) == ["model.safetensors"]
    assert _hashes(stranger).items() <= before.items()


def test_what_cannot_be_written_is_refused_before_writing(tmp_path: Path):
    with refused("E-CHECKPOINT-CONFIG", "hidden_size"):
        make_tiny_checkpoint(tmp_path / "t", hidden_size=48)
    assert not (tmp_path / "t").exists()
    with output_lock(tmp_path / "t"), refused("E-LOCKED"):
        make_tiny_checkpoint(tmp_path / "t", **SIZES)


def test_late_layers_still_tell_tokens_apart_and_carry_context(tmp_path: Path):
    model = Transformer.from_checkpoint(make_tiny_checkpoint(tmp_path / "t", vocab_size=300))
    assert model.config.num_hidden_layers == 8
    ids = torch.randint(0, 300, (8, 64), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 20] = (ids[:, 20] + 1) % 300
    embedded = model.embedding[ids]
    _, hidden = model(ids, return_hidden_states=(6, 8), no_logits=True)
    _, moved = model(changed, return_hidden_states=(6, 8), no_logits=True)
    for tap in (6, 8):
        assert torch.cosine_similarity(hidden[tap], embedded, dim=-1).mean() > 0.5
        change = (moved[tap] - hidden[tap]).norm(dim=-1) / hidden[tap].norm(dim=-1)
        assert change[:, :20].max() == 0
        assert change[:, 21:30].mean() > 0.01
