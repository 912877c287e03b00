"""Writes `.idx` files: while a shard is written, or from the shard alone when one was lost."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from loader.format import INDEX_HEADER, INDEX_MAGIC, INDEX_VERSION, open_shard
from nmoe_core.atomic import write_bytes
from nmoe_core.errors import FormatError
from nmoe_core.shards.verify import CHUNK_TOKENS


class IndexWriter:
    """Collects document spans and writes an `.idx` file.

    Args:
        path: Where `finalize` writes.
    """

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
        ends = np.frombuffer(self._ends, "u8").astype("<u8")
        starts = np.concatenate([np.zeros(1, "<u8"), ends[:-1]]) if len(ends) else ends
        header = INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, len(ends), 0)
        write_bytes(self.path, header + np.stack([starts, ends], axis=1).astype("<u8").tobytes())
        return len(ends)


def regenerate_index(
    shard: Path, eos_token_id: int, *, allow_tail: bool = False
) -> tuple[Path, int]:
    """Rebuild the index of a shard from its EOS tokens; return its path and number of documents.

    Args:
        shard: The `.npy` file; the index goes next to it.
        eos_token_id: Token that ends every document.
        allow_tail: Make a document of tokens after the last EOS instead of refusing them.

    Raises:
        FormatError: Not a shard, or tokens follow the last EOS (E-SHARD-TAIL).
    """
    tokens = open_shard(shard)
    ends: list[int] = []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        ends += (start + 1 + np.flatnonzero(chunk == eos_token_id)).tolist()
    num_tail = len(tokens) - (ends[-1] if ends else 0)
    if num_tail and not allow_tail:
        raise FormatError(
            "tokens follow the last EOS",
            where=shard,
            found=f"{num_tail} tokens",
            expected="a shard that ends with an EOS",
            do="check --eos-token-id, or use --allow-tail to make a document of them",
            code="E-SHARD-TAIL",
        )
    index = IndexWriter(shard.with_suffix(".idx"))
    for begin, end in zip([0, *ends], [*ends, len(tokens)] if num_tail else ends):
        index.add_document(begin, end)
    return index.path, index.finalize()
