"""Each statistic of a small text is what counting by hand gives."""

import string
import zlib

import pytest

from nmoe_core.labels.oracles.heuristic import grade, refusal
from nmoe_core.labels.oracles.text_statistics import (
    WINDOW_CHARS,
    latin_share,
    measure,
    other_language_share,
)
from nmoe_core.labels.scores import QUALITY

WORDS = [a + b for a in "qxz" for b in string.ascii_lowercase]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "see a cat with garbage computer sentences",
            {"guidance": 1 / 7, "short_words": 3 / 7, "long_words": 2 / 7},
        ),
        ("ab 12 + c", {"symbols": 1 - 3 / 6}),
        # Runs of 25 words, of which 20 and one are distinct; a rest of 24 words is no run.
        (" ".join([*WORDS[:20], *["x"] * 30, *WORDS[20:44]]), {"variety": (21 + 1) / 50}),
        (" ".join(WORDS[:25]), {"variety": 1}),
        ("One two three. Two three! Four", {"segment_words": 6 / 3, "overlap": (1 + 0) / 2}),
        # A line of prose has six words and few symbols.
        ("one two three four five six\na b c d e", {"prose": 27 / 36}),
        ("a + b - c * d / e = f", {"prose": 0}),
        ("abc, abc, abc, abc, abc, abc,", {"prose": 0}),  # three quarters are letters
        # Three neighbours are alike in shape, two in their first words, others in nothing.
        ("x = 1\ny = 2\nz = 3\nz is\nother, one\nthird! one", {"repetition": 3 / 5}),
        ("a\na", {"repetition": 1, "indentation": 1}),
        # Steps of 5 and 3 inwards are none that an editor makes; 2, 4 and 8 are.
        ("if a:\n     b\n   c\n      d\n  e\nf\n", {"indentation": 2 / 5}),
        ("a\n        b\nc\n    d\n      e\n", {"indentation": 1}),
        ("a\n     b\n     c\n", {"indentation": 1 / 2}),
        ("    a\nb\n  c\n", {"indentation": 1}),  # the window begins inside a block
        ("    a\nb\n   c\n", {"indentation": 1 / 2}),
        ("A. B. C. d.", {"sentence_form": 2 / 3}),
        ("a,b, c; d:", {"spacing": 3 / 4}),
        ("(a [b] c)", {"depth": (2 + 1) / 2, "nesting": 1}),
        ("[x (y] z)", {"depth": 2, "nesting": 1 / 2}),
        ("a) (b", {"depth": 0}),
        ("a) (b) (", {"depth": 1, "nesting": 1}),
    ],
)
def test_a_statistic_is_what_counting_gives(text: str, expected: dict[str, float]) -> None:
    found = measure(text)
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)


def test_statistics_of_which_a_text_has_nothing_are_left_out() -> None:
    assert set(measure("one")) == {
        *("guidance", "short_words", "long_words", "segment_words", "prose"),
        *("symbols", "compression", "depth"),
    }
    assert set(measure("(((")) == {"prose", "symbols", "compression", "depth"}
    assert "variety" not in measure(" ".join(WORDS[:24]))
    assert measure(" \n") == {}


def test_a_statistic_is_the_mean_over_the_windows_that_have_it() -> None:
    first, second = "aaa " * (WINDOW_CHARS // 4), "+ b " * (WINDOW_CHARS // 4)
    assert measure(first + second)["symbols"] == pytest.approx((0 + 1 / 2) / 2)
    assert measure(first + "+ + " * (WINDOW_CHARS // 4))["short_words"] == 1


def test_compression_is_that_of_deflate() -> None:
    text = " ".join(WORDS[:40])
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    size = len(deflate.compress(text.encode()) + deflate.flush())
    assert measure(text.replace(" ", "\n  "))["compression"] == size / len(text)


def test_letters_and_frequent_words_of_other_languages_are_counted() -> None:
    assert latin_share("12 (3)") == 1
    assert latin_share("\u024f\u1e00\u1eff\u0250\u1f00\u1dbf") == 3 / 6
    assert other_language_share("und und") == 0
    assert other_language_share("und und und") == 1
    assert other_language_share("und und und the") == 3 / 4
    assert refusal("aa ЯЯ") is None, "half of the letters are Latin"
    assert refusal("a ЯЯ") == "unsupported_script"
    assert refusal("und und und the of to") is None, "half of the words are English"
    assert refusal("und und und und the of to") == "unsupported_language"


def test_grades_lie_on_the_lines_between_the_points_of_the_curves() -> None:
    def helpfulness(**statistics: float) -> int:
        grades = grade(statistics)
        assert set(grades) == set(QUALITY.names)
        return grades["helpfulness"]

    assert set(grade({}).values()) == {0}
    assert [grade({"symbols": x})["correctness"] for x in (0.0, 0.05, 0.3, 1.0)] == [4, 4, 0, 0]
    # Guidance of 0.05 stands for a mean of 0.7, which lies 0.11 / 0.2 of the way from grade 1 to 2.
    assert helpfulness(guidance=0.05) == 2
    assert helpfulness(guidance=0.045) == 1  # a mean of 0.6417
    assert [helpfulness(guidance=x) for x in (0, 0.02, 0.11, 1)] == [0, 0, 4, 4]
    # Seven parts of guidance and three of prose: 0.7 * 0.7 + 0.3 * 0.5 is 0.64.
    assert helpfulness(guidance=0.05, prose=0.35) == 1
    assert helpfulness(guidance=0.05, prose=0.6) == 2
