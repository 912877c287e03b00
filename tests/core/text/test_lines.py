"""The transform `lines`: each rule, alone and together, decides as a plain implementation does."""

import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.attributes.signals import signals
from nmoe_core.config.transforms import LINE_PRESETS, LinesTable
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.chain import Chain
from nmoe_core.text.transforms.edits import edited, original
from nmoe_core.text.transforms.lines.rules import RULES, LineRules
from tests.core.text.naive_lines import rule_of, shortened

pa = pytest.importorskip("pyarrow")

_PARTS = (
    *("the", "a", "cat", "SHOUTS", "IN", "Straße", "3", "3.4K", "12,000", "likes", "views", "x1"),
    *("javascript", "JavaScript", "terms", "of", "use", "Cookie", "Policy", "read", "more", "sign"),
    *(
        "in",
        "sign-in",
        "items",
        "in",
        "cart",
        "Share",
        "this",
        "[1]",
        "[edit]",
        "[citation needed]",
    ),
    *(
        "[]",
        "東京",
        "は",
        "。",
        "สวัสดี",
        "नमस्ते।",
        "مرحبا؟",
        "\u00a0",
        "…",
        "...",
        ".",
        "!",
        "?",
        '"',
    ),
    *("terms of use", "uses cookies", "3.4K likes", "items in cart", "Read more...", "sign in"),
    *("_", "-", "(", ")", "w" * 1000, "w" * 1001, "\t", "é", "ß", "٣"),
)
_EVERYTHING: dict[str, Any] = {
    "presets": ("c4", "refinedweb"),
    "bad_starts": ("Share this", "(", "re.d"),
}
_ALONE: list[dict[str, Any]] = [
    *(
        {key: value}
        for preset in LINE_PRESETS.values()
        for key, value in preset.items()
        if key != "refinedweb_short_words"
    ),
    {"c4_min_words": 5, "refinedweb_max_upper": 0.1, "refinedweb_min_words": 4},
    {"bad_starts": ("share", "sign in")},
]


def _table(**keys: Any) -> LinesTable:
    return LinesTable(kind="lines", **keys)


def _batch(texts: list[str]) -> Batch:
    normal, payloads = normalize_batch(texts)
    return Batch(normal, payloads, [str(i) for i in range(len(texts))])


def _random_text(rng: random.Random) -> str:
    def line() -> str:
        words = rng.choices(_PARTS, k=rng.choice((0, 1, 1, 2, 3, 5, 12)))
        return rng.choice((" ", "", " ", "  ")).join(words) + rng.choice(("", ".", " ", "…"))

    return "\n".join(line() for _ in range(rng.randrange(12)))


def _real_texts() -> list[str]:
    """The documentation of this repository."""
    root = Path(__file__).parents[3]
    return [path.read_text("utf-8") for path in sorted((root / "docs").glob("*.md"))]


def _lines_of_plain(text: str, table: LinesTable) -> list[str]:
    """The lines that the plain implementation keeps, without blank ones."""
    kept = []
    for line in text.split("\n"):
        if rule_of(line, table) is None:
            kept.append(shortened(line, table))
    return [line for line in kept if line.strip()]


def _check(texts: list[str], table: LinesTable) -> int:
    """Compare all lines of the texts; the number of edits."""
    batch = _batch(texts)
    edits = LineRules(table).edits(batch)
    for i, text in enumerate(batch.texts):
        after = edited(text, edits.get(i, []))
        own = edits.get(i, [])
        assert all(one.end <= other.start for one, other in pairwise(own))
        kept = [one.rstrip() for one in after.split("\n") if one.strip()]
        assert kept == [one.rstrip() for one in _lines_of_plain(text, table)]
        assert ("\n\n\n" in after) <= ("\n\n\n" in text)
    return sum(map(len, edits.values()))


@pytest.mark.parametrize("keys", [_EVERYTHING, *_ALONE], ids=lambda keys: "+".join(keys))
def test_lines_are_kept_as_by_a_plain_implementation(keys: dict[str, Any]) -> None:
    rng = random.Random(1)
    assert _check([_random_text(rng) for _ in range(300)], _table(**keys))


