"""Credentials in texts of others: all are hidden, at a cost that follows the text's length."""

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import FormatError, without_credentials
from nmoe_core.base.errors import one_line
from nmoe_core.labels.oracles.dialects import final_text
from nmoe_core.text.redact import Redactor
from tests.growth import growth

# What is hidden, in the plainest words; these patterns take quadratic time.
_LOGIN = re.compile(r"(?<=://)(?:[^\s'\"/@:]*:[^\s'\"]*|[^\s'\"/]+)@")
_QUERY = re.compile(r"(https?://[^\s'\"?]+)\?[^\s'\"?]*=[^\s'\";,]*")
_PARTS = (
    *("://", "http://", "https://", "http://h?a=b", "://u:p@h", ":", "/", "@", "?", "=", "&"),
    *("a", "s", "é", " ", "\n", "\u00a0", "'", '"', ";", ",", "//", "http"),
)


@given(st.lists(st.sampled_from(_PARTS), max_size=14).map("".join))
def test_every_login_and_query_is_hidden_and_nothing_else_changes(text: str) -> None:
    plain = _QUERY.sub(r"\1?[hidden]", _LOGIN.sub("[hidden]@", text))
    assert without_credentials(text) == plain


_HOSTILE = (
    *("://a:", "http://", "http://a?", "://a@", "http://?", "http://a?b", "https://a:b@c?d=e "),
    *("authorization ", "authorization: a ", "authorization:", "@", " ", "'"),
)
_READERS: dict[str, Callable[[str], object]] = {
    "of addresses": without_credentials,
    "of a key": Redactor("k" * 40).clean,
    "of an error": lambda text: FormatError(text, where="a"),
    "of one line": lambda text: one_line(ValueError(text)),
}


@pytest.mark.parametrize("unit", _HOSTILE)
@pytest.mark.parametrize("reader", _READERS)
def test_cost_follows_the_length_of_a_text(reader: str, unit: str) -> None:
    size = 2**15 // len(unit)
    assert growth(_READERS[reader], unit * size, unit * (8 * size)) < 24


@pytest.mark.parametrize("message", ["<|channel|>analysis<|message|>{}<|end|>", "\n```", "{"])
def test_cost_follows_the_length_of_an_answer(message: str) -> None:
    assert growth(final_text, message * 4000, message * 32000) < 24


def test_a_long_text_is_cut_before_it_is_cleaned_and_shows_no_half_of_a_secret() -> None:
    secret = "sk-" + "0123456789" * 4
    clean = Redactor(secret).clean
    for offset in range(len(secret)):
        shown = clean("a" * offset + secret * 4000, 16_000)
        assert "sk-" not in shown
        assert shown.count("[hidden]") > 1000
    assert growth(lambda text: clean(text, 16_000), "a\n" * 2**16, "a\n" * 2**21) < 4
    assert clean("ab", 1) == "a"


def test_a_login_that_a_cut_would_split_is_hidden_first() -> None:
    login = "".join(random.Random(3).choices("abcdef", k=40))
    for offset in range(240, 300, 7):
        assert login[:8] not in one_line(OSError("x" * offset + f" s3://me:{login}@bucket"))
