"""The letters and digits of texts, which stay the same in every file that quotes a text.

Blanks, punctuation, case, and the escapes of JSON and HTML are left out, so a line of JSON, a page,
a table and the plain text have the same letters. Grams of letters find texts in files without
their tokens.
"""

import re
import unicodedata

import numpy as np

from nmoe_core.curate.takedown.grams import GRAM_TOKENS, grams_of

FEWEST_LETTERS = 20
"""Texts with fewer letters are not searched for by letters: too many files would have them."""
_EVERY = 16
PASSAGE_LETTERS = GRAM_TOKENS + _EVERY - 1
"""A passage with so many successive letters of a text is always found."""
# Begin at the first backslash of a run: from each of them, long runs take quadratic time.
_CODE = re.compile(r"(?<!\\)\\+u([0-9a-fA-F]{4})")
_ESCAPE = re.compile(r"(?<!\\)\\+[nrtbf]|&(?:amp;)*#?\w{2,8};")
_OTHERS = re.compile(r"[\W_]+")
_ASCII_OTHERS = bytes(code for code in range(128) if not chr(code).isalnum())


def letters_of(text: str) -> np.ndarray:
    """The code points of a text's letters and digits: uint32 `[n]`."""
    if "\\u" in text:
        text = _CODE.sub(lambda code: chr(int(code[1], 16)), text)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = _ESCAPE.sub(" ", text)
    if text.isascii():
        ascii_letters = text.lower().encode().translate(None, _ASCII_OTHERS)
        return np.frombuffer(ascii_letters, np.uint8).astype("<u4")
    text = unicodedata.normalize("NFKC", _OTHERS.sub("", text))
    return np.frombuffer(text.lower().encode("utf-32-le", "replace"), "<u4")


def letter_grams(text: str, number: int) -> np.ndarray:
    """The grams to find a text by its letters, as rows of dtype `GRAMS` with the text's `number`;
    empty if it has fewer than `FEWEST_LETTERS`."""
    letters = letters_of(text)
    return grams_of(letters if len(letters) >= FEWEST_LETTERS else letters[:0], number, _EVERY)
