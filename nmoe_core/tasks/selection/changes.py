"""What transforms changed in the text of each source, with samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from loader.files.format import load_manifest
from nmoe_core.config.run import Run
from nmoe_core.shards.manifest import changes_by_rule, changes_file
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.chain import Chain, transforms_of

_SAMPLED_CHARS = 120
_REDACT = "redact"  # the transform whose removed text must not be shown unless it is asked for


@dataclass(frozen=True, slots=True)
class SampleChange:
    """A span that a transform replaced."""

    source: str
    transform: str
    rule: str
    ingest_id: str
    removed: str | None
    """The beginning of the removed text, without personal data that `redact` finds for this source;
    None if it was not kept."""
    replacement: str


def changed_text(run: Run, sources: list[str]) -> list[dict[str, Any]]:
    """The rows of `changes_by_rule` of each source's training split, with the source."""
    rows = []
    for source in sources:
        found = changes_by_rule(run.tree.split(source, "train"))
        rows += [{"source": source, **row} for row in found]
    return rows


def changed_samples(run: Run, source: str, per_rule: int) -> list[SampleChange]:
    """The first `per_rule` changes of each rule in the first shard of a source that has changes."""
    from nmoe_core.attributes.attribute import open_shard_documents
    from nmoe_core.shards.changes import read_changes

    for shard in run.tree.shards(source, run.config.prep.num_shards):
        if not shard.manifest.is_file() or changes_file(load_manifest(shard.manifest)) is None:
            continue
        rows = read_changes(shard.manifest.parent).column("changes").to_pylist()
        ids = open_shard_documents(shard).ingest_ids
        every = [(ids[i], change) for i, changes in enumerate(rows) for change in changes]
        if every:
            tables = transforms_of(run.config.transforms, source)
            redaction = Chain([table for table in tables if table.kind == _REDACT])
            rules = sorted({(change["transform"], change["rule"]) for _, change in every})
            return [
                _sample(source, ingest_id, change, redaction)
                for rule in rules
                for ingest_id, change in islice(_of_rule(every, rule), per_rule)
            ]
    return []


def _of_rule(
    every: list[tuple[str, dict[str, Any]]], rule: tuple[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    return (one for one in every if (one[1]["transform"], one[1]["rule"]) == rule)


def _sample(source: str, ingest_id: str, change: dict[str, Any], redaction: Chain) -> SampleChange:
    removed = change["removed"]
    if removed and change["transform"] == _REDACT:
        removed = f"{removed[0]}...{removed[-1]}, {len(removed)} characters"
    elif removed:
        [removed], *_ = redaction.apply(Batch([removed], [removed.encode()], [ingest_id]))
    if removed is not None and len(removed) > _SAMPLED_CHARS:
        removed = f"{removed[:_SAMPLED_CHARS]}..."
    named = source, change["transform"], change["rule"], ingest_id
    return SampleChange(*named, removed, change["replacement"])
