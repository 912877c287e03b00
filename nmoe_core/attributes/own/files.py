"""A user's own attribute: Parquet files with `doc_id` or `text_sha256`, joined to the shards.

Hashes are 32 bytes, or 64 hexadecimal digits. A document without a row gets nulls; two different
rows for one key are refused. Files are read once for all shards of a call. Memory: the files.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from loader.files.format import load_manifest
from loader.files.regular import regular
from nmoe_core.attributes import CODES
from nmoe_core.attributes.attribute import made, open_shard_documents, replace_rows
from nmoe_core.base.atomic import replacing
from nmoe_core.base.errors import FormatError, one_line
from nmoe_core.base.fingerprint import local_digest, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.attributes import KEYS
from nmoe_core.config.tree import ShardPaths
from nmoe_core.shards.attribute_file import is_attribute_current, positions
from nmoe_core.shards.manifest import documents_digest


class UserFiles:
    """The Parquet files of a user's own attribute."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name
        self._paths = paths

    @cached_property
    def digest(self) -> str:
        """Digest of the files' content."""
        return sha256_json([local_digest(file) for file in self._paths])

    @property
    def schema(self) -> pa.Schema:
        """Common schema of all files, including the key. Raises FormatError as `rows`."""
        try:
            return pa.unify_schemas([pq.read_schema(regular(path)) for path in self._paths])
        except (pa.ArrowException, OSError) as error:
            raise _refuse(self.name, self._paths, one_line(error), "Parquet") from None

    @cached_property
    def rows(self) -> tuple[str, pa.Table]:
        """The name of the key column, and all rows. Raises FormatError (E-ATTRIBUTE-JOIN)."""
        return _read(self.name, self._paths)


def join_attribute(shard: ShardPaths, files: UserFiles) -> Result:
    """Make the file of a shard from the rows of a user's files, unless it is up to date.

    Raises:
        FormatError: A file cannot be read, has neither key column, or has two rows for one key
            (E-ATTRIBUTE-JOIN).
        LockedError: Another process is making this file.
    """
    path = shard.attribute(files.name)
    manifest = load_manifest(shard.manifest)
    made_from = {
        "documents": documents_digest(manifest),
        "code": CODES["join"],
        "files": files.digest,
    }
    with replacing(path):
        changed = not is_attribute_current(path, made_from)
        if changed:
            key, rows = files.rows
            documents = open_shard_documents(shard).documents
            wanted = pa.array(documents.doc_ids, pa.string())
            if key == "text_sha256":
                wanted = pa.array(map(bytes.fromhex, documents.text_sha256), pa.binary(32))
            places = positions(wanted, rows.column(key))
            own = rows.drop_columns([n for n in KEYS if n in rows.column_names]).take(places)
            batches = own.combine_chunks().to_batches()
            replace_rows(path, files.name, made_from, documents, own.schema, batches)
    return made(path, changed=changed)


def _read(name: str, paths: Sequence[Path]) -> tuple[str, pa.Table]:
    try:
        tables = [pq.ParquetFile(regular(path)).read(use_threads=False) for path in paths]
        table = pa.concat_tables(tables, promote_options="default").replace_schema_metadata()
    except (pa.ArrowException, OSError) as error:
        raise _refuse(name, paths, one_line(error), "Parquet") from None
    key = next((key for key in KEYS if key in table.column_names), None)
    if key is None or table.num_columns < 2 or len(set(table.column_names)) < table.num_columns:
        expected = f"{' or '.join(KEYS)}, and other columns with distinct names"
        raise _refuse(name, paths, ", ".join(table.column_names), expected)
    keys = table.column(key).combine_chunks()
    if key == "text_sha256" and not pa.types.is_fixed_size_binary(keys.type):
        keys = _from_hex(name, paths, keys)
    try:
        keys = keys.cast(pa.string() if key == "doc_id" else pa.binary(32))
    except pa.ArrowException:
        raise _refuse(name, paths, f"{key} of type {keys.type}", "text, or 32 bytes") from None
    table = _without_repeats(table.set_column(table.column_names.index(key), key, keys))
    keys = table.column(key).combine_chunks()
    values, counts = keys.value_counts().flatten()
    twice = values.filter(pa.array(counts.to_numpy() > 1))
    if len(twice) or keys.null_count:
        value = twice[0].as_py() if len(twice) else None
        found = f"{value.hex() if isinstance(value, bytes) else value} {'twice' if value else ''}"
        raise _refuse(name, paths, found.strip(), f"each {key} in at most one row")
    return key, table


def _without_repeats(table: pa.Table) -> pa.Table:
    """The table without repeated rows; unchanged if its types cannot be compared."""
    try:
        return pa.TableGroupBy(table, table.column_names, use_threads=False).aggregate([])
    except pa.ArrowNotImplementedError:  # columns of lists cannot be compared
        return table


def _from_hex(name: str, paths: Sequence[Path], keys: pa.Array) -> pa.Array:
    try:
        return pa.array([bytes.fromhex(text) for text in keys.to_pylist()], pa.binary(32))
    except (ValueError, TypeError, pa.ArrowException):
        found = f"text_sha256 of type {keys.type}"
        raise _refuse(name, paths, found, "32 bytes, or 64 hexadecimal digits") from None


def _refuse(name: str, paths: Sequence[Path], found: str, expected: str) -> FormatError:
    return FormatError(
        f"the files of attribute {name} cannot be joined",
        where=", ".join(map(str, paths[:3])),
        found=found,
        expected=expected,
        do="correct the files or attributes.files",
        code="E-ATTRIBUTE-JOIN",
    )
