"""Writes one `.npy` file with its index and ids: appends first, and writes the headers at the end.

Memory does not grow with tokens or documents. Another process can resume from a saved `state`: it
truncates the files to the lengths in the state. A lost index can be rebuilt from the shard alone.
"""

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from loader.files.regular import open_file
from loader.files.shard import INDEX_HEADER, INDEX_MAGIC, INDEX_VERSION, open_shard
from nmoe_core.base.atomic import (
    atomic_file,
    failpoint,
    named_errors,
    replacing,
    start_writeback,
    write_bytes,
)
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.config.tree import shard_dir_name
from nmoe_core.shards.verify import CHUNK_TOKENS

NPY_HEADER_BYTES = 128
# Tools that search a tree for `*.npy` must not find an unfinished file.
PART_SUFFIX = ".part"
FileState = tuple[int, int, int]
_U4 = np.dtype("<u4")


def npy_header(num_tokens: int, integers: np.dtype = _U4) -> bytes:
    """NPY v1.0 header of a 1-D array: always 128 bytes, as numpy writes it."""
    text = f"{{'descr': '{integers.str}', 'fortran_order': False, 'shape': ({num_tokens},), }}"
    body = text.ljust(NPY_HEADER_BYTES - 11).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def id_line(ingest_id: str, text_sha256: str) -> bytes:
    """A document's line of the `.ids.jsonl` file."""
    row = {"id": ingest_id, "text_sha256": text_sha256}
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def id_lines(ingest_ids: Sequence[str], text_sha256s: Sequence[str]) -> list[bytes]:
    """Like `id_line`, for many documents; all ids are checked together for characters that JSON
    escapes."""
    together = "".join(ingest_ids)
    is_plain = together.isascii() and together.isprintable()
    rows = zip(ingest_ids, text_sha256s, strict=True)
    if not is_plain or '"' in together or "\\" in together:
        return [id_line(*row) for row in rows]
    return [b'{"id":"%b","text_sha256":"%b"}\n' % (i.encode(), s.encode()) for i, s in rows]


def seal_file(path: Path) -> str:
    """Make a file durable; return its SHA-256."""
    # start the write first, to hash while the system writes the file to disk
    digest = sha256_file(path)
    with open_file(path) as file:
        failpoint("fsync")
        os.fsync(file.fileno())
    return digest


class OpenShardFile:
    """An unfinished `.npy` file with its index and ids, resumed from `state`. Raises FormatError if
    a file is shorter than in `state` (E-PREP-JOURNAL)."""

    def __init__(
        self,
        directory: Path,
        stem: str,
        state: FileState = (0, 0, 0),
        integers: np.dtype = _U4,
        bucket: str = "",
    ) -> None:
        self.integers = integers
        self.bucket = bucket
        self.npy = directory / f"{stem}.npy"
        self.num_tokens, self.num_documents, self.ids_bytes = state
        sizes = (
            NPY_HEADER_BYTES + integers.itemsize * self.num_tokens,
            INDEX_HEADER.size + 16 * self.num_documents,
            self.ids_bytes,
        )
        if self.npy.exists():  # the writer of this file was killed between `publish` and the commit
            self.npy.rename(self._part)
        for path, size_bytes in zip(self.paths(), sizes):
            if self.num_documents:
                require_size(path, size_bytes)
        self._files = [open_at(path, size) for path, size in zip(self.paths(), sizes)]
        self._tokens, self._index, self._ids = self._files

    @property
    def state(self) -> FileState:
        return self.num_tokens, self.num_documents, self.ids_bytes

    @property
    def _part(self) -> Path:
        return self.npy.with_name(self.npy.name + PART_SUFFIX)

    def paths(self) -> tuple[Path, Path, Path]:
        """Paths of the token file (with its working name), the index and the ids."""
        return self._part, self.npy.with_suffix(".idx"), self.npy.with_suffix(".ids.jsonl")

    def append(self, tokens: np.ndarray, num_tokens: np.ndarray, ids: bytes | memoryview) -> None:
        with named_errors(self.npy):
            failpoint("write")
            self._tokens.write(tokens.data)
            self._index.write(index_rows(self.num_tokens, num_tokens))
            self._ids.write(ids)
        self.num_tokens += len(tokens)
        self.num_documents += len(num_tokens)
        self.ids_bytes += len(ids)

    def flush(self) -> list[int]:
        for file in self._files:
            file.flush()
        return [os.dup(file.fileno()) for file in self._files]

    def finish(self) -> None:
        headers = npy_header(self.num_tokens, self.integers), index_header(self.num_documents)
        with named_errors(self.npy):
            for file, header in zip(self._files, headers):
                failpoint("write")
                file.seek(0)
                file.write(header)
            for file in self._files:
                file.flush()
                start_writeback(file.fileno())
        self.close()

    def publish(self, checksum: str, index_checksum: str, ids_checksum: str) -> dict[str, Any]:
        """Rename the token file to its final name; return the manifest entry."""
        os.replace(self._part, self.npy)
        _, index, ids = self.paths()
        return {
            "path": self.npy.name,
            "index_path": index.name,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "checksum": checksum,
            "index_checksum": index_checksum,
            "ids_path": ids.name,
            "ids_checksum": ids_checksum,
            **({"bucket": self.bucket} if self.bucket else {}),
        }

    def close(self) -> None:
        for file in self._files:
            file.close()


