"""Runs documents through the backbone and both heads, with an early exit before each head; or
through student and probe, whose weighted mean is then the last score.

If a student scores first, the documents that it drops do not reach the backbone. The other
documents run through the blocks up to the last one that the probe reads. Documents that the probe
does not drop are packed into new batches, and continue from the same states to the judge's tap. So
each block runs at most once per document, and not for dropped documents.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints, local_digest
from nmoe_core.base.settings import GraderKind, expert_fingerprints
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine import Residual, Transformer
from nmoe_core.labels.scores import QUALITY, Scale
from nmoe_core.quality.heads.features import (
    Batch,
    arithmetic,
    batches,
    device_of,
    finite_states,
    pooled,
)
from nmoe_core.quality.heads.head_files import (
    bad_format,
    context_of,
    heads_digest,
    load_head,
    stacked_digest,
)
from nmoe_core.quality.heads.models import Judge, Probe
from nmoe_core.quality.heads.scores import (
    DocumentTokens,
    ExitRule,
    ExitRules,
    HeadScores,
    Scorer,
    stacked,
)
from nmoe_core.quality.heads.shapes import tap_of, taps_of

if TYPE_CHECKING:
    from nmoe_core.quality.kept_states import KeptStates


@dataclass(frozen=True, slots=True)
class Heads:
    """Probe and judge of one directory, with the digests of their files.

    `probe_taps` and `judge_tap` are the numbers of the blocks whose states the heads read.
    `train_contents` are the digests of their training documents (int64, sorted; see
    `DocumentTokens.digests`), empty if not known. `labels_digest` is the digest of their labels.
    """

    probe: Probe
    judge: Judge
    probe_digest: str
    judge_digest: str
    scorer_model: str
    max_ctx: int
    probe_taps: tuple[int, ...]
    judge_tap: int
    train_contents: np.ndarray
    labels_digest: str = ""
    scale: Scale = QUALITY

    @property
    def digest(self) -> str:
        """One digest of both files."""
        return heads_digest(self.probe_digest, self.judge_digest)


def load_heads(heads_dir: Path, model: Transformer, max_ctx: int | None = None) -> Heads:
    """Load both heads of a directory for a backbone and `max_ctx` tokens per document, by default
    as in training. Raises HeadError as `load_head` for either file, and also if the files are not a
    probe and a judge (E-HEAD-FORMAT)."""
    paths = heads_dir / PROBE_NAME, heads_dir / JUDGE_NAME
    if max_ctx is None:
        max_ctx = context_of(paths[0])
    loaded = [load_head(path, model, max_ctx) for path in paths]
    (probe, header, seen, scale), (judge, _, judge_seen, _) = loaded
    if not isinstance(probe, Probe) or not isinstance(judge, Judge):
        raise bad_format(heads_dir, f"{type(probe).__name__} and {type(judge).__name__}")
    probe_taps = taps_of(model, header.get("tap"), paths[0])
    judge_tap = tap_of("judge", model, loaded[1].header.get("tap"), paths[1])
    if probe.arch.hidden_size != len(probe_taps) * model.config.hidden_size:
        found = f"{probe.arch.hidden_size} dimensions for {len(probe_taps)} blocks"
        raise bad_format(paths[0], found)
    if loaded[0].scale != loaded[1].scale:
        raise bad_format(heads_dir, "a probe and a judge with different rubrics")
    return Heads(
        *(probe, judge, local_digest(paths[0]), local_digest(paths[1])),
        *(str(header.get("scorer_model", "")), max_ctx, probe_taps, judge_tap),
        train_contents=np.unique(np.concatenate([seen, judge_seen])),
        labels_digest=str(header.get("labels_digest", "")),
        scale=scale,
    )


@dataclass(frozen=True, slots=True)
class HeadScorer:
    """The backbone and both heads; a batch has `batch_size` documents.

    If `student` is given, the student scores first. It must have been fitted on the same labels and
    read the same token ids. With `probe_weight`, which needs a student, the judge does not run: the
    weighted mean of student and probe is returned as `judge`; the probe then reads the mean states
    that `kept` has, and only other documents run through the backbone. So `kept` must be of a
    backbone that is `features.is_batch_invariant`.
    """

    model: Transformer
    heads: Heads
    batch_size: int = 32
    student: Scorer | None = None
    probe_weight: float | None = None
    kept: KeptStates | None = None

    @property
    def kind(self) -> GraderKind:
        return "hydra" if self.probe_weight is None else "stacked"

    @property
    def max_ctx(self) -> int:
        return self.heads.max_ctx

    @property
    def digest(self) -> str:
        if self.probe_weight is None:
            return self.heads.digest
        return stacked_digest(self.heads.digest, self.student_digest, self.probe_weight)

    @property
    def scale(self) -> Scale:
        return self.heads.scale

    @property
    def fingerprints(self) -> Fingerprints:
        heads = self.heads
        files = {"probe": heads.probe_digest, "judge": heads.judge_digest}
        first = {} if self.student is None else self.student.fingerprints
        way = expert_fingerprints(self.model.runtime.experts.name)
        weight = {} if self.probe_weight is None else {"probe_weight": repr(self.probe_weight)}
        return {"backbone": self.model.digest, **way, **files, **first, **weight}

    @property
    def student_digest(self) -> str:
        return "" if self.student is None else self.student.digest

    @property
    def scored_by(self) -> Fingerprints:
        made_with = {"heads": self.digest, "arithmetic": arithmetic(self.model)}
        return {"backbone": self.model.digest, **made_with}

    @property
    def scorer_model(self) -> str:
        return self.heads.scorer_model

    @property
    def train_contents(self) -> np.ndarray:
        return self.heads.train_contents

    @property
    def tokens_processed(self) -> int:
        return self.model.tokens_processed

    def score(
        self,
        documents: DocumentTokens,
        exits: ExitRules | None = None,
        known: HeadScores | None = None,
    ) -> HeadScores:
        """Score documents with the student, if given, and with both heads.

        `exits` selects the documents that exit early; if it is None, the judge scores all
        documents. `known` are earlier scores by the same backbone and heads: the scores of a batch
        are reused if the batch has the same documents and the same early exits. Raises HeadError if
        a score is not finite although the states are (E-HEAD-NONFINITE).
        """
        exits = exits or ExitRules(*2 * [lambda scores, rows: np.zeros(len(rows), np.bool_)])
        known = known or HeadScores.empty(0, len(self.scale))
        scores = HeadScores.empty(len(documents), len(self.scale))
        if self.student is not None:
            read = [tokens[: self.student.max_ctx] for tokens in documents.tokens]
            first = self.student.score(DocumentTokens(documents.names, read))
            scores.student[:] = first.judge
            scores.exited[:] = exits.student(scores.student, range(len(documents)))
        stay = np.flatnonzero(~scores.exited).tolist()
        features = np.full((len(documents), self.heads.probe.arch.hidden_size), np.nan, np.float32)
        if self.kept is not None and self.probe_weight is not None:
            features = self.kept.find(documents, self.heads.probe_taps)
        for batch in batches(documents, self.batch_size, device_of(self.model), stay):
            key = batch_key(documents, batch.rows)
            scores.batches[key] = batch.rows
            places = known.batches.get(key, [])
            is_known = len(places) > 0
            if is_known:
                left = exits.probe(known.probe[places], batch.rows)
                is_known = (left == known.exited[places]).all()
            if not is_known:
                if self.probe_weight is None:
                    self._score_batch(documents, batch, exits.probe, scores)
                else:
                    self._score_by_both(documents, batch, self.probe_weight, features, scores)
                continue
            for name in ("probe", "judge", "exited"):
                getattr(scores, name)[batch.rows] = getattr(known, name)[places]
            again = zip(batch.rows, places)
            scores.failed.update({row: known.failed[i] for row, i in again if i in known.failed})
        return scores

    def _score_batch(
        self, documents: DocumentTokens, batch: Batch, exits: ExitRule, scores: HeadScores
    ) -> None:
        heads = self.heads
        failed = scores.failed
        scores.ran.extend(batch.rows)
        last = heads.probe_taps[-1]
        taps = {*heads.probe_taps, *([heads.judge_tap] if heads.judge_tap <= last else [])}
        states, batch = finite_states(self.model, batch, sorted(taps), failed)
        if not batch.rows:
            return
        read = [states[tap] for tap in heads.probe_taps]
        with torch.no_grad():
            outputs = heads.probe(read, batch.lengths)
        scores.probe[batch.rows] = self._stored(outputs, "probe", documents, batch.rows)
        scores.exited[batch.rows] = exits(scores.probe[batch.rows], batch.rows)
        stays = np.flatnonzero(~scores.exited[batch.rows]).tolist()
        states, batch = batch.only(stays, states)
        if batch.rows and heads.judge_tap > last:
            start = Residual(last, states[last])
            states, batch = finite_states(self.model, batch, (heads.judge_tap,), failed, start)
        if batch.rows:
            with torch.no_grad():
                outputs = heads.judge(states[heads.judge_tap], batch.lengths)
            scores.judge[batch.rows] = self._stored(outputs, "judge", documents, batch.rows)

    def _score_by_both(
        self,
        documents: DocumentTokens,
        batch: Batch,
        probe_weight: float,
        features: np.ndarray,
        scores: HeadScores,
    ) -> None:
        """Score a batch by student and probe. `features` `[N, blocks * H]` are the mean states of
        all documents, NaN if a document must run through the backbone."""
        todo = np.flatnonzero(np.isnan(features[batch.rows]).any(axis=1)).tolist()
        if todo:
            _, other = batch.only(todo, {})
            scores.ran.extend(other.rows)
            taps = self.heads.probe_taps
            states, other = finite_states(self.model, other, taps, scores.failed)
            means = [pooled(states[tap], other.lengths) for tap in taps]
            features[other.rows] = torch.cat(means, dim=1).cpu().numpy()
        rows = [row for row in batch.rows if row not in scores.failed]
        if rows:
            given = torch.from_numpy(features[rows]).to(device_of(self.model))
            with torch.no_grad():
                outputs = self.heads.probe.from_pooled(given)
            scores.probe[rows] = self._stored(outputs, "probe", documents, rows)
            both = scores.student[rows], scores.probe[rows]
            scores.judge[rows] = stacked(*both, probe_weight, self.scale)

    def _stored(
        self, outputs: Tensor, kind: str, documents: DocumentTokens, rows: list[int]
    ) -> np.ndarray:
        bad = torch.nonzero(~torch.isfinite(outputs).all(dim=1)).flatten().tolist()
        if bad:
            raise HeadError(
                f"scores of the {kind} are not finite",
                where=documents.names[rows[bad[0]]],
                found=f"{len(bad)} of {len(rows)} documents in this batch",
                do="train the heads again",
                code="E-HEAD-NONFINITE",
            )
        return self.scale.stored(outputs.cpu().numpy())


def batch_key(documents: DocumentTokens, rows: list[int]) -> str:
    """SHA-256 of the tokens of a batch, in the order of its documents."""
    digest = hashlib.sha256()
    for i in rows:
        digest.update(np.asarray([len(documents.tokens[i])], "<u8").tobytes())
        digest.update(np.asarray(documents.tokens[i], "<u4").tobytes())
    return digest.hexdigest()
