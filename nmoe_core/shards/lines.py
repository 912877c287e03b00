"""Keys of the records from which the documents of a shard were made, and of those that left no
document, as they were empty or too short: `.lines` in the directory of a shard.

A pass over a source that grew reuses the documents of known records. A known JSON line need not be
parsed: its key is its XXH3-128 hash. The hash includes the line's position if the position is the
document's id. The key of any other record is made of its id and raw text. The file only saves work
and is not part of the shard: manifests do not list it. It records the digest of the reading
settings and the checksums of the shard's files. Without this file, all text is read and normalised
again.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from loader.files.format import Manifest
from loader.files.regular import read_file
from nmoe_core.shards.manifest import entry_row
from nmoe_core.shards.shard_file import StagedFiles

LINES_NAME = ".lines"
LINE_ROW = np.dtype([("key", "<u8", 2), ("text_bytes", "<u8")])
"""Row of a document; the key is zero if the line does not identify the document."""
DROPPED_ROW = np.dtype([("line", LINE_ROW), ("outcome", "<u4"), ("is_emptied", "<u4")])
"""Row of a record that left no document: why (as a number of `prep.tokenize.OUTCOMES`), and whether
transforms left nothing of it. Its key is never zero."""


def line_keys(lines: Iterable[bytes]) -> np.ndarray:
    """The keys of lines: uint64 `[lines, 2]`."""
    return np.frombuffer(b"".join(map(xxh3_128_digest, lines)), "<u8").reshape(-1, 2)


def placed_keys(keys: np.ndarray, places: Iterable[str]) -> np.ndarray:
    """The keys of lines whose documents have their positions as ids: uint64 `[lines, 2]`."""
    return keys ^ line_keys(place.encode() for place in places)


def read_lines(manifest: Manifest, reading: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The rows of a shard, LINE_ROW `[documents]`, and those of the records that left none,
    DROPPED_ROW `[records]`; None if the file is missing, or the shard's files or the digest of the
    reading settings changed."""
    path = manifest.path.parent / LINES_NAME
    if not path.is_file():
        return None
    payload = read_file(path)
    names = ("checksum", "index_checksum", "ids_checksum")
    sums = [str(entry_row(entry).get(name)) for entry in manifest.shards for name in names]
    mark = _mark([reading, *sums])
    size_bytes = len(mark) + LINE_ROW.itemsize * manifest.total_documents
    num_dropped, rest = divmod(len(payload) - size_bytes, DROPPED_ROW.itemsize)
    if num_dropped < 0 or rest or not payload.startswith(mark):
        return None
    lines = np.frombuffer(payload, LINE_ROW, manifest.total_documents, len(mark))
    return lines, np.frombuffer(payload, DROPPED_ROW, num_dropped, size_bytes)


def _mark(digests: Sequence[str]) -> bytes:
    return hashlib.sha256("".join(digests).encode()).digest()


class StagedLines(StagedFiles):
    """The rows of `.lines` that a pass writes; `num_documents` is the number of documents of each
    shard so far, and `num_dropped` that of the records without a document."""

    def __init__(
        self, directory: Path, num_documents: dict[int, int], num_dropped: dict[int, int]
    ) -> None:
        sizes = {bucket: n * LINE_ROW.itemsize for bucket, n in num_documents.items()}
        super().__init__(directory, ".lines", sizes)
        sizes = {bucket: n * DROPPED_ROW.itemsize for bucket, n in num_dropped.items()}
        self._dropped = StagedFiles(directory, ".dropped", sizes)

    @property
    def num_dropped(self) -> dict[int, int]:
        """Records of each shard so far that left no document."""
        return {bucket: n // DROPPED_ROW.itemsize for bucket, n in self._dropped.sizes.items()}

    def drop(self, bucket: int, rows: np.ndarray) -> None:
        """Append records without a document, DROPPED_ROW."""
        self._dropped.append(bucket, rows.tobytes())

    def flush(self) -> list[int]:
        return super().flush() + self._dropped.flush()

    def suspend(self) -> None:
        super().suspend()
        self._dropped.suspend()

    def sealed(self, bucket: int, digests: Sequence[str]) -> Iterator[bytes]:
        """The content of a shard's `.lines` file. `digests` are the digest of the reading settings,
        then the checksums of the shard's token, index and ids files."""
        yield _mark(digests)
        yield read_file(self.path(bucket))
        yield read_file(self._dropped.path(bucket))
