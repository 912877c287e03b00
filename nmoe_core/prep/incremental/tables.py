"""Tables of the documents that a split already has, for a pass over a source that changed.

The tables are in `.prep/known` and take 112 bytes per document, and per record that left none;
building them takes 40 bytes of memory for each. Files whose checksum differs from their manifest
are left out, and so are documents that may have been cut. The lines of a shard are included only if
the shard was made with the current settings.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from loader.files.format import MANIFEST_NAME, Manifest, ShardEntry, check_digest, load_manifest
from loader.files.regular import regular
from nmoe_core.base.atomic import named_errors, save_array
from nmoe_core.base.errors import FormatError
from nmoe_core.prep.settings import PREP_CODE, PrepSettings
from nmoe_core.shards.documents import open_entry
from nmoe_core.shards.lines import DROPPED_ROW, LINE_ROW, read_lines
from nmoe_core.shards.manifest import ShardFormat, entry_row, shard_dirs
from nmoe_core.sources.records import Reading

KNOWN_NAME = "known"
DOCUMENTS = "documents.npy"
BY_TEXT = "by_text.npy"
BY_LINE = "by_line.npy"
FILES = "files.json"
# Rows of a table, uint64 `[12, documents]`: four words of the text's SHA-256, two words of the
# line's key, bytes of the text, start and end of its tokens, start and end of its line in the ids
# file, number of the file.
NUM_ROWS = 12
TEXT = slice(0, 4)
KEY = slice(4, 6)
_LOG = logging.getLogger(__name__)


class OldShard(NamedTuple):
    """A committed shard whose documents a pass may reuse."""

    manifest: Manifest
    table: Path
    reading: str | None
    """Digest of the reading settings; None if the shard's lines would give other documents now."""
    has_transforms: bool


class OldFile(NamedTuple):
    """A token file of an old shard, or the records of a shard that left no document in one way,
    which have neither tokens nor ids."""

    npy: str
    ids: str
    bucket: int
    dtype: str
    has_bos: bool
    num_documents: int
    first_document: int
    """Number of its first document in the shard."""
    changes: str
    """Arrow file of what transforms changed in the documents of the shard; empty without
    transforms."""
    outcome: int = 0
    """Number in `prep.tokenize.OUTCOMES`; 0 for documents."""
    is_emptied: bool = False
    """Whether transforms left nothing of the records."""


def old_shards(
    split_dir: Path, tables: Path, settings: PrepSettings, fmt: ShardFormat, reading: Reading
) -> list[OldShard]:
    """The shards of a split that this version of the code made with this tokenizer."""
    found = []
    for directory in shard_dirs(split_dir):
        try:
            manifest = load_manifest(directory / MANIFEST_NAME)
        except FormatError:  # a shard that cannot be read is left out: readers would refuse it too
            continue
        extra = manifest.extra
        made_by = extra.get("fingerprints", {}).get("code"), extra.get("tokenizer_fingerprint")
        if made_by == (PREP_CODE, fmt.tokenizer_fingerprint):
            ends = manifest.eos_token_id, extra.get("bos_token_id"), manifest.dtype
            was = extra.get("source_info", {}).get("settings", {})
            has_lines = ends == (fmt.eos_token_id, fmt.bos_token_id, fmt.dtype)
            has_lines &= _of_a_line(was) == _of_a_line(settings.identity())
            table = tables / f"{directory.name}.npy"
            known = reading.digest if has_lines else None
            found.append(OldShard(manifest, table, known, bool(settings.transforms)))
    return found