def test_lines_of_real_texts_are_kept_as_by_a_plain_implementation() -> None:
    texts = _real_texts()
    for keys in (_EVERYTHING, {"presets": ("c4",)}, {"presets": ("fineweb", "refinedweb")}):
        assert _check(texts, _table(**keys))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("Home | About us | Contact", "c4_end_punctuation"),
        ("It goes on and on...", "c4_end_punctuation"),
        ("Too short.", "c4_min_words"),
        ("Please enable JavaScript to go on.", "c4_javascript"),
        ("This page uses cookies for you.", "c4_policy"),
        ("THESE ARE THE TERMS HERE.", "refinedweb_max_upper"),
        ("1 2 3 2", "refinedweb_digits"),
        ("3.4K likes", "refinedweb_counter"),
        ("Menu", "refinedweb_min_words"),
        ("share THIS with all your friends.", "bad_starts"),
        ("他说今天天气很好。", None),
        ("यह एक छोटा वाक्य है।", None),
        ("هل هذا سؤال جيد يا صديقي؟", None),
        ("He said that it was good.[1]", None),
    ],
)
def test_line_is_recorded_with_the_first_rule_that_holds(line: str, rule: str | None) -> None:
    keys = _EVERYTHING | {"bad_starts": ("Share this",)}
    if rule is not None and rule.startswith("refinedweb"):
        keys = {"presets": ("refinedweb",)}
    text = f"One line that stays here, as it is.\n{line}\nAnother line that stays here, as it is."
    [edits] = LineRules(_table(**keys)).edits(_batch([text])).values() or [[]]
    whole = [edit for edit in edits if edit.rule in RULES]
    assert [edit.rule for edit in whole] == ([rule] if rule else [])


def test_short_line_loses_only_its_phrase_and_a_long_line_nothing() -> None:
    text = (
        "A tale of two cities. Read more...\n"
        "Sign in\n"
        "You have 3 items in cart now\n"
        "In this long line of more than ten words they say: read more"
    )
    found = Chain([_table(presets=("refinedweb",))]).apply(_batch([text]))
    assert found[0] == [
        "A tale of two cities. \nYou have 3  now\n"
        "In this long line of more than ten words they say: read more"
    ]
    assert [change.rule for change in found[2][0].changes] == [
        "refinedweb_ends",
        "refinedweb_starts",
        "refinedweb_anywhere",
    ]
    assert original(found[0][0], found[2][0].changes) == text


def test_last_line_is_removed_if_the_line_before_it_loses_the_white_space_at_its_end() -> None:
    text = "Two lines of text here.\nA tale of it. Read more...  \nMenu"
    found = Chain([_table(presets=("refinedweb",))]).apply(_batch([text]))
    assert found[0] == ["Two lines of text here.\nA tale of it."]
    assert original(found[0][0], found[2][0].changes) == text


def test_one_blank_line_stays_where_lines_between_blank_lines_were() -> None:
    keep = "This line is kept by all the rules."
    text = f"menu\n\n{keep}\n\nmenu\nmore menu\n\nmenu\n\n{keep}\nmenu\n\n{keep}\n\nmenu\n\nmenu"
    [after], _, _ = Chain([_table(presets=("c4",))]).apply(_batch([text]))
    assert after == f"{keep}\n\n{keep}\n\n{keep}"


def test_consecutive_lines_of_one_rule_are_one_edit() -> None:
    text = "one\ntwo\nthree\nThis line is kept by all the rules.\nfour"
    [edits] = LineRules(_table(presets=("c4",))).edits(_batch([text])).values()
    assert [text[edit.start : edit.end] for edit in edits] == ["one\ntwo\nthree\n", "\nfour"]


def test_a_key_that_is_set_wins_over_its_preset() -> None:
    table = _table(presets=("c4", "refinedweb"), c4_min_words=4, refinedweb_ends=())
    assert (table.c4_min_words, table.refinedweb_ends) == (4, ())
    assert (table.c4_end_punctuation, table.refinedweb_counter) == (True, True)
    same = _table(**LINE_PRESETS["c4"])
    assert same.identity() == _table(presets=("c4",)).identity()


def test_share_of_kept_lines_is_that_of_the_attribute_signals() -> None:
    rng = random.Random(2)
    texts = [*_real_texts(), *(_random_text(rng) for _ in range(200))]
    batch = _batch(texts)
    found = LineRules(_table(presets=("c4",))).edits(batch)
    shares = signals(pa.array(batch.texts, pa.large_string())).column("c4_lines").to_pylist()
    for i, text in enumerate(batch.texts):
        cited = re.sub(r"\[\d*\]|\[edit\]|\[citation needed\]", "", text)
        after = edited(text, found.get(i, []))
        num_lines, kept = (sum(bool(x.strip()) for x in one.split("\n")) for one in (cited, after))
        assert shares[i] == pytest.approx(kept / max(1, num_lines))
