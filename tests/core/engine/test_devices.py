"""Shards of the items, a process for each, results in order and the same at any number of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.engine import Transformer
from nmoe_core.engine.devices import ModelSource, Shard, map_devices

WORK = """
import torch
from nmoe_core.engine import BatchedGenerator
from tests.core.engine.builders import make_generator

def features(model, documents):
    found = []
    for document in documents:
        ids = torch.tensor([document])
        _, hidden = model(ids, return_hidden_states=(3,), no_logits=True)
        found.append(hidden[3][0].mean(0).tolist())
    return found

def completions(model, prompts):
    generator = make_generator(model, max_seq_len=64, max_batch=3)
    return generator.generate_batch(prompts, max_tokens=6, temperature=0.0)

def too_few(model, documents):
    return documents[1:]
"""
DOCUMENTS = [[(7 * i + j) % 300 for j in range(5 + 3 * i)] for i in range(7)]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that worker processes can import."""
    (tmp_path / "shard_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("shard_work")


@pytest.mark.parametrize("name", ["features", "completions"])
def test_results_are_the_same_on_any_number_of_devices(
    tiny_dir: Path, tiny_model: Transformer, work: ModuleType, name: str
):
    task, source = getattr(work, name), ModelSource(str(tiny_dir))
    alone = task(tiny_model, DOCUMENTS)
    assert len(alone) == len(DOCUMENTS)
    assert map_devices(task, DOCUMENTS, source, 3, in_processes=False) == alone
    assert map_devices(task, DOCUMENTS, source, 2) == alone
    assert map_devices(task, DOCUMENTS[:1], source, 3, in_processes=False) == alone[:1]


def test_a_process_by_hand_does_the_same_part(tiny_model: Transformer, work: ModuleType):
    parts = [Shard.parse(f"{i}/3").of(DOCUMENTS) for i in range(3)]
    assert [len(part) for part in parts] == [3, 2, 2]
    alone = work.features(tiny_model, DOCUMENTS)
    assert [work.features(tiny_model, part) for part in parts] == [alone[i::3] for i in range(3)]


def test_a_shard_takes_the_accelerator_of_its_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    devices = [str(Shard(i, 6).device("cuda")) for i in range(6)]
    assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1"]
    assert str(Shard(3, 6).device("cpu")) == "cpu"
    assert str(Shard(3, 6).device("cuda:1")) == "cuda:1"


@pytest.mark.parametrize("text", ["", "3", "2/2", "-1/2", "1/0", "a/b", "1/2/3", "0/ 2"])
def test_what_is_no_shard_is_refused(text: str):
    with pytest.raises(ConfigError, match="not a shard") as caught:
        Shard.parse(text)
    assert caught.value.code == "E-CONFIG-SHARD"


def test_work_that_loses_an_item_is_refused(tiny_dir: Path, work: ModuleType):
    with pytest.raises(NmoeError, match="one result for each") as caught:
        map_devices(work.too_few, DOCUMENTS, ModelSource(str(tiny_dir)), 2, in_processes=False)
    assert caught.value.code == "E-WORKER-RESULTS"
