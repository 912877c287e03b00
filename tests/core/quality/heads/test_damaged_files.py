"""Damaged files of heads and checkpoints: one clear error, or success."""

import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save, save_file

from loader.files.checksummed_json import sealed
from nmoe_core.base.errors import NmoeError
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine import ModelConfig, Transformer, make_tiny_checkpoint
from nmoe_core.engine.weights.checkpoint import open_checkpoint
from nmoe_core.quality.heads.convert import import_pickle
from nmoe_core.quality.heads.head_files import HEADER_KEY, load_head, read_header
from nmoe_core.quality.heads.models import Judge, Probe
from nmoe_core.quality.heads.scoring import load_heads
from nmoe_core.quality.heads.shapes import JudgeArch, ProbeArch
from tests.conftest import Mutations
from tests.core.engine.test_config import ORIGINAL_20B
from tests.core.small_gradings import MAX_CTX, write_head
from tests.refusals import refused

NUM_MUTATIONS = 300


def _only_clear_errors(work: Callable[[], object]) -> bool:
    """Whether it succeeded; another error than the project's own fails the test."""
    found = ""
    try:
        work()
    except NmoeError as error:
        found = error.line()
    assert "\n" not in found
    return not found


@pytest.fixture
def heads_dir(tmp_path: Path, backbone: Transformer) -> Path:
    for tap, head in enumerate((Probe(ProbeArch(32)), Judge(JudgeArch(32, 16, 2, 16))), 1):
        write_head(tmp_path, head, backbone, np.arange(5), tap=tap, metrics={"spearman": 0.5})
    return tmp_path


def test_a_damaged_config_of_a_checkpoint_is_one_clear_error(
    mutations: Mutations, tmp_path: Path
) -> None:
    sizes = {"num_layers": 2, "num_experts": 2, "hidden_size": 32, "intermediate_size": 32}
    path = make_tiny_checkpoint(tmp_path / "tiny", vocab_size=64, **sizes) / "config.json"
    payload = path.read_bytes()

    def opened() -> None:
        with open_checkpoint(path.parent):
            pass

    fine = 0
    for i in range(NUM_MUTATIONS):
        change = mutations.any_bytes if i % 2 else mutations.any_value
        path.write_bytes(change(payload))
        fine += _only_clear_errors(opened)
    assert 0 < fine < NUM_MUTATIONS
    for form in (json.loads(payload), ORIGINAL_20B):
        for _ in range(10 * NUM_MUTATIONS):
            odd = json.loads(mutations.any_value(json.dumps(form).encode()))
            _only_clear_errors(partial(ModelConfig.from_dict, odd))


@pytest.mark.parametrize("name", [PROBE_NAME, JUDGE_NAME])
def test_a_damaged_head_file_is_one_clear_error(
    mutations: Mutations, heads_dir: Path, backbone: Transformer, name: str
) -> None:
    assert load_heads(heads_dir, backbone, MAX_CTX).probe_taps == (1,)
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
        fine += _only_clear_errors(lambda: load_heads(heads_dir, backbone, MAX_CTX))
    assert 0 < fine < NUM_MUTATIONS


class Code:
    """What a pickle reader would run."""

    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize(
    "change",
    [
        {"arch": {"kind": "probe", "hidden_size": 10**12}},
        {"arch": {"kind": "probe", "hidden_size": 32, "is_normalised": "yes"}},
        {"arch": {"kind": "judge", "hidden_size": 32, "mid_dim": 16, "num_heads": 0}},
        {"arch": {"kind": "teacher", "hidden_size": 32}},
        {"arch": [1]},
        {"backbone": "text"},
        {"tap": 9},
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
        load_heads(heads_dir, backbone, MAX_CTX)


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
        {"proj.weight": torch.zeros(5, 64), "proj.bias": torch.zeros(5)},
        {"proj.weight": Code()},
        {"epoch": 3, "state": {}},
        [torch.zeros(2)],
        5,
    ],
)
def test_a_pickle_of_other_tensors_or_of_code_is_refused(
    tmp_path: Path, backbone: Transformer, value: object
) -> None:
    torch.save(value, tmp_path / "head.pt")
    with refused("E-HEAD-FORMAT"):
        import_pickle(tmp_path / "head.pt", tmp_path / "heads", backbone, MAX_CTX)
    assert not (tmp_path / "heads").exists()


def test_a_pickle_is_refused_before_its_compressed_members_are_unpacked(
    tmp_path: Path, backbone: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"proj.weight": torch.zeros(5, 4096)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "head.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert (tmp_path / "head.pt").stat().st_size < 4096
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpacked"))
    with refused("E-HEAD-FORMAT", "members of [0-9]+ bytes in"):
        import_pickle(tmp_path / "head.pt", tmp_path / "heads", backbone, MAX_CTX)


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
        _only_clear_errors(lambda: import_pickle(path, tmp_path / "out", backbone, MAX_CTX))


def test_a_head_whose_header_or_weights_were_edited_is_refused(
    heads_dir: Path, backbone: Transformer
) -> None:
    path = heads_dir / PROBE_NAME
    header, tensors = read_header(path), load(path.read_bytes())
    hashes = {key: header.pop(key) for key in ("content_hash", "tensors_sha256")}
    moved = torch.nextafter(tensors["proj.weight"], torch.tensor(9.0))
    for weights, text in (
        (tensors | {"proj.weight": moved}, header | hashes),
        (tensors, header | hashes | {"scorer_model": "other"}),
        (tensors, header),
    ):
        save_file(weights, path, {HEADER_KEY: json.dumps(text)})
        with refused("E-HEAD-CHANGED"):
            load_head(path, backbone, MAX_CTX)
    save_file(tensors, path, {HEADER_KEY: json.dumps(header | {"format": "hydra-head/1"})})
    load_head(path, backbone, MAX_CTX)
