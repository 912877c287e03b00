"""Texts as Parquet files in the layout of Hugging Face datasets: `load_dataset("DIR")` reads them.

One row per document, in the order of the manifest: `text`, `id` (the ingest id), `source`,
`text_sha256`; of curated shards also `topic`, `score`, `decision`, `scores` (JSON) and
`parent_doc_id`; then attributes and passthrough columns. `README.md` is the card. Memory: the
columns of one shard, and 1,000 texts.
"""

from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from loader.files.regular import read_file
from nmoe_core.base.atomic import atomic_file, write_bytes
from nmoe_core.base.fingerprint import local_digest
from nmoe_core.config.attributes import KEYS
from nmoe_core.config.tree import LINEAGE_NAME
from nmoe_core.shards.attribute_file import read_attribute, stale
from nmoe_core.shards.documents import ShardFile
from nmoe_core.shards.manifest import column_files, first_documents
from nmoe_core.text.documents import decode_documents
from nmoe_core.text.tokenizer import Tokenizer

_ROWS = 1000
_NUMBER = "number of the document"
_NUMBERS = {"topic": pa.int64(), "score": pa.float64()}
_LINEAGE = pa.schema(_NUMBERS | dict.fromkeys(("decision", "scores", "parent_doc_id"), pa.string()))


def files_beside(manifest: Manifest) -> dict[str, str]:
    """The digests of lineage and attributes of the manifest's shards."""
    found = {}
    for directory in {manifest.shard_path(entry).parent: None for entry in manifest.shards}:
        for path in (directory / LINEAGE_NAME, *_attributes(directory)):
            if path.is_file():
                found[str(path.relative_to(directory.parents[3]))] = local_digest(path)
    return found


def write_texts(
    output: Path, manifest: Manifest, files: Iterator[ShardFile], tokenizer: Tokenizer
) -> Iterator[Path]:
    """Write one file per shard file, and the card; yields the path of each when it is complete."""
    split = manifest.path.parent.name if manifest.path.parent.name == "valid" else "train"
    firsts = first_documents(manifest)
    columns = []
    for number, (entry, file) in enumerate(zip(manifest.shards, files)):
        directory = manifest.shard_path(entry).parent
        beside = _beside(directory, firsts[number], file)
        path = output / f"{split}-{number:05d}-of-{len(manifest.shards):05d}.parquet"
        with atomic_file(path) as stream:
            writer = None
            for first in range(0, len(file.spans), _ROWS):
                spans = file.spans[first : first + _ROWS]
                ids, digests = zip(*file.ids()[first : first + _ROWS])
                texts = decode_documents(tokenizer, file.tokens, spans)
                sources = [manifest.dataset] * len(spans)
                rest = beside.slice(first, _ROWS)
                table = pa.table(
                    [texts, *map(pa.array, (ids, sources, digests)), *rest.columns],
                    names=["text", "id", "source", "text_sha256", *rest.column_names],
                )
                writer = writer or pq.ParquetWriter(stream, table.schema, compression="zstd")
                writer.write_table(table)
                columns = table.column_names
            if writer is not None:
                writer.close()
        yield path
    card = output / "README.md"
    write_bytes(card, _card(manifest, split, columns).encode())
    yield card


def _beside(directory: Path, first: int, file: ShardFile) -> pa.Table:
    """Lineage, attributes and passthrough columns of the documents of a file, which begin at
    document `first` of its shard. Raises FormatError if an attribute is of other documents
    (E-ATTRIBUTE-STALE)."""
    own = range(first, first + len(file.spans))
    parents = [*own]  # the numbers of the documents in the data shard, whose attributes these are
    table = pa.table({_NUMBER: parents})
    if (path := directory / LINEAGE_NAME).is_file():
        rows = [orjson.loads(line) for line in read_file(path).splitlines()[first : own.stop]]
        for row in rows:
            row["score"] = row["aggregated"]
            row["scores"] = orjson.dumps(row["scores"]).decode()
        parents = [row["parent_index"] for row in rows]
        lineage = pa.Table.from_pylist(rows, _LINEAGE)
        for name in lineage.column_names:
            table = table.append_column(name, lineage.column(name))
    manifest = load_manifest(directory / MANIFEST_NAME)
    for path in (*_attributes(directory), *column_files(manifest)):
        rows = [*own] if path.parent == directory else parents
        values = read_attribute(path)
        if max(rows, default=-1) >= values.num_rows:
            raise stale(path.stem, path, f"{values.num_rows} documents")
        values = values.take(rows)
        if path.parent != directory:
            found = [digest.hex() for digest in values.column("text_sha256").to_pylist()]
            if found != [digest for _, digest in file.ids()]:
                raise stale(path.stem, path, "other texts")
        for name in values.column_names:
            if name not in KEYS:
                shown = name if name not in table.column_names else f"{path.stem}.{name}"
                table = table.append_column(shown, values.column(name))
    return table.drop_columns(_NUMBER)


def _attributes(directory: Path) -> list[Path]:
    """The files of attributes of a shard `{tree}/{source}/{split}/shard_NNNN` of a run."""
    if len(directory.parents) < 4 or directory.parent.name != "train":
        return []
    beside = directory.parents[3] / "attributes" / directory.parents[1].name / directory.name
    return sorted(beside.glob("*.parquet"))


def _card(manifest: Manifest, split: str, columns: list[str]) -> str:
    return f"""---
configs:
- config_name: default
  data_files:
  - split: {"validation" if split == "valid" else "train"}
    path: {split}-*.parquet
---

# {manifest.dataset}

{manifest.total_documents:,} documents, {manifest.total_tokens:,} tokens of {manifest.tokenizer},
in the order of training. Content of the shards: `{manifest.content_digest()}`.

Columns: {", ".join(columns)}.
"""
