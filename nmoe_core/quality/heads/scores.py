"""Documents as graders see them (the first `max_ctx` tokens, without the EOS), their scores, and
the interface of every grader: `Scorer`.

Calibration and grading both use one `Scorer`, so thresholds meet the scores they were fitted on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.settings import GraderKind
from nmoe_core.labels.scores import Scale
from nmoe_core.shards.documents import DocumentReader
from nmoe_core.text.models import ModelIds

BUFFER_BATCHES = 16
MAX_FAILED = 10
MAX_FAILED_SHARE = 0.01
ExitRule = Callable[[np.ndarray, Sequence[int]], np.ndarray]


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """Documents as the heads see them: their ids, and their tokens, uint32 `[1..max_ctx]` each."""

    names: Sequence[str]
    tokens: Sequence[np.ndarray]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, rows: slice) -> DocumentTokens:
        return DocumentTokens(self.names[rows], self.tokens[rows])

    def digests(self) -> np.ndarray:
        """64 bits of the SHA-256 of each document's tokens: int64 `[N]`."""
        found = [hashlib.sha256(np.asarray(tokens, "<u4").tobytes()) for tokens in self.tokens]
        bits = [int.from_bytes(d.digest()[:8], "little", signed=True) for d in found]
        return np.array(bits, np.int64)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token shards below `data_root`, and how much of a document the heads see."""

    data_root: Path
    eos_token_id: int
    max_ctx: int
    model: ModelIds | None = None
    """Reader of documents whose ids are not the backbone's own."""

    @property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the ids, in addition to the shards' own."""
        return {} if self.model is None else self.model.fingerprints

    def read(self, doc_ids: Sequence[str]) -> DocumentTokens:
        """Documents by id; raises as `DocumentReader.tokens`."""
        reader = DocumentReader(self.data_root)
        eos = self.eos_token_id
        tokens = (reader.tokens(doc_id, eos) for doc_id in doc_ids)
        seen = [as_seen(one, eos, self.max_ctx, self.model) for one in tokens]
        return DocumentTokens(doc_ids, seen)


def as_seen(
    tokens: np.ndarray, eos_token_id: int, max_ctx: int, model: ModelIds | None = None
) -> np.ndarray:
    """The part of a document that heads see; in an empty document they see the EOS."""
    if model is not None:
        tokens = model(tokens, max_ctx)
        eos_token_id = model.eos_token_id
    return tokens[:max_ctx] if len(tokens) else np.array([eos_token_id], np.uint32)


def require_few_failed(failed: Mapping[str, str], num_documents: int) -> None:
    """Refuse when so many of `num_documents` failed that the documents cannot be the cause.

    `failed` has the reason of each failed document by its id. Raises HeadError: all failed, or more
    than ten and one in a hundred (E-HEAD-NONFINITE).
    """
    allowed = min(max(MAX_FAILED, MAX_FAILED_SHARE * num_documents), num_documents - 1)
    if len(failed) <= allowed:
        return
    name, reason = next(iter(failed.items()))
    raise HeadError(
        reason,
        where=name,
        found=f"{len(failed)} of {num_documents} documents failed in this or a similar way",
        expected=f"at most {int(allowed)}",
        do="check the checkpoint, or run the backbone in float32",
        code="E-HEAD-NONFINITE",
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread inside, so that sums have one order and results equal bytes.

    To use several cores, run several processes, each with its own shards.
    """
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class ExitRules(NamedTuple):
    """Rules for the documents that leave, bool `[B]`, by stored scores `[B, D]` of the student or
    the probe, and by the places of the documents in the call."""

    student: ExitRule
    probe: ExitRule


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Scores of documents in their order, as they are stored: clamped to the scale, six decimals.

    `probe` is float64 `[N, D]`; `judge` the same, NaN if `exited` (bool `[N]`) says that the
    document left before it; `student` the scores of a student that runs first, else NaN. A document
    that left at the student has no scores of the probe either. `failed` holds, by row, why a
    document has no scores; a failure after the probe leaves its probe scores. `batches` holds the
    rows that ran together, by `batch_key`; `ran` the rows not reused from earlier scores.
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
    def batch_size(self) -> int:
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
        """Digest of the student that scores before the probe; empty if there is none."""
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
        """Fingerprints of a score beside the texts of its batch; None if computing a score is as
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
