"""How well a trained head agrees with the oracle on documents that it was not fitted on.

Documents are compared by what the heads see of them (`DocumentTokens.digests`), not by their ids: a
corpus holds the same text under several ids, in train and in val.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import LabelError
from nmoe_core.labels.agreement import agreement, baselines
from nmoe_core.labels.files import Labels
from nmoe_core.labels.noise import read_noise
from nmoe_core.labels.oracle import Scorer

MIN_DOCUMENTS = 3


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Documents to measure on.

    `rows` is bool `[N]`; `num_seen` documents are left out because of their content, `num_repeated`
    because an earlier one has the same content.
    """

    rows: np.ndarray
    num_seen: int
    num_repeated: int


def held_out(contents: Sequence[Any] | np.ndarray, seen: np.ndarray | Sequence[Any]) -> HeldOut:
    """The documents whose content is not among `seen`, the first one of each content.

    Args:
        contents: Digest of each document's content, `[N]`.
        seen: Digests of the contents that were fitted on.
    """
    digests = np.asarray(contents)
    is_seen = np.isin(digests, np.asarray(seen, digests.dtype))
    is_first = np.zeros(len(digests), np.bool_)
    is_first[np.unique(digests, return_index=True)[1]] = True
    rows = ~is_seen & is_first
    return HeldOut(rows, int(is_seen.sum()), int((~is_seen & ~is_first).sum()))


def head_metrics(
    predicted: np.ndarray, labels: Labels, train: Labels, fresh: HeldOut
) -> dict[str, Any]:
    """Agreement and baselines; empty where there are fewer than three documents to measure on.

    Args:
        predicted: The head's scores of the labelled documents, `[N, 5]`; NaN where states are not
            finite.
        labels: What the oracle says of them.
        train: The labels that the head was fitted on.
        fresh: Which of the documents were not fitted on or chosen by.
    """
    is_finite = np.isfinite(predicted).all(axis=1)
    good = np.flatnonzero(fresh.rows & is_finite)
    if len(good) < MIN_DOCUMENTS:
        return {}
    sources = [labels.sources[i] for i in good.tolist()]
    metrics = agreement(predicted[good], labels.scores[good], sources)
    metrics |= baselines(
        (train.scores, train.sources, document_lengths(train.doc_ids)),
        (labels.scores[good], sources, document_lengths(labels.doc_ids)[good]),
    )
    ceiling = noise_ceiling(labels.path)
    share = metrics["spearman"] / ceiling if ceiling and metrics["spearman"] else None
    return metrics | {
        "noise_ceiling": ceiling,
        "share_of_ceiling": share and round(share, 6),
        "num_failed": int((fresh.rows & ~is_finite).sum()),
        "num_trained_on": fresh.num_seen,
        "num_repeated": fresh.num_repeated,
    }


def noise_ceiling(labels: Path) -> float | None:
    """Best rank correlation that the oracle's own noise allows, where documents were asked twice.

    Read from `noise_{split}.json` beside `labels_{split}.jsonl`.
    """
    path = labels.with_name(f"{labels.stem.replace('labels', 'noise', 1)}.json")
    ceiling = (read_noise(path) or {}).get("ceiling")
    return float(ceiling) if isinstance(ceiling, int | float) and 0 < ceiling <= 1 else None


def document_lengths(doc_ids: Sequence[str]) -> np.ndarray:
    """Tokens of each document, int64 `[N]`."""
    spans = [parse_doc_id(doc_id) for doc_id in doc_ids]
    return np.array([span.end - span.start for span in spans], np.int64)


def require_same_scorer(labels: Labels, scorer: Scorer) -> None:
    """Refuse labels to measure on that another scorer gave than those fitted on.

    Raises:
        LabelError: E-LABEL-MIXED.
    """
    if labels.doc_ids and labels.scorer != scorer:
        raise LabelError(
            "labels to measure on have another scorer or rubric",
            where=labels.path,
            found="/".join(labels.scorer),
            expected="/".join(scorer),
            code="E-LABEL-MIXED",
        )
