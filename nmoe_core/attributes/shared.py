"""Attributes that depend on all documents of a run, such as duplicates.

Files are written shard by shard if their rows changed. `{name}.json` beside the sources records the
inputs of each shard, so that the next run knows which rows may still be valid; it is written last.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from loader.files.format import load_manifest
from nmoe_core.attributes.attribute import replace_rows
from nmoe_core.base.atomic import replacing, write_json
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.fingerprint import (
    Fingerprints,
    is_current,
    read_sealed,
    read_summary,
    seal_summary,
    sha256_json,
)
from nmoe_core.base.result import Result
from nmoe_core.config.attributes import KEYS
from nmoe_core.config.tree import ShardPaths, Tree
from nmoe_core.shards.attribute_file import (
    Documents,
    find_footer,
    read_attribute,
    read_footer,
    read_values,
    stale,
)
from nmoe_core.shards.documents import ingest_ids_at
from nmoe_core.shards.manifest import digest_of


class ShardRows(NamedTuple):
    """The file of an attribute for a shard; each access reads it."""

    shard: ShardPaths
    attribute: str

    @property
    def source(self) -> str:
        return self.shard.source

    def column(self, name: str) -> pa.Array:
        """The values of a column, as one array."""
        table = read_attribute(self.shard.attribute(self.attribute), [name])
        return table.column(name).combine_chunks()

    def ingest_ids(self, rows: np.ndarray) -> list[str]:
        """Ids of some documents, given by ascending rows. Raises as `ingest_ids_at`."""
        return ingest_ids_at(load_manifest(self.shard.manifest), rows)


@dataclass(frozen=True, slots=True)
class Corpus:
    """All shards of a run, with two digests per shard: of its documents and ids, and of its
    attribute file."""

    shards: list[ShardPaths]
    attribute: str
    documents: list[str]
    digests: list[str]

    @classmethod
    def open(cls, shards: Sequence[ShardPaths], attribute: str) -> "Corpus":
        """Raises FormatError if a shard has no such file, or its file was made from other documents
        (E-ATTRIBUTE-STALE)."""
        found = [_current(shard, attribute) for shard in shards]
        return cls(list(shards), attribute, *([pair[i] for pair in found] for i in range(2)))

    @property
    def inputs(self) -> dict[str, list[str]]:
        """Both digests of each shard, by `{source}/{shard}`."""
        places = [f"{shard.source}/{shard.name}" for shard in self.shards]
        return dict(zip(places, map(list, zip(self.documents, self.digests))))

    def read(self) -> Iterator[ShardRows]:
        """Read the attribute file of each shard."""
        return (ShardRows(shard, self.attribute) for shard in self.shards)


class Before(NamedTuple):
    """The last run's tables that may still be valid, because code and settings are the same."""

    tables: list[pa.Table | None]
    """Rows of each shard; None if it is new or has changed."""
    moved: set[str]
    """Sources with a shard that is new, changed or gone since that run."""


def write_changed(
    tree: Tree,
    name: str,
    corpus: Corpus,
    made_with: Fingerprints,
    compute: Callable[[Before], Sequence[pa.Table]],
    settings: Mapping[str, Any],
) -> Result:
    """If an input changed, compute the rows of all shards and write the rows that differ. The
    summary records the `settings`; `made_with` has their digest as a fingerprint. Raises
    LockedError if another process is writing."""
    inputs = corpus.inputs
    places = list(inputs)
    made_from = {"inputs": sha256_json(list(inputs.items())), **made_with}
    summary = tree.attributes / f"{name}.json"
    paths = [shard.attribute(name) for shard in corpus.shards]
    with replacing(summary, *paths):
        written = 0
        known = read_sealed(summary) or {}
        footers = [find_footer(path) for path in paths]
        # A killed run may have replaced files but not the summary.
        there = sha256_json([places, [footer and footer.digest for footer in footers]])
        if not is_current(summary, made_from) or known.get("digest") != there:
            before = _before(corpus, name, inputs, known, made_with)
            found = compute(before)
            for i, (old, rows) in enumerate(zip(before.tables, found, strict=True)):
                written += rows is not old and _write(corpus, i, name, made_with, rows)
            digests = [read_footer(path).digest for path in paths]
            facts = {"digest": sha256_json([places, digests]), "fingerprints": made_from}
            facts |= {"settings": dict(settings)}
            made = {place: [*inputs[place], digest] for place, digest in zip(places, digests)}
            write_json(summary, seal_summary(facts | {"shards": made}))
        digest = read_summary(summary)["digest"]
    documents = sum(read_footer(path).num_rows for path in paths)
    counts = {"documents": documents, "shards": len(paths), "shards_written": written}
    return Result(digest, {**counts, "changed": written > 0, "path": shown(summary)})


def _before(
    corpus: Corpus,
    name: str,
    inputs: dict[str, list[str]],
    summary: dict[str, Any],
    made_with: Fingerprints,
) -> Before:
    recorded = {k: v for k, v in summary.get("fingerprints", {}).items() if k != "inputs"}
    made = summary.get("shards", {}) if recorded == made_with else {}
    sources = {place.split("/")[0] for place in made}
    tables = list[pa.Table | None]()
    moved = {place.split("/")[0] for place in made.keys() - inputs}
    for shard, (place, found) in zip(corpus.shards, inputs.items()):
        path = shard.attribute(name)
        footer = find_footer(path)
        made_from = {"documents": found[0], **made_with}
        is_known = (
            footer is not None
            and footer.fingerprints == made_from
            and made.get(place) == [*found, footer.digest]
        )
        tables.append(read_values(path) if is_known else None)
        if not is_known:
            moved.add(shard.source)
    return Before(tables, moved & sources)


def _write(corpus: Corpus, i: int, name: str, made_with: Fingerprints, rows: pa.Table) -> bool:
    shard = corpus.shards[i]
    made_from = {"documents": corpus.documents[i], **made_with}
    path = shard.attribute(name)
    columns = ShardRows(shard, corpus.attribute)
    with replacing(path):
        old = find_footer(path)
        is_made = old is not None and old.fingerprints == made_from
        if is_made and read_values(path).equals(rows):
            return False
        documents = Documents(*(columns.column(key) for key in KEYS))
        replace_rows(
            path, name, made_from, documents, rows.schema, rows.combine_chunks().to_batches()
        )
        return True


def _current(shard: ShardPaths, name: str) -> tuple[str, str]:
    path = shard.attribute(name)
    footer = read_footer(path)
    documents = digest_of(shard.manifest)
    if footer.fingerprints.get("documents") != documents:
        raise stale(name, path, footer.fingerprints.get("documents"), documents)
    return documents, footer.digest
