"""Searches many texts at once by RE2, at about 600 MB/s on one core.

Python's own engine is not used on whole texts, since it may take quadratic time.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def column_of(payloads: Sequence[bytes]) -> pa.Array:
    """Texts in UTF-8 as an Arrow array."""
    offsets = np.zeros(len(payloads) + 1, np.int64)
    np.cumsum([len(payload) for payload in payloads], out=offsets[1:])
    buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(payloads))
    return pa.LargeStringArray.from_buffers(len(payloads), *buffers)


def matches(texts: pa.Array, regex: str, ignore_case: bool = False) -> np.ndarray:
    """Whether each text has a match: bool."""
    options = pc.MatchSubstringOptions(regex, ignore_case=ignore_case)
    found = pc.call_function("match_substring_regex", [texts], options)
    return found.to_numpy(zero_copy_only=False).astype(np.bool_)


def holders(texts: pa.Array, regex: str) -> np.ndarray:
    """Numbers of the texts that have a match: int64."""
    return np.flatnonzero(matches(texts, regex))


def parts_of(texts: pa.Array, regex: str) -> Iterator[list[str]]:
    """Each text in parts: before the first match of the pattern, the match, up to the next one, and
    so on; matches are at odd places. A NUL in a text is read as U+0001."""
    data = texts.buffers()[2]
    if data is not None and not np.frombuffer(data, np.uint8).all():
        plain = pc.ReplaceSubstringOptions("\0", "\1")
        texts = pc.call_function("replace_substring", [texts], plain)
    options = pc.ReplaceSubstringOptions(regex, "\0\\0\0")
    for text in pc.call_function("replace_substring_regex", [texts], options):
        yield text.as_py().split("\0")


def spans_of(texts: pa.Array, regex: str) -> Iterator[list[tuple[int, int]]]:
    """The start and end, in characters, of each match in each text."""
    for parts in parts_of(texts, regex):
        ends = [*accumulate(map(len, parts))]
        yield [*zip(ends[0::2], ends[1::2])]
