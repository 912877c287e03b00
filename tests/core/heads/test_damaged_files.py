"""Damaged files of heads, checkpoints and slices: one clear error, or success."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save, save_file

from loader.files.sealed import sealed
from nmoe_core.base.errors import HeadError, NmoeError
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine import ModelConfig, Transformer, make_tiny_checkpoint
from nmoe_core.engine.weights.checkpoint import open_checkpoint
from nmoe_core.heads.convert import import_pickle
from nmoe_core.heads.files import HEADER_KEY, load_head, read_header, save_head
from nmoe_core.heads.models import Judge, JudgeArch, Probe, ProbeArch
from nmoe_core.heads.scoring import load_heads
from nmoe_core.labels.slices import read_slice
from tests.conftest import Mutations
from tests.refusals import refused

NUM_MUTATIONS = 300


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
    shared = {
        "max_ctx": 16,
        "backbone": {"digest": backbone.digest, "num_hidden_layers": 2, "hidden_size": 32},
        "scorer_model": "m",
        "metrics": {"spearman": 0.5},
    }
    heads = ((PROBE_NAME, Probe(ProbeArch(32))), (JUDGE_NAME, Judge(JudgeArch(32, 16, 2, 16))))
    for tap, (name, head) in enumerate(heads, 1):
        save_head(tmp_path / name, head, {"tap": tap, **shared}, torch.arange(5).numpy())
    return tmp_path


def test_a_damaged_config_json_is_one_clear_error(
    mutations: Mutations, checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint" / "config.json"
    path.parent.mkdir()
    for file in checkpoint.iterdir():
        (path.parent / file.name).symlink_to(file)
    path.unlink()
    payload = (checkpoint / "config.json").read_bytes()
    fine = 0
    for i in range(NUM_MUTATIONS):
        change = mutations.any_bytes if i % 2 else mutations.any_value
        path.write_bytes(change(payload))
        fine += _only_clear_errors(lambda: _open(path.parent))
    assert 0 < fine < NUM_MUTATIONS


@pytest.mark.parametrize("form", ["hf", "original"])
def test_an_odd_value_in_either_form_of_the_config_is_one_clear_error(
    mutations: Mutations, backbone: Transformer, form: str
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
    for _ in range(10 * NUM_MUTATIONS):
        odd = json.loads(mutations.any_value(json.dumps(raw).encode()))
        _only_clear_errors(partial(ModelConfig.from_dict, odd))


@pytest.mark.parametrize("name", [PROBE_NAME, JUDGE_NAME])
def test_a_damaged_head_file_is_one_clear_error(
    mutations: Mutations, heads_dir: Path, backbone: Transformer, name: str
) -> None:
    assert load_heads(heads_dir, backbone, 16).probe_tap == 1
    path = heads_dir / name
    tensors = load(payload := path.read_bytes())
    header = json.dumps(read_header(path)).encode()
    start = len(payload) - sum(value.nbytes for value in tensors.values())
    fine = 0
    for i in range(NUM_MUTATIONS):
        if i % 3 == 0:
            path.write_bytes(payload[:8] + mutations.any_bytes(payload[8:start]) + payload[start:])
        else:
            changed = (mutations.any_value if i % 3 == 1 else mutations.any_bytes)(header)
            path.write_bytes(save(tensors, {HEADER_KEY: changed.decode(errors="replace")}))
        fine += _only_clear_errors(lambda: load_heads(heads_dir, backbone, 16))
    assert 0 < fine < NUM_MUTATIONS


@pytest.mark.parametrize(
    "change",
    [
        {"arch": {"kind": "probe", "hidden_size": 10**12}},
        {"arch": {"kind": "probe", "hidden_size": 32, "is_normalised": "yes"}},
        {"arch": {"kind": "judge", "hidden_size": 32, "mid_dim": 16, "num_heads": 0}},
        {"arch": {"kind": "teacher", "hidden_size": 32}},
        {"arch": [1]},
        {"backbone": "text"},
        {"tap": 3},
        {"tap": "1"},
    ],
)
def test_a_head_whose_header_fits_no_head_is_refused_as_such(
    heads_dir: Path, backbone: Transformer, change: dict[str, Any]
) -> None:
    path = heads_dir / PROBE_NAME
    header = json.dumps(sealed(read_header(path) | change))
    save_file(load(path.read_bytes()), path, {HEADER_KEY: header})
    what = "no such block" if "tap" in change else None
    with refused("E-HEAD-BACKBONE" if "backbone" in change else "E-HEAD-FORMAT", what):
        load_heads(heads_dir, backbone, 16)


@pytest.mark.parametrize(
    "value",
    [
        {"gate.weight": torch.zeros(3), "gate.bias": torch.zeros(1)},
        {"gate.weight": torch.zeros(()), "gate.bias": torch.zeros(1)},
        {"gate.weight": torch.zeros(2, 32), "gate.bias": torch.zeros(2)},
        {"gate.weight": torch.zeros(1, 32)},
        {"proj.weight": torch.zeros(5, 64)},
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
    with refused("E-HEAD-FORMAT"):
        import_pickle(tmp_path / "head.pt", tmp_path, backbone, 16)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_pickle_of_a_head_is_refused(
    mutations: Mutations, tmp_path: Path, backbone: Transformer
) -> None:
    path = tmp_path / "head.pt"
    state = {"proj.weight": torch.zeros(5, 32), "proj.bias": torch.zeros(5)}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    payload = path.read_bytes()
    for _ in range(NUM_MUTATIONS):
        path.write_bytes(mutations.any_bytes(payload))
        _only_clear_errors(lambda: import_pickle(path, tmp_path / "out", backbone, 16))


def test_a_judge_s_number_of_attention_heads_must_divide_its_width(
    tmp_path: Path, backbone: Transformer
) -> None:
    torch.save(Judge(JudgeArch(32, 16, 2, 16)).state_dict(), tmp_path / "head.pt")
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
    with refused("E-DOCID", "slice:1"):
        read_slice(tmp_path / "slice")


def test_a_head_whose_header_or_weights_were_edited_is_refused(
    heads_dir: Path, backbone: Transformer
) -> None:
    path = heads_dir / PROBE_NAME
    header, tensors = read_header(path), load(path.read_bytes())
    moved = torch.nextafter(tensors["proj.weight"], torch.tensor(9.0))
    edited = header | {"scorer_model": "other"}
    bare = {k: v for k, v in header.items() if k != "content_hash"}
    for weights, text in (
        (tensors | {"proj.weight": moved}, header),
        (tensors, edited),
        (tensors, bare),
    ):
        save_file(weights, path, {HEADER_KEY: json.dumps(text)})
        with refused("E-HEAD-CHANGED"):
            load_head(path, backbone, 16)
    new = ("content_hash", "tensors_sha256")
    old = {k: v for k, v in header.items() if k not in new} | {"format": "hydra-head/1"}
    save_file(tensors, path, {HEADER_KEY: json.dumps(old)})
    load_head(path, backbone, 16)
