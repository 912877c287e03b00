"""What a curated shard would be made from now, and whether the one that is there was made from it.

The task and its preview ask here, so the preview names exactly the shards that are then written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loader.files.format import Manifest, load_manifest
from nmoe_core.base.fingerprint import Fingerprints, is_current, recorded
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.consumed import ConsumedPrefix, consumed_prefix, kept_tokens_before
from nmoe_core.curate.shards.inputs import ShardQuality, ShardTopics, load_quality, load_topics
from nmoe_core.curate.shards.planning import CurateSettings
from nmoe_core.shards.manifest import documents_digest, is_shard_current


@dataclass(frozen=True, slots=True)
class CurrentInputs:
    """All that a curated shard is made from; `shared` is the same for all shards of a source."""

    shard: ShardPaths
    manifest: Manifest
    topics: ShardTopics
    quality: ShardQuality
    prefix: ConsumedPrefix
    shared: Fingerprints
    fingerprints: Fingerprints

    def stale(self) -> list[str]:
        """Why the shard would be curated again; empty when it is current."""
        summary = self.shard.curation
        before, wanted = recorded(summary), self.fingerprints
        if before is None:
            return ["not curated yet"]
        if before != wanted:
            return [key for key in {**wanted, **before} if before.get(key) != wanted.get(key)]
        if is_current(summary, wanted) and is_shard_current(self.shard.curated, self.shared):
            return []
        return ["its files are damaged"]


def current_inputs(
    shard: ShardPaths, settings: CurateSettings, planned: Mapping[int, int] | None = None
) -> CurrentInputs:
    """What a shard would be curated from now: the one rule of the task and of its preview.

    Args:
        shard: The shard.
        settings: Selection and order.
        planned: Tokens that shards before this one will have when they are curated again first.

    Raises:
        CurationError, FormatError: As `curate_shard`.
    """
    manifest = load_manifest(shard.manifest)
    topics = load_topics(shard, manifest)
    quality = load_quality(shard, manifest)
    prefix = ConsumedPrefix()
    if settings.resume_from_token:
        prefix = consumed_prefix(shard, settings.resume_from_token, planned or {})
    elif settings.fills_windows():
        prefix = ConsumedPrefix(kept_tokens_before(shard, settings.decisions()))
    shared = settings.fingerprints() | {"topic_model": topics.topic_model, "grader": quality.grader}
    fingerprints = shared | {
        "parent": documents_digest(manifest),
        "quality": quality.checksum,
        "topics": topics.checksum,
        "seq_len": str(settings.seq_len),
    }
    if settings.fills_windows():
        fingerprints["offset"] = str(prefix.start % settings.seq_len)
    return CurrentInputs(shard, manifest, topics, quality, prefix, shared, fingerprints)
