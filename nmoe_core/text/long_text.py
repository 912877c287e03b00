"""Cuts long texts: into pieces whose ids equal the ids of the whole, and into parts that end with
a paragraph.

The pieces are for tokenizers. A rule is a pattern of positions at which to cut, and the number of
characters that are dropped there. Encodings of tiktoken use the first rule, which follows from
their split patterns. For any other tokenizer, the rules are tried when the tokenizer is loaded: a
rule is used if no token can span its cut, and if the pieces of all test texts give the same ids as
the whole texts. Texts are encoded whole if no rule passes, or if the model is Unigram, which
depends on the whole text.
"""

import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

PIECE_CHARS = 2**20
_LETTERS = "A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣"
_BLANK = re.compile("[\u2581\u0120]")  # characters for a blank in vocabularies

# Text after which a cut may be made, best first: the end of a paragraph, a line, a sentence, a
# word.
_ENDS = (("\n\n",), ("\n",), (". ", "! ", "? ", "。", "！", "？", "।"), (" ",))
_REACH = 4


class CutRule(NamedTuple):
    """Positions where a text may be cut, and the number of characters dropped there."""

    place: re.Pattern[str]
    num_dropped: int = 0


AFTER_LETTERS = CutRule(re.compile(f"(?<=[{_LETTERS}])(?=[\x00-&(-@\\[-`{{-\x7f、。，：；！？])"))
_BETWEEN_WORDS = re.compile(f"(?<=[{_LETTERS}0-9])(?= [{_LETTERS}0-9])")
BEFORE_BLANKS = CutRule(_BETWEEN_WORDS)
AT_BLANKS = CutRule(_BETWEEN_WORDS, 1)
_WORDS = (
    "the quick brown fox don't stop 12 345 of a The END naïve Привет мир 東京 가나 x1 y Z tokens, "
    "(and) ends. \n new-line two\tblanks é ok 's it's 9 10 100,000 www.example.com 'tis Ünï_x -- a"
)


def safe_pieces(
    text: str, piece_chars: int = PIECE_CHARS, rule: CutRule | None = AFTER_LETTERS
) -> Iterator[str]:
    """The text in pieces of at least `piece_chars` characters (except the last), and rarely many
    more.

    A token never spans a cut, so the pieces give the ids of the whole. Every encoding of tiktoken
    first splits text by a pattern in which a run of letters ends at the next character that is not
    a letter, and the next match starts there. The one exception is an apostrophe, which may belong
    to a contraction. So a cut is between a letter and a following ASCII or CJK character that is
    not a letter, mark or apostrophe. Text without such a place is not cut.

    >>> list(safe_pieces("one two three", 4))
    ['one two', ' three']
    """
    start = 0
    while rule is not None and len(text) - start > piece_chars:
        cut = rule.place.search(text, start + piece_chars)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start() + rule.num_dropped
    yield text[start:]


def proven_rule(row: Callable[[str], Sequence[int]], vocabulary: Iterable[str]) -> CutRule | None:
    """The first rule whose pieces give the ids of the whole text; None if there is no such rule."""
    tokens = [_BLANK.sub(" ", token) + "a" for token in vocabulary]
    for rule in (AFTER_LETTERS, BEFORE_BLANKS, AT_BLANKS):
        if any(rule.place.search(token) for token in tokens):
            continue
        if all(_is_exact(row, text, rule) for text in _probes()):
            return rule
    return None


def _is_exact(row: Callable[[str], Sequence[int]], text: str, rule: CutRule) -> bool:
    pieces = [list(row(piece)) for piece in safe_pieces(text, 12, rule)]
    return np.array_equal(list(row(text)), [token for piece in pieces for token in piece])


def _probes() -> Iterator[str]:
    rng = random.Random(11)
    for _ in range(200):
        words = rng.choices(_WORDS.split(" "), k=40)
        yield "".join(word + rng.choice((" ", " ", " ", " ", ", ", "\n", "/")) for word in words)
    yield "東京の人、と。カナ、한국어 말。" * 20


def split_text(text: str, num_parts: int) -> list[str]:
    """At most `num_parts` parts of a text, without the white space at their ends.

    The ideal position of a cut makes equal parts. The cut is at the last end of a paragraph within
    a quarter of a part before the ideal position. If no paragraph ends there, the cut is at the end
    of a line, else of a sentence, else of a word. If none of these is found, the cut is at the
    ideal position, but not before a combining mark.

    >>> split_text("One thing here.\\n\\nAnother one. And more.", 2)
    ['One thing here.', 'Another one. And more.']
    """
    parts = []
    start = 0
    for remaining in range(num_parts, 1, -1):
        length = (len(text) - start) // remaining
        cut = _cut(text, start + length - length // _REACH, start + length)
        parts.append(text[start:cut].strip())
        start = cut
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _cut(text: str, first: int, last: int) -> int:
    """The best position to cut between `first` and `last`."""
    for ends in _ENDS:
        found = max(_after(text, end, first, last) for end in ends)
        if found >= 0:
            return found
    while last > first and unicodedata.combining(text[last]):
        last -= 1
    return last


def _after(text: str, end: str, first: int, last: int) -> int:
    """The position after the last `end` in this range; -1 if there is none."""
    place = text.rfind(end, first, last)
    return place if place < 0 else place + len(end)
