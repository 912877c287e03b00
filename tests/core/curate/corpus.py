"""A small source with planted topics: documents of one topic use tokens of one range."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from nmoe_core.base.atomic import write_json, write_jsonl
from nmoe_core.base.docid import bucket_of
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths, Tree, shard_dir_name
from nmoe_core.curate.shards.combine import combine_curated
from nmoe_core.curate.shards.curated import CurateSettings, curate_shard
from nmoe_core.curate.shards.lineage import verify_curated_shard
from nmoe_core.curate.topics.assign import TopicSettings, assign_topics, fit_topic_model
from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.curate.topics.model import load_topic_model
from nmoe_core.shards.documents import ShardFile, shard_files
from nmoe_core.shards.manifest import ShardFormat, combine_shards, documents_digest
from nmoe_core.shards.writer import ShardWriter
from tests.project import contents, jsonl_source, write_project

VOCAB_SIZE = 1201
EOS = 1200
TABLE = np.random.default_rng(9).standard_normal((VOCAB_SIZE, 16)).astype(np.float32)
FORMAT = ShardFormat("web", "v1", "toy", VOCAB_SIZE, EOS, "toy-fingerprint")


def shard_manifest(tree_root: Path, source: str, bucket: int) -> Manifest:
    """The committed manifest of one training shard."""
    return load_manifest(tree_root / source / "train" / shard_dir_name(bucket) / MANIFEST_NAME)


@dataclass
class Corpus:
    """A data tree, its backbone, and the tree of what is made from it."""

    root: Path
    num_buckets: int = 2
    num_topics: int = 6
    planted: dict[str, int] = field(default_factory=dict)
    source: str = "web"

    def __post_init__(self) -> None:
        self.tree = Tree.below(self.root)
        self.data, self.curated = self.tree.data, self.tree.curated
        self.quality, self.topics = self.tree.quality, self.tree.topics
        self.loads = 0
        self.table = EmbeddingTable("backbone-a", self._load)

    def _load(self) -> np.ndarray:
        self.loads += 1
        return TABLE

    def write(
        self, num_documents: int, *, num_sorted: int | None = None, num_empty: int = 0
    ) -> Corpus:
        """Write documents of topics in runs, those after the first `num_sorted` in turn.

        They are dealt to shards by the MD5 rule, and files of shards hold few documents.
        """
        rng, num_sorted = np.random.default_rng(5), num_sorted or num_documents
        shards = self.tree.shards(self.source, self.num_buckets)
        writers = [ShardWriter(shard.directory, FORMAT, 4000) for shard in shards]
        for i in range(num_documents):
            in_run = i * self.num_topics // num_sorted
            topic = in_run if i < num_sorted else i % self.num_topics
            tokens = topic * (1200 // self.num_topics)
            tokens = tokens + rng.integers(0, 8, rng.integers(20, 90))
            name, digest = f"doc-{i:05d}", hashlib.sha256(tokens.tobytes()).hexdigest()
            self.planted[name] = topic
            bucket = bucket_of(name, self.num_buckets)
            writers[bucket].add_document(tokens.astype(np.uint32), name, digest)
        for i in range(num_empty):
            empty = np.empty(0, np.uint32)
            writers[i % self.num_buckets].add_document(empty, f"empty-{i}", "0" * 64)
        info = {"source": self.source, "assignment": "md5"}
        for writer in writers:
            writer.finish({"source": f"{num_documents} documents"}, info)
        manifest = combine_shards(self.tree.split(self.source), FORMAT, self.num_buckets, info)
        write_json(self.tree.manifest(self.source), manifest)
        return self

    def configure(self, curation: dict[str, Any] | None = None, seq_len: int = 256) -> Run:
        """A run over this tree, with the backbone's table on disk."""
        backbone = self.root / "backbone"
        backbone.mkdir(exist_ok=True)
        save_file({"embedding.weight": TABLE}, backbone / "model.safetensors")
        (backbone / "config.json").write_text('{"nmoe_recipe": {}}')  # random weights
        settings = {
            "root": ".",
            "seq_len": seq_len,
            "backbone": {"checkpoint": "backbone"},
            "curation": {"num_topics": 6, "topics_from": "backbone"} | (curation or {}),
        }
        return write_project(self.root, [jsonl_source("web", [])], settings).run

    def shard(self, bucket: int) -> ShardPaths:
        return self.tree.shard(self.source, bucket)

    def files(self, bucket: int, tree: Path | None = None) -> list[ShardFile]:
        root = tree or self.data
        return shard_files(root, shard_manifest(root, self.source, bucket))

    def doc_ids(self, bucket: int, tree: Path | None = None) -> list[str]:
        return [name for file in self.files(bucket, tree) for name in file.doc_ids()]

    def ingest_ids(self, bucket: int, tree: Path | None = None) -> list[str]:
        return [name for file in self.files(bucket, tree) for name, _ in file.ids()]

    def fit(self, **options: int) -> Result:
        settings = TopicSettings(**({"num_topics": self.num_topics, "seed": 3} | options))
        return fit_topic_model(self.tree, [self.source], self.table, settings)

    def assign(self, bucket: int) -> Result:
        model = load_topic_model(self.tree.topic_model)
        return assign_topics(self.shard(bucket), self.table, model)

    def grade(self, bucket: int, decide: Callable[[int], str] | None = None) -> None:
        """Write quality rows as grading does; by default every third document has each decision."""
        decide = decide or (lambda i: ("keep", "band", "drop")[i % 3])
        shard, rows = self.shard(bucket), []
        for i, doc_id in enumerate(self.doc_ids(bucket)):
            row = {"doc_id": doc_id, "source": self.source, "scores": None, "aggregated": i / 1000}
            decision = decide(i)
            row |= {"decision": decision, "q_probe": 0.25, "early_exit": decision == "drop"}
            rows.append(row)
        write_jsonl(shard.scores, rows)
        content = documents_digest(shard_manifest(self.data, self.source, bucket))
        write_json(
            shard.graded / "summary.json",
            {"total": len(rows), "fingerprints": {"shard": content, "calibration": "c1"}},
        )

    def curate(self, bucket: int, **options: Any) -> Result:
        return curate_shard(self.shard(bucket), CurateSettings(**({"seq_len": 256} | options)))

    def curate_all(self, **options: Any) -> list[Result]:
        return [self.curate(bucket, **options) for bucket in range(self.num_buckets)]

    def combine(self, seq_len: int = 256) -> Result:
        settings = CurateSettings(seq_len=seq_len)
        return combine_curated(self.tree, self.source, self.num_buckets, settings)

    def curation(self, bucket: int | None = None) -> dict[str, Any]:
        """What was recorded of a curated shard, or of all of them."""
        whole = self.tree.curation(self.source)
        path = whole if bucket is None else self.shard(bucket).curation
        return json.loads(path.read_text())

    def verify(self, bucket: int = 0) -> int:
        return verify_curated_shard(self.shard(bucket))

    def prepare(self) -> None:
        """Fit, assign and grade everything."""
        self.fit()
        for bucket in range(self.num_buckets):
            self.assign(bucket)
            self.grade(bucket)

    def copied(self, root: Path) -> Corpus:
        shutil.copytree(self.root, root)
        return replace(self, root=root)

    def times(self, tree: Path) -> dict[str, int]:
        return {name: (tree / name).stat().st_mtime_ns for name in contents(tree)}
