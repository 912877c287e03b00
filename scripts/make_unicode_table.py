"""Writes `text/transforms/unicode.npz`: lower case and class of every code point, frozen.

Python's own tables change with its version, and with them every hash of a word. Run this with the
newest installed Python, and raise `VERSION` of the modules that use the table, because all
signatures change.
"""

import sys
import unicodedata
from pathlib import Path

import numpy as np

TABLE = Path(__file__).resolve().parents[1] / "nmoe_core" / "text" / "transforms" / "unicode.npz"
WORD, ALONE, UNSPACED, SPACE, ALPHA, UPPER, DIGIT = (1 << bit for bit in range(7))
# Scripts that are written without spaces between words, and Hangul, whose words are short.
_UNSPACED = (
    *("CJK ", "IDEOGRAPHIC ", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO ", "YI "),
    *("TANGUT", "NUSHU ", "THAI ", "LAO ", "KHMER ", "MYANMAR ", "TAI LE ", "NEW TAI LUE "),
    *("TAI THAM ", "TAI VIET ", "AHOM ", "JAVANESE ", "BALINESE "),
)
_HANGUL = ("HANGUL", "HALFWIDTH HANGUL")


def entry(code: int) -> tuple[int, int]:
    """Lower case and class bits of a code point."""
    char = chr(code)
    category = unicodedata.category(char)
    name = unicodedata.name(char, "")
    lower = char.lower()
    is_word = category[0] in "LMN" or char == "_"
    unspaced = is_word and name.startswith(_UNSPACED)
    alone = unspaced or (is_word and name.startswith(_HANGUL))
    bits = (
        WORD * is_word
        | ALONE * alone
        | UNSPACED * unspaced
        | SPACE * char.isspace()
        | ALPHA * char.isalpha()
        | UPPER * char.isupper()
        | DIGIT * (category == "Nd")
    )
    return ord(lower[0]), bits  # if two code points, as for a dotted capital i, the first


def main() -> None:
    """Write the table."""
    lower, bits = np.array([entry(code) for code in range(sys.maxunicode + 1)]).T
    shift = (lower - np.arange(len(lower))).astype(np.int32)
    np.savez_compressed(
        TABLE, shift=shift, bits=bits.astype(np.uint8), version=unicodedata.unidata_version
    )
    print(f"{TABLE}: {TABLE.stat().st_size} bytes, Unicode {unicodedata.unidata_version}")


if __name__ == "__main__":
    main()
