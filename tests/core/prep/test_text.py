"""Normalisation is idempotent and does exactly what its name says."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.prep.text import normalize_text


@settings(max_examples=200, deadline=None)
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
