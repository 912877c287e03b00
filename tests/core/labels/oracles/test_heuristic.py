import ast
import itertools
import random
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.base.intervals import spearman
from nmoe_core.labels.oracle import OracleResult, Question
from nmoe_core.labels.oracles.heuristic import DIMENSION_CURVES, HeuristicOracle, grade, refusal
from nmoe_core.labels.oracles.text_statistics import MAX_WINDOWS, WINDOW_CHARS, measure, windows
from nmoe_core.labels.scores import QUALITY

MAX_CHARS = 4000
KINDS = ("source", "docstring", "metadata")


def real_texts() -> dict[str, list[str]]:
    """Library source, its docstrings, and package metadata: text found beside any Python."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [path.read_text("utf-8", "replace") for path in library]
    docstrings: list[str] = []
    for text in sources[::3]:
        owners = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
        docstrings += [string for n in owners if (string := ast.get_docstring(n))]
    metadata = sorted({d.read_text("METADATA") or "" for d in distributions()} - {""})
    return dict(zip(KINDS, (sources, docstrings, metadata)))


@pytest.fixture(scope="module")
def corpus() -> list[tuple[str, str]]:
    """(kind, text) pairs, each text cut at three random lengths; nearly none is refused."""
    rng = random.Random(0)
    found = [
        (kind, text[: rng.randint(200, MAX_CHARS)])
        for kind, texts in real_texts().items()
        for text in texts
        if len(text) >= 200
        for _ in range(3)
    ]
    scored = [one for one in found if refusal(one[1]) is None]
    assert len(scored) >= 0.99 * len(found)
    return scored


def result_of(text: str) -> OracleResult:
    ((_, result),) = HeuristicOracle().label([Question(text)])
    return result


@pytest.fixture(scope="module")
def grades(corpus: list[tuple[str, str]]) -> np.ndarray:
    return np.array([list((result_of(text).scores or {}).values()) for _, text in corpus])


def test_grades_of_real_text_spread_and_neither_repeat_each_other_nor_follow_the_length(
    corpus: list[tuple[str, str]], grades: np.ndarray
) -> None:
    assert len(grades) > 300
    for column, name in zip(grades.T, QUALITY.names):
        shares = np.bincount(column, minlength=5) / len(column)
        assert shares.max() <= 0.7, (name, shares)
        assert (shares > 0.01).sum() >= 4, (name, shares)
    for a, b in itertools.combinations(range(5), 2):
        assert abs(np.corrcoef(grades[:, a], grades[:, b])[0, 1]) < 0.7, (a, b)
    # Length within each kind, because docstrings are short by nature and source is not.
    lengths = np.array([len(text) for _, text in corpus])
    for kind in KINDS:
        member = np.array([k == kind for k, _ in corpus])
        rho = spearman(grades[member].mean(1), lengths[member])
        assert rho is not None
        assert abs(rho) < 0.3, kind


def test_texts_said_twice_and_not_shuffled_measure_the_same(corpus: list[tuple[str, str]]) -> None:
    for text in [text for _, text in corpus if len(text) > 3000][:20]:
        once, twice = measure(text), measure(f"{text}\n{text}")
        for name in ("guidance", "short_words", "variety", "compression", "symbols"):
            assert twice[name] == pytest.approx(once[name], abs=0.12), name
    prose = next(text for kind, text in corpus if kind == "metadata" and len(text) > 2000)
    rng = random.Random(0)
    lines = [line.split(" ") for line in prose.split("\n")]
    for line in lines:
        rng.shuffle(line)
    rng.shuffle(lines)
    before, after = measure(prose), measure("\n".join(" ".join(line) for line in lines))
    changed = {name for name in before if abs(before[name] - after.get(name, -1)) > 0.02}
    assert len(changed & {"overlap", "repetition", "compression", "depth", "nesting"}) >= 2


def test_repeated_lines_and_crossed_brackets_cost_grades() -> None:
    good = "The reader opens a file (see [1]). The file must exist, because it is read at once.\n"
    assert measure("[x (y] z) " * 20)["nesting"] < measure(good * 3)["nesting"] == 1.0
    listing = "Classifier :: A\nClassifier :: B\nClassifier :: C\nClassifier :: D\n"
    assert measure(listing)["repetition"] == 1.0
    ragged, even = "if a:\n     b\n   c\n      d\n  e\nf\n", "if a:\n    b\n    c\nd\n"
    assert measure(ragged)["indentation"] < measure(even)["indentation"] == 1.0


def test_each_curve_of_the_oracle_counts() -> None:
    """Moving a statistic over its range moves the dimensions that name it, and no other."""
    users: dict[str, set[str]] = {}
    for name, (curves, _) in DIMENSION_CURVES.items():
        for curve in curves:
            users.setdefault(curve.statistic, set()).add(name)
    rng = np.random.default_rng(0)
    for statistic, expected in users.items():
        moved: set[str] = set()
        for _ in range(20):
            others = {name: float(rng.random()) for name in users}
            seen = [grade(others | {statistic: float(v)}) for v in np.linspace(0, 12, 241)]
            moved |= {name for name in QUALITY.names if len({s[name] for s in seen}) > 1}
        assert moved == expected, statistic


def test_equal_texts_get_equal_scores_in_any_batch() -> None:
    oracle = HeuristicOracle()
    (_, first), (_, second) = oracle.label([Question("a b c.\n")] * 2)
    assert first == second == result_of("a b c.\n")
    assert oracle.fingerprint == HeuristicOracle().fingerprint


def test_compression_is_that_of_one_block_whatever_the_text(corpus: list[tuple[str, str]]) -> None:
    text = " ".join(corpus[0][1].split())
    solid = text.replace(" ", "_")
    assert measure(solid[:400])["compression"] == measure(solid[:256])["compression"]
    indented = "    " + text[:100].replace(" ", "\n    ")
    assert measure(indented)["compression"] == measure(text[:100])["compression"]


def test_windows_cover_both_ends_and_stay_bounded() -> None:
    text = "".join(chr(97 + i % 26) for i in range(50_000))
    first, *_, last = parts = windows(text)
    assert (len(parts), first, last) == (MAX_WINDOWS, text[:WINDOW_CHARS], text[-WINDOW_CHARS:])
    assert windows(text[:700]) == [text[:400], text[300:700]]
    assert windows(text[:100]) == [text[:100]]


OTHER = "unsupported_language"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((odd, "scored") for odd in ("x", "\ufffd", "12, 34; 56", "((((", "\n" * 50 + "a")),
        ("\x00\ud800", "scored"),
        ("1 + 2 = 3; 4 > 3" * 9, "scored"),
        ("Voilà où l'été naît: ça dépend de l'œuvre, của người Việt Nam. " * 9, OTHER),
        ("for i in range(n):\n    les.append(una[i])  # the largest of them\n" * 20, "scored"),
        ("Das Gesetz ist auf den Vertrag nicht anzuwenden, den der Bund schließt.", OTHER),
        ("Cette commande est un alias et ne doit pas être utilisée avec les autres.", OTHER),
        ("Este comando es un alias para los usuarios que no usan el otro, como se ve.", OTHER),
        ("Perintah ini merupakan alias yang tidak dapat digunakan dengan yang lain.", OTHER),
        ("The word 東京 (Tōkyō) means eastern capital, 京都 the capital city." * 9, "scored"),
        (" \n\t ", "empty_text"),
        ("床前明月光,疑是地上霜。举头望明月,低头思故乡。" * 20, "unsupported_script"),
        ("ひらがなと カタカナ、それから漢字。" * 20, "unsupported_script"),
        ("Москва, как много в этом звуке для сердца русского слилось." * 9, "unsupported_script"),
        ("สวัสดีชาวโลก " * 30, "unsupported_script"),
    ],
)
def test_odd_texts_get_scores_but_blank_or_foreign_ones_a_reason(text: str, reason: str) -> None:
    result = result_of(text)
    assert ((result.scores is not None), result.finish_reason) == (reason == "scored", reason)
