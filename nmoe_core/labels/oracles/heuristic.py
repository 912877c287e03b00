"""An oracle without a model: maps fixed text statistics to the five dimensions.

Each dimension is a weighted mean of two to five statistics (see `text_statistics`). A
piecewise-linear curve maps each statistic to 0..1, and another curve maps the mean to a grade 0..4.
All numbers are in `DIMENSION_CURVES`. They were chosen so that the grades of English documentation
and Python source are spread over 0..4. The statistics do not depend on the length of the text. The
oracle judges only form, not whether a statement is true, and only English and source code: a text
in another script or language gets no scores. A document takes a third of a millisecond.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.labels.oracle import (
    EMPTY_TEXT,
    UNSUPPORTED_LANGUAGE,
    UNSUPPORTED_SCRIPT,
    Keep,
    OracleResult,
    Question,
    Reply,
    Scorer,
)
from nmoe_core.labels.oracles import text_statistics
from nmoe_core.labels.scores import QUALITY, Scale

SCORER_MODEL = "heuristic"
SCORER_VERSION = "text-statistics-v3"
MIN_LATIN_SHARE = 0.5
MAX_OTHER_SHARE = 0.5
_GRADES = tuple(float(grade) for grade in range(5))


class Curve(NamedTuple):
    """A statistic's weight, and the points of its piecewise-linear curve to 0..1."""

    statistic: str
    weight: float
    at: tuple[float, ...]
    gives: tuple[float, ...]


# The curves of each dimension, and the weighted means that get grades 0 to 4.
DIMENSION_CURVES: dict[str, tuple[tuple[Curve, ...], tuple[float, ...]]] = {
    # Words that explain or instruct, in running text.
    "helpfulness": (
        (
            Curve("guidance", 0.7, (0.0, 0.02, 0.05, 0.11), (0.0, 0.35, 0.7, 1.0)),
            Curve("prose", 0.3, (0.1, 0.6), (0.0, 1.0)),
        ),
        (0.32, 0.59, 0.79, 0.89, 1.0),
    ),
    # Well-formed: sentences begin properly, few symbols, separators spaced, indents closed.
    "correctness": (
        (
            Curve("sentence_form", 0.35, (0.0, 1.0), (0.0, 1.0)),
            Curve("symbols", 0.25, (0.05, 0.3), (1.0, 0.0)),
            Curve("spacing", 0.2, (0.2, 1.0), (0.0, 1.0)),
            Curve("indentation", 0.15, (0.6, 1.0), (0.0, 1.0)),
            Curve("nesting", 0.05, (0.8, 1.0), (0.0, 1.0)),
        ),
        (0.54, 0.7, 0.85, 0.95, 1.0),
    ),
    # Neighbouring sentences share some but not all words and are not very short; lines do not
    # repeat.
    "coherence": (
        (
            Curve("overlap", 0.5, (0.0, 0.1, 0.25, 0.5, 1.0), (0.0, 0.5, 1.0, 0.6, 0.0)),
            Curve("segment_words", 0.35, (3.0, 12.0), (0.0, 1.0)),
            Curve("repetition", 0.15, (0.0, 0.15, 0.6), (1.0, 0.8, 0.0)),
        ),
        (0.29, 0.44, 0.57, 0.69, 0.82),
    ),
    # Long words and sentences, brackets inside brackets, symbols.
    "complexity": (
        (
            Curve("long_words", 0.45, (0.05, 0.3), (0.0, 1.0)),
            Curve("depth", 0.25, (0.0, 1.0, 2.0), (0.0, 0.5, 1.0)),
            Curve("segment_words", 0.2, (3.0, 12.0), (0.0, 1.0)),
            Curve("symbols", 0.1, (0.05, 0.25), (0.0, 1.0)),
        ),
        (0.25, 0.34, 0.44, 0.55, 0.65),
    ),
    # Few function words, hard to compress, few words said twice.
    "density": (
        (
            Curve("short_words", 0.45, (0.2, 0.55), (1.0, 0.0)),
            Curve("compression", 0.3, (0.5, 0.75), (0.0, 1.0)),
            Curve("variety", 0.25, (0.55, 0.95), (0.0, 1.0)),
        ),
        (0.31, 0.45, 0.57, 0.68, 0.77),
    ),
}


class HeuristicOracle:
    """Scores texts by their statistics. Records name the rubric's hash, although the rubric is not
    read."""

    def __init__(self, rubric_hash: str = "", scale: Scale = QUALITY) -> None:
        self.scale = scale
        self.scorer = Scorer(SCORER_MODEL, SCORER_VERSION, rubric_hash)
        self.fingerprint = sha256_json([SCORER_MODEL, SCORER_VERSION, DIMENSION_CURVES])
        # There are no weights and no prompt: answers depend only on the version and the numbers
        # above.
        self.facts: dict[str, Any] = {"backend": "heuristic", "table": self.fingerprint}
        self.request_digest = ""
        self.request_digests: tuple[str, ...] = ()
        self.max_new: int | None = None
        self.served = "any"

    def settle(self, accepts: Callable[[str], bool | None]) -> None:
        """There is one form of questions."""

    def label(
        self, questions: Iterable[Question], keep: Keep | None = None
    ) -> Iterator[tuple[int, OracleResult]]:
        """Yield one result per text; there are no replies to keep. Blank texts, texts mostly in
        other scripts than Latin, and texts in other languages than English get no scores."""
        for i, question in enumerate(questions):
            reason = refusal(question.text)
            scores = None if reason else grade(text_statistics.measure(question.text))
            yield i, OracleResult(scores, "", reason or "scored")

    def read(self, reply: Reply) -> OracleResult | None:
        raise NotImplementedError("this oracle gives no replies")


def refusal(text: str) -> str | None:
    """The reason why a text gets no scores; None if it gets scores."""
    if not text.strip():
        return EMPTY_TEXT
    if text_statistics.latin_share(text) < MIN_LATIN_SHARE:
        return UNSUPPORTED_SCRIPT
    is_other = text_statistics.other_language_share(text) > MAX_OTHER_SHARE
    return UNSUPPORTED_LANGUAGE if is_other else None


def grade(statistics: Mapping[str, float]) -> dict[str, int]:
    """Grades 0..4 of the five dimensions.

    A statistic that a text lacks (no brackets, no second sentence) is left out of the weighted
    mean; a dimension without any statistic gets 0.
    """
    grades: dict[str, int] = dict.fromkeys(QUALITY.names, 0)
    for name in QUALITY.names:
        curves, grades_at = DIMENSION_CURVES[name]
        total = weight = 0.0
        for statistic, share, at, gives in curves:
            if statistic in statistics:
                total += share * _interpolate(statistics[statistic], at, gives)
                weight += share
        if weight:
            # Round halves up: rounding to even would favour grades 0, 2 and 4.
            grades[name] = int(_interpolate(total / weight, grades_at, _GRADES) + 0.5)
    return grades


def _interpolate(x: float, at: Sequence[float], gives: Sequence[float]) -> float:
    """Evaluate the piecewise-linear curve through the points; it is constant outside them."""
    if x <= at[0]:
        return gives[0]
    for i in range(1, len(at)):
        if x <= at[i]:
            share = (x - at[i - 1]) / (at[i] - at[i - 1])
            return gives[i - 1] + share * (gives[i] - gives[i - 1])
    return gives[-1]
