"""A small source with planted topics: documents of one topic use tokens of one range."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.files.format import MANIFEST_NAME
from nmoe_core.base.atomic import write_json, write_jsonl
from nmoe_core.base.docid import bucket_of
from nmoe_core.base.result import Result
from nmoe_core.config.tree import ShardPaths, Tree, shard_dir_name
from nmoe_core.curate.shards.combine import combine_curated
from nmoe_core.curate.shards.curated import CurateSettings, curate_shard
from nmoe_core.curate.shards.verify import verify_curated_shard
from nmoe_core.curate.topics.assign import TopicSettings, assign_topics, fit_topic_model
from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.curate.topics.model import load_topic_model
from nmoe_core.shards.documents import shard_files, shard_manifest
from nmoe_core.shards.manifest import (
    ShardFormat,
    combine_shards,
    documents_digest,
)
from nmoe_core.shards.writer import ShardWriter

VOCAB_SIZE = 1201
EOS = 1200
HIDDEN = 16
FORMAT = ShardFormat("web", "v1", "toy", VOCAB_SIZE, EOS, "toy-fingerprint")


@dataclass
class Corpus:
    """A data tree, its backbone, and the tree of what is made from it."""

    root: Path
    num_buckets: int
    num_topics: int
    planted: dict[str, int]
    source: str = "web"

    def __post_init__(self) -> None:
        self.tree = Tree.below(self.root)
        self.data, self.curated = self.tree.data, self.tree.curated
        self.quality, self.topics = self.tree.quality, self.tree.topics
        rows = np.random.default_rng(9).standard_normal((VOCAB_SIZE, HIDDEN)).astype(np.float32)
        self.loads = 0
        self.table = EmbeddingTable("backbone-a", lambda: self._load(rows))

    def _load(self, rows: np.ndarray) -> np.ndarray:
        self.loads += 1
        return rows

    def shard(self, bucket: int) -> ShardPaths:
        return self.tree.shard(self.source, bucket)

    def files(self, bucket: int, tree: Path | None = None):
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
        shard = self.shard(bucket)
        rows = [
            {
                "doc_id": doc_id,
                "source": self.source,
                "scores": None,
                "aggregated": i / 1000,
                "decision": decide(i),
                "q_probe": 0.25,
                "early_exit": decide(i) == "drop",
            }
            for i, doc_id in enumerate(self.doc_ids(bucket))
        ]
        write_jsonl(shard.scores, rows)
        content = documents_digest(shard_manifest(self.data, self.source, bucket))
        write_json(
            shard.graded / "summary.json",
            {"total": len(rows), "fingerprints": {"shard": content, "calibration": "c1"}},
        )

    def curate(self, bucket: int, **options: Any) -> Result:
        return curate_shard(self.shard(bucket), CurateSettings(**({"seq_len": 256} | options)))

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

    def outputs(self, tree: Path) -> dict[str, bytes]:
        """Every committed file of a tree, by relative path."""
        paths = (path for path in sorted(tree.rglob("*")) if path.is_file())
        return {
            path.relative_to(tree).as_posix(): path.read_bytes()
            for path in paths
            if path.name != ".lock"
        }

    def times(self, tree: Path) -> dict[str, int]:
        return {name: (tree / name).stat().st_mtime_ns for name in self.outputs(tree)}


def write_tree(
    root: Path,
    num_documents: int,
    num_topics: int,
    num_buckets: int,
    tokens_per_shard: int,
    num_empty: int = 0,
) -> Corpus:
    """Documents sorted by topic, dealt to buckets by the MD5 rule; bucket files rotate early."""
    rng = np.random.default_rng(5)
    train = root / "data" / "web" / "train"
    writers = [
        ShardWriter(train / shard_dir_name(k), FORMAT, tokens_per_shard) for k in range(num_buckets)
    ]
    planted = {}
    width = 1200 // num_topics
    for i in range(num_documents):
        topic = i * num_topics // num_documents
        tokens = topic * width + rng.integers(0, 8, rng.integers(20, 90))
        ingest_id = f"doc-{i:05d}"
        planted[ingest_id] = topic
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        writers[bucket_of(ingest_id, num_buckets)].add_document(
            tokens.astype(np.uint32), ingest_id, digest
        )
    for i in range(num_empty):
        writers[i % num_buckets].add_document(np.empty(0, np.uint32), f"empty-{i}", "0" * 64)
    for writer in writers:
        writer.finish({"source": "r1"}, {"source": "web", "assignment": "md5"})
    manifest = combine_shards(train, FORMAT, num_buckets, {"source": "web", "assignment": "md5"})
    write_json(train / MANIFEST_NAME, manifest)
    return Corpus(root, num_buckets, num_topics, planted)


@pytest.fixture
def make_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Corpus]:
    """Build a corpus under the test's directory, with the clock of manifests fixed."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")

    def make(
        name: str = "run",
        num_documents: int = 240,
        num_topics: int = 6,
        num_buckets: int = 2,
        num_empty: int = 0,
    ) -> Corpus:
        root = tmp_path / name
        return write_tree(root, num_documents, num_topics, num_buckets, 4000, num_empty)

    return make


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    """240 documents, 6 topics, 2 shards of several files."""
    return make_corpus()


@pytest.fixture(scope="session")
def graded_once(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        corpus = write_tree(tmp_path_factory.mktemp("graded"), 240, 6, 2, 4000)
        corpus.prepare()
    return corpus


@pytest.fixture
def graded(graded_once: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """`corpus` with topics and grades; a copy of one made once, since commits wait for the disk."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    shutil.copytree(graded_once.root, tmp_path / "run")
    return replace(graded_once, root=tmp_path / "run")
