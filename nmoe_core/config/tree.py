"""Paths of all files of a run. Every path is taken from a `Tree`; other code never joins them.

A task takes the run's tree, and compute takes the tree or one of its shards:

    shard = run.tree.shard("web", 3)
    shard.manifest   data/web/train/shard_0003/manifest.json
    shard.scores     quality/web/shard_0003/quality_scores.jsonl
    shard.curation   curated/web/train/shard_0003/curation.json
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from loader.files.format import MANIFEST_NAME
from nmoe_core.base.errors import FormatError

SCORES_NAME = "quality_scores.jsonl"
CURATION_NAME = "curation.json"
LINEAGE_NAME = "lineage.jsonl"
PROBE_NAME = "hydra_probe.safetensors"
JUDGE_NAME = "hydra_judge.safetensors"
STUDENT_NAME = "hydra_student.safetensors"
CALIBRATION_NAME = "calibration_summary.json"
COST_NAME = "cost.json"


def shard_dir_name(bucket: int) -> str:
    """Name of a bucket's directory: `shard_NNNN`."""
    return f"shard_{bucket:04d}"


class _Below:
    """A path below the path of another attribute."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory = directory
        self._name = name

    def __get__(self, paths: object, kind: type) -> Path:
        return getattr(paths, self._directory) / self._name


@dataclass(frozen=True, slots=True)
class Tree:
    """The paths of a run: `Tree.below(root)`."""

    root: Path
    data: Path
    slices: Path
    labels: Path
    heads: Path
    calibration: Path
    quality: Path
    topics: Path
    attributes: Path
    curated: Path
    seen: Path
    plan: Path
    checkpoint: Path

    probe = _Below("heads", PROBE_NAME)
    judge = _Below("heads", JUDGE_NAME)
    student = _Below("heads", STUDENT_NAME)
    calibration_summary = _Below("calibration", CALIBRATION_NAME)
    calibration_cost = _Below("calibration", COST_NAME)
    topic_model = _Below("topics", "topic_model.safetensors")
    duplicates = _Below("attributes", "duplicates.json")
    topic_terms = _Below("topics", "topic_terms.json")
    seen_digests = _Below("seen", ".digests.json")
    looked = _Below("root", ".walk.json")
    input_ledger = _Below("root", "input_ledger.json")
    account = _Below("root", "account.json")
    buckets = _Below("root", "mixture/buckets.json")
    takedown = _Below("root", "takedown/documents.jsonl")
    takedown_grams = _Below("root", "takedown/grams.npy")
    takedown_letters = _Below("root", "takedown/letters.npy")
    takedown_proof = _Below("root", "takedown/proof.json")

    @classmethod
    def below(cls, root: Path, **moved: Path) -> Tree:
        """The tree of a run whose files are all below `root`, except the `moved` ones."""
        names = ["data", "slices", "labels", "heads", "calibration", "quality", "topics"]
        names += ["attributes", "curated", "seen"]
        places = {name: root / name for name in names}
        places |= {"plan": root / "mixture" / "loader_plan.json", "checkpoint": root / "backbone"}
        return cls(root=root, **places | moved)

    def remix(self, number: int) -> Path:
        """The certificate of the plan's remix `number`, counted from 1."""
        return self.plan.with_name(f"remix_{number:04d}.json")

    def remixes(self) -> list[Path]:
        """Certificates of the plan's remixes, in their order."""
        return sorted(self.plan.parent.glob("remix_*.json"))

    def picture(self, name: str) -> Path:
        """A stored picture: `.pictures/{name}.md`."""
        return self.root / ".pictures" / f"{name}.md"

    def split(self, source: str, split: str = "train") -> Path:
        """`data/{source}/{split}`."""
        return self.data / source / split

    def manifest(self, source: str, split: str = "train") -> Path:
        """Path of the manifest of all shards of a split."""
        return self.split(source, split) / MANIFEST_NAME

    def source_digests(self, source: str, split: str) -> Path:
        """File with digests of the files that a split was made from, to recognise unchanged
        files."""
        return self.root / ".sources" / f"{source}.{split}.json"

    def shard(self, source: str, bucket: int, split: str = "train") -> ShardPaths:
        return ShardPaths(self, source, bucket, split)

    def shard_of(self, rel: str) -> ShardPaths:
        """The paths of the shard that contains the path `{source}/{split}/shard_NNNN/...`. Raises
        FormatError if the path is in no shard (E-DOCID)."""
        match = re.match(r"([^/]+)/([^/]+)/shard_(\d{4,})(?:/|$)", rel)
        if match is None:
            raise FormatError("not a path in a shard", where=self.data, found=rel, code="E-DOCID")
        return ShardPaths(self, match[1], int(match[3]), match[2])

    def shards(self, source: str, num_shards: int, split: str = "train") -> list[ShardPaths]:
        return [ShardPaths(self, source, bucket, split) for bucket in range(num_shards)]

    def curated_split(self, source: str) -> Path:
        """`curated/{source}/train`."""
        return self.curated / source / "train"

    def curated_manifest(self, source: str) -> Path:
        return self.curated_split(source) / MANIFEST_NAME

    def bucket_manifest(self, source: str, bucket: str) -> Path:
        """The manifest of a bucket of a source's curated documents, such as `science/q3`."""
        name = f"bucket_{bucket.replace('/', '+')}.json"
        return self.curated_split(source) / name

    def bucket_manifests(self, source: str) -> list[Path]:
        """The manifests of all buckets of a source, sorted."""
        return sorted(self.curated_split(source).glob("bucket_*.json"))

    def curation(self, source: str) -> Path:
        """File with counts and diversity of all curated shards of a source."""
        return self.curated_split(source) / CURATION_NAME

    def source_slices(self, source: str) -> Path:
        """Directory of the document ids that a source contributes to labelling."""
        return self.slices / "sources" / source

    def slice(self, split: str, number: int) -> Path:
        """Path of the document ids of one slice."""
        return self.slices / f"{split}_shard_{number:02d}"

    def label_shard(self, split: str, number: int) -> Path:
        """Directory of the labels of one slice."""
        return self.labels / split / f"shard_{number}"

    @property
    def answers(self) -> Path:
        """Directory of all replies of oracles."""
        return self.labels / "answers"

    def merged_labels(self, split: str) -> Path:
        return self.labels / "merged" / f"labels_{split}.jsonl"


