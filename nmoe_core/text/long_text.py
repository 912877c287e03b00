"""Cuts a long text so that the ids of its pieces equal the ids of the whole.

A rule is a pattern of positions at which to cut, and the number of characters that are dropped
there. Encodings of tiktoken use the first rule, which follows from their split patterns. For any
other tokenizer, the rules are tried when the tokenizer is loaded: a rule is used if no token can
span its cut, and if the pieces of all test texts give the same ids as the whole texts. Texts are
encoded whole if no rule passes, or if the model is Unigram, which depends on the whole text.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

PIECE_CHARS = 2**20
_LETTERS = "A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣"
_BLANK = re.compile("[\u2581\u0120]")  # characters for a blank in vocabularies


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
