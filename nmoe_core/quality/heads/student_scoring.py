"""The student as the only grader: its scores are used instead of the judge's, and no probe runs.

Documents do not leave early, and scores of an earlier grading are not reused: one core scores about
fifty thousand documents per second. `HeadScorer` runs the same scorer before its probe.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmoe_core.base.fingerprint import Fingerprints, local_digest
from nmoe_core.base.settings import GraderKind
from nmoe_core.labels.scores import Scale
from nmoe_core.quality.heads.ngrams import TokenTable
from nmoe_core.quality.heads.scores import DocumentTokens, ExitRules, HeadScores
from nmoe_core.quality.heads.student_file import LoadedStudent, load_student, token_table
from nmoe_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StudentScorer:
    """A loaded student; `table` belongs to the tokenizer of the documents."""

    loaded: LoadedStudent
    digest: str
    table: TokenTable
    batch_size: int = 64

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer, batch_size: int = 64) -> "StudentScorer":
        """Read a file; raises HeadError as `load_student`."""
        return cls(load_student(path), local_digest(path), token_table(tokenizer), batch_size)

    @property
    def kind(self) -> GraderKind:
        return "student"

    @property
    def max_ctx(self) -> int:
        return int(self.loaded.header["max_ctx"])

    @property
    def fingerprints(self) -> Fingerprints:
        return {"student": self.digest}

    @property
    def scale(self) -> Scale:
        return self.loaded.student.scale

    @property
    def student_digest(self) -> str:
        return ""

    @property
    def scored_by(self) -> None:
        return None

    @property
    def scorer_model(self) -> str:
        return str(self.loaded.header.get("scorer_model", ""))

    @property
    def train_contents(self) -> np.ndarray:
        return self.loaded.train_contents

    @property
    def tokens_processed(self) -> int:
        return 0

    def score(
        self,
        documents: DocumentTokens,
        exits: ExitRules | None = None,
        known: HeadScores | None = None,
    ) -> HeadScores:
        """Score documents; the student's scores are returned as `judge`. No document exits
        early."""
        scores = HeadScores.empty(len(documents), len(self.scale))
        scores.judge[:] = self.loaded.student.predict(documents.tokens, self.table)
        return scores
