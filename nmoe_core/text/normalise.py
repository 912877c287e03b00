"""Text normalisation `nfc-ctl-v1`: idempotent, versioned, the same on every machine.

Steps, in this order: lone surrogates become U+FFFD; line ends become LF; C0/C1 controls other than
TAB and LF, and every U+FEFF, are removed; white space is stripped from both ends; NFC is applied.
NFC is last, because characters next to a removed control may compose. Joiners and direction marks
are kept, because scripts need them. The name `nfc-ctl-v1` is part of every shard's fingerprints.

`normalize_batch` gives the same texts at about a tenth of the cost: it scans the UTF-8 bytes of all
texts together, and runs the exact steps only on texts that may change.
"""

import functools
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np

NORMALIZER = "nfc-ctl-v1"
_PIECE_BYTES = 2**18
_PIECE_CHARS = 2**16
_LONG_CHARS = 2**20
_LONG_RUN = 64
_MARKS = range(0x300, 0x20000)
_DROPPED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")


def normalize_text(text: str) -> str:
    """Normalise one document; a long one is processed in pieces, to save memory.

    >>> normalize_text(" cafe\\u0301\\r\\nline\\x00 ")
    'café\\nline'
    """
    # Texts can be normalised line by line: no step spans an LF, and NFC neither creates nor removes
    # white space.
    return "".join(map(_normalized, _lines_of(text))).strip()


def _lines_of(text: str) -> Iterator[str]:
    """The text in pieces of at least `_PIECE_CHARS` characters; all except the last end with LF."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARS) + 1 or len(text)
        yield text[start:end]
        start = end


def _normalized(text: str) -> str:
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if _DROPPED.search(text):
        text = _DROPPED.sub("", text)
    return text if text.isascii() else unicodedata.normalize("NFC", _with_sorted_marks(text))


def _with_sorted_marks(text: str) -> str:
    """The text with long runs of marks in canonical order. `unicodedata` would sort these runs by
    insertion, in quadratic time."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    edges = np.flatnonzero(np.diff(_mark_classes()[points] > 0, prepend=False, append=False))
    runs = edges.reshape(-1, 2)
    parts = []
    last = 0
    for start, end in runs[runs[:, 1] - runs[:, 0] > _LONG_RUN].tolist():
        parts += [text[last:start], _sorted_marks(text[start:end])]
        last = end
    return "".join([*parts, text[last:]])


def _sorted_marks(marks: str) -> str:
    for mark in set(marks):
        spelled = unicodedata.normalize("NFD", mark)
        if spelled != mark:
            marks = marks.replace(mark, spelled)
    points = np.frombuffer(marks.encode("utf-32-le"), "<u4")
    classes = _mark_classes()[points]
    by_class = [points[classes == one] for one in np.unique(classes)]
    return np.concatenate(by_class).tobytes().decode("utf-32-le")


@functools.cache
def _mark_classes() -> np.ndarray:
    """The combining class by which marks are sorted, 0 for other characters: uint8 `[code
    points]`."""
    classes = np.zeros(sys.maxunicode + 1, np.uint8)
    # A mark that decomposes into two marks may lack a class, but the first of these two has a
    # class.
    spelled = (unicodedata.normalize("NFD", chr(point)) for point in _MARKS)
    classes[_MARKS.start : _MARKS.stop] = [unicodedata.combining(one[0]) for one in spelled]
    return classes


def normalize_batch(texts: Sequence[str]) -> tuple[list[str], list[bytes]]:
    """Every text normalised as by `normalize_text`, and its UTF-8 bytes."""
    normal = [text.strip() for text in texts]
    encoded = [_utf8(text) for text in normal]
    for i in _suspects(normal, encoded):
        # Free the original text here, so that memory holds one copy less of a long text.
        normal[i] = ""
        encoded[i] = b""
        normal[i] = normalize_text(texts[i])
        encoded[i] = normal[i].encode()
    return normal, encoded


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # lone surrogates; the NUL makes the text a suspect
        return b"\x00"


def _suspects(texts: list[str], encoded: list[bytes]) -> list[int]:
    """Indices of texts that may need normalisation; they include all texts that do."""
    suspects = _holders(range(len(texts)), encoded, _ascii_controls)
    others = [i for i, payload in enumerate(encoded) if len(payload) != len(texts[i])]
    suspects |= _holders(others, encoded, _other_controls)
    for i in _holders(others, encoded, _composable) - suspects:
        # `is_normalized` may normalise the whole text, which is too expensive for a long one.
        is_long = len(texts[i]) > _LONG_CHARS
        if is_long or not unicodedata.is_normalized("NFC", texts[i]):
            suspects.add(i)
    return sorted(suspects)


def _holders(
    indices: Sequence[int], encoded: list[bytes], find: Callable[[bytes], np.ndarray]
) -> set[int]:
    """Indices of texts in which `find` matches; searches all texts together."""
    payloads = [encoded[i] for i in indices]
    found = find(b"".join(payloads))
    if not len(found):
        return set()
    bounds = np.fromiter(accumulate(map(len, payloads)), np.int64, len(payloads))
    return {indices[k] for k in np.searchsorted(bounds, found, side="right").tolist()}


def _ascii_controls(payload: bytes) -> np.ndarray:
    """Offsets of the ASCII controls that normalisation removes or replaces: int64."""
    found = [np.empty(0, np.int64)]
    has_delete = 0x7F in payload
    for start, view in pieces(payload, 0):
        hits = view < 0x09
        hits |= view - np.uint8(0x0B) < 0x15  # 0x0b..0x1f by one comparison, since uint8 wraps
        if has_delete:
            hits |= view == 0x7F
        found.append(np.flatnonzero(hits) + start)
    return np.concatenate(found)


def _other_controls(payload: bytes) -> np.ndarray:
    """Offsets of C1 controls and U+FEFF in UTF-8 bytes, int64; an offset may be repeated."""
    found = [np.empty(0, np.int64)]
    for start, view in pieces(payload, 2):
        c1 = np.flatnonzero(view[:-1] == 0xC2)
        c1 = c1[view[c1 + 1] < 0xA0]
        marks = np.flatnonzero(view[:-2] == 0xEF)
        marks = marks[(view[marks + 1] == 0xBB) & (view[marks + 2] == 0xBF)]
        found += [c1 + start, marks + start]
    return np.concatenate(found)


def _composable(payload: bytes) -> np.ndarray:
    """Offsets of the characters that NFC may change, int64: those from U+0300 on, except the dashes
    and quotation marks from U+2002 to U+203F."""
    found = [np.empty(0, np.int64)]
    for start, view in pieces(payload, 2):
        leads = np.flatnonzero(view[:_PIECE_BYTES] >= 0xCC)
        is_mark = view[leads] == 0xE2
        marks = leads[is_mark]
        is_mark[is_mark] = (view[marks + 1] == 0x80) & (view[marks + 2] >= 0x82)
        found.append(leads[~is_mark] + start)
    return np.concatenate(found)


def pieces(payload: bytes, overlap: int) -> Iterator[tuple[int, np.ndarray]]:
    """Pieces of a payload that fit into the CPU cache; temporary arrays do not grow with the
    payload."""
    view = np.frombuffer(payload, np.uint8)
    for start in range(0, len(view), _PIECE_BYTES):
        yield start, view[start : start + _PIECE_BYTES + overlap]
