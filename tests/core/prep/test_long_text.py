"""A text is cut where no split pattern has a match; tests of any tokenizer compare the ids."""

import inspect
import re

import pytest
import regex
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.text.long_text import safe_pieces
from nmoe_core.text.vocabulary import load_tiktoken

_SOURCE = inspect.getsource(tiktoken_ext.openai_public)
_ALPHABET = (
    "abzAZ019 \t\n\r'\u2019.,;!?/-_\"()~éßÉΩяЯ一龥あんアン가힣ー、。，٣\u0301\u094d\u00a0\u3000"
    "ʰǅ\U0001f468\u200d"
)
_WORDS = ["don't ", "I'LL", "x's", " the", "\n\n", "  ", "123", "Ünï", "東京、", "a", "/"]
_TEXTS = st.text(st.sampled_from(_ALPHABET), max_size=200) | st.lists(
    st.sampled_from(_WORDS), max_size=60
).map("".join)


def _patterns() -> list[str]:
    """The split patterns that tiktoken ships, among them the one that is used by default."""
    module = tiktoken_ext.openai_public
    found = [v for k, v in vars(module).items() if k.endswith("pat_str") and isinstance(v, str)]
    found += [eval(text) for text in re.findall(r'"pat_str": (r"""[^"]*""")', _SOURCE)]
    return [*found, load_tiktoken("o200k_harmony")._pat_str]


@pytest.mark.parametrize("pattern", _patterns())
def test_no_match_of_a_split_pattern_spans_a_cut(pattern: str) -> None:
    compiled = regex.compile(pattern)

    @settings(max_examples=300)
    @given(_TEXTS, st.integers(1, 20))
    def check(text: str, piece_chars: int) -> None:
        pieces = list(safe_pieces(text, piece_chars))
        assert "".join(pieces) == text
        whole = compiled.findall(text)
        assert [match for piece in pieces for match in compiled.findall(piece)] == whole

    check()


def test_pieces_are_not_much_longer_than_asked() -> None:
    text = "some words in a row, and 東京の人、と。" * 1000
    assert max(map(len, safe_pieces(text, 1000))) < 1020
    assert list(safe_pieces("a" * 5000, 1000)) == ["a" * 5000]
