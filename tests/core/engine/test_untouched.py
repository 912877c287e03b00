"""What is dear to read is read once in a process while its files are untouched."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from nmoe_core.base import fingerprint as digests
from nmoe_core.engine import checkpoint_digest, make_tiny_checkpoint


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
    from nmoe_core.config.run import Run
    from nmoe_core.tasks.backbone import load_backbone

    hashed: list[Path] = []
    whole = digests.sha256_file
    monkeypatch.setattr(digests, "sha256_file", lambda p: (hashed.append(p), whole(p))[1])
    run = Run(None, {"backbone.checkpoint": str(checkpoint)})
    models = [load_backbone(run) for _ in range(8)]
    files = [path for path in checkpoint.rglob("*") if path.suffix in (".json", ".safetensors")]
    assert set(hashed) <= set(files)
    assert len(hashed) == len(set(hashed)) >= 2, "config.json and the weights, once each"
    assert len({id(model) for model in models}) == 1


def test_weights_that_change_in_place_are_hashed_again(checkpoint: Path) -> None:
    before = checkpoint_digest(checkpoint)
    weights, *_ = checkpoint.rglob("*.safetensors")
    payload = bytearray(weights.read_bytes())
    payload[-1] ^= 1
    with open(weights, "r+b") as file:
        file.write(payload)
    assert checkpoint_digest(checkpoint) != before


def test_the_embedding_table_is_read_once_for_any_number_of_shards(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmoe_core.curate.topics.embed import EmbeddingTable
    from nmoe_core.tasks import curate

    opened: list[Any] = []
    table = EmbeddingTable.open

    def counted(path: Path) -> EmbeddingTable:
        opened.append(path)
        return table(path)

    monkeypatch.setattr(EmbeddingTable, "open", counted)
    monkeypatch.setattr("nmoe_core.curate.topics.model.load_topic_model", lambda path: None)
    tree = SimpleNamespace(checkpoint=checkpoint, topic_model=checkpoint)
    run: Any = SimpleNamespace(tree=tree, paths=tree)
    for _ in range(8):
        assert curate.assign_shard_topics(run, "web", []) == {}
    assert len(opened) == 1
    other = checkpoint.with_name("other")
    shutil.copytree(checkpoint, other)
    tree.checkpoint = other
    curate.assign_shard_topics(run, "web", [])
    assert len(opened) == 2
