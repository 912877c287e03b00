"""The input of graders (the first `max_ctx` tokens of each document, without the EOS), the scores
that graders return, and their interface, `Scorer`.

Calibration and grading use the same `Scorer`, so thresholds are applied to the same scores on which
they were fitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from nmoe_core.base.bucket.ahead import fetched_ahead
from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.settings import GraderKind
from nmoe_core.labels.scores import Scale
from nmoe_core.quality.families import FamilyNames
from nmoe_core.shards.documents import DocumentReader, shard_paths
from nmoe_core.text.models import ModelIds

BUFFER_BATCHES = 16
MAX_FAILED = 10
MAX_FAILED_SHARE = 0.01
ExitRule = Callable[[np.ndarray, Sequence[int]], np.ndarray]


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """Documents as heads read them: ids, and the tokens of each document, uint32 `[1..max_ctx]`."""

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
    """Token shards below `data_root`, and the number of tokens per document that heads read."""

    data_root: Path
    eos_token_id: int
    max_ctx: int
    model: ModelIds | None = None
    """Translates token ids if the shards do not have the backbone's tokenizer; else None."""
    families: FamilyNames | None = None
    """The families of documents, if there are any."""

    @property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the translation of token ids and of families, in addition to those of the
        shards."""
        used = (one for one in (self.model, self.families) if one is not None)
        return {name: value for one in used for name, value in one.fingerprints.items()}

    def read(self, doc_ids: Sequence[str]) -> DocumentTokens:
        """Documents by id, copied, so that no shard stays mapped; raises as
        `DocumentReader.tokens`."""
        reader = DocumentReader(self.data_root)
        eos = self.eos_token_id
        with fetched_ahead(shard_paths(self.data_root, doc_ids)):
            tokens = (reader.tokens(doc_id, eos) for doc_id in doc_ids)
            seen = [as_seen(one, eos, self.max_ctx, self.model).copy() for one in tokens]
        return DocumentTokens(doc_ids, seen)


def as_seen(
    tokens: np.ndarray, eos_token_id: int, max_ctx: int, model: ModelIds | None = None
) -> np.ndarray:
    """The tokens of a document that heads read; for an empty document, the EOS."""
    if model is not None:
        tokens = model(tokens, max_ctx)
        eos_token_id = model.eos_token_id
    return tokens[:max_ctx] if len(tokens) else np.array([eos_token_id], np.uint32)


def require_few_failed(failed: Mapping[str, str], num_documents: int) -> None:
    """Raise an error if so many of `num_documents` documents failed that the cause must be the
    backbone, not the documents.

    `failed` maps the id of each failed document to the reason. Raises HeadError if all documents
    failed, or if more than ten documents and more than one in a hundred failed (E-HEAD-NONFINITE).
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
def one_thread(graders: Iterable[GraderKind] = ("hydra",)) -> Iterator[None]:
    """Run torch on one CPU thread inside the context. Sums are then always computed in the same
    order, so equal inputs give equal bytes. The student alone does not use torch, which is then not
    imported.

    To use several cores, run several processes, each with its own shards.
    """
    if set(graders) == {"student"}:
        yield
        return
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class ExitRules(NamedTuple):
    """Two functions that decide which documents exit early. Each takes stored scores `[B, D]` (of
    the student or of the probe) and the documents' positions in the argument of `score`, and
    returns bool `[B]`."""

    student: ExitRule
    probe: ExitRule


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Scores of documents, in the order of the documents, as stored: clamped to the scale, six
    decimals.

    `probe`, `judge` and `student` are float64 `[N, D]`, NaN if the grader did not score the
    document. `exited` (bool `[N]`) marks documents that were dropped before the judge ran; a
    document that the student dropped has no probe scores either. `failed` maps a row to the reason
    why the document has no scores; if the failure came after the probe, the row keeps its probe
    scores. `batches` maps a `batch_key` to the rows that ran together; `ran` lists the rows that
    were scored by this call, not reused.
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
        """Allocate `num_scores` scores for `num_documents` documents, all NaN."""
        shape = num_documents, num_scores
        student, probe, judge = (np.full(shape, np.nan) for _ in range(3))
        return cls(probe, judge, np.zeros(num_documents, np.bool_), student)


def stacked(
    student: np.ndarray, probe: np.ndarray, probe_weight: float, scale: Scale
) -> np.ndarray:
    """The weighted mean of stored scores `[N, D]` of student and probe, as files hold it."""
    return scale.stored(probe_weight * probe + (1 - probe_weight) * student)


class Scorer(Protocol):
    """A grader: both heads over their backbone, student and probe, or the student
    (`StudentScorer`)."""

    @property
    def kind(self) -> GraderKind: ...

    @property
    def batch_size(self) -> int:
        """Documents per batch."""
        ...

    @property
    def max_ctx(self) -> int:
        """Number of tokens that the grader reads per document."""
        ...

    @property
    def digest(self) -> str:
        """The digest of the grader; a calibration names the digest of the grader for which its
        thresholds were fitted."""
        ...

    @property
    def student_digest(self) -> str:
        """Digest of the student that scores before the probe; empty without a student."""
        ...

    @property
    def scale(self) -> Scale:
        """The scale of the grader's scores."""
        ...

    @property
    def fingerprints(self) -> Fingerprints:
        """Digests of the files that the scores depend on, by name."""
        ...

    @property
    def scored_by(self) -> Fingerprints | None:
        """Fingerprints of everything that a score depends on except the batch; None if scoring is
        as fast as looking a score up."""
        ...

    @property
    def scorer_model(self) -> str:
        """The oracle that made the training labels."""
        ...

    @property
    def train_contents(self) -> np.ndarray:
        """Digests of the training documents; see `Heads`."""
        ...

    @property
    def tokens_processed(self) -> int:
        """Tokens that the backbone has processed in this process; 0 without a backbone."""
        ...

    def score(
        self,
        documents: DocumentTokens,
        exits: ExitRules | None = None,
        known: HeadScores | None = None,
    ) -> HeadScores:
        """Score documents; see `HeadScorer.score`."""
        ...
