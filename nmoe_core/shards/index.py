"""Writes `.idx` files: while a shard is written, or from the shard alone when one was lost."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from loader.files.shard import INDEX_HEADER, INDEX_MAGIC, INDEX_VERSION, open_shard
from nmoe_core.base.atomic import atomic_file, write_bytes
from nmoe_core.base.errors import FormatError
from nmoe_core.shards.verify import CHUNK_TOKENS


def index_header(num_documents: int) -> bytes:
    """Header of an `.idx` file."""
    return INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, num_documents, 0)


def index_rows(start: int, num_tokens: np.ndarray) -> bytes:
    """Index rows of documents that follow each other from token `start`.

    `num_tokens` is int64 `[documents]`: tokens of each, its EOS included.
    """
    rows = np.empty((len(num_tokens), 2), "<u8")
    rows[:, 1] = num_tokens.cumsum() + start
    rows[1:, 0] = rows[:-1, 1]
    rows[:1, 0] = start
    return rows.tobytes()


class IndexWriter:
    """Collects document spans and writes an `.idx` file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._ends = array("Q")

    def add_document(self, start: int, end: int) -> None:
        """Append a span; it must be non-empty and start where the last one ended."""
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
    """Rebuild the index beside a shard from its EOS tokens; return its path and its documents.

    `allow_tail` makes a document of tokens after the last EOS instead of refusing them.

    Raises:
        FormatError: Not a shard, or tokens follow the last EOS (E-SHARD-TAIL).
    """
    path = shard.with_suffix(".idx")
    tokens = open_shard(shard)
    with atomic_file(path) as file:
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
                do="check --eos-token-id, or use --allow-tail to make a document of them",
                code="E-SHARD-TAIL",
            )
        if num_tail:
            file.write(index_rows(num_indexed, np.array([num_tail])))
            num_documents += 1
        file.seek(0)
        file.write(index_header(num_documents))
    return path, num_documents
