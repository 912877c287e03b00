"""The columns of attributes, defined without compiled code, and the kept columns of committed
shards: `columns.parquet` beside the files of each."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nmoe_core.attributes.files import Documents, read_attribute, write_attribute
from nmoe_core.base.atomic import atomic_file
from nmoe_core.config.attributes import KEYS
from nmoe_core.shards.manifest import COLUMNS_NAME
from nmoe_core.shards.shard_file import seal_file

NGRAMS = (2, 3, 4, 5, 6, 7, 8, 9, 10)
"""For the first three sizes the most frequent n-gram counts, for the others all repeated ones."""
COUNTS = (
    *("n_chars", "n_words", "n_symbol_words", "n_stop_words", "n_lines", "n_newlines"),
    *("n_paragraphs", "n_sentences", "n_c4_sentences"),
)
SHARES = (
    *("mean_word_chars", "hashes_per_word", "ellipses_per_word", "alphabetic_words"),
    *("bullet_lines", "ellipsis_lines", "ended_lines", "short_lines", "c4_lines"),
    *("refinedweb_cut_words", "dup_lines", "dup_line_chars", "dup_paragraphs"),
    *("dup_paragraph_chars", *(f"{'top' if n < 5 else 'dup'}_{n}gram_chars" for n in NGRAMS)),
)
FLAGS = {"has_lorem_ipsum": "lorem ipsum", "has_curly_bracket": "{"}
PERSONAL = ("n_emails", "n_ips", "n_cards", "n_ibans", "n_phones")
NUM_BANDS = 16  # of a signature, of seven hashes each
NUM_HASHES = 7 * NUM_BANDS
SCHEMAS = {
    "signals": pa.schema(
        [
            *(pa.field(name, pa.int64(), nullable=False) for name in COUNTS),
            *(pa.field(name, pa.float32(), nullable=False) for name in SHARES),
            *(pa.field(name, pa.bool_(), nullable=False) for name in FLAGS),
        ]
    ),
    "language": pa.schema(
        [
            pa.field("lang", pa.string(), nullable=False),  # ISO 639-1, or `und`
            pa.field("lang_score", pa.float32()),  # 0 to 1 by the detector; null if it did not run
        ]
    ),
    "contamination": pa.schema(
        [
            pa.field("contamination", pa.float32(), nullable=False),  # share of words, 0 to 1
            pa.field("contaminated_by", pa.string()),  # the set with most of these words
        ]
    ),
    "pii": pa.schema([pa.field(name, pa.int32(), nullable=False) for name in PERSONAL]),
    "signatures": pa.schema(
        [
            pa.field("keys", pa.binary(8 * NUM_BANDS), nullable=False),
            pa.field("sketch", pa.binary(NUM_HASHES), nullable=False),
        ]
    ),
    "duplicates": pa.schema(
        [
            pa.field("is_survivor", pa.bool_(), nullable=False),
            pa.field("exact_of", pa.string()),  # {source}//{ingest id} of the kept document
            pa.field("near_of", pa.string()),
            pa.field("near_jaccard", pa.float32()),
            pa.field("contained_in", pa.string()),  # of a survivor that is a part of another
            pa.field("containment", pa.float32()),
        ]
    ),
}
_EXAMPLE_CHARS = 40


def column_facts(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Name, type, number of missing values and an example of each column of these files."""
    tables = [read_attribute(path).drop_columns(list(KEYS)) for path in paths]
    if not tables:
        return []
    table = pa.concat_tables(tables)
    return [
        {
            "column": field.name,
            "type": str(field.type),
            "missing": table.column(i).null_count,
            "documents": table.num_rows,
            "example": _example(table.column(i)),
        }
        for i, field in enumerate(table.schema)
    ]


def write_columns(
    directory: Path, documents: Documents, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> dict[str, str]:
    """Write the columns of a shard's documents; return the file's fields in the manifest."""
    path = directory / COLUMNS_NAME
    digest = write_attribute(path, "columns", {}, documents, schema, batches)
    return {
        "columns_path": COLUMNS_NAME,
        "columns_checksum": seal_file(path),
        "columns_digest": digest,
    }


def copy_columns(paths: Sequence[Path], out: Path) -> None:
    """Write the rows of all files, one after the other, as one file."""
    with (
        atomic_file(out) as file,
        pq.ParquetWriter(
            file, pq.read_schema(paths[0]).remove_metadata(), compression="zstd"
        ) as writer,
    ):
        for path in paths:
            writer.write_table(read_attribute(path))


def values_of(path: Path, number: int) -> dict[str, Any]:
    """The values of one document, by its number in the shard."""
    row = read_attribute(path).slice(number, 1)
    return {name: row.column(name)[0].as_py() for name in row.schema.names if name not in KEYS}


def _example(values: pa.ChunkedArray) -> str | None:
    known = values.drop_null()
    if not len(known):
        return None
    text = str(known[0].as_py())
    return text if len(text) <= _EXAMPLE_CHARS else text[: _EXAMPLE_CHARS - 3] + "..."
