"""Computes one attribute of documents and writes its file for one shard.

The row of a document depends only on its text. So rows are reused from an earlier file made by the
same code with the same settings, and only new and changed texts are processed. Rows that a model
computes are kept in parts until the file is written, so a killed run loses at most one part.
Memory: a batch of 1 M tokens, and the rows of one shard.
"""

import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loader.files.format import Manifest, load_manifest
from loader.files.regular import read_file
from nmoe_core.base.atomic import (
    TMP_MARK,
    fsync_dir,
    rename,
    replacing,
    write_bytes,
    write_json,
    writing_if,
)
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints, read_sealed, seal_summary, sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.tree import ShardPaths
from nmoe_core.shards.attribute_file import (
    Documents,
    Footer,
    find_footer,
    is_attribute_current,
    positions,
    read_attribute,
    read_footer,
    rows_digest,
    stale,
    write_attribute,
)
from nmoe_core.shards.columns import column_values
from nmoe_core.shards.documents import ShardFile, require_undamaged, shard_files
from nmoe_core.shards.drift import drift
from nmoe_core.shards.manifest import column_files, documents_digest
from nmoe_core.text.documents import decode_documents
from nmoe_core.text.tokenizer import load_tokenizer

_BATCH_TOKENS = 2**20
PART_TOKENS = 2**16
INPUT = "input_sha256"
"""Column with the digest of a document's text and of the values that a function read, as hex."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A computation that records columns about each document's text. Can be pickled.

    Attributes:
        name: Name of the attribute and of its files.
        schema: Schema of its columns.
        made_with: Fingerprints of code and settings.
        compute: Function from the texts of documents to their rows.
        facts: Facts about the settings; the result of every file reports them.
        reads_tokens: `compute` takes a list of the documents' token ids (without EOS) instead of
            texts, and a function to call with the number of documents as they are finished. Its
            rows are kept in parts.
        reads_columns: `compute` takes, beside texts, a list of the documents' ids and the values of
            these passthrough columns by name; None: it takes texts alone. Its rows are kept in
            parts. If it reads a column, a row has `INPUT`, and is reused if this is equal.
    """

    name: str
    schema: pa.Schema
    made_with: Fingerprints
    compute: Callable[..., pa.Table]
    facts: Mapping[str, int] = field(default_factory=dict)
    reads_tokens: bool = False
    reads_columns: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """The column whose values decide which rows are reused."""
        return INPUT if self.reads_columns else "text_sha256"

    def made_from(self, manifest: Manifest) -> Fingerprints:
        """Fingerprints of the file of a shard."""
        digest = sha256_json([*column_files(manifest).values()])
        read = {"read": digest} if self.reads_columns else {}
        return {"documents": documents_digest(manifest), **read, **self.made_with}


class ShardDocuments(NamedTuple):
    """The documents of a committed shard."""

    manifest: Manifest
    files: list[ShardFile]
    documents: Documents
    ingest_ids: list[str]


def open_shard_documents(shard: ShardPaths) -> ShardDocuments:
    """Ids and files of a shard. Raises FormatError if the shard is missing or damaged, or another
    tool wrote it without text hashes (E-SHARD-IDS)."""
    manifest = load_manifest(shard.manifest)
    files = shard_files(shard.tree.data, manifest)
    ids = [pair for file in files for pair in file.ids()]
    if ids and not ids[0][1]:
        raise FormatError(
            "the shard has no text hashes, which attributes need",
            where=shard.manifest,
            do="prepare the source with `nmoe prep`",
            code="E-SHARD-IDS",
        )
    doc_ids = [doc_id for file in files for doc_id in file.doc_ids()]
    documents = Documents(doc_ids, [digest for _, digest in ids])
    return ShardDocuments(manifest, files, documents, [ingest_id for ingest_id, _ in ids])


def make_attribute(shard: ShardPaths, attribute: Attribute, chosen: TokenizerSettings) -> Result:
    """Make the file of a shard, unless it is up to date.

    Raises:
        FormatError: The shard is missing or damaged, or has no text hashes.
        LockedError: Another process is making this file.
    """
    path = shard.attribute(attribute.name)
    manifest = load_manifest(shard.manifest)
    made_from = attribute.made_from(manifest)
    computed = 0
    with writing_if(lambda: not is_attribute_current(path, made_from), path) as changed:
        if changed:
            old = find_footer(path)
            require_undamaged(manifest)
            opened = open_shard_documents(shard)
            parts = Parts(path, made_from)
            rows = _Rows(attribute, chosen, opened, _known(path, old, attribute), parts)
            written = opened.documents, attribute.schema, rows.batches()
            replace_rows(path, attribute.name, made_from, *written)
            parts.remove()
            computed = int(rows.is_new.sum())
    return made(path, changed=changed, computed=computed, **attribute.facts)


