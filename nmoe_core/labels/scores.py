"""Scores by a rubric: their scale, the strict parser of an oracle's answer, and the aggregate.

Oracle scores are integers on the rubric's scale; scores of heads are real numbers, clamped to the
scale. All aggregates come from `Scale.aggregate`, so a decision can be recomputed from a row of
scores.

An oracle's final answer must be one JSON object without other text. An object within other text may
be a guess, a quotation from the document, or an answer that the document told the model to give, so
it is used only on request, and marked as salvaged. An answer with two objects has no scores.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from loader.files.nested import json_value
from nmoe_core.base.errors import LabelError
from nmoe_core.base.intervals import alpha, alpha_interval
from nmoe_core.config.rubric import REASON, Rubric

# Numbers are stored with six decimals, and decisions are made from the stored numbers, so a
# decision that is recomputed from a file is the same.
DECIMALS = 6
_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")
# A whole answer may be in a Markdown fence.
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n([^`]*)\n[ \t]*```\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Scale:
    """The dimensions of scores, in order, each with its lowest and highest grade and its weight in
    the aggregate.

    A vector of scores has one value per dimension; arrays of vectors have shape `[..., D]`.
    """

    names: tuple[str, ...]
    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, rubric: Rubric) -> "Scale":
        """The scale of a rubric; weights are divided by their sum."""
        rows = rubric.dimensions.values()
        total = sum(one.weight for one in rows)
        return cls(
            tuple(rubric.dimensions),
            tuple(one.lowest for one in rows),
            tuple(one.lowest + len(one.grades) - 1 for one in rows),
            tuple(one.weight / total for one in rows),
        )

    @classmethod
    def read(cls, value: Any) -> "Scale":
        """Parse the scale in a file (see `in_file`); None gives `QUALITY`. Raises ValueError."""
        if value is None:
            return QUALITY
        rows = list(value.values()) if isinstance(value, dict) else []
        if not rows or not all(_is_row(row) for row in rows):
            raise ValueError(f"not a scale: {value!r}"[:160])
        lowest, highest, weights = zip(*rows)
        return cls(tuple(value), lowest, highest, tuple(map(float, weights)))

    def in_file(self) -> dict[str, Any]:
        """The entry `scale` of a file: lowest grade, highest grade and weight of each dimension.
        Empty for `QUALITY`, because files without this entry have the scale `QUALITY`."""
        rows = zip(self.names, self.lowest, self.highest, self.weights)
        return {} if self == QUALITY else {"scale": {name: row for name, *row in rows}}

    def weighted(self, weights: Mapping[str, float]) -> "Scale":
        """The same dimensions with other weights, by name."""
        return replace(self, weights=tuple(float(weights[name]) for name in self.names))

    def with_same_grades(self, other: "Scale") -> bool:
        """Whether both scales have the same dimensions and grades; weights may differ."""
        return replace(self, weights=other.weights) == other

    def __len__(self) -> int:
        return len(self.names)

    def vector(self, scores: Mapping[str, float]) -> list[float]:
        """The values in the order of the dimensions. Raises KeyError if a dimension is missing."""
        return [float(scores[name]) for name in self.names]

    def by_name(self, vector: Sequence[float] | np.ndarray) -> dict[str, float]:
        """The values by dimension, with six decimals, as files hold them."""
        return {name: round(float(value), DECIMALS) for name, value in zip(self.names, vector)}

    def stored(self, scores: np.ndarray) -> np.ndarray:
        """Clamp head outputs `[N, D]` to the scale and round them to six decimals: float64, as
        files hold them."""
        clamped = np.clip(scores.astype(np.float64), self.lowest, self.highest)
        return np.round(clamped, DECIMALS) + 0.0  # + 0.0 turns -0.0 into 0.0

    def shares(self, scores: np.ndarray) -> np.ndarray:
        """Map clamped scores `[..., D]` to 0 (lowest grade) .. 1 (highest grade): float64."""
        low = np.asarray(self.lowest, np.float64)
        high = np.asarray(self.highest, np.float64)
        return (np.clip(np.asarray(scores, np.float64), low, high) - low) / (high - low)

    def aggregate(self, scores: np.ndarray) -> np.ndarray:
        """Weighted mean of the shares of scores `[..., D]`, in 0..1, with six decimals."""
        weights = np.asarray(self.weights)
        weighted = (self.shares(scores) * weights).sum(axis=-1)
        return np.round(weighted / weights.sum(), DECIMALS)

    def label(self, scores: Mapping[str, float]) -> dict[str, Any]:
        """The fields of a label's record for an oracle's scores."""
        found = _aggregated(self, tuple(self.vector(scores)))
        return {"scores": {n: scores[n] for n in self.names}, "aggregated": found, **self.in_file()}


QUALITY = Scale(
    ("helpfulness", "correctness", "coherence", "complexity", "density"),
    *((0,) * 5, (4,) * 5, (0.2,) * 5),
)
"""The scale of the rubric `quality_v1`."""


@functools.lru_cache(1 << 14)
def _aggregated(scale: Scale, grades: tuple[float, ...]) -> float:
    """`aggregate` of grades; cached, because labels have few distinct grades."""
    return float(scale.aggregate(np.asarray(grades)))


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or [type(value) for value in row[:2]] != [int, int]:
        return False
    return len(row) == 3 and row[0] < row[1] and _is_weight(row[2])


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def scale_in(header: Mapping[str, Any]) -> Scale:
    """Parse the scale in a file's header or record. Raises LabelError (E-LABEL-SCORES)."""
    try:
        return Scale.read(header.get("scale"))
    except ValueError as error:
        raise _bad_scores(str(error), "lowest, highest grade, weight per dimension") from None


