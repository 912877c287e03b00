"""Small curated corpora in buckets, written as tokens, without a model: every token is another."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from loader.files.format import load_manifest
from nmoe_core.base.atomic import write_json
from nmoe_core.config.run import Run
from nmoe_core.curate.settings import curate_settings
from nmoe_core.curate.shards.combine import combine_curated
from nmoe_core.curate.topics.assign import TopicSettings, assign_topics, fit_topic_model
from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.curate.topics.model import load_topic_model
from nmoe_core.shards.attribute_file import Documents
from nmoe_core.shards.columns import write_columns
from nmoe_core.shards.documents import shard_files
from nmoe_core.shards.manifest import ShardFormat, combine_shards
from nmoe_core.shards.writer import ShardWriter
from nmoe_core.tasks import curate, hydra
from nmoe_core.tasks.selection.bucket_plan import bucket_paths
from nmoe_core.tasks.selection.buckets import fit_buckets, put_in_buckets
from nmoe_core.tasks.selection.rule import select_shards
from tests.core.curate.bucket_plans.naive import EOS, Document
from tests.project import Project, jsonl_source, write_project

SOURCES = ("web", "books", "code")
VOCABULARY = 201_088
NUM_SHARDS = 2
_TABLE = EmbeddingTable("small", lambda: np.random.default_rng(1).normal(size=(VOCABULARY, 2)))
LANGUAGES = ["en"] * 6 + ["de/at"] * 3 + ["fi", "é", "", None]
SCHEMA = pa.schema(
    {
        "lang": pa.string(),
        "score": pa.float64(),
        "level": pa.int64(),
        "time": pa.int64(),
        "flag": pa.bool_(),
    }
)
_BY = ("lang", "score:2", "score:3", "score:5", "level", "level:3", "time:2", "flag")


@dataclass
class Corpus:
    """A run with curated buckets, and its kept documents in the order of the shards."""

    project: Project
    sources: tuple[str, ...]
    by: list[str]
    least: int
    order: str
    kept: list[Document]

    def run(self, **settings: Any) -> Run:
        """The run, with other settings."""
        own = {"mixture.buckets.by": self.by, "mixture.buckets.least_tokens": self.least}
        return Run(self.project.config, own | settings)

    def curated(self) -> dict[str, list[tuple[int, ...]]]:
        """The tokens of the documents of each bucket of the plan, in its order."""
        run = self.run()
        found = {}
        for source in self.sources:
            for name, path in bucket_paths(run, source).items():
                files = shard_files(path.parent, load_manifest(path))
                spans = [(file, span) for file in files for span in file.spans.tolist()]
                found[name] = [tuple(f.tokens[a:b].tolist()) for f, (a, b) in spans]
        return found


def random_row(rng: random.Random, few: bool) -> dict[str, Any]:
    scores = [None, float("nan"), float("inf"), *[0.25 * k for k in range(4)]]
    return {
        "lang": rng.choice(LANGUAGES),
        "score": rng.choice(scores) if few else rng.choice([rng.random()] * 9 + [None]),
        "level": rng.choice([0, 1, 1, 2, 2, 7, None]),
        "time": 1_700_000_000_000_000_000 + rng.randrange(10**15),
        "flag": rng.random() < 0.3,
    }


def make_corpus(directory: Path, seed: int) -> Corpus:
    """A corpus of random documents, curated with random settings of buckets."""
    rng = random.Random(f"corpus {seed}")
    sources = SOURCES[: rng.randint(1, 3)]
    by = rng.sample(_BY, rng.randint(1, 3))
    columns = [text.partition(":")[0] for text in by]
    by = [text for i, text in enumerate(by) if text.partition(":")[0] not in columns[:i]]
    least = rng.choice([1, 1, 30, 80, 200, 1500])
    order = rng.choice(["original", "original", "shuffle", "golden"])
    rules = {"where": "flag or lang is not null"} if rng.random() < 0.4 else {}
    if rules and rng.random() < 0.5:
        rules["repeat"] = "case when flag then 2 else 1 end"
    settings = {
        "seq_len": 8,
        "batch_size": 4,
        "grading": {"grader": "none"},
        "curation": {"order": order, "num_topics": 2, **rules},
        "prep": {"num_shards": NUM_SHARDS},
        "attributes": {"columns": [*SCHEMA.names]},
        "mixture": {"buckets": {"by": by, "least_tokens": least}},
    }
    tables = [jsonl_source(name, []) for name in sources]
    project = write_project(directory, tables, settings)
    few = rng.random() < 0.3
    number = 1
    kept = []
    for source in sources:
        lacks = rng.choice([None, "level", "score"]) if source != sources[0] else None
        for document in _write(project.run, source, rng, number, few, lacks):
            number += len(document.tokens)
            flag = document.row["flag"]
            is_kept = flag or document.row["lang"] is not None or not rules
            times = 2 if flag and "repeat" in rules else 1
            if is_kept:
                kept.append(document._replace(times=times))
    corpus = Corpus(project, sources, by, least, order, kept)
    _curate(corpus.run(), sources)
    return corpus


def _write(
    run: Run, source: str, rng: random.Random, number: int, few: bool, lacks: str | None
) -> list[Document]:
    """Write the shards of a source; returns the documents in their order. number: the first
    token."""
    fmt = ShardFormat(source, "v1", "o200k_harmony", VOCABULARY, EOS, "same")
    found = []
    for shard in run.tree.shards(source, NUM_SHARDS):
        writer = ShardWriter(shard.directory, fmt, rng.choice([120, 10_000]))
        rows = []
        ids = []
        for k in range(rng.randint(3, 30)):
            length = rng.choice([1, 2, 5, 9, rng.randint(1, 40)])
            tokens = tuple(range(number, number + length))
            number += length + 1
            row = random_row(rng, few)
            if lacks is not None:
                row[lacks] = None
            name = f"{source}-{shard.bucket}-{k}"
            writer.add_document(np.array(tokens, np.uint32), name, f"{number:064x}")
            rows.append(row)
            ids.append((f"{source}//{name}", f"{number:064x}"))
            found.append(Document(name, source, (*tokens, EOS), row, 1))
        schema = SCHEMA if lacks is None else SCHEMA.remove(SCHEMA.get_field_index(lacks))
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        info = write_columns(writer.staged, Documents(*zip(*ids)), schema, [batch])
        writer.finish({"source": "none"}, {"source": source, "assignment": "md5", **info})
    whole = combine_shards(run.tree.split(source), fmt, NUM_SHARDS, {"source": source})
    write_json(run.tree.manifest(source), whole)
    return found


def _curate(run: Run, sources: tuple[str, ...]) -> None:
    numbers = range(NUM_SHARDS)
    fit_topic_model(run.tree, [*sources], _TABLE, TopicSettings(2, 1))
    model = load_topic_model(run.tree.topic_model)
    for source in sources:
        for shard in run.tree.shards(source, NUM_SHARDS):
            assign_topics(shard, _TABLE, model)
        hydra.grade_shards(run, source, numbers)
        if run.config.curation.where is not None:
            select_shards(run, source, numbers)
    fit_buckets(run, sources)
    for source in sources:
        put_in_buckets(run, source, numbers)
        curate.curate_shards(run, source, numbers)
        combine_curated(run.tree, source, NUM_SHARDS, curate_settings(run, source))
