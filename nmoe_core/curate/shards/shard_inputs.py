"""What a curated shard is made from now, and whether the one that is there was made from it.

The task and its preview ask here, so that a preview says what is then done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.files.format import Manifest
from nmoe_core.base.fingerprint import Fingerprints, is_current, recorded
from nmoe_core.curate.shards.consumed import (
    CURATION_NAME,
    Front,
    consumed_front,
    kept_tokens_before,
    no_front,
)
from nmoe_core.curate.shards.inputs import ShardQuality, ShardTopics, load_quality, load_topics
from nmoe_core.curate.shards.planning import CurateSettings
from nmoe_core.shards.documents import shard_manifest
from nmoe_core.shards.manifest import documents_digest, is_shard_current, shard_dir_name


@dataclass(frozen=True, slots=True)
class CurationRoots:
    """Where shards, their scores and topics lie, and the curated ones."""

    data: Path
    curated: Path
    quality: Path
    topics: Path


@dataclass(frozen=True, slots=True)
class CurationInputs:
    """All that a curated shard is made from; `shared` is the same for all shards of a source."""

    roots: CurationRoots
    directory: Path
    manifest: Manifest
    topics: ShardTopics
    quality: ShardQuality
    front: Front
    shared: Fingerprints
    fingerprints: Fingerprints

    def stale(self) -> list[str]:
        """Why the shard would be curated again; empty when it is current."""
        summary = self.directory / CURATION_NAME
        before, wanted = recorded(summary), self.fingerprints
        if before is None:
            return ["not curated yet"]
        if before != wanted:
            return [key for key in {**wanted, **before} if before.get(key) != wanted.get(key)]
        if is_current(summary, wanted) and is_shard_current(self.directory, self.shared):
            return []
        return ["its files are damaged"]


def curation_inputs(
    roots: CurationRoots,
    source: str,
    bucket: int,
    settings: CurateSettings,
    planned: Mapping[int, int] | None = None,
) -> CurationInputs:
    """What a shard would be curated from now: the one rule of the task and of its preview.

    Args:
        roots: Where everything lies.
        source: Source name.
        bucket: Shard number.
        settings: Selection and order.
        planned: Tokens that shards before this one will have when they are curated again first.

    Raises:
        CurationError, FormatError: As `curate_shard`.
    """
    manifest = shard_manifest(roots.data, source, bucket)
    topics = load_topics(roots.topics, source, bucket, manifest)
    quality = load_quality(roots.quality, source, bucket, manifest)
    front = no_front()
    if settings.resume_from_token:
        from_token = settings.resume_from_token
        front = consumed_front(roots.curated, source, bucket, from_token, planned or {})
    elif settings.fills_windows():
        places = roots.data, roots.curated, roots.quality
        front = no_front(kept_tokens_before(*places, source, bucket, settings.decisions()))
    shared = settings.fingerprints() | {
        "topic_model": topics.topic_model,
        "grader": quality.grader,
    }
    fingerprints = shared | {
        "parent": documents_digest(manifest),
        "quality": quality.checksum,
        "topics": topics.checksum,
        "seq_len": str(settings.seq_len),
    }
    if settings.fills_windows():
        fingerprints["offset"] = str(front.start % settings.seq_len)
    directory = roots.curated / source / "train" / shard_dir_name(bucket)
    return CurationInputs(roots, directory, manifest, topics, quality, front, shared, fingerprints)