def parse_scores(
    value: str | Mapping[str, Any], scale: Scale = QUALITY, *, is_combined: bool = False
) -> dict[str, float]:
    """Parse the scores of an oracle's answer, in the order of the scale.

    `value` is one JSON object, as text or parsed, with exactly the scale's dimensions, each once
    and an integer grade (`4.0` counts as 4, `true` is refused). With `is_combined`, numbers between
    two grades count too, because several raters may have been combined. Raises LabelError for
    anything else (E-LABEL-SCORES).
    """
    scores = _parse_object(value) if isinstance(value, str) else value
    if not isinstance(scores, Mapping):
        raise _bad_scores(type(scores).__name__, "one JSON object")
    if set(scores) != set(scale.names):
        raise _bad_scores(f"keys {sorted(map(str, scores))}", f"exactly {', '.join(scale.names)}")
    grades = zip(scale.names, scale.lowest, scale.highest)
    return {
        name: _grade(name, scores[name], (low, high), is_combined) for name, low, high in grades
    }


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json_value(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise _bad_scores(f"{error}", "one JSON object") from None
    if not isinstance(value, dict):
        raise _bad_scores(type(value).__name__, "one JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _grade(name: str, value: object, ends: tuple[int, int], is_combined: bool) -> float:
    # Compare with the bounds before converting: `int` fails on NaN and infinity.
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    low, high = ends
    if low <= number <= high and (is_combined or number == int(number)):
        return int(number) if number == int(number) else number
    kind = "a number" if is_combined else "an integer"
    raise _bad_scores(f"{name} = {value!r}"[:80], f"{kind} {low}..{high}")


def _bad_scores(found: str, expected: str) -> LabelError:
    return LabelError("invalid scores", found=found, expected=expected, code="E-LABEL-SCORES")


class Answer(NamedTuple):
    """What a final answer says: the scores, or None; whether it also has other text; the reason;
    the text of the object."""

    scores: dict[str, float] | None = None
    is_embedded: bool = False
    reason: str = ""
    text: str = ""


def read_scores(
    text: str, extract_embedded: bool = False, scale: Scale = QUALITY, has_reason: bool = False
) -> Answer:
    """Read a final answer. With `has_reason`, the object must begin with a reason.

    With `extract_embedded`, one flat object within other text is accepted.
    """
    fenced = _FENCED.fullmatch(text)
    with suppress(LabelError):
        return _read_object(fenced[1] if fenced else text, scale, has_reason)
    objects = _FLAT_OBJECT.findall(text) if extract_embedded else []
    if len(objects) == 1:
        with suppress(LabelError):
            return _read_object(objects[0], scale, has_reason)._replace(is_embedded=True)
    return Answer()


def _read_object(text: str, scale: Scale, has_reason: bool) -> Answer:
    value = _parse_object(text)
    reason = ""
    if has_reason:
        reason = value.pop(REASON) if next(iter(value), None) == REASON else None
        if not isinstance(reason, str) or not reason.strip():
            raise _bad_scores(repr(reason), f"a text under {REASON!r}, the first key")
    return Answer(parse_scores(value, scale), False, reason, text)


def rounded(value: float | np.floating[Any] | None) -> float | None:
    """A number rounded to six decimals, as files hold it; None stays None."""
    return None if value is None else round(float(value), DECIMALS)


def agreement_rows(
    rated: Sequence[Mapping[str, Mapping[str, float]]], scale: Scale
) -> list[dict[str, Any]]:
    """How far several raters agree, by dimension of the scale. `rated` has the scores of a document
    by rater; documents of fewer than two raters do not count.

    A row has Krippendorff's `alpha` with its 95 % interval `low` to `high` (None if undefined), the
    number `n` of documents, and the number of `raters`.
    """
    shared = [one for one in rated if len(one) > 1]
    names = sorted({name for one in shared for name in one})
    grades = np.full((len(scale), len(shared), len(names)), np.nan)
    for row, one in enumerate(shared):
        for name, scores in one.items():
            grades[:, row, names.index(name)] = scale.vector(scores)
    rows: list[dict[str, Any]] = []
    for dimension, table in zip(scale.names, grades):
        low, high = alpha_interval(table) or (None, None)
        counts = {"dimension": dimension, "n": len(shared), "raters": len(names)}
        rows.append(counts | {"alpha": rounded(alpha(table)), "low": low, "high": high})
    return rows
