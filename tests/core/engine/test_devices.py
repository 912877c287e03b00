"""Where a model is loaded, and shards of the items: a process each, results in order."""

import itertools
from pathlib import Path

import pytest
import torch

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.quality import BackboneTable, EngineOracleTable
from nmoe_core.config.run import Run
from nmoe_core.engine import ModelConfig, Transformer, backend
from nmoe_core.engine.devices import Shard
from nmoe_core.engine.weights.checkpoint import Checkpoint, open_checkpoint
from nmoe_core.engine.weights.mxfp4 import PackedExperts
from nmoe_core.tasks.backbone import load_backbone
from tests.refusals import refused, refused_line

GB = 10**9


def _published(layers: int, experts: int) -> ModelConfig:
    return ModelConfig(
        *(layers, experts, 4, 201_088, 2880, 2880, 64, 64, 8, 128),
        layer_types=("sliding_attention", "full_attention") * (layers // 2),
        rope_theta=150_000.0,
        rope_scaling=None,
        max_position_embeddings=131_072,
    )


NO_DEVICES = ("cuda", "cuda:1", "foo", "", "meta", "cuda:x", "mps")


@pytest.mark.parametrize(
    ("option", "value", "num_gpus", "named"),
    [
        *[("--device", device, 0, "E-CONFIG-DEVICE") for device in NO_DEVICES],
        ("--device", "cuda:2", 2, "2 cuda"),
        *[("--threads", number, 0, "--threads") for number in ("0", "-1")],
    ],
)
def test_a_device_or_a_number_of_threads_that_there_is_not_is_one_line(
    tmp_path: Path, tiny_dir: Path, capsys, monkeypatch, option, value, num_gpus, named
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": "a", "tokens": [1]}\n')
    command = ("generate", str(source), "-o", str(out), "--checkpoint", str(tiny_dir))
    assert named in refused_line(capsys, *command, option, value)
    assert not out.exists()
    if num_gpus:
        assert backend.usable_device("cuda:1") == torch.device("cuda:1")


def test_weights_are_estimated_as_they_will_lie_in_memory(tiny_dir: Path) -> None:
    large, small = _published(36, 128), _published(24, 32)
    found = [
        backend.weight_bytes(large, torch.bfloat16, "decoded") / GB,
        backend.weight_bytes(large, torch.bfloat16, "packed") / GB,
        backend.weight_bytes(small, torch.float32, "decoded") / GB,
    ]
    assert found == pytest.approx([233.7, 65.2, 83.7], rel=0.01)
    for dtype, form in itertools.product((torch.float32, torch.bfloat16), ("decoded", "packed")):
        model = Transformer.from_checkpoint(tiny_dir, dtype=dtype, moe_backend=form)
        real = sum(p.nbytes for p in model.parameters())
        assert backend.weight_bytes(model.config, dtype, form) == pytest.approx(real, rel=0.02)


def test_a_model_that_cannot_fit_is_refused_before_a_weight_is_read_and_what_fits_is_named(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpoint(tiny_dir) as checkpoint:
        packed = backend.weight_bytes(checkpoint.config, torch.bfloat16, "packed")
    room = packed + 1000
    monkeypatch.setattr(backend, "room_bytes", lambda device: room)
    assert Transformer.from_checkpoint(tiny_dir, dtype=torch.bfloat16, moe_backend="packed")
    monkeypatch.setattr(Checkpoint, "tables", None)
    fitting = 'moe_backend = "packed", dtype = "bfloat16"'
    with refused("E-CONFIG-MEMORY", "do not fit", naming=[fitting]):
        Transformer.from_checkpoint(tiny_dir)
    room = 1
    with refused("E-CONFIG-MEMORY", "larger") as caught:
        Transformer.from_checkpoint(tiny_dir)
    assert "packed" not in str(caught.value)


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
    assert BackboneTable().moe_backend == EngineOracleTable().moe_backend == "auto"


def test_no_form_of_weights_but_those_that_there_are_is_taken(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="auto, decoded, packed, grouped"):
        Transformer.from_checkpoint(tiny_dir, moe_backend="halved")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="float16"):
        Transformer.from_checkpoint(tiny_dir, dtype=torch.float16)


def test_grading_loads_the_experts_in_the_form_that_its_run_asks_for(
    tiny_dir: Path, tmp_path: Path
) -> None:
    text = f'root = "out"\n[backbone]\ncheckpoint = "{tiny_dir}"\nmoe_backend = "packed"\n'
    (tmp_path / "run.toml").write_text(text)
    model = load_backbone(Run(tmp_path / "run.toml"))
    assert any(isinstance(part, PackedExperts) for part in model.modules())


def test_a_shard_takes_every_nth_item_and_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch):
    items = [list(Shard.parse(f"{i}/3").of(range(7))) for i in range(3)]
    assert items == [[0, 3, 6], [1, 4], [2, 5]]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    devices = [str(Shard(i, 6).device("cuda")) for i in range(6)]
    assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1"]
    assert str(Shard(3, 6).device("cpu")) == "cpu"
    assert str(Shard(3, 6).device("cuda:1")) == "cuda:1"
    with pytest.raises(ConfigError):
        Shard(0, 1).device("foo")


@pytest.mark.parametrize("text", ["", "3", "2/2", "-1/2", "1/0", "a/b", "1/2/3", "0/ 2"])
def test_what_is_no_shard_is_refused(text: str):
    with refused("E-CONFIG-SHARD", "invalid shard"):
        Shard.parse(text)
