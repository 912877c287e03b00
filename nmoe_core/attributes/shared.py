"""An attribute that depends on all documents of a run, such as which is a copy of which.

Its files are written shard by shard, and only those whose rows changed. `{name}.json` beside the
sources names what they were made from; it is written last.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from loader.files.format import load_manifest
from nmoe_core.attributes.attribute import open_shard_documents, replace_rows
from nmoe_core.attributes.files import (
    find_footer,
    read_attribute,
    read_footer,
    rows_digest,
    stale,
    with_keys,
)
from nmoe_core.base.atomic import replacing, write_json
from nmoe_core.base.fingerprint import (
    Fingerprints,
    is_current,
    read_summary,
    seal_summary,
    sha256_json,
)
from nmoe_core.base.result import Result
from nmoe_core.config.tree import ShardPaths, Tree
from nmoe_core.shards.manifest import documents_digest


class ShardRows(NamedTuple):
    """What is read of a shard."""

    source: str
    ingest_ids: pa.Array
    text_sha256: pa.Array
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class Corpus:
    """All shards of a run, and for each the digest of its file of the attribute."""

    shards: list[ShardPaths]
    attribute: str
    digests: list[str]

    @classmethod
    def open(cls, shards: Sequence[ShardPaths], attribute: str) -> "Corpus":
        """Raises FormatError: a shard has no such file, or one of other documents
        (E-ATTRIBUTE-STALE)."""
        return cls(list(shards), attribute, [_current(shard, attribute) for shard in shards])

    def read(self) -> Iterator[ShardRows]:
        """The rows of each shard."""
        for shard in self.shards:
            opened = open_shard_documents(shard)
            rows = read_attribute(shard.attribute(self.attribute)).combine_chunks()
            hashes = rows.column("text_sha256").combine_chunks()
            ids = pa.array(opened.ingest_ids, pa.string())
            yield ShardRows(shard.source, ids, hashes, rows)


def write_changed(
    tree: Tree,
    name: str,
    corpus: Corpus,
    made_with: Fingerprints,
    compute: Callable[[], Sequence[pa.Table]],
) -> Result:
    """Compute the rows of all shards, unless nothing changed, and write those that are new. Raises
    LockedError: another process does."""
    places = [[shard.source, shard.bucket] for shard in corpus.shards]
    made_from = {"inputs": sha256_json([places, corpus.digests]), **made_with}
    summary = tree.attributes / f"{name}.json"
    with replacing(summary):
        paths = [shard.attribute(name) for shard in corpus.shards]
        written = 0
        if not is_current(summary, made_from) or not all(path.is_file() for path in paths):
            for shard, rows in zip(corpus.shards, compute()):
                written += _write(shard, name, made_with, rows)
            digests = [read_footer(path).digest for path in paths]
            facts = {"digest": sha256_json([places, digests]), "fingerprints": made_from}
            write_json(summary, seal_summary(facts))
        digest = read_summary(summary)["digest"]
    documents = sum(read_footer(path).num_rows for path in paths)
    counts = {"documents": documents, "shards": len(paths), "shards_written": written}
    return Result(digest, {**counts, "changed": written > 0, "path": str(summary)})


def _write(shard: ShardPaths, name: str, made_with: Fingerprints, rows: pa.Table) -> bool:
    path, opened = shard.attribute(name), open_shard_documents(shard)
    made_from = {"documents": documents_digest(opened.manifest), **made_with}
    with replacing(path):
        old = find_footer(path)
        digest = rows_digest(with_keys(opened.documents, rows))
        if old is not None and old.digest == digest and old.fingerprints == made_from:
            return False
        batches = rows.combine_chunks().to_batches()
        replace_rows(path, name, made_from, opened.documents, rows.schema, batches)
        return True


def _current(shard: ShardPaths, name: str) -> str:
    path = shard.attribute(name)
    footer, documents = read_footer(path), documents_digest(load_manifest(shard.manifest))
    if footer.fingerprints.get("documents") != documents:
        raise stale(name, path, footer.fingerprints.get("documents"), documents)
    return footer.digest
