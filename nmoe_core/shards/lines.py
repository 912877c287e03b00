"""Keys of the records from which the documents of a shard were made: `.lines` in its directory.

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


def line_keys(lines: Iterable[bytes]) -> np.ndarray:
    """The keys of lines: uint64 `[lines, 2]`."""
    return np.frombuffer(b"".join(map(xxh3_128_digest, lines)), "<u8").reshape(-1, 2)


def placed_keys(keys: np.ndarray, places: Iterable[str]) -> np.ndarray:
    """The keys of lines whose documents have their positions as ids: uint64 `[lines, 2]`."""
    return keys ^ line_keys(place.encode() for place in places)


def read_lines(manifest: Manifest, reading: str) -> np.ndarray | None:
    """The rows of a shard, LINE_ROW `[documents]`; None if the file is missing, or the shard's
    files or the digest of the reading settings changed."""
    path = manifest.path.parent / LINES_NAME
    if not path.is_file():
        return None
    payload = read_file(path)
    names = ("checksum", "index_checksum", "ids_checksum")
    sums = [str(entry_row(entry).get(name)) for entry in manifest.shards for name in names]
    mark = _mark([reading, *sums])
    size_bytes = len(mark) + LINE_ROW.itemsize * manifest.total_documents
    if len(payload) != size_bytes or not payload.startswith(mark):
        return None
    return np.frombuffer(payload, LINE_ROW, -1, len(mark))


def _mark(digests: Sequence[str]) -> bytes:
    return hashlib.sha256("".join(digests).encode()).digest()


class StagedLines(StagedFiles):
    """The rows of `.lines` that a pass writes; `num_documents` is the number of documents of each
    shard so far."""

    def __init__(self, directory: Path, num_documents: dict[int, int]) -> None:
        sizes = {bucket: n * LINE_ROW.itemsize for bucket, n in num_documents.items()}
        super().__init__(directory, ".lines", sizes)

    def sealed(self, bucket: int, digests: Sequence[str]) -> Iterator[bytes]:
        """The content of a shard's `.lines` file. `digests` are the digest of the reading settings,
        then the checksums of the shard's token, index and ids files."""
        yield _mark(digests)
        yield read_file(self.path(bucket))
