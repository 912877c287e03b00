"""A run of one small source that the heuristic oracle labelled, and commands on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmoe_core.cli import main
from tests.project import Project, Source, jsonl_source, write_project

WORDS = ("use the default value", "because each example", "returns a long explanation of it")
SETTINGS: dict[str, Any] = {
    "prep": {"num_shards": 2, "max_tokens": "all", "min_doc_tokens": 1},
    "oracle": {"max_doc_tokens": 32},
}
TINY: dict[str, Any] = {
    "backbone": {"kind": "tiny"},
    "heads": {"max_ctx": 16, "judge": {"mid_dim": 16, "num_heads": 4, "ffn_dim": 32}},
}


def source_of(count: int) -> Source:
    texts = [f"number {i} " + f"{WORDS[i % 3]} {i % 7} " * (1 + i % 5) for i in range(count)]
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    return jsonl_source("web", rows)


def nmoe(project: Project, words: str, *more: object) -> None:
    assert main([*words.split(), "--config", str(project.config), *map(str, more)]) == 0


def labelled_run(directory: Path, count: int, settings: Mapping[str, Any]) -> Project:
    """A run of so many documents, as far as its labels."""
    made = write_project(directory, [source_of(count)], SETTINGS | settings)
    hydra = ("slices", "oracle-label", "merge-labels")
    for words in ("prep-mixture", *(f"hydra {task}" for task in hydra)):
        nmoe(made, words)
    return made
