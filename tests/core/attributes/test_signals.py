"""Signals of texts against plain definitions, and the rules that are made of them."""

import random
import re

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from nmoe_core.attributes.presets import PRESETS
from nmoe_core.attributes.signals import SCHEMA, signals
from tests.core.attributes import naive_signals
from tests.project import REPOSITORY

_PIECES = (
    *("The cat sat on the mat.", "to be, and to have; with that...", "WE ACCEPT", "12", "3 likes"),
    *(
        "We use cookies!",
        "- item",
        "• item …",
        "#tag # #",
        "\n",
        "\n\n",
        "\n \n",
        "  ",
        "\t",
        "{x}",
    ),
    *(
        "lorem Ipsum",
        "床前明月光，疑是地上霜。",
        "สวัสดี",
        "ไทย",
        "a" * 1001 + ".",
        '"Is it so?" he said.',
        "e.g. so",
        "See fig. 12 (of p. 7). (And so on.) Mr. Ünal, i.e. ünal... Ok!",
        "As is known,[12] it is so.[1][citation needed]",
        "[edit]",
        "a[0] = b[]",
    ),
    *("ខ្ញុំស្រលាញ់ភាសាខ្មែរ។", "မြန်မာစာကို ဖတ်သည်။", "ພາສາລາວ", "Բարեւ ձեզ։", "ሰላም ለዓለም።", "བོད་ཡིག །"),
)


def check(texts: list[str]) -> None:
    """All numbers of all texts are those of the plain definitions."""
    for text, row in zip(texts, signals(pa.array(texts, pa.large_string())).to_pylist()):
        assert row == pytest.approx(naive_signals.signals(text), rel=1e-6), text


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.sampled_from(_PIECES), max_size=30), max_size=4),
    st.sampled_from(("", " ")),
)
def test_numbers_are_those_of_the_plain_definitions(texts: list[list[str]], joint: str) -> None:
    check([joint.join(pieces).strip() for pieces in texts])


def test_numbers_of_lines_with_marks_of_citations_are_those_of_the_plain_definitions() -> None:
    rng = random.Random(1)
    pieces = ["[1]", "[edit]", "[citation needed]", "[]", "[[2]]", "[ed[1]it]", "[٣]", "[EDIT]"]
    pieces += ["one", "two words", ".", "...", "…", "?", '"', ")", " ", " ", "\u00a0", "\t", "[x]"]
    pieces += ["three words now.", "javascript", "。", "\n", "\n", "\n\n", "a" * 1001, "e.g. so"]
    check(["".join(rng.choices(pieces, k=rng.randrange(40))).strip() for _ in range(1500)])


def test_numbers_of_real_texts_are_those_of_the_plain_definitions() -> None:
    files = [*REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("nmoe_core/attributes/*.py")]
    texts = [path.read_text("utf-8").strip() for path in files]
    check(texts + [part.strip() for text in texts for part in text.split("\n#")])


def test_texts_in_several_batches_are_measured_alike_whatever_their_type_of_arrow() -> None:
    texts = [f"Line {i} of a text. " * 5000 for i in range(120)]  # three batches
    assert signals(pa.array(texts, pa.string())) == signals(pa.array(texts, pa.large_string()))


