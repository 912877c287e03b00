"""The keys of the records that the documents of a shard were made from: `.lines` in its directory.

A pass over a source that grew reuses a document whose record it knows. A known JSON line need not
be parsed: its key is its XXH3-128, which includes its place if the place is the document's id. The
key of any other record is made of its id and raw text. The file saves work and is not part of the
shard: no manifest names it, but it names the way records were read, and the files of its shard by
their checksums. Without it, all text is read and normalised.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from loader.files.format import Manifest
from nmoe_core.shards.manifest import entry_row
from nmoe_core.shards.shard_file import StagedFiles

LINES_NAME = ".lines"
LINE_ROW = np.dtype([("key", "<u8", 2), ("text_bytes", "<u8")])
"""A document's row; the key is zero if its line does not identify it."""


def line_keys(lines: Iterable[bytes]) -> np.ndarray:
    """The keys of lines: uint64 `[lines, 2]`."""
    return np.frombuffer(b"".join(map(xxh3_128_digest, lines)), "<u8").reshape(-1, 2)


def placed_keys(keys: np.ndarray, places: Iterable[str]) -> np.ndarray:
    """The keys of lines whose documents have their places as ids: uint64 `[lines, 2]`."""
    return keys ^ line_keys(place.encode() for place in places)


def read_lines(manifest: Manifest, reading: str) -> np.ndarray | None:
    """The rows of a shard, LINE_ROW `[documents]`; None without them, or if its files or the digest
    of how records are read changed."""
    path = manifest.path.parent / LINES_NAME
    if not path.is_file():
        return None
    payload = path.read_bytes()
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
    """The rows of a pass over `num_documents`, the documents in each shard so far."""

    def __init__(self, directory: Path, num_documents: dict[int, int]) -> None:
        sizes = {bucket: n * LINE_ROW.itemsize for bucket, n in num_documents.items()}
        super().__init__(directory, ".lines", sizes)

    def sealed(self, bucket: int, digests: Sequence[str]) -> Iterator[bytes]:
        """The file of a shard; `digests` are of how records were read, and of its token, index and
        ids files."""
        yield _mark(digests)
        yield self.path(bucket).read_bytes()