def _of_a_line(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, apart from the reading settings, that determine which document is made from a
    line."""
    return settings | {"max_tokens": None, "reading_digest": None}


def write_table(worker: Any, shard: OldShard) -> list[OldFile]:
    """Write the table of a shard; return its undamaged files."""
    manifest = shard.manifest
    found = None if shard.reading is None else read_lines(manifest, shard.reading)
    changes = ""
    if found is not None and shard.has_transforms:
        changes = _unpacked_changes(shard)
        found = found if changes else None
    if found is None:
        found = np.zeros(manifest.total_documents, LINE_ROW), np.zeros(0, DROPPED_ROW)
    lines, dropped = found
    files = []
    parts = [np.empty((NUM_ROWS, 0), np.uint64)]
    first = 0
    for entry in manifest.shards:
        last = first + entry.num_documents
        try:
            file, rows = _rows(manifest, entry, lines[first:last])
            file = file._replace(first_document=first, changes=changes)
        except (FormatError, OSError, ValueError) as error:
            where = manifest.shard_path(entry)
            _LOG.warning("documents of %s are tokenised again: %s", where, error)
        else:
            files.append(file)
            parts.append(rows)
        first = last
    table = np.concatenate(parts, axis=1)
    info = manifest.extra.get("source_info", {})
    if info.get("truncated_documents", 1) and table.shape[1]:
        lengths = table[8] - table[7]
        table[:7, lengths == lengths.max()] = 0  # the longest documents may have been cut
    parts = [table]
    for kind in np.unique(dropped[["outcome", "is_emptied"]]):
        of_kind = dropped["line"][dropped[["outcome", "is_emptied"]] == kind]
        rows = np.zeros((NUM_ROWS, len(of_kind)), np.uint64)
        rows[KEY] = of_kind["key"].T
        rows[6] = of_kind["text_bytes"]
        parts.append(rows)
        bucket = int(manifest.path.parent.name.removeprefix("shard_"))
        facts = bucket, manifest.dtype, False, len(of_kind), 0, ""
        files.append(OldFile("", "", *facts, int(kind["outcome"]), bool(kind["is_emptied"])))
    _save(shard.table, np.concatenate(parts, axis=1))
    return files


def _save(path: Path, values: np.ndarray) -> None:
    with named_errors(path), open(path, "wb") as file:
        save_array(file, values)


def _unpacked_changes(shard: OldShard) -> str:
    """Copy what transforms changed in a shard to an Arrow file, which is read by memory map; return
    its path. Empty if the shard's record is missing or damaged."""
    import pyarrow as pa

    from nmoe_core.shards.changes import SCHEMA, undamaged_changes

    rows = undamaged_changes(shard.manifest)
    if rows is None:
        return ""
    path = str(shard.table.with_suffix(".arrow"))
    with named_errors(path), pa.ipc.new_file(path, SCHEMA) as file:
        file.write_table(rows.cast(SCHEMA))
    return path


def _rows(manifest: Manifest, entry: ShardEntry, lines: np.ndarray) -> tuple[OldFile, np.ndarray]:
    """The documents of one file, uint64 `[12, documents]`."""
    directory = manifest.path.parent
    check_digest(manifest.shard_path(entry), entry.checksum, "E-SHARD-CHECKSUM")
    paths = {
        kind: directory / str(entry_row(entry).get(f"{kind}_path")) for kind in ("index", "ids")
    }
    for kind, path in paths.items():
        check_digest(path, str(entry.extra.get(f"{kind}_checksum")), "E-SHARD-CHECKSUM")
    file = open_entry(directory, manifest, entry)
    payload = np.fromfile(regular(paths["ids"]), np.uint8)
    ends = np.flatnonzero(payload == ord("\n")) + 1
    rows = np.zeros((NUM_ROWS, len(file.spans)), np.uint64)
    # A line of the ids file ends with 64 digits of the hash, a quotation mark, a brace and LF.
    digests = payload[ends[:, None] + np.arange(-67, -3)].tobytes().decode()
    rows[TEXT] = np.frombuffer(bytes.fromhex(digests), ">u8").reshape(-1, 4).T
    rows[4:6] = lines["key"].T
    rows[6] = lines["text_bytes"]
    rows[7:9] = file.spans.T
    rows[9, 1:] = ends[:-1]
    rows[10] = ends
    has_bos = manifest.extra.get("bos_token_id") is not None
    bucket = int(directory.name.removeprefix("shard_"))
    npy = manifest.shard_path(entry)
    facts = str(npy), str(paths["ids"]), bucket, manifest.dtype, has_bos, len(file.spans)
    return OldFile(*facts, 0, ""), rows


def join_tables(
    tables: Path, shards: Sequence[OldShard], files: Sequence[Sequence[OldFile]]
) -> None:
    """Merge the tables of the shards into one, sorted by text and by line."""
    every = [file for of_shard in files for file in of_shard if file.num_documents]
    if not every:
        return
    shape = NUM_ROWS, sum(file.num_documents for file in every)
    joined = np.lib.format.open_memmap(tables / DOCUMENTS, "w+", np.uint64, shape)
    first = 0
    for shard in shards:
        part = np.load(regular(shard.table), mmap_mode="r")
        joined[:, first : first + part.shape[1]] = part
        first += part.shape[1]
        shard.table.unlink()
    joined[11] = np.repeat(np.arange(len(every)), [file.num_documents for file in every])
    for name, column in ((BY_TEXT, joined[0]), (BY_LINE, joined[4])):
        order = np.argsort(column, kind="stable")
        # Key 0 means that the document has no key: leave it out.
        order = order[np.searchsorted(column, 1, sorter=order) :]
        _save(tables / name, np.stack([column[order], order.astype(np.uint64)]))
    joined.flush()
    (tables / FILES).write_bytes(orjson.dumps([tuple(file) for file in every]))
