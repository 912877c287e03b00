"""What a grader gives to documents, and what every grader can do: `Scorer`.

Calibration and grading both use one `Scorer`, so thresholds meet the scores they were fitted on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.settings import GraderKind
from nmoe_core.labels.scores import Scale

if TYPE_CHECKING:
    from nmoe_core.heads.features import DocumentTokens

ExitRule = Callable[[np.ndarray, Sequence[int]], np.ndarray]


class ExitRules(NamedTuple):
    """Which documents leave, bool `[B]`, by stored scores `[B, D]` of the student or the probe, and
    by the documents' places among those that are scored."""

    student: ExitRule
    probe: ExitRule


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Scores of documents in their order, as they are stored: clamped to the scale, six decimals.

    `probe` is float64 `[N, D]`; `judge` the same, NaN where `exited` (bool `[N]`) says that the
    document left before it; `student` those of a student that is asked first, else NaN. A document
    that left at the student has no scores of the probe either. `failed` holds, by row, why a
    document has no scores; a failure after the probe leaves its probe scores. `batches` holds the
    rows that ran together, by `batch_key`; `ran` those not taken over from earlier scores.
    """

    probe: np.ndarray
    judge: np.ndarray
    exited: np.ndarray
    student: np.ndarray
    failed: dict[int, str] = field(default_factory=dict)
    batches: dict[str, list[int]] = field(default_factory=dict)
    ran: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, num_documents: int, num_scores: int) -> HeadScores:
        """Room for so many scores of so many documents, all NaN."""
        shape = num_documents, num_scores
        student, probe, judge = (np.full(shape, np.nan) for _ in range(3))
        return cls(probe, judge, np.zeros(num_documents, np.bool_), student)


class Scorer(Protocol):
    """A grader: both heads over their backbone, or the student (`StudentScorer`)."""

    @property
    def kind(self) -> GraderKind: ...

    @property
    def max_batch(self) -> int:
        """Documents that run together."""
        ...

    @property
    def max_ctx(self) -> int:
        """How many tokens of a document it reads."""
        ...

    @property
    def digest(self) -> str:
        """The digest that thresholds are fitted for."""
        ...

    @property
    def student_digest(self) -> str:
        """Digest of the student that is asked before the probe; empty where none is."""
        ...

    @property
    def scale(self) -> Scale:
        """The scale of its scores."""
        ...

    @property
    def fingerprints(self) -> Fingerprints:
        """Digests of the files that make the scores, by name."""
        ...

    @property
    def scored_by(self) -> Fingerprints | None:
        """Fingerprints of a score beside the texts of its batch; None where making a score is as
        quick as finding it."""
        ...

    @property
    def scorer_model(self) -> str:
        """The oracle whose labels it was fitted on."""
        ...

    @property
    def train_contents(self) -> np.ndarray:
        """Digests of the documents that it was fitted on; see `Heads`."""
        ...

    @property
    def tokens_processed(self) -> int:
        """Tokens that the backbone has run in this process; 0 without a backbone."""
        ...

    def score(
        self,
        documents: DocumentTokens,
        exits: ExitRules | None = None,
        known: HeadScores | None = None,
    ) -> HeadScores:
        """Score documents; see `HeadScorer.score`."""
        ...
