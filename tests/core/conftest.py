"""Fixtures of the quality tests: a tiny backbone, shards of two sources, a rubric.

What needs torch is imported by the fixtures: other tests run without it too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nmoe_core.cli import main
from nmoe_core.config.rubric import Rubric
from tests.project import CONFIGS, json_lines

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer
    from tests.core.small_gradings import Grading


@pytest.fixture
def rubric() -> Rubric:
    return Rubric.load(CONFIGS / "rubrics" / "quality_v1.toml")


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> "Transformer":
    import torch

    from nmoe_core.engine import Transformer, make_tiny_checkpoint
    from tests.core.small_gradings import VOCAB

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("backbone")
    make_tiny_checkpoint(path, vocab_size=VOCAB, num_experts=4, hidden_size=32, head_dim=8)
    return Transformer.from_checkpoint(path)


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of 260 documents; do not write to it."""
    from tests.core.small_gradings import random_documents, write_source

    data_root = tmp_path_factory.mktemp("world") / "data"
    write_source(data_root, "web", random_documents(1, 200), num_shards=3)
    write_source(data_root, "books", random_documents(2, 60), num_shards=2)
    return data_root


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    """A small tree of its own."""
    from tests.core.small_gradings import random_documents, write_source

    write_source(tmp_path / "data", "web", random_documents(1, 40))
    write_source(tmp_path / "data", "books", random_documents(2, 20))
    return tmp_path / "data"


@pytest.fixture
def prepared_data(tmp_path: Path) -> Path:
    """Two sources, prepared from JSON lines with the real tokenizer."""
    words = ["quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "again", "today"]
    for name, count in (("web", 90), ("books", 60)):
        texts = [" ".join(words[(i * k) % 10] for k in range(12 + i % 9)) for i in range(count)]
        rows = [{"id": f"{name}-{i}", "text": text} for i, text in enumerate(texts)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json_lines(rows))
        flags = ["--paths", str(path), "--name", name, "--num-shards", "2", "--workers", "1"]
        output = str(tmp_path / "data" / name / "train")
        assert main(["prep", "--source", "jsonl", *flags, "--output", output]) == 0
    return tmp_path / "data"


@pytest.fixture(scope="session")
def own_once(
    tmp_path_factory: pytest.TempPathFactory, shared_data: Path, backbone: "Transformer"
) -> "Grading":
    from tests.core.small_gradings import Grading

    made = Grading(tmp_path_factory.mktemp("own"), shared_data, backbone)
    made.calibrate()
    return made


@pytest.fixture
def own(tmp_path: Path, own_once: "Grading") -> "Grading":
    """Heads and their calibration, to grade with and to change."""
    return own_once.copied(tmp_path)