@pytest.mark.parametrize(
    ("text", "sentences", "least_words"),
    [
        ("Ես գրում եմ։ Դու կարդում ես։", 2, 6),
        ("እኔ እጽፋለሁ። አንተ ታነባለህ።", 2, 4),
        ("ខ្ញុំសរសេរ។ អ្នកអាន។ល្អ។", 3, 15),
        ("ကျွန်တော်ရေးသည်။သူဖတ်သည်။", 2, 15),
        ("བོད་ཡིག་འབྲི། ཁོ་ཀློག", 1, 2),
        ("ຂ້ອຍຂຽນ. ເຈົ້າອ່ານ.", 2, 12),
        ("यह हिन्दी है। वह पढ़ता है।", 2, 6),
        ("ܟܬܒܐ ܛܒܐ܀ ܟܬܒܐ ܛܒܐ܂", 2, 4),
    ],
)
def test_sentences_and_words_of_scripts_are_those_of_unicode(
    text: str, sentences: int, least_words: int
) -> None:
    [row] = signals(pa.array([text], pa.large_string())).to_pylist()
    assert row["n_sentences"] == sentences
    assert row["n_words"] >= least_words


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Use a tool, e.g. a saw. It cuts.", 2),
        ("See p. 12 of the book. Then stop.", 2),
        ("He came. (she said) Then he left.", 1),
        ("It costs 3.50. 12 were sold! and more? yes.", 3),
        ("Сл. на с. 5 (напр. так). Это всё.", 2),
        ("Das ist so. ähnlich war es. Über alles.", 2),
    ],
)
def test_a_period_before_a_lower_case_letter_does_not_end_a_sentence(
    text: str, sentences: int
) -> None:
    [row] = signals(pa.array([text], pa.large_string())).to_pylist()
    assert row["n_sentences"] == sentences


def test_sentences_of_c4_are_in_lines_of_five_words_without_marks_of_citations() -> None:
    lines = "Paris is a large city.[1]\nIt has many old bridges.[2][citation needed]\n[edit]"
    texts = [lines, lines.replace("large ", ""), "It is [3] a city.", 'He agreed with "all of it"']
    rows = signals(pa.array(texts, pa.large_string())).to_pylist()
    assert [row["n_c4_sentences"] for row in rows] == [2, 1, 0, 1]
    assert [row["c4_lines"] for row in rows] == [1, 0.5, 0, 1]
    assert [row["n_lines"] for row in rows] == [3, 3, 1, 1]


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["This line of a page has no end at all"] * 22 + ["This line of a page has one."] * 3, 0),
        (["Short."] * 67 + ["This line of a page is longer than thirty characters."] * 33, 1),
    ],
)
def test_fineweb_drops_what_is_exactly_at_its_limits(lines: list[str], name: int) -> None:
    duckdb = pytest.importorskip("duckdb")
    texts = ["\n".join(lines), "\n".join(lines + [lines[-1]] * 2)]
    with duckdb.connect() as connection:
        connection.register("found", signals(pa.array(texts, pa.large_string())))
        clause = PRESETS["fineweb"].clauses[name]
        assert connection.execute(f"select {clause} from found").fetchall() == [(False,), (True,)]


def test_the_page_of_signals_defines_every_column() -> None:
    page = (REPOSITORY / "docs" / "signals.md").read_text("utf-8")
    heads = re.findall(r"^\* ((?:`\w+`(?:,\s+)?)+):\s", page, re.MULTILINE)
    defined = re.findall(r"`(\w+)`", " ".join([*heads, page.split("The other columns")[1][:60]]))
    assert sorted(defined) == sorted(SCHEMA.names)


def test_clauses_of_presets_are_over_columns_that_are_recorded() -> None:
    clauses = " ".join(clause for preset in PRESETS.values() for clause in preset.clauses)
    named = set(re.findall(r"[a-z]\w+", clauses)) - {"between", "and", "not"}
    assert named <= set(SCHEMA.names)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("gopher_quality", (1, 0, 1)),
        ("gopher_repetition", (1, 0, 0)),
        ("fineweb", (1, 0, 0)),
        ("c4", (1, 0, 1)),
        ("refinedweb", (1, 0, 1)),
    ],
)
def test_presets_keep_prose_and_drop_menus_and_repetition(name: str, kept: tuple[int]) -> None:
    duckdb = pytest.importorskip("duckdb")
    rng = random.Random(0)
    prose = "\n".join(
        f"The {' '.join(''.join(rng.choices('aeinorst', k=6)) for _ in range(9))} and that."
        for _ in range(60)
    )
    menu = "\n".join(["Home", "Contact"] * 30)
    with duckdb.connect() as connection:
        connection.register("found", signals(pa.array([prose, menu, prose + "\n" + prose])))
        clauses = " and ".join(PRESETS[name].clauses)
        rows = connection.execute(f"select {clauses} from found").fetchall()
    assert rows == [(bool(is_kept),) for is_kept in kept]
