"""Language, personal data and contamination against plain definitions and planted copies."""

import ipaddress
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("numba")

from nmoe_core.attributes.contamination import Evaluations, contamination
from nmoe_core.attributes.pii import pii
from nmoe_core.config.attributes import HubSet
from nmoe_core.sources.forms.strings import set_strings
from nmoe_core.tasks.attributes import open_attribute
from nmoe_core.text.transforms.personal.patterns import PATTERNS, is_email
from tests.core.attributes import naive
from tests.project import REPOSITORY, json_lines, write_project
from tests.refusals import refused

GERMAN = (
    "Das Gesetz tritt am Tage nach der Verkündung in Kraft, soweit nichts anderes bestimmt ist."
)
SHORT = "Which planet is known as the Red Planet?"
CHINESE = "床前明月光，疑是地上霜。举头望明月，低头思故乡。"


def of(texts: list[str]) -> pa.Array:
    """Texts as attributes take them."""
    return pa.array(texts, pa.large_string())


def real_texts() -> list[str]:
    """Documents and code of this repository."""
    files = [*REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("nmoe_core/base/*.py")]
    return [part for path in files for part in path.read_text("utf-8").split("\n\n")]


@pytest.mark.parametrize(
    ("text", "lang"),
    [
        (GERMAN, "de"),
        (CHINESE, "zh"),
        ("Kurz und gut", "und"),
        ("", "und"),
        ("1 + 1 = 2 " * 100, "und"),
        ("add 0.000123 -99999 -> -99998.999877\n" * 100, "und"),
    ],
)
def test_texts_have_a_language_and_short_ones_and_tables_of_numbers_have_none(
    text: str, lang: str
) -> None:
    pytest.importorskip("eldc")
    from nmoe_core.attributes.language import language

    [row] = language(of([text])).to_pylist()
    assert row["lang"] == lang
    assert (row["lang_score"] is None) == (lang not in ("de", "zh"))


def test_short_texts_have_their_language_and_the_exceptions_are_known() -> None:
    pytest.importorskip("eldc")
    from nmoe_core.attributes.language import MIN_SCORE, language

    lines = Path(__file__).with_name("short_texts.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    found = language(of([row["text"] for row in rows])).to_pylist()
    wanted = [row.get("found", row["lang"]) for row in rows]
    assert [one["lang"] for one in found] == wanted
    assert all(one["lang_score"] >= MIN_SCORE for one in found if one["lang"] != "und")
    assert sum(row["lang"] != "und" for row in rows) == 31


def test_a_text_in_an_unknown_language_mostly_has_no_language_but_a_low_score() -> None:
    pytest.importorskip("eldc")
    from nmoe_core.attributes.language import MIN_SCORE, language

    swahili = "Mtu anayetaka kusoma kitabu hiki anapaswa kuingia katika maktaba ya kijiji chetu."
    welsh = "Mae'r trên yn gadael am wyth o'r gloch y bore, ac mae'n cyrraedd cyn hanner dydd."
    for row in language(of([swahili, welsh])).to_pylist():
        assert row["lang"] == "und"
        assert 0 < row["lang_score"] < MIN_SCORE


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        (
            "n_emails",
            ("a.b+c@mail.example.org", "x@y.io,", "ab@163.com", "mail to:me@x.de:"),
            (
                *("@example", "a@b", "user @ mail.org", "git@github.com:a/b.git", "git@x.org"),
                *("image@2x.png", "libssl3@3.2.0", "libssl3@3.2.0.tar", "me@host.org:/data"),
                *("left@1.0.beta", "logo@3x.webp"),
            ),
        ),
        (
            "n_ips",
            ("193.99.144.80", "8.8.8.8.", "1.1.1.1", "2a00:1450:4001:81b::200e", "52.1.2.3"),
            (
                *("1.2.3", "300.1.1.1", "1.2.3.4.5", "127.0.0.1", "10.20.30.40", "192.168.0.1"),
                *("172.20.1.5", "169.254.10.10", "0.0.0.0", "255.255.255.0", "203.0.113.77"),
                *("1.2.3.4", "version 21.4.10.2", "Section 12.10.4.11", "v11.22.33.44"),
                *("2001:db8::17", "2024:10:11", "::1", "fe80::1", "std::vector", "224.0.0.251"),
            ),
        ),
        (
            "n_cards",
            (
                *("4111 1111 1111 1111", "378282246310005", "2221000000000009"),
                *("2223 0031 2200 3222", "3530111333300000", "5555-5555-5555-4444"),
            ),
            ("4111111111111112", "4" * 30, "2220000000000000", "2221000000000000"),
        ),
        (
            "n_ibans",
            ("DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432"),
            ("DE88370400440532013000", "DE90370400440532013000", "GB82WEST12345698765431"),
        ),
        (
            "n_phones",
            (
                *("+49 30 1234567", "(555) 123-4567", "+14155552671", "415-555-2671"),
                *("+33 1 23 45 67 89", "+33123456789", "415.555.2671", "+44 20 7946 0958"),
            ),
            ("+1.000000", "+10011010010", "555 1234", "+1 2 34", "123-456-7890", "2024-10-11"),
        ),
    ],
)
def test_personal_data_counts_where_its_digits_are_right(
    name: str, yes: tuple[str, ...], no: tuple[str, ...]
) -> None:
    texts = [f"Write to {one} today" for one in (*yes, *no)] + [", ".join(yes)]
    expected = [1] * len(yes) + [0] * len(no) + [len(yes)]
    assert pii(of(texts))[name].to_pylist() == expected


