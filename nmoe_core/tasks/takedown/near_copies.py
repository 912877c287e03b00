"""Finds near copies of the documents of a takedown, which are not removed unless the list names
them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmoe_core.audit.takedown.find import Found
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.prep.mixture import run_sources


def near_copies(run: Run, found: Sequence[Found]) -> list[dict[str, Any]] | None:
    """Near copies of taken-down training documents, by the attribute `duplicates`; None if the run
    does not record it. `duplicates` has only the similarity of each document to the kept document
    of its group, so all documents of the group are listed with this similarity."""
    if "duplicates" not in run.config.attributes.use:
        return None
    rows: dict[str, tuple[str, float | None]] = {}
    for source in run_sources(run):
        for shard in run.tree.shards(source.name, run.config.prep.num_shards):
            if shard.attribute("duplicates").is_file():
                rows |= _rows(shard)
    going = {f"{one.source}//{one.ingest_id}" for one in found if one.split == "train"}
    kept = going | {rows[name][0] for name in going if name in rows}
    near = {name: row for name, row in rows.items() if row[0] in kept}
    near |= {name: (name, None) for name in kept if name not in near}
    return [
        {"document": name, "of": of, "jaccard": jaccard}
        for name, (of, jaccard) in sorted(near.items())
        if name not in going
    ]


def _rows(shard: ShardPaths) -> dict[str, tuple[str, float | None]]:
    """The copies in a shard, by document name: the kept document, and the similarity to it, or None
    for an exact copy."""
    from nmoe_core.attributes.attribute import open_shard_documents
    from nmoe_core.shards.attribute_file import read_attribute

    table = read_attribute(shard.attribute("duplicates"), ["exact_of", "near_of", "near_jaccard"])
    exact, near, jaccard = (column.to_pylist() for column in table.columns)
    if not any(exact) and not any(near):
        return {}
    ids = open_shard_documents(shard).ingest_ids
    rows = {}
    for ingest_id, exact_of, near_of, similarity in zip(ids, exact, near, jaccard):
        kept = exact_of or near_of
        if kept is not None:
            rows[f"{shard.source}//{ingest_id}"] = (kept, similarity)
    return rows
