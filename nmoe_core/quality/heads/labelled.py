"""The labels of one training: heads are fitted on train; val and test are only used for reported
figures."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.labels.label_files import Labels, read_labels
from nmoe_core.labels.slices import data_digest
from nmoe_core.quality.families import with_families
from nmoe_core.quality.few_labels import Curve, few_labels
from nmoe_core.quality.heads.metrics import head_metrics, held_out, require_same_scorer
from nmoe_core.quality.heads.scores import Corpus, DocumentTokens
from nmoe_core.text.near_copies import MIN_OVERLAP, near_copies

MIN_LABELS = 10
# Names of the fingerprints that do not affect the weights.
REPORTED_ON = ("labels_val", "labels_test", "student", "families")
_FIGURES = {"val": "metrics", "test": "test_metrics"}
# (split, its labels, its documents) -> scores `[N, D]`.
Predict = Callable[[str, Labels, DocumentTokens], np.ndarray]


class Reported(NamedTuple):
    """The figures that a training reports: `metrics` on val and `test_metrics`, each empty without
    labels, and `few_labels` if there is a curve; and the digests of contents that later metrics
    must exclude: train and its near copies."""

    figures: dict[str, Any]
    contents: np.ndarray


class Labelled:
    """Merged label files by split; `train` is required.

    Attributes:
        train: Labels to fit on.
        reported: Labels of val and test, by split, if given.
        use_salvaged: Whether salvaged labels are included.

    Raises:
        LabelError: Labels are missing or mixed, or val has another scorer (E-LABEL-...).
        HeadError: There are too few labels (E-HEAD-FEW), or all are equal (E-HEAD-CONSTANT).
    """

    def __init__(self, files: Mapping[str, Path | None], use_salvaged: bool) -> None:
        named = {split: path for split, path in files.items() if path is not None}
        read = {split: read_labels(path, use_salvaged) for split, path in named.items()}
        self.use_salvaged = use_salvaged
        self.train = read.pop("train")
        self.reported = read
        _require_learnable(self.train)
        for others in read.values():
            require_same_scorer(others, self.train.scorer)

    @property
    def digests(self) -> Fingerprints:
        """Digest of the labels of each split; empty for a split without labels."""
        found = {split: labels.digest for split, labels in self.reported.items()}
        val = found.get("val", "")
        test = found.get("test", "")
        return {"labels_train": self.train.digest, "labels_val": val, "labels_test": test}

    @property
    def doc_ids(self) -> list[str]:
        """The ids of all labelled documents, those of train first."""
        read = [self.train, *self.reported.values()]
        return [doc_id for labels in read for doc_id in labels.doc_ids]

    @property
    def sources(self) -> list[str]:
        """The sources of all labelled documents, sorted."""
        read = [self.train, *self.reported.values()]
        return sorted({source for labels in read for source in labels.sources})

    def fingerprints(self, corpus: Corpus) -> Fingerprints:
        """Fingerprints of the labels and of the labelled documents."""
        data = data_digest(corpus.data_root, self.sources)
        return {**self.digests, "data": data, **corpus.fingerprints}

    def report(
        self,
        corpus: Corpus,
        fitted: DocumentTokens,
        predict: Predict,
        beside: Mapping[str, Predict] | None = None,
        curve: Callable[[DocumentTokens], Curve] | None = None,
    ) -> Reported:
        """Measure agreement on val and test. Documents are excluded if their content, or a near
        copy of it, is in train (for test: in train or val).

        `fitted` are the documents of train; `beside` are other graders by name, with whose scores
        the head's are compared. `curve` scores the val documents after training on samples of the
        labels.
        """
        found: dict[str, Any] = {name: {} for name in _FIGURES.values()}
        used = fitted.digests()
        read = list(fitted.tokens)
        near = np.empty(0, np.int64)
        for split, name in _FIGURES.items():
            labels = self.reported.get(split)
            if labels is not None and labels.doc_ids:
                labels = with_families(labels, corpus.families)
                documents = corpus.read(labels.doc_ids)
                contents = documents.digests()
                copies = contents[near_copies(documents.tokens, read)]
                copies = copies[~np.isin(copies, used)]
                near = np.concatenate([near, copies])
                fresh = held_out(contents, np.concatenate([used, near]))
                is_alike = near_copies(documents.tokens, read, MIN_OVERLAP)
                fresh = fresh._replace(is_alike=is_alike)
                given = (split, labels, documents)
                others = {other: score(*given) for other, score in (beside or {}).items()}
                found[name] = head_metrics(predict(*given), others, labels, self.train, fresh)
                if found[name]:
                    found[name]["num_near_copies"] = int(np.isin(contents, copies).sum())
                if curve is not None and split == "val":
                    found["few_labels"] = few_labels(curve(documents), labels, fresh.rows)
                used = np.concatenate([used, contents])
                read += documents.tokens
        return Reported(found, np.concatenate([fitted.digests(), near]))


def _require_learnable(train: Labels) -> None:
    if len(train.doc_ids) < MIN_LABELS:
        do = 'label more documents, or set grader = "none" in [grading]'
        if train.num_unsupported:
            unknown = f"{train.num_unsupported} of the labelled documents"
            do = f"use an oracle that judges the language of {unknown}, or label more documents"
        raise HeadError(
            "too few labels to train on",
            where=train.path,
            found=len(train.doc_ids),
            expected=f"at least {MIN_LABELS}",
            do=do,
            code="E-HEAD-FEW",
        )
    train.require_coverage()
    given = train.scale.aggregate(train.scores)
    if np.ptp(given) == 0:
        raise HeadError(
            "all labels are equal, so a head cannot learn from them",
            where=train.path,
            found=f"the aggregate {given[0]} for all {len(train.doc_ids)} documents",
            do="check the oracle",
            code="E-HEAD-CONSTANT",
        )