def test_candidates_are_the_matches_of_the_patterns() -> None:
    rng = random.Random(0)
    parts = [*"a1@.-+():/\0\1\u00e9 \n", "A1", "1.2", "415", "4111", "8.8.8.8", "version", "DE89"]
    texts = ["".join(rng.choices([*parts, "me@b.org"], k=30)) for _ in range(3000)]
    for name, pattern in PATTERNS.items():
        of_each = [re.findall(pattern.regex, text, re.ASCII) for text in texts]
        good = pattern.is_one or bool
        assert pii(of(texts))[name].to_pylist() == [sum(map(good, one)) for one in of_each]


def test_planted_personal_data_is_found_in_real_texts() -> None:
    rng = random.Random(0)
    texts = real_texts()
    before = pii(of(texts))
    cards = [_card(rng) for _ in texts]
    addresses = [str(ipaddress.IPv4Address(0x5D000000 + rng.getrandbits(20))) for _ in texts]
    planted = pii(of([f"{t} (card {c}, from {a})" for t, c, a in zip(texts, cards, addresses)]))
    for name in PATTERNS:
        more = int(name in ("n_cards", "n_ips"))
        assert planted[name].to_pylist() == [count + more for count in before[name].to_pylist()]
    found = [re.findall(PATTERNS["n_emails"].regex, text, re.ASCII) for text in texts]
    assert before["n_emails"].to_pylist() == [sum(map(is_email, some)) for some in found]


def _card(rng: random.Random) -> str:
    """A number of 16 digits by Luhn's rule, digit by digit."""
    digits = [4, *(rng.randrange(10) for _ in range(14))]
    total = sum(2 * d - 9 * (d > 4) if i % 2 == 0 else d for i, d in enumerate(digits))
    return "".join(map(str, [*digits, -total % 10]))


def read(sets: Mapping[str, str | HubSet], base: Path, min_words: int = 8) -> Evaluations:
    strings = {name: [*set_strings(one, base)] for name, one in sets.items()}
    return Evaluations.of(strings, min_words)