@dataclass(frozen=True, slots=True)
class ShardPaths:
    """The paths of one shard of a split; grades, topics and curated shards exist for `train`
    only."""

    tree: Tree
    source: str
    bucket: int
    split: str = "train"

    manifest = _Below("directory", MANIFEST_NAME)
    scores = _Below("graded", SCORES_NAME)
    topics = _Below("with_topics", "topics.npy")
    curated_manifest = _Below("curated", MANIFEST_NAME)
    curation = _Below("curated", CURATION_NAME)
    lineage = _Below("curated", LINEAGE_NAME)
    seen_index = _Below("seen", "index.json")

    @property
    def selection(self) -> Path:
        """File with the result of the run's `where` for each document."""
        return self.attribute("selection")

    @property
    def buckets(self) -> Path:
        """File with the bucket of each document, if the run has buckets."""
        return self.attribute("buckets")

    @property
    def name(self) -> str:
        return shard_dir_name(self.bucket)

    @property
    def directory(self) -> Path:
        return self.tree.split(self.source, self.split) / self.name

    @property
    def inputs(self) -> list[Path]:
        """The directories that tasks of this shard read."""
        attributes = self.tree.attributes / self.source / self.name
        return [self.directory, self.graded, self.with_topics, attributes]

    @property
    def graded(self) -> Path:
        """Directory of the shard's scores and their summary."""
        return self.tree.quality / self.source / self.name

    def attribute(self, name: str) -> Path:
        """The shard's file of an attribute: `attributes/{source}/shard_NNNN/{name}.parquet`."""
        return self.tree.attributes / self.source / self.name / f"{name}.parquet"

    @property
    def with_topics(self) -> Path:
        """Directory of the shard's topics and their summary."""
        return self.tree.topics / self.source / self.name

    @property
    def curated(self) -> Path:
        """The shard's directory in the curated tree."""
        return self.tree.curated_split(self.source) / self.name

    @property
    def seen(self) -> Path:
        """Directory of the search index of the curated shard."""
        return self.tree.seen / self.source / self.name
