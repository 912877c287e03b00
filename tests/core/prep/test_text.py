"""Normalisation is idempotent and does exactly what its name says."""

import sys
import unicodedata
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.text.normalise import normalize_batch, normalize_text
from tests.growth import growth


@settings(max_examples=200)
@given(st.text(st.characters(codec=None), max_size=60))
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = normalize_text(text)
    assert normalize_text(once) == once
    assert once.encode().decode() == once


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\r\nb\rc", "a\nb\nc"),
        ("\ufeffhead\ufeff tail", "head tail"),
        ("x\x00y\x1b[0m\x85z\x7f", "xy[0mz"),
        ("tab\tand\nline stay", "tab\tand\nline stay"),
        ("e\u0301", "é"),
        ("e\x00\u0301", "é"),
        ("bad \ud800 surrogate", "bad \ufffd surrogate"),
        ("family \U0001f468\u200d\U0001f469", "family \U0001f468\u200d\U0001f469"),
        (" \n\t ", ""),
    ],
)
def test_each_rule_of_the_normaliser_holds(raw: str, expected: str) -> None:
    assert normalize_text(raw) == expected
    assert unicodedata.is_normalized("NFC", normalize_text(raw))


# What the quick look must not miss: controls at the edges of their ranges and of UTF-8 sequences,
# characters that compose, and their neighbours that must be left alone.
_NEAR = st.text(
    st.sampled_from(
        "a é\u00a0\u0085\u0080\u009f\u00c2\x00\x08\t\n\x0b\x0c\r\x1f \x7f\ufeff\ufefe\uff0c\u2028"
        "\u0300\u0301\u0344\u0374\u1100\u1161\u212b\ud7a3東\U0001f468\u200d\ud800\udfff\u02ff"
    ),
    max_size=12,
)


@settings(max_examples=400)
@given(
    st.lists(_NEAR | st.text(st.characters(codec=None), max_size=30), max_size=8), st.integers(1, 9)
)
def test_a_batch_is_normalised_as_its_texts_are_one_by_one(texts: list[str], size: int) -> None:
    sizes = {"_PIECE_BYTES": size, "_PIECE_CHARS": size, "_LONG_CHARS": size}
    with patch.multiple("nmoe_core.text.normalise", **sizes):
        normal, encoded = normalize_batch(texts)
    assert normal == [normalize_text(text) for text in texts]
    assert encoded == [text.encode() for text in normal]


def test_every_character_alone_and_between_letters_is_normalised_in_a_batch() -> None:
    texts = [f"{before}{chr(c)}{before}" for c in range(0x3100) for before in ("", "x", "e")]
    assert normalize_batch(texts)[0] == [normalize_text(text) for text in texts]


# Marks of several classes; some stand for two, and some have no class of their own.
_MARKED = st.text(
    st.sampled_from(
        "a\u00e9\u1fa2\u1112\u1161\u0300\u0301\u0308\u0315\u0323\u0327\u0334\u0338\u0340\u0344\u0345"
        "\u05b0\u05bc\u0653\u093c\u09be\u0dca\u0f71\u0f73\u0f75\u0f81\u3099\U0001d165\U0001d16e\u200d"
    ),
    max_size=40,
)


@settings(max_examples=400)
@given(st.lists(_MARKED | st.text(max_size=20), max_size=4), st.integers(0, 5))
def test_marks_are_composed_as_unicode_says_however_they_are_sorted(
    parts: list[str], longest: int
) -> None:
    # A lone surrogate, a control or white space at an end is no matter of composition.
    text = "a" + "\u0301b".join(parts).translate(_CONTROLS) + "b"
    with patch("nmoe_core.text.normalise._LONG_RUN", longest):
        assert normalize_text(text) == unicodedata.normalize("NFC", text)


_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(0x7F, 0xA0), 0xFEFF])


def test_every_mark_takes_its_place_in_a_long_run() -> None:
    every = [chr(point) for point in range(0x300, sys.maxunicode) if not 0xD800 <= point < 0xE000]
    marks = [c for c in every if unicodedata.combining(unicodedata.normalize("NFD", c)[-1])]
    for text in ("".join(marks), "".join(reversed(marks)), "a" + "".join(marks[::7] * 3)):
        assert normalize_text(text) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    "unit",
    [
        *("\u0315\u0300", "\u0300\u0315", "\u0f73", "\u0344", "\u0f81\u0f71", "\u0323\u0301\u0327"),
        *("\u0300", "\u1fa2\u0323", "a\u0315\u0300", "\u0dd9\u0dca", "\u1112\u1161\u11a8"),
        *("\u0315\u0300" * 31 + "e", "\u0315\u0300\n", "\U0001d16e\U0001d165"),
    ],
)
def test_cost_of_normalising_follows_the_length_of_a_text(unit: str) -> None:
    short, long = (["a" + unit * (size // len(unit)) + "b"] for size in (2**12, 2**15))
    assert growth(normalize_batch, short, long) < 24
