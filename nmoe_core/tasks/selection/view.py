"""All attributes of a run, with columns named like `signals.n_words`, `columns.url`,
`quality.decision`.

Rows of a shard have the same order in all its files, so columns are combined without a join. Every
file records the documents that it was made from; a file made from other documents is refused. Only
requested columns are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from loader.files.format import Manifest, load_manifest
from loader.files.regular import open_file
from nmoe_core.attributes.attribute import open_shard_documents
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.attributes import KEYS, WITHOUT_COLUMNS
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.inputs import load_quality, load_topics
from nmoe_core.prep.mixture import run_sources
from nmoe_core.quality.calibration.graded import SUMMARY_NAME
from nmoe_core.shards.attribute_file import read_attribute, read_footer, stale
from nmoe_core.shards.changes import SCHEMA as CHANGES
from nmoe_core.shards.manifest import changes_file, column_files, documents_digest
from nmoe_core.tasks.attributes import attribute_names, attribute_schema

Schema = dict[str, pa.DataType]
_SCORES: Schema = {
    "decision": pa.string(),
    "aggregated": pa.float64(),
    "q_probe": pa.float64(),
    "q_student": pa.float64(),
    "early_exit": pa.bool_(),
}
BUCKETS = "buckets"
_TOPICS: Schema = {"topic": pa.uint16()}
DOCUMENTS: Schema = {
    "source": pa.string(),
    "shard": pa.int32(),
    "doc_id": pa.string(),
    "ingest_id": pa.string(),
    "doc_hash": pa.float64(),
}


class Part(NamedTuple):
    """One attribute of a shard."""

    schema: Callable[[], Schema]
    """Reads the schema of its columns, by their names without the attribute."""
    digest: Callable[[], str]
    read: Callable[[Sequence[str]], pa.Table]
    """Reads the given columns; rows are in the order of the shard."""


def shard_parts(run: Run, shard: ShardPaths, names: Iterable[str] | None = None) -> dict[str, Part]:
    """The attributes of a shard by name: only `names`, or all without buckets. Raises FormatError
    (for quality and topics CurationError) if a file is damaged or was made from other documents
    (E-ATTRIBUTE-STALE)."""
    manifest = load_manifest(shard.manifest)
    wanted = None if names is None else set(names)
    found = {"documents": _documents(shard, manifest)}
    for name, find in _BY_PREP.items():
        if (wanted is None or name in wanted) and (path := find(manifest)) is not None:
            found[name] = _of_file(path, manifest, name)
    for name in attribute_names(run):
        is_wanted = name not in WITHOUT_COLUMNS and (wanted is None or name in wanted)
        if is_wanted and (path := shard.attribute(name)).is_file():
            found[name] = _of_file(path, manifest, name)
    if (shard.graded / SUMMARY_NAME).is_file():
        found["quality"] = Part(
            lambda: _scores_schema(run),
            lambda: load_quality(shard, manifest).checksum,
            partial(_scores, run, shard, manifest),
        )
    if shard.topics.is_file():
        found["topics"] = Part(
            lambda: _TOPICS,
            lambda: load_topics(shard, manifest).checksum,
            lambda columns: pa.table({"topic": load_topics(shard, manifest).topics}),
        )
    # Buckets depend on the selection, so no rule reads them; they must be asked for by name.
    if wanted is not None and BUCKETS in wanted and shard.buckets.is_file():
        found[BUCKETS] = _of_file(shard.buckets, manifest, BUCKETS)
    return {name: part for name, part in found.items() if wanted is None or name in wanted}


def run_schema(run: Run, source: str) -> Schema:
    """Every column of the documents of a source, as `attribute.column`, from its shards. Columns
    that only other sources have are included with the type null."""
    names = [one.name for one in run_sources(run)]
    found: Schema = {}
    for name in [source, *(name for name in names if name != source)]:
        found |= {**source_schema(run, name), **found}
    return found


def source_schema(run: Run, source: str) -> Schema:
    """Every column of the first prepared shard of a source, as `attribute.column`; empty if no
    shard is prepared. Raises as `shard_parts`."""
    shards = run.tree.shards(source, run.config.prep.num_shards)
    first = next((shard for shard in shards if shard.manifest.is_file()), None)
    parts = {} if first is None else shard_parts(run, first)
    found: Schema = {}
    for attribute, part in parts.items():
        found |= {f"{attribute}.{column}": kind for column, kind in part.schema().items()}
    return found


def planned_schema(run: Run) -> Schema:
    """Every column that documents will have before selection, also columns that are not made yet.
    Passthrough columns get their types in prep, so they are left out. Raises as
    `attribute_schema`."""
    kept = {column: pa.null() for one in run_sources(run) for column in one.spec.columns or ()}
    parts = {"columns": kept, "quality": _scores_schema(run), "topics": _TOPICS}
    if run.config.transforms:
        parts["changes"] = {field.name: field.type for field in CHANGES}
    made = {n: attribute_schema(run, n) for n in attribute_names(run) if n not in WITHOUT_COLUMNS}
    return labelled({"documents": DOCUMENTS}) | labelled(parts) | labelled(made)


def labelled(parts: Mapping[str, Schema | pa.Schema]) -> Schema:
    """Columns of attributes as `attribute.column`, without the key columns."""
    found: Schema = {}
    for name, part in parts.items():
        fields = part if isinstance(part, dict) else {field.name: field.type for field in part}
        own = {c: kind for c, kind in fields.items() if name == "documents" or c not in KEYS}
        found |= {f"{name}.{column}": kind for column, kind in own.items()}
    return found


def read_columns(run: Run, shard: ShardPaths, schema: Schema, labels: Sequence[str]) -> pa.Table:
    """Columns of a shard by their labels. Raises as `shard_parts`, and FormatError if an attribute
    is not made for this shard (E-ATTRIBUTE-MISSING) or has rows of other texts
    (E-ATTRIBUTE-STALE)."""
    by_attribute: dict[str, list[str]] = {}
    for label in labels:
        attribute, _, column = label.partition(".")
        by_attribute.setdefault(attribute, []).append(column)
    parts = shard_parts(run, shard, by_attribute)
    num_rows = load_manifest(shard.manifest)
    found: dict[str, pa.ChunkedArray | pa.Array] = {}
    hashes = None
    for attribute, columns in by_attribute.items():
        if attribute not in parts and attribute not in _BY_PREP:
            raise FormatError(
                f"attribute {attribute} is not made for this shard",
                where=shard.attribute(attribute),
                do="run `nmoe attributes`; for quality or topics, grade or curate first",
                code="E-ATTRIBUTE-MISSING",
            )
        part = parts.get(attribute)
        known = {} if part is None else part.schema()
        present = [name for name in columns if name in known]
        if part is not None and present:
            table = part.read(present)
            if KEYS[1] in table.column_names:
                own = table.column(KEYS[1])
                if hashes is not None and not own.equals(hashes):
                    raise stale(attribute, shard.attribute(attribute), "rows of other texts")
                hashes = own
            found |= {f"{attribute}.{name}": table.column(name) for name in present}
        for name in columns:
            label = f"{attribute}.{name}"
            found.setdefault(label, pa.nulls(num_rows.total_documents, schema[label]))
    ordered = {label: found[label] for label in labels}
    return pa.table(ordered) if ordered else pa.table({"": pa.nulls(num_rows.total_documents)})


def _documents(shard: ShardPaths, manifest: Manifest) -> Part:
    same = {"source": shard.source, "shard": shard.bucket}

    def read(columns: Sequence[str]) -> pa.Table:
        found = {}
        for name, value in same.items():
            found[name] = pa.repeat(pa.scalar(value, DOCUMENTS[name]), manifest.total_documents)
        if not same.keys() >= set(columns):  # ids are read only if they are asked for
            opened = open_shard_documents(shard)
            found["doc_id"] = pa.array(opened.documents.doc_ids, DOCUMENTS["doc_id"])
            found["ingest_id"] = pa.array(opened.ingest_ids, DOCUMENTS["ingest_id"])
            if "doc_hash" in columns:
                found["doc_hash"] = pa.array(doc_hashes(shard.source, opened.ingest_ids))
        return pa.table({name: found[name] for name in columns})

    return Part(lambda: DOCUMENTS, lambda: sha256_json([shard.source, shard.bucket]), read)


def doc_hashes(source: str, ingest_ids: Iterable[str]) -> np.ndarray:
    """A number from 0 to under 1 for each document, float64 `[N]`: the first 53 bits of the SHA-256
    of `{source}//{ingest id}` in UTF-8, divided by 2**53. This never changes: it decides which
    documents the samples of earlier runs have."""
    names = (f"{source}//{one}".encode() for one in ingest_ids)
    digests = b"".join(sha256(name).digest()[:8] for name in names)
    return (np.frombuffer(digests, ">u8") >> 11) / 2.0**53


# The files that prep writes with a shard.
_BY_PREP: dict[str, Callable[[Manifest], Path | None]] = {
    "columns": lambda manifest: next(iter(column_files(manifest)), None),
    "changes": changes_file,
}


def _of_file(path: Path, manifest: Manifest, name: str) -> Part:
    footer = read_footer(path)
    made_from = footer.fingerprints.get("documents")
    if name in _BY_PREP:
        is_of_shard = footer.num_rows == manifest.total_documents
    else:
        is_of_shard = made_from == documents_digest(manifest)
    if not is_of_shard:
        raise stale(name, path, made_from)

    def schema() -> Schema:
        return {field.name: field.type for field in footer.schema if field.name not in KEYS}

    return Part(
        schema, lambda: footer.digest, lambda columns: read_attribute(path, [KEYS[1], *columns])
    )


def _scores_schema(run: Run) -> Schema:
    return _SCORES | dict.fromkeys(run.rubric.dimensions, pa.float64())


def _scores(run: Run, shard: ShardPaths, manifest: Manifest, columns: Sequence[str]) -> pa.Table:
    rows = []
    schema = _scores_schema(run)
    with open_file(load_quality(shard, manifest).path) as file:
        for line in file:
            row = orjson.loads(line)
            rows.append(row | (row["scores"] or {}))
    return pa.table({n: pa.array([r.get(n) for r in rows], schema[n]) for n in columns})
