"""Damaged files of heads, checkpoints and slices: one clear error, or success."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.files.sealed import sealed
from nmoe_core.base.errors import FormatError, HeadError, NmoeError
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine import ModelConfig, Transformer, make_tiny_checkpoint
from nmoe_core.engine.weights.checkpoint import open_checkpoint
from nmoe_core.heads.convert import import_pickle
from nmoe_core.heads.files import load_heads, read_header, save_head
from nmoe_core.heads.models import JudgeArch, ProbeArch, build_head
from nmoe_core.labels.slices import read_slice

NUM_MUTATIONS = 300
# Values that JSON can hold and no field here means.
ODD: list[Any] = [None, True, -1, 0, 1.5, 10**9, 10**30, "", "x", [], [[]], {}, {"a": {}}, [None]]


def _mutated(payload: bytes, rng: random.Random) -> bytes:
    """The bytes with one to three of them changed, left out or repeated."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(data))
        kind = rng.randrange(3)
        if kind == 0:
            data[i] = rng.randrange(256)
        elif kind == 1:
            del data[i]
        else:
            data[i:i] = data[i : i + rng.randint(1, 8)]
    return bytes(data)


def _with_odd_values(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one of its parts replaced or gone."""
    copied = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        keys = (
            part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        )
        for key in keys:
            places.append((part, key))
            walk(part[key])

    walk(copied)
    holder, key = rng.choice(places)
    if rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice(ODD)
    return copied


def _open(path: Path) -> None:
    with open_checkpoint(path):
        pass


def _only_clear_errors(work: Callable[[], object]) -> bool:
    """Whether it succeeded; another error than the project's own fails the test."""
    found = ""
    try:
        work()
    except NmoeError as error:
        found = error.line()
    assert "\n" not in found
    return not found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged") / "checkpoint"
    sizes = {"num_layers": 2, "num_experts": 2, "hidden_size": 32, "intermediate_size": 32}
    return make_tiny_checkpoint(path, vocab_size=64, **sizes)


@pytest.fixture(scope="module")
def backbone(checkpoint: Path) -> Transformer:
    return Transformer.from_checkpoint(checkpoint)


@pytest.fixture
def heads_dir(tmp_path: Path, backbone: Transformer) -> Path:
    config = backbone.config
    shared = {
        "max_ctx": 16,
        "backbone": {"digest": backbone.digest, "num_hidden_layers": 2, "hidden_size": 32},
        "scorer_model": "m",
        "metrics": {"spearman": 0.5},
    }
    for name, arch, tap in (
        (PROBE_NAME, ProbeArch(config.hidden_size), 1),
        (JUDGE_NAME, JudgeArch(config.hidden_size, 16, 2, 16), 2),
    ):
        contents = torch.arange(5).numpy()
        save_head(tmp_path / name, build_head(arch), {"tap": tap, **shared}, contents)
    return tmp_path


def test_a_damaged_config_json_is_one_clear_error(checkpoint: Path, tmp_path: Path) -> None:
    path, rng = tmp_path / "checkpoint" / "config.json", random.Random(1)
    path.parent.mkdir()
    for file in checkpoint.iterdir():
        (path.parent / file.name).symlink_to(file)
    path.unlink()
    payload = (checkpoint / "config.json").read_bytes()
    fine = 0
    for i in range(NUM_MUTATIONS):
        odd = json.dumps(_with_odd_values(json.loads(payload), rng)).encode()
        path.write_bytes(_mutated(payload, rng) if i % 2 else odd)
        fine += _only_clear_errors(lambda: _open(path.parent))
    assert 0 < fine < NUM_MUTATIONS


@pytest.mark.parametrize("form", ["hf", "original"])
def test_an_odd_value_in_either_form_of_the_config_is_one_clear_error(
    backbone: Transformer, form: str
) -> None:
    config = backbone.config
    raw = config.to_hf()
    if form == "original":
        names = ("num_hidden_layers", "num_experts", "experts_per_token", "vocab_size", "head_dim")
        more = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        rest = ("sliding_window", "swiglu_limit", "rope_theta")
        raw = {name: getattr(config, name) for name in (*names, *more, *rest)}
        raw |= {"initial_context_length": 4096, "rope_scaling_factor": 32.0}
        raw |= {"rope_ntk_alpha": 1, "rope_ntk_beta": 32}
    assert ModelConfig.from_dict(raw)
    rng = random.Random(3)
    for _ in range(10 * NUM_MUTATIONS):
        _only_clear_errors(partial(ModelConfig.from_dict, _with_odd_values(raw, rng)))


@pytest.mark.parametrize("name", [PROBE_NAME, JUDGE_NAME])
def test_a_damaged_head_file_is_one_clear_error(
    heads_dir: Path, backbone: Transformer, name: str
) -> None:
    assert load_heads(heads_dir, backbone, 16).probe_tap == 1
    path, rng = heads_dir / name, random.Random(2)
    payload = path.read_bytes()
    (size,) = struct.unpack("<Q", payload[:8])
    outer, tensors = json.loads(payload[8 : 8 + size]), payload[8 + size :]
    inner = json.loads(outer["__metadata__"]["nmoe"])
    fine = 0
    for i in range(NUM_MUTATIONS):
        if i % 3 == 0:
            changed = _mutated(payload[8 : 8 + size], rng)
        elif i % 3 == 1:
            text = json.dumps(_with_odd_values(inner, rng))
            changed = json.dumps(outer | {"__metadata__": {"nmoe": text}}).encode()
        else:
            text = _mutated(json.dumps(inner).encode(), rng).decode(errors="replace")
            changed = json.dumps(outer | {"__metadata__": {"nmoe": text}}).encode()
        path.write_bytes(struct.pack("<Q", len(changed)) + changed + tensors)
        fine += _only_clear_errors(lambda: load_heads(heads_dir, backbone, 16))
    assert 0 < fine < NUM_MUTATIONS


@pytest.mark.parametrize(
    "change",
    [
        {"arch": {"kind": "probe", "hidden_size": 10**12}},
        {"arch": {"kind": "probe", "hidden_size": 32, "is_normalised": "yes"}},
        {"arch": {"kind": "judge", "hidden_size": 32, "mid_dim": 16, "num_heads": 0}},
        {"arch": [1]},
        {"backbone": "text"},
        {"tap": 3},
        {"tap": "1"},
    ],
)
def test_a_head_whose_header_fits_no_head_is_refused_as_such(
    heads_dir: Path, backbone: Transformer, change: dict[str, Any]
) -> None:
    header = read_header(heads_dir / PROBE_NAME)
    head = build_head(ProbeArch(32))
    arch = change.pop("arch", None)
    save_head(heads_dir / PROBE_NAME, head, {**header, **change})
    if arch is not None:
        payload = (heads_dir / PROBE_NAME).read_bytes()
        (size,) = struct.unpack("<Q", payload[:8])
        outer = json.loads(payload[8 : 8 + size])
        inner = sealed(json.loads(outer["__metadata__"]["nmoe"]) | {"arch": arch})
        changed = json.dumps(outer | {"__metadata__": {"nmoe": json.dumps(inner)}}).encode()
        (heads_dir / PROBE_NAME).write_bytes(
            struct.pack("<Q", len(changed)) + changed + payload[8 + size :]
        )
    with pytest.raises(HeadError) as caught:
        load_heads(heads_dir, backbone, 16)
    assert caught.value.code in ("E-HEAD-FORMAT", "E-HEAD-BACKBONE")


@pytest.mark.parametrize(
    "value",
    [
        {"gate.weight": torch.zeros(3), "gate.bias": torch.zeros(1)},
        {"gate.weight": torch.zeros(()), "gate.bias": torch.zeros(1)},
        {"proj.weight": torch.zeros(5), "proj.bias": torch.zeros(5)},
        {"q0": torch.zeros(32), "proj.weight": torch.zeros(16, 32)},
        {"rubric_head.weight": torch.zeros(5, 16)},
        {1: torch.zeros(2)},
        {"proj": {2: torch.zeros(2)}},
        {"proj.weight": torch.zeros(0, 32), "proj.bias": torch.zeros(0), "q0": torch.zeros(32)},
        [torch.zeros(2)],
        5,
    ],
)
def test_a_pickle_of_other_tensors_is_refused(
    tmp_path: Path, backbone: Transformer, value: object
) -> None:
    torch.save(value, tmp_path / "head.pt")
    with pytest.raises(HeadError) as caught:
        import_pickle(tmp_path / "head.pt", tmp_path, backbone, 16)
    assert caught.value.code == "E-HEAD-FORMAT"


def test_a_damaged_pickle_of_a_head_is_refused(tmp_path: Path, backbone: Transformer) -> None:
    path, rng = tmp_path / "head.pt", random.Random(4)
    state = {"proj.weight": torch.zeros(5, 32), "proj.bias": torch.zeros(5)}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    payload = path.read_bytes()
    for _ in range(NUM_MUTATIONS):
        path.write_bytes(_mutated(payload, rng))
        _only_clear_errors(lambda: import_pickle(path, tmp_path / "out", backbone, 16))


def test_a_judge_s_number_of_attention_heads_must_divide_its_width(
    tmp_path: Path, backbone: Transformer
) -> None:
    torch.save(build_head(JudgeArch(32, 16, 2, 16)).state_dict(), tmp_path / "head.pt")
    for num_heads in (0, -1, 3):
        with pytest.raises(HeadError):
            import_pickle(tmp_path / "head.pt", tmp_path, backbone, 16, num_heads)
    assert import_pickle(tmp_path / "head.pt", tmp_path, backbone, 16, 2).is_file()


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"doc_id": "x", "source": "s"}', '{"doc_id": 5, "source": []}', "5", "[1]"],
)
def test_a_line_that_is_no_row_of_a_slice_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "slice").write_text(line + "\n")
    with pytest.raises(FormatError) as caught:
        read_slice(tmp_path / "slice")
    assert caught.value.code == "E-DOCID"
    assert "slice:1" in caught.value.line()
