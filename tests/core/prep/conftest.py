"""A small source of real-looking documents, and ways to read shards without the package."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nmoe_core.prep.run import PrepSettings
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import Reading
from nmoe_core.sources.storage import SourceFile
from tests.core.prep.web import Web
from tests.project import json_lines

WORDS = [
    *("the", "of", "shard", "token", "model", "Straße", "東京", "data", "loss", "step"),
    *("batch", "of", "to", "in", "code\n\tif", "x:", "y"),
]


@pytest.fixture
def documents() -> list[dict[str, str]]:
    rng = random.Random(7)
    return [
        {"id": f"doc-{i}", "text": " ".join(rng.choices(WORDS, k=rng.randrange(12, 200)))}
        for i in range(300)
    ]


@pytest.fixture
def source(tmp_path: Path, documents: list[dict[str, str]]) -> JsonlSource:
    path = tmp_path / "input" / "part.jsonl"
    path.parent.mkdir()
    path.write_text(json_lines(documents), encoding="utf-8")
    return JsonlSource(Reading("web"), [SourceFile(path, "part.jsonl")])


@pytest.fixture
def web(source: JsonlSource, tmp_path: Path) -> Web:
    return Web(source, PrepSettings(name="web", num_shards=4), tmp_path / "train")
