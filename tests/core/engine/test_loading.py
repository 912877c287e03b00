"""Loading: what is costly to read is read once while it is unchanged, and memory stays low."""

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from nmoe_core.base import fingerprint as digests
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.run import Run
from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.engine import checkpoint_digest, make_tiny_checkpoint
from nmoe_core.engine.weights.layout import HUGGING_FACE, stored_tensors
from nmoe_core.tasks import curate
from nmoe_core.tasks.backbone import load_backbone
from tests.core.engine.builders import SMALL
from tests.project import output_of

# Loads once so that every code path and library is warm, then again under the high-water mark.
SCRIPT = """
import gc, json, sys, torch
from nmoe_core.engine import Transformer

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

torch.set_num_threads(1)
small, path, dtype, backend = sys.argv[1:]
settings = {"dtype": getattr(torch, dtype), "moe_backend": backend}
load = lambda path: Transformer.from_checkpoint(path, **settings)
load(small)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
model = load(path)
resident = sum(p.nbytes for p in model.parameters())
print(json.dumps({"peak": status("VmHWM") - before, "resident": resident}))
"""


@pytest.fixture(scope="module")
def large_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Over 90 MB: four blocks of 32 experts, whose values do not matter."""
    config = replace(
        SMALL,
        num_hidden_layers=4,
        num_experts=32,
        vocab_size=2000,
        hidden_size=640,
        intermediate_size=640,
        layer_types=("sliding_attention", "full_attention") * 2,
        quant_method="mxfp4",
    )
    directory = tmp_path_factory.mktemp("large")
    types = {"BF16": torch.bfloat16, "U8": torch.uint8}
    tensors = {
        name: torch.full(spec.shape, 100, dtype=types[spec.dtypes[0]])
        for name, spec in stored_tensors(config, HUGGING_FACE, ()).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return directory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the mark is Linux's")
@pytest.mark.parametrize(
    ("dtype", "experts"),
    [
        ("bfloat16", "packed"),
        *(
            pytest.param(dtype, "decoded", marks=pytest.mark.slow)
            for dtype in ("bfloat16", "float32")
        ),
    ],
)
def test_loading_peaks_below_a_fifth_above_the_model(
    large_dir: Path, tiny_dir: Path, dtype: str, experts: str
):
    command = (sys.executable, "-c", SCRIPT, tiny_dir, large_dir, dtype, experts)
    seen = json.loads(output_of(*command))
    assert seen["resident"] > 90e6
    assert seen["peak"] <= 1.2 * seen["resident"]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that was written a while ago."""
    make_tiny_checkpoint(tmp_path / "c", vocab_size=64, num_experts=2, hidden_size=32, head_dim=8)
    later = time.time_ns() + 10**11
    monkeypatch.setattr(digests, "time", SimpleNamespace(time_ns=lambda: later))
    return tmp_path / "c"


def test_a_checkpoint_is_hashed_once_for_any_number_of_shards(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_file = Mock(wraps=digests.sha256_file)
    monkeypatch.setattr(digests, "sha256_file", hash_file)
    run = Run(None, {"backbone.checkpoint": str(checkpoint)})
    models = [load_backbone(run) for _ in range(8)]
    hashed = [call.args[0] for call in hash_file.call_args_list]
    files = [path for path in checkpoint.rglob("*") if path.suffix in (".json", ".safetensors")]
    assert set(hashed) <= set(files)
    assert len(hashed) == len(set(hashed)) >= 2, "config.json and the weights, once each"
    assert len({id(model) for model in models}) == 1
    before, (weights, *_) = checkpoint_digest(checkpoint), checkpoint.rglob("*.safetensors")
    with open(weights, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xaa")
    assert checkpoint_digest(checkpoint) != before


def test_the_embedding_table_is_read_once_for_any_number_of_shards(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Mock(wraps=EmbeddingTable.open)
    monkeypatch.setattr(EmbeddingTable, "open", opened)
    monkeypatch.setattr("nmoe_core.curate.topics.model.load_topic_model", lambda path: None)
    tree = SimpleNamespace(checkpoint=checkpoint, topic_model=checkpoint)
    curation = SimpleNamespace(topics_from="backbone")
    config = SimpleNamespace(curation=curation)
    run: Any = SimpleNamespace(tree=tree, paths=tree, config=config, tokenizer=TokenizerSettings())
    for _ in range(8):
        assert curate.assign_shard_topics(run, "web", []) == {}
    assert opened.call_count == 1
    tree.checkpoint = shutil.copytree(checkpoint, checkpoint.with_name("other"))
    curate.assign_shard_topics(run, "web", [])
    assert opened.call_count == 2