def test_shares_of_evaluation_sets_are_those_of_plain_windows(tmp_path: Path) -> None:
    rng = random.Random(0)
    sets = {
        "quiz": [" ".join(f"Q{rng.randrange(50)}" for _ in range(40)) for _ in range(20)],
        "stories": [f"Two or three words {SHORT} and more"],
        "poems": [CHINESE, GERMAN, "too short to count", SHORT, SHORT + " more"],
    }
    for name, texts in sets.items():
        rows = [
            {"id": i, "turns": [{"role": "user", "text": text}]} for i, text in enumerate(texts)
        ]
        (tmp_path / name).write_text(json_lines(rows), "utf-8")
    evaluations = read({name: name for name in sets}, tmp_path)
    planted = [
        *(text.replace(" ", "  ").upper() + "!" for text in sets["quiz"]),
        *(" ".join(text.split()[5:17]) for text in sets["quiz"]),
        *(
            f"{part}\n{text[len(text) // 3 :]}"
            for part in real_texts()[:40]
            for text in (CHINESE, sets["quiz"][3])
        ),
        CHINESE + " " + sets["quiz"][0],
        f"two or three words {SHORT} and more",
        *(f"Asked: {SHORT} {SHORT} More? {CHINESE}", SHORT, " ".join(SHORT.split()[1:])),
        # Across where so many windows end as are looked up at a time.
        *(" ".join(["x", "y"] * (n // 2) + [sets["quiz"][1]] * 26) for n in range(980, 1030, 6)),
    ]
    found = contamination(of([*planted, *real_texts(), ""]), evaluations).to_pylist()
    known = {name: windows(texts) for name, texts in sets.items()}
    for text, row in zip([*planted, *real_texts(), ""], found, strict=True):
        share, name = plain_contamination(naive.words(text), known)
        assert row == {"contamination": np.float32(share), "contaminated_by": name}, text
    assert [row["contamination"] for row in found[:20]] == [1] * 20
    assert [row["contamination"] for row in found[20:40]] == [0] * 20
    assert evaluations.facts == {"evaluation_strings": 52, "short_strings": 27}


def plain_contamination(words: list[str], known: dict[str, set]) -> tuple[float, str | None]:
    """Share of words in windows that a set holds, and the set with most of them."""
    of_words: dict[int, str] = {}
    for size in range(13, 7, -1):
        for i in range(len(words) - size + 1):
            for name in [name for name in known if tuple(words[i : i + size]) in known[name]][:1]:
                of_words = dict.fromkeys(range(i, i + size), name) | of_words
    by_set = {name: [*of_words.values()].count(name) for name in known}
    most = max(by_set, key=by_set.__getitem__) if of_words else None
    return len(of_words) / max(1, len(words)), most


def windows(texts: list[str]) -> set[tuple[str, ...]]:
    """All windows of 13 words, and shorter texts from 8 words on."""
    found = [naive.words(text) for text in texts]
    whole = {tuple(words) for words in found if 8 <= len(words) < 13}
    return whole | {tuple(words[i : i + 13]) for words in found for i in range(len(words) - 12)}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "E-SOURCE-NOTFOUND"),
        ('{"text": "a b c"}\n', "E-CONTAMINATION-SET"),
        ("no json\n", "E-CONTAMINATION-SET"),
        ('{"text": ' + json.dumps(GERMAN) + "}\n[1]", "E-CONTAMINATION-SET"),
    ],
)
def test_a_set_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str | None, code: str
) -> None:
    if content is not None:
        (tmp_path / "set.jsonl").write_text(content, "utf-8")
    with refused(code, naming=["set"]):
        read({"set": "set.jsonl"}, tmp_path)


def test_without_sets_no_text_is_contaminated() -> None:
    [row] = contamination(of([GERMAN]), Evaluations.of({})).to_pylist()
    assert row == {"contamination": 0, "contaminated_by": None}


@pytest.mark.parametrize("named", [True, False])
def test_a_run_names_its_evaluation_sets(tmp_path: Path, named: bool) -> None:
    (tmp_path / "set.jsonl").write_text(json_lines([{"text": GERMAN}]), "utf-8")
    tables = {"attributes": {"use": ["contamination"]}}
    if named:
        tables["contamination"] = {"evaluations": {"law": "set.jsonl"}}
    run = write_project(tmp_path, [], tables).run
    if not named:
        with refused("E-CONFIG-EVALUATIONS"):
            open_attribute(run, "contamination")
        return
    attribute = open_attribute(run, "contamination")
    assert attribute.facts == {"evaluation_strings": 1, "short_strings": 0}
    [row] = attribute.compute(of([GERMAN])).to_pylist()
    assert row == {"contamination": 1, "contaminated_by": "law"}
