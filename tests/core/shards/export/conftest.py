"""A source to export, and its documents."""

from pathlib import Path

import pytest

from loader.files.format import load_manifest
from nmoe_core import JSONLSource, PrepConfig, PrepPipeline
from nmoe_core.shards.documents import open_entry
from tests.project import json_lines

Documents = list[tuple[str, list[int]]]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of 3 shards and 4 files, one document longer than 65,535 tokens."""
    root = tmp_path_factory.mktemp("export")
    texts = [f"document {i} " + "word " * (40 * (i % 9) + 4) for i in range(60)] + ["a b " * 40_000]
    rows = ({"id": f"row,{i}\u00e9", "text": text} for i, text in enumerate(texts))
    (root / "in.jsonl").write_text(json_lines(rows))
    config = PrepConfig(
        output_dir=root / "web", dataset_name="web", num_shards=3, tokens_per_shard=80_500
    )
    return PrepPipeline(JSONLSource(root / "in.jsonl"), config).run().path


@pytest.fixture(scope="module")
def documents(manifest: Path) -> Documents:
    loaded = load_manifest(manifest)
    files = [open_entry(manifest.parent, loaded, entry) for entry in loaded.shards]
    assert len(files) > 3
    return [(ids[0], tokens.tolist()) for file in files for _, tokens, ids in file.documents()]
