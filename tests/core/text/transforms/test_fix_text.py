"""Text that was decoded with a wrong encoding is repaired, and right text stays as it is."""

import random
import re
from importlib.metadata import PackageNotFoundError

import pytest

pytest.importorskip("ftfy")

import ftfy
from ftfy.badness import BADNESS_RE

from nmoe_core.base.errors import ConfigError
from nmoe_core.config import functions
from nmoe_core.config.transforms import FixTextTable, RedactTable
from nmoe_core.text.transforms import chain
from tests.core.text.transforms.applied import applied, batch_of, chain_of, one
from tests.growth import growth

_RIGHT = (
    *("Das Gesetz tritt am Tage nach der Verkündung in Kraft; 5 € für alle™.", "naïve café – “ok”"),
    *(
        "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
        "Привет, мир! Как дела?",
        "Ελληνικά κείμενα",
    ),
    *(
        "مرحبا بالعالم",
        "ﬁnal ligature, ＷＩＤＥ letters, ‘quotes’",
        "x &= 3 && y; a<b &amp;",
        "ÇA VA, ÉTÉ",
    ),
)
_SPELLED = ("café", "naïve", "“quoted” – it’s", "Привет мир", "日本語テキスト", "5 € ½ ©")


@pytest.mark.parametrize("text", _RIGHT)
def test_right_text_stays(text: str) -> None:
    assert one(chain_of("fix_text"), text) == text


def test_mojibake_planted_into_lines_is_repaired_and_other_lines_stay() -> None:
    rng = random.Random(0)
    texts, expected = [], []
    for _ in range(60):
        lines = rng.choices(_RIGHT[:5], k=5)
        word = rng.choice(_SPELLED)
        wrong = word.encode().decode("cp1252", "ignore")
        if ftfy.fix_encoding(f"{wrong}.") != f"{word}.":  # bytes that cp1252 has no letters for
            continue
        texts.append("\n".join([*lines, f"{wrong}.", "the end"]))
        expected.append("\n".join([*lines, f"{word}.", "the end"]))
    assert len(texts) > 20
    assert applied(chain_of("fix_text"), texts) == expected


def test_entities_are_replaced_once_and_not_in_markup() -> None:
    fixes = chain_of("fix_text")
    assert one(fixes, "AT&amp;T &eacute;t&eacute; &#8217;") == "AT&T été ’"
    assert one(fixes, "&amp;amp; &unknown;") == "&amp; &unknown;"
    assert one(fixes, "caf&Atilde;&copy; noir") == "café noir"
    assert one(fixes, "<p>AT&amp;T</p>") == "<p>AT&amp;T</p>"


def test_each_repair_can_be_turned_off() -> None:
    text = "caf\u00c3\u00a9 &amp; more"
    assert one(chain_of("fix_text", entities=False), text) == "café &amp; more"
    assert one(chain_of("fix_text", mojibake=False), text) == "caf\u00c3\u00a9 & more"


def test_texts_that_the_heuristic_of_ftfy_finds_bad_are_all_searched() -> None:
    """The pattern for RE2 has at least the matches of ftfy's own."""
    from nmoe_core.text.transforms import fix_text
    from nmoe_core.text.transforms.search import column_of, holders

    rng = random.Random(0)
    chars = [*sorted({char for char in BADNESS_RE.pattern if not char.isascii()}), *" aZ1\n.²"]
    texts = ["".join(rng.choices(chars, k=4)) for _ in range(4000)]
    held = set(holders(column_of([text.encode() for text in texts]), fix_text._BAD).tolist())
    bad = {i for i, text in enumerate(texts) if re.search(BADNESS_RE, text)}
    assert bad - held == set()
    assert len(held - bad) < 0.2 * len(texts)


def test_the_version_of_the_library_is_part_of_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = FixTextTable(kind="fix_text")
    [before] = chain.identity([table])
    monkeypatch.setattr(functions, "version", lambda package: "0")
    [after] = chain.identity([table])
    assert before["packages"] == {"ftfy": ftfy.__version__}
    assert after == before | {"packages": {"ftfy": "0"}}


def test_a_missing_library_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(functions, "version", version)
    with pytest.raises(ConfigError, match=r"needs the package `ftfy`.*nmoe-data\[transforms\]"):
        chain.identity([FixTextTable(kind="fix_text")])
    assert chain.identity([RedactTable(kind="redact", kinds=("email",))]), "it needs no library"


@pytest.mark.parametrize(
    "unit",
    ["Ã", "Ã ", "а", "â€", "Â ", "é ", "ВЂ", "à²", "&amp;", "amp;", "&", "xÃ©\n", "Ã\u0192Æ’"],
)
def test_time_follows_the_length_of_a_text(unit: str) -> None:
    fixes = chain_of("fix_text")
    small, large = ("&" + unit * (size // len(unit)) for size in (2**11, 2**14))
    assert growth(lambda text: fixes.apply(batch_of([text])), small, large, 1e-3) < 24
