"""Where a model is loaded: a device that is not here, or too little memory, is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli import main
from nmoe_core.config.quality import BackboneTable, EngineOracleTable
from nmoe_core.engine import ModelConfig, Transformer, backend
from nmoe_core.engine.devices import Shard
from nmoe_core.engine.weights.checkpoint import Checkpoint, open_checkpoint
from nmoe_core.engine.weights.mxfp4 import PackedExperts

GB = 10**9


def _published(layers: int, experts: int) -> ModelConfig:
    return ModelConfig(
        *(layers, experts, 4, 201_088, 2880, 2880, 64, 64, 8, 128),
        layer_types=("sliding_attention", "full_attention") * (layers // 2),
        rope_theta=150_000.0,
        rope_scaling=None,
        max_position_embeddings=131_072,
    )


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "foo", "", "meta", "cuda:x", "mps"])
def test_a_device_that_is_not_here_is_one_line(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Transformer.from_checkpoint(tiny_dir, device=device)
    assert caught.value.code == "E-CONFIG-DEVICE"
    (tmp_path / "in.jsonl").write_text('{"id": "a", "tokens": [1]}\n')
    command = ["generate", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main([*command, "--checkpoint", str(tiny_dir), "--device", device]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ERROR [E-CONFIG-DEVICE]: ")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_gpu_beyond_those_of_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert backend.usable_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="2 cuda"):
        backend.usable_device("cuda:2")
    with pytest.raises(ConfigError):
        Shard(0, 1).device("foo")


@pytest.mark.parametrize("threads", ["0", "-1"])
def test_a_number_of_threads_below_one_is_one_line(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "tokens": [1]}\n')
    command = ["generate", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main([*command, "--checkpoint", str(tiny_dir), "--threads", threads]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--threads" in line


def test_weights_are_estimated_as_they_will_lie_in_memory(tiny_dir: Path) -> None:
    large, small = _published(36, 128), _published(24, 32)
    found = [
        backend.weight_bytes(large, torch.bfloat16, "decoded") / GB,
        backend.weight_bytes(large, torch.bfloat16, "packed") / GB,
        backend.weight_bytes(small, torch.float32, "decoded") / GB,
    ]
    assert found == pytest.approx([233.7, 65.2, 83.7], rel=0.01)
    for dtype in (torch.float32, torch.bfloat16):
        for form in ("decoded", "packed"):
            model = Transformer.from_checkpoint(tiny_dir, dtype=dtype, experts=form)
            real = sum(p.nbytes for p in model.parameters())
            assert backend.weight_bytes(model.config, dtype, form) == pytest.approx(real, rel=0.02)


def test_a_model_that_cannot_fit_is_refused_before_a_weight_is_read_and_what_fits_is_named(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpoint(tiny_dir) as checkpoint:
        packed = backend.weight_bytes(checkpoint.config, torch.bfloat16, "packed")
    room = packed + 1000
    monkeypatch.setattr(backend, "room_bytes", lambda device: room)
    assert Transformer.from_checkpoint(tiny_dir, dtype=torch.bfloat16, experts="packed")
    monkeypatch.setattr(Checkpoint, "tables", None)
    with pytest.raises(ConfigError, match="do not fit") as caught:
        Transformer.from_checkpoint(tiny_dir)
    assert caught.value.code == "E-CONFIG-MEMORY"
    assert 'experts = "packed", dtype = "bfloat16"' in caught.value.line()
    room = 1
    with pytest.raises(ConfigError, match="larger") as caught:
        Transformer.from_checkpoint(tiny_dir)
    assert "packed" not in caught.value.line()


def test_experts_stay_packed_on_a_gpu_and_are_decoded_on_a_cpu_unless_asked(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpoint(tiny_dir) as checkpoint:
        assert checkpoint.expert_form("auto") == "decoded"
        assert checkpoint.expert_form("packed") == "packed"
    with open_checkpoint(tiny_dir, device="cuda:1") as checkpoint:
        assert checkpoint.expert_form("auto") == "packed"
        assert checkpoint.expert_form("decoded") == "decoded"
        monkeypatch.setattr(type(checkpoint.layout), "is_packed", lambda *names: False)
        assert checkpoint.expert_form("auto") == "decoded"
    with pytest.raises(ConfigError, match="auto, decoded or packed"):
        Transformer.from_checkpoint(tiny_dir, experts="halved")  # pyright: ignore[reportArgumentType]
    assert BackboneTable().experts == EngineOracleTable().experts == "auto"


def test_grading_loads_the_experts_in_the_form_that_its_run_asks_for(
    tiny_dir: Path, tmp_path: Path
) -> None:
    from nmoe_core.config.run import Run
    from nmoe_core.tasks.backbone import load_backbone

    text = f'root = "out"\n[backbone]\ncheckpoint = "{tiny_dir}"\nexperts = "packed"\n'
    (tmp_path / "run.toml").write_text(text)
    model = load_backbone(Run(tmp_path / "run.toml"))
    assert any(isinstance(part, PackedExperts) for part in model.modules())
