"""A small project whose plan has buckets by language and length as its sources."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.tasks import curate
from tests.project import Project, jsonl_source, write_project

Row = dict[str, Any]
SOURCES = ("web", "books")
SETTINGS: dict[str, Any] = {
    "seq_len": 16,
    "batch_size": 4,
    "on_exhaust": "wrap",
    "grading": {"grader": "none"},
    "attributes": {"use": ["signals"], "columns": ["lang"]},
    "prep": {"min_doc_tokens": 1},
    "curation": {"num_topics": 3, "order": "original", "where": "n_words > 4"},
    "mixture": {"buckets": {"by": ["lang", "n_words:3"], "least_tokens": 200}},
}


WORDS = [f"{a}{b}" for a in ("sea", "oil", "red", "law", "ant") for b in ("", "s", "man", "ful")]


def bucket_rows(source: str) -> list[Row]:
    """Documents of 1 to 60 words; a language is rare, and one is missing."""
    rng = random.Random(source)
    return [
        {
            "id": f"{source}-{i}",
            "text": " ".join(rng.choices(WORDS, k=rng.randrange(1, 60))),
            "lang": rng.choice(["en"] * 10 + ["en-gb"] * 3 + ["de/at"] * 5 + [None] * 3 + ["fi"]),
        }
        for i in range(120)
    ]


def bucket_project(directory: Path, settings: Mapping[str, Any] = SETTINGS) -> Project:
    made = write_project(directory, [jsonl_source(n, bucket_rows(n)) for n in SOURCES], settings)
    command(made, "prep-mixture")
    command(made, "attributes")
    command(made, "hydra", "grade")
    return made


def command(project: Project, *verb: str, status: int = 0) -> None:
    assert main([*verb, "--config", str(project.config)]) == status


def curated(project: Project) -> Run:
    """Curate all sources and make the plan."""
    command(project, "curate", "shards")
    curate.make_plan(project.run, SOURCES, [])
    return project.run
