"""Shard document ids and the two MD5 rules that place documents.

A document id is `{source}//{rel}#s={start}:e={end}`: `rel` is the POSIX path of the `.npy` file
relative to the data root, `start` and `end` are token offsets, end exclusive and past the EOS.
Other tools that read the same directories use the same rules, so the rules must not change by a
bit; see docs/formats.md.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nmoe_core.base.errors import FormatError

# An id has exactly one spelling: ASCII digits without leading zeros, no empty or `.` part of the
# path.
_OFFSET = r"0|[1-9][0-9]{0,17}"
_DOC_ID = re.compile(
    r"(?P<source>[^/#]+)//(?P<rel>(?!\./)(?!.*/\.?(?:/|#))[^#]+)"
    rf"#s=(?P<start>{_OFFSET}):e=(?P<end>{_OFFSET})",
    re.DOTALL,
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
    """The parts of a document id. Raises FormatError if the text is not a document id or its span
    is empty (E-DOCID)."""
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


def buckets_of(ingest_ids: Iterable[str], num_shards: int) -> np.ndarray:
    """`bucket_of` of each id: int64 `[ids]`."""
    digests = [hashlib.md5(i.encode(), usedforsecurity=False).digest() for i in ingest_ids]
    firsts = np.frombuffer(b"".join(digests), ">u8")[::2]
    return (firsts % num_shards).astype(np.int64)


def split_of(doc_id: str) -> str:
    """Label split of a document: 80 % `train`, 10 % `val`, 10 % `test`, by the MD5 of its id."""
    h = int(_md5(doc_id)[:8], 16) % 100
    return "train" if h < 80 else "val" if h < 90 else "test"


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