def made(path: Path, **facts: int) -> Result:
    """The result for a committed file. The digest in it covers the rows, so equal rows from
    different inputs do not count as a change."""
    footer = read_footer(path)
    found = {"documents": footer.num_rows, "bytes": path.stat().st_size, **facts}
    return Result(footer.digest, {**found, "path": shown(path)})


def replace_rows(
    path: Path,
    name: str,
    fingerprints: Fingerprints,
    documents: Documents,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
) -> None:
    """Write the file, like `write_attribute`. If the new rows differ from the old rows,
    `{name}.drift.json` beside the file records the drift of each column from the old version. The
    drift file is written before the rows, and readers ignore it until the rows are written."""
    footer = find_footer(path)
    if footer is None:
        write_attribute(path, name, fingerprints, documents, schema, batches)
        return
    staged = path.with_name(f".{path.name}{TMP_MARK}new")
    try:
        digest = write_attribute(staged, name, fingerprints, documents, schema, batches)
        if footer.digest != digest:
            # Columns of bytes and lists have no bins, and would take much memory.
            names = [f.name for f in schema if not _is_fixed_size(f.type)]
            old, new = (read_attribute(one, names) for one in (path, staged))
            found = {"digest": digest, "documents": len(documents.doc_ids)}
            found |= {"drift": drift(old, new)}
            with replacing(_drift_path(path)):
                write_json(_drift_path(path), seal_summary(found))
        rename(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def _is_fixed_size(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_binary(kind) or pa.types.is_fixed_size_list(kind)


def read_drift(path: Path) -> tuple[int, dict[str, float]] | None:
    """Number of documents of a file, and the drift of each column from the previous version; None
    for the first version."""
    found = read_sealed(_drift_path(path))
    if found is None or found["digest"] != read_footer(path).digest:
        return None
    return found["documents"], found["drift"]


def _drift_path(path: Path) -> Path:
    return path.with_suffix(".drift.json")


def check_attribute(shard: ShardPaths, name: str) -> int:
    """Check that an attribute file has the documents of its shard, in order; return their number.
    Raises FormatError if the file has other documents (E-ATTRIBUTE-STALE), or its rows have changed
    since they were written (E-ATTRIBUTE-FORMAT)."""
    path = shard.attribute(name)
    documents = open_shard_documents(shard).documents
    table = read_attribute(path)
    footer = read_footer(path)
    if rows_digest(table) != footer.digest:
        raise FormatError(
            "rows have changed since they were written",
            where=path,
            do="delete the file, then make the attribute again",
            code="E-ATTRIBUTE-FORMAT",
        )
    hashes = [value.hex() for value in table.column("text_sha256").to_pylist()]
    if Documents(table.column("doc_id").to_pylist(), hashes) != documents:
        expected = f"the {len(documents.doc_ids)} documents of {shard.name}, in its order"
        raise stale(name, path, f"{table.num_rows} rows", expected)
    return table.num_rows


class Parts:
    """Rows that are computed part by part, in files beside an output until the output is written.
    `made_from` are the fingerprints of the output."""

    def __init__(self, path: Path, made_from: Fingerprints) -> None:
        self._directory = path.with_name(f".{path.name}.parts")
        self._made_from = made_from

    def rows(self, texts: Sequence[str], compute: Callable[[], pa.Table]) -> pa.Table:
        """The rows of texts, given by their digests: read if a killed run computed them, else
        computed and written."""
        path = self._directory / f"{sha256_json([self._made_from, list(texts)])}.arrow"
        try:
            return pa.ipc.open_file(read_file(path)).read_all()
        except (FileNotFoundError, pa.ArrowInvalid):  # not there yet, or damaged
            table = compute()
        payload = io.BytesIO()
        with pa.ipc.new_file(payload, table.schema) as file:
            file.write_table(table)
        write_bytes(path, payload.getvalue())
        return table

    def remove(self) -> None:
        """Delete all parts."""
        shutil.rmtree(self._directory, ignore_errors=True)


class _Rows:
    """Rows of a shard's documents: reused if the text is known (and not `is_new`), else computed.
    The hash covers the whole text, but prep may have cut the text at another length, so the number
    of tokens must be equal too."""

    def __init__(
        self,
        attribute: Attribute,
        chosen: TokenizerSettings,
        opened: ShardDocuments,
        known: pa.Table | None,
        parts: Parts,
    ) -> None:
        self._attribute = attribute
        self._opened = opened
        self._tokenizer = load_tokenizer(chosen)
        self._parts = parts
        self._known = known if known is not None and known.num_rows else None
        count = len(opened.documents.doc_ids)
        self._columns: dict[str, list[Any]] = {}
        self._inputs: Sequence[str] = opened.documents.text_sha256
        if attribute.reads_columns:
            self._columns = column_values(opened.manifest, attribute.reads_columns)
            values = zip(self._inputs, *self._columns.values())
            self._inputs = [sha256_json(list(row)) for row in values]
        self._places = np.zeros(count, np.int64)
        self.is_new = np.ones(count, np.bool_)
        if self._known is not None:
            keys = pa.array(self._inputs, pa.string())
            if attribute.key == "text_sha256":
                keys = pa.array(map(bytes.fromhex, self._inputs), pa.binary(32))
            found = positions(keys, self._known.column(attribute.key))
            self._places = found.fill_null(0).to_numpy()
            lengths = lengths_of(self._known.column("doc_id").combine_chunks())
            self.is_new = found.is_null().to_numpy(zero_copy_only=False)
            own = [np.zeros(0, np.int64), *(file.lengths() for file in opened.files)]
            self.is_new |= lengths[self._places] != np.concatenate(own)
        where = "/".join(opened.manifest.path.parent.parts[-3::2])
        self._meter = Meter(f"{attribute.name} {where}", int(self.is_new.sum()))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows of all documents, in order."""
        is_kept = self._attribute.reads_tokens or self._attribute.reads_columns is not None
        size = PART_TOKENS if is_kept else _BATCH_TOKENS
        first = 0
        for file in self._opened.files:
            for spans in _cut(file.spans, size):
                yield from self._rows(file, spans, slice(first, first + len(spans))).to_batches()
                first += len(spans)
                file.release()

    def _rows(self, file: ShardFile, spans: np.ndarray, documents: slice) -> pa.Table:
        schema = self._attribute.schema
        is_new = self.is_new[documents]
        parts = []
        order = np.empty(len(spans), np.int64)
        if is_new.any():
            places = np.flatnonzero(is_new) + documents.start
            rows = self._computed(file, spans[is_new], places.tolist())
            parts.append(rows.select(schema.names).cast(schema))
            order[is_new] = np.arange(is_new.sum())
        if self._known is not None and not is_new.all():
            places = pa.array(self._places[documents][~is_new])
            parts.append(self._known.select(schema.names).take(places))
            order[~is_new] = int(is_new.sum()) + np.arange(len(places))
        return pa.concat_tables(parts).take(order) if len(parts) > 1 else parts[0]

    def _computed(self, file: ShardFile, spans: np.ndarray, places: list[int]) -> pa.Table:
        """The rows of documents, given by their places in the shard."""
        compute = self._attribute.compute
        if not self._attribute.reads_tokens and self._attribute.reads_columns is None:
            return compute(decode_documents(self._tokenizer, file.tokens, spans))
        inputs = [self._inputs[i] for i in places]
        lengths = np.diff(spans, axis=1).ravel().tolist()
        keys = [f"{digest} {length}" for digest, length in zip(inputs, lengths)]

        def rows() -> pa.Table:
            if self._attribute.reads_tokens:
                tokens = [file.tokens[start : end - 1] for start, end in spans.tolist()]
                return compute(tokens, self._meter.add)
            texts = decode_documents(self._tokenizer, file.tokens, spans)
            ids = [str(self._opened.documents.doc_ids[i]) for i in places]
            columns = {name: [of[i] for i in places] for name, of in self._columns.items()}
            table = compute(texts, ids, columns)
            self._meter.add(len(ids))
            return table.append_column(INPUT, pa.array(inputs, pa.string())) if columns else table

        return self._parts.rows(keys, rows)


def lengths_of(doc_ids: pa.Array) -> np.ndarray:
    """Number of tokens of each document, read from its id: int64 `[N]`."""
    options = pc.ExtractRegexOptions(r"#s=(?P<start>\d+):e=(?P<end>\d+)$")
    spans = pc.call_function("extract_regex", [doc_ids], options)
    start, end = (spans.field(i).cast(pa.int64()).to_numpy() for i in range(2))
    return end - start


def _known(path: Path, old: Footer | None, attribute: Attribute) -> pa.Table | None:
    """The rows of an earlier file, if the same code made it with the same settings."""
    if old is None:
        return None
    made_with = {k: v for k, v in old.fingerprints.items() if k not in ("documents", "read")}
    return read_attribute(path) if made_with == attribute.made_with else None


def _cut(spans: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Split spans into batches of at most `size` tokens; a document that is longer than a batch
    forms one batch alone."""
    first = 0
    while first < len(spans):
        end = int(spans[first, 0]) + size
        last = max(first + 1, int(np.searchsorted(spans[:, 1], end, side="right")))
        yield spans[first:last]
        first = last
