"""Cuts a long text where no token can span the cut, so that its pieces give the ids of the whole.

Every encoding of tiktoken first splits text by a pattern in which a run of letters ends at the
next character that is no letter, whatever that character is, and the next match starts there. The
one exception is an apostrophe, which may belong to a contraction. A cut therefore falls between a
letter and a following ASCII or CJK character that is none of letter, mark and apostrophe. A stretch
without such a place stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PIECE_CHARS = 2**20
_LETTERS = "A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣"
_CUT = re.compile(f"(?<=[{_LETTERS}])(?=[\x00-&(-@\\[-`{{-\x7f、。，：；！？])")


def safe_pieces(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """The text in pieces of at least `piece_chars` characters, but the last, and seldom many more.

    >>> list(safe_pieces("one two three", 4))
    ['one two', ' three']
    """
    start = 0
    while len(text) - start > piece_chars:
        cut = _CUT.search(text, start + piece_chars)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]
