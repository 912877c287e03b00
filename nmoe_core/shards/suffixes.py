"""The suffix array of tokens: all positions, sorted by the sequence of tokens that starts there.

libdivsufsort sorts bytes, so each id becomes two or three bytes, the highest first, and only the
positions at which an id begins are kept. This takes 15 bytes of memory per token while it runs, 10
if all ids are below 65,536.
"""

import importlib
from typing import Any

import numpy as np

from nmoe_core.base.errors import ConfigError, FormatError

MAX_TOKENS = 700_000_000  # at three bytes per token, byte positions fit an int32
BYTES_PER_TOKEN = 15
_CHUNK = 2**24


def load_sorter() -> Any:
    """Import the package that sorts suffixes. Raises ConfigError if it is missing
    (E-CONFIG-EXTRA)."""
    try:
        return importlib.import_module("pydivsufsort")
    except ImportError as error:
        raise ConfigError(
            f"sorting suffixes of tokens needs the package `{error.name}`",
            do="pip install 'nmoe-data[seen]'",
            code="E-CONFIG-EXTRA",
        ) from error


def parts(spans: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Split documents into parts of at most `most` tokens; returns start and end of each. A
    document with more than `most` tokens is a part by itself. spans: contiguous document spans,
    int64 `[num_documents, 2]`."""
    ends = spans[:, 1]
    found = []
    start = 0
    while start < (ends[-1] if len(ends) else 0):
        last = int(np.searchsorted(ends, start + most, "right")) - 1
        first = int(np.searchsorted(ends, start, "right"))
        end = int(ends[max(first, last)])
        found.append((start, end))
        start = end
    return found


def is_in_order(tokens: np.ndarray, suffixes: np.ndarray) -> bool:
    """Check in linear time that `suffixes` is `suffix_array(tokens)`. Each position must appear
    once. For two neighbours in `suffixes`, the first must have the smaller token id, or the same id
    if the suffixes that start one token later are in order."""
    count = len(tokens)
    if len(suffixes) != count or (np.bincount(suffixes, minlength=count) != 1).any():
        return False
    rank = np.full(count + 1, -1)
    rank[suffixes] = np.arange(count)
    ids = tokens[suffixes]
    following = rank[suffixes.astype(np.int64) + 1]
    is_same = ids[:-1] == ids[1:]
    return bool(((ids[:-1] < ids[1:]) | (is_same & (following[:-1] < following[1:]))).all())


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """All positions, sorted by the sequence of ids that starts there: uint32 `[num_tokens]`.

    tokens: uint32 or uint16 `[num_tokens]`, at least one. Raises FormatError if there are more than
    `MAX_TOKENS`, or an id has more than three bytes (E-SEEN-SIZE).
    """
    largest = int(tokens.max())
    if len(tokens) > MAX_TOKENS or largest >= 2**24:
        raise FormatError(
            "the part is too large to sort",
            found=f"{len(tokens)} tokens, with ids up to {largest}",
            expected=f"at most {MAX_TOKENS} tokens in a document, with ids below {2**24}",
            do="lower prep.max_doc_tokens",
            code="E-SEEN-SIZE",
        )
    width = 2 if largest < 2**16 else 3
    spelled = np.empty((len(tokens), width), np.uint8)
    for start in range(0, len(tokens), _CHUNK):
        high_first = tokens[start : start + _CHUNK].astype(">u4").view(np.uint8)
        spelled[start : start + _CHUNK] = high_first.reshape(-1, 4)[:, 4 - width :]
    order: np.ndarray = load_sorter().divsufsort(spelled.reshape(-1))
    del spelled
    # In place: the write position never overtakes the read position.
    kept = 0
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        own = chunk[chunk % width == 0] // width
        order[kept : kept + len(own)] = own
        kept += len(own)
    return order[:kept].view(np.uint32)