def require_size(path: Path, size_bytes: int) -> None:
    """Raise FormatError if a file is shorter than the journal says (E-PREP-JOURNAL)."""
    found = path.stat().st_size if path.exists() else 0
    if found < size_bytes:
        raise FormatError(
            "an unfinished file is shorter than its journal says",
            where=path,
            found=f"{found} bytes",
            expected=f"{size_bytes} bytes",
            do="start over",
            code="E-PREP-JOURNAL",
        )


def open_at(path: Path, size_bytes: int) -> IO[bytes]:
    """Open a file for appending; creates it, or truncates it to `size_bytes`."""
    file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115  (closed by close)
    file.truncate(size_bytes)
    file.seek(size_bytes)
    return file


class StagedFiles:
    """The files that a pass appends to, one per shard: `shard_NNNN{suffix}` in `directory`. The
    files are first truncated to `sizes`. Later appends update `sizes`. Raises FormatError if a file
    is shorter than in `sizes` (E-PREP-JOURNAL)."""

    def __init__(self, directory: Path, suffix: str, sizes: dict[int, int]) -> None:
        self.directory = directory
        self.sizes = sizes
        self._suffix = suffix
        if sizes:
            directory.mkdir(parents=True, exist_ok=True)
        for bucket, size_bytes in sizes.items():
            require_size(self.path(bucket), size_bytes)
        self._files = {bucket: open_at(self.path(bucket), size) for bucket, size in sizes.items()}

    def path(self, bucket: int) -> Path:
        """The file of a shard."""
        return self.directory / f"{shard_dir_name(bucket)}{self._suffix}"

    def append(self, bucket: int, payload: bytes | memoryview) -> None:
        """Append bytes to the file of a shard."""
        file = self._files[bucket]
        with named_errors(file.name):
            failpoint("write")
            self.sizes[bucket] += file.write(payload)

    def flush(self) -> list[int]:
        """Flush all files to the operating system; return duplicate descriptors of them."""
        files = [file for file in self._files.values() if not file.closed]
        for file in files:
            with named_errors(file.name):
                file.flush()
        return [os.dup(file.fileno()) for file in files]

    def suspend(self) -> None:
        """Close the files and keep them."""
        for file in self._files.values():
            file.close()


def index_header(num_documents: int) -> bytes:
    """Header of an `.idx` file."""
    return INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, num_documents, 0)


def index_rows(start: int, num_tokens: np.ndarray) -> bytes:
    """Index rows of consecutive documents, the first of which starts at token `start`.

    `num_tokens` is int64 `[documents]`: tokens of each document, including EOS.
    """
    rows = np.empty((len(num_tokens), 2), "<u8")
    rows[:, 1] = num_tokens.cumsum() + start
    rows[1:, 0] = rows[:-1, 1]
    rows[:1, 0] = start
    return rows.tobytes()


class IndexWriter:
    """Collects document spans, then writes an `.idx` file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._ends = array("Q")

    def add_document(self, start: int, end: int) -> None:
        """Append the span of a document. It must not be empty, and must start at the end of the
        previous span."""
        last = self._ends[-1] if self._ends else 0
        if start != last or end <= start:
            raise FormatError(
                "document spans must be contiguous",
                where=self.path,
                found=f"{start}:{end}",
                expected=f"a span from {last}",
                code="E-INDEX-FORMAT",
            )
        self._ends.append(end)

    def finalize(self) -> int:
        """Commit the file; return the number of documents."""
        ends = np.frombuffer(self._ends, "u8").astype(np.int64)
        write_bytes(self.path, index_header(len(ends)) + index_rows(0, np.diff(ends, prepend=0)))
        return len(ends)


def regenerate_index(
    shard: Path, eos_token_id: int, *, allow_tail: bool = False
) -> tuple[Path, int]:
    """Rebuild the index of a shard file from its EOS tokens; return the path and number of
    documents.

    With `allow_tail`, tokens after the last EOS become a document. Raises FormatError if the file
    is not a shard, or has tokens after the last EOS (E-SHARD-TAIL).
    """
    path = shard.with_suffix(".idx")
    tokens = open_shard(shard)
    with replacing(path), atomic_file(path) as file:
        file.write(index_header(0))
        num_documents = num_indexed = 0
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
            ends = start + 1 + np.flatnonzero(chunk == eos_token_id)
            file.write(index_rows(num_indexed, np.diff(ends, prepend=num_indexed)))
            num_documents += len(ends)
            num_indexed = int(ends[-1]) if len(ends) else num_indexed
        num_tail = len(tokens) - num_indexed
        if num_tail and not allow_tail:
            raise FormatError(
                "tokens follow the last EOS",
                where=shard,
                found=f"{num_tail} tokens",
                expected="a shard that ends with an EOS",
                do="check --eos-token-id, or use --allow-tail to treat these tokens as a document",
                code="E-SHARD-TAIL",
            )
        if num_tail:
            file.write(index_rows(num_indexed, np.array([num_tail])))
            num_documents += 1
        file.seek(0)
        file.write(index_header(num_documents))
    return path, num_documents
