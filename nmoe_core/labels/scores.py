"""The five rubric dimensions, the strict reader of scores, and the weighted aggregate.

Oracle scores are integers 0..4; heads give real numbers that are clamped to 0..4. Every aggregate
in the platform comes from `aggregate`, so a decision can be recomputed from a row of scores.

An oracle's final answer must be one JSON object and no other word. An object among other words may
be a guess, a quotation from the document, or what the document told the model to say, so it is
taken only on request, and marked as salvaged. An answer with two objects has no scores.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from nmoe_core.base.errors import LabelError
from nmoe_core.config.rubric import DIMENSIONS, MAX_GRADE

# Numbers are stored with six decimals, and decisions are made on the stored numbers: a reader who
# recomputes a decision from a file gets the same.
DECIMALS = 6
_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")
# A whole answer may stand in a Markdown fence.
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n([^`]*)\n[ \t]*```\s*", re.IGNORECASE)
UNIFORM_WEIGHTS: dict[str, float] = {name: 1 / len(DIMENSIONS) for name in DIMENSIONS}


def parse_scores(value: str | Mapping[str, Any]) -> dict[str, int]:
    """The scores of an oracle's answer, in the order of `DIMENSIONS`.

    `value` is one JSON object, as text or parsed, of exactly the five dimensions, each once and an
    integer 0..4 (`4.0` counts as 4, `true` does not). Anything else is refused (E-LABEL-SCORES).
    """
    scores = value
    if isinstance(value, str):
        try:
            scores = json.loads(value, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise _bad_scores(f"{error}", "one JSON object") from None
    if not isinstance(scores, Mapping):
        raise _bad_scores(type(scores).__name__, "one JSON object")
    if set(scores) != set(DIMENSIONS):
        raise _bad_scores(f"keys {sorted(map(str, scores))}", f"exactly {', '.join(DIMENSIONS)}")
    return {name: _grade(name, scores[name]) for name in DIMENSIONS}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _grade(name: str, value: object) -> int:
    # Compared with 0..4 before it is converted: NaN and infinity have no integer.
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if 0 <= number <= MAX_GRADE and number == int(number):
        return int(number)
    raise _bad_scores(f"{name} = {value!r}"[:80], f"an integer 0..{MAX_GRADE}")


def _bad_scores(found: str, expected: str) -> LabelError:
    return LabelError("not a set of scores", found=found, expected=expected, code="E-LABEL-SCORES")


def read_scores(text: str, salvage: bool = False) -> tuple[dict[str, int] | None, bool]:
    """The scores that a final answer gives, or None; and whether they stood among other words.

    With `salvage`, an answer that is not the object alone may have one flat object in it.
    """
    fenced = _FENCED.fullmatch(text)
    with suppress(LabelError):
        return parse_scores(fenced[1] if fenced else text), False
    objects = _FLAT_OBJECT.findall(text) if salvage else []
    if len(objects) == 1:
        with suppress(LabelError):
            return parse_scores(objects[0]), True
    return None, False


def rounded(value: float | np.floating[Any] | None) -> float | None:
    """A number as it is written to files; None stays None."""
    return None if value is None else round(float(value), DECIMALS)


def as_vector(scores: Mapping[str, float]) -> list[float]:
    """The five values in the order of `DIMENSIONS`."""
    return [float(scores[name]) for name in DIMENSIONS]


def as_scores(vector: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The five values by name, as they are written to files."""
    return {name: round(float(value), DECIMALS) for name, value in zip(DIMENSIONS, vector)}


def stored(scores: np.ndarray) -> np.ndarray:
    """Head outputs `[N, 5]` as they are stored: float64, clamped to 0..4, six decimals."""
    # Adding zero turns a negative zero into a plain one.
    return np.round(np.clip(scores.astype(np.float64), 0, MAX_GRADE), DECIMALS) + 0.0


def aggregate(scores: np.ndarray, weights: Mapping[str, float] | None = None) -> np.ndarray:
    """Weighted mean of the clamped dimensions, in 0..1, with six decimals.

    `scores` are `[..., 5]`, the dimensions in order; `weights`, uniform by default, are divided by
    their sum here.
    """
    w = np.asarray(as_vector(weights or UNIFORM_WEIGHTS))
    shares = np.clip(np.asarray(scores, np.float64), 0, MAX_GRADE) / MAX_GRADE
    return np.round((shares * w).sum(axis=-1) / w.sum(), DECIMALS)
