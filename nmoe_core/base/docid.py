"""Shard document ids and the two MD5 rules that place documents.

A document id is `{source}//{rel}#s={start}:e={end}`: `rel` is the POSIX path of the `.npy` file
relative to the data root, `start` and `end` are token offsets, end exclusive and past the EOS. The
rules are bit-exact contracts with other tools that read the same trees; see docs/formats.md.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.files.format import open_shard, resolve_inside
from nmoe_core.base.errors import FormatError

_DOC_ID = re.compile(
    r"(?P<source>[^/#]+)//(?P<rel>[^#]+)#s=(?P<start>\d{1,18}):e=(?P<end>\d{1,18})"
)


class DocId(NamedTuple):
    """A parsed document id."""

    source: str
    rel: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.source}//{self.rel}#s={self.start}:e={self.end}"


def parse_doc_id(text: str) -> DocId:
    """Split a document id into its parts.

    Raises:
        FormatError: The text is not a document id, or its span is empty (E-DOCID).
    """
    match = _DOC_ID.fullmatch(text)
    if match is None or int(match["start"]) >= int(match["end"]):
        raise FormatError(
            "not a document id",
            found=repr(text[:200]),
            expected="{source}//{path}#s={start}:e={end} with start < end",
            code="E-DOCID",
        )
    return DocId(match["source"], match["rel"], int(match["start"]), int(match["end"]))


def bucket_of(ingest_id: str, num_shards: int) -> int:
    """Shard of a document: first 16 hex digits of the MD5 of its ingest id, modulo `num_shards`."""
    return int(_md5(ingest_id)[:16], 16) % num_shards


def split_of(doc_id: str) -> str:
    """Label split of a document: 80 % `train`, 10 % `val`, 10 % `test`, by the MD5 of its id."""
    h = int(_md5(doc_id)[:8], 16) % 100
    return "train" if h < 80 else "val" if h < 90 else "test"


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


class DocumentReader:
    """Reads the tokens of documents by id under one data root; keeps the last shard mapped.

    Args:
        data_root: Directory that document ids are relative to.
    """

    def __init__(self, data_root: Path) -> None:
        self.data_root = data_root
        self._open: tuple[str, np.ndarray] | None = None

    def tokens(self, doc_id: str | DocId, eos_token_id: int | None = None) -> np.ndarray:
        """Token ids of a document: uint32 `[length]`, a view of the mapped shard.

        Args:
            doc_id: The id, as text or parsed.
            eos_token_id: When given, the span must end with this token, which is left out.

        Raises:
            FormatError: The id is malformed (E-DOCID), leads outside the data root
                (E-PATH-ESCAPE), or its span is not a document of the shard (E-DOCID).
        """
        parsed = parse_doc_id(doc_id) if isinstance(doc_id, str) else doc_id
        if self._open is None or self._open[0] != parsed.rel:
            self._open = (parsed.rel, open_shard(resolve_inside(self.data_root, parsed.rel)))
        shard = self._open[1]
        if parsed.end > len(shard):
            raise FormatError(
                "document ends past its shard",
                where=str(parsed),
                found=f"end {parsed.end}",
                expected=f"at most {len(shard)}",
                code="E-DOCID",
            )
        if eos_token_id is None:
            return shard[parsed.start : parsed.end]
        if shard[parsed.end - 1] != eos_token_id:
            raise FormatError(
                "document does not end with the EOS token",
                where=str(parsed),
                found=int(shard[parsed.end - 1]),
                expected=eos_token_id,
                code="E-DOCID",
            )
        return shard[parsed.start : parsed.end - 1]
