"""Which documents to label next: `nmoe hydra plan-labels`.

Of the documents whose predicted score is nearer to the threshold than the median, each next one
lowers the variance of all predictions most, given the labels and the documents chosen before it. So
documents like many others, but unlike the labelled ones, come first. `benchmarks.plan_labels`
compares this with other strategies.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from nmoe_core.base.errors import LabelError
from nmoe_core.config.run import Run
from nmoe_core.labels.label_files import Labels
from nmoe_core.labels.sample import Row, drawn_ids
from nmoe_core.labels.slices import NUM_LABEL_SHARDS, read_slice
from nmoe_core.quality.heads.scores import Corpus, DocumentTokens
from nmoe_core.quality.ridge import fit_ridge, spread_rows

MAX_CANDIDATES = 3000
MAX_LABELS = 2000
# Features `[N, F]`, dense or sparse, of documents whose first ones have these scores `[L, D]`.
Features = Callable[[DocumentTokens, np.ndarray], Any]


def next_labels(
    run: Run, train: Labels, corpus: Corpus, features_of: Features, budget: int
) -> list[Row]:
    """The (document id, source) pairs of `budget` documents of the train slices that have no label
    yet, best first.

    At most `MAX_CANDIDATES` documents, drawn by the hash of their ids, are compared with at most
    `MAX_LABELS` labels; texts that are labelled already are left out. Raises LabelError if fewer
    than twice the budget are left (E-LABEL-FEW); raises also as `read_slice`.
    """
    drawn = drawn_ids(run.tree, run.config.oracle.max_documents)
    slices = [run.tree.slice("train", i) for i in range(NUM_LABEL_SHARDS) if drawn is not None]
    free = [row for path in slices for row in read_slice(path) if row[0] not in (drawn or ())]
    free = sorted(free, key=lambda row: hashlib.sha256(row[0].encode()).digest())[:MAX_CANDIDATES]
    labelled = spread_rows(len(train.doc_ids), MAX_LABELS)
    known = corpus.read([train.doc_ids[i] for i in labelled.tolist()])
    found = corpus.read([doc_id for doc_id, _ in free])
    digests = found.digests()
    is_first = np.isin(np.arange(len(free)), np.unique(digests, return_index=True)[1])
    places = np.flatnonzero(is_first & ~np.isin(digests, known.digests())).tolist()
    if len(places) < 2 * budget:
        raise LabelError(
            "too few documents without a label to choose from",
            where=run.tree.slices,
            found=f"{len(places)} texts of train",
            expected=f"at least {2 * budget}, twice the budget",
            do="lower --budget, or [oracle] max_documents; all documents up to it are labelled",
            code="E-LABEL-FEW",
        )
    names = [*known.names, *(found.names[i] for i in places)]
    tokens = [*known.tokens, *(found.tokens[i] for i in places)]
    scores = train.scores[labelled]
    with threadpool_limits(1):  # one order of sums, so that equal inputs give equal choices
        features = features_of(DocumentTokens(names, tokens), scores)
        kernel = features @ features.T
        kernel = kernel if isinstance(kernel, np.ndarray) else kernel.toarray()
        keep = run.config.calibration.target_keep
        chosen = choose_next(kernel, train.scale.aggregate(scores), budget, keep)
    return [free[places[row - len(labelled)]] for row in chosen]


def choose_next(
    kernel: np.ndarray, scores: np.ndarray, count: int, target_keep: float = 0.5
) -> list[int]:
    """Choose `count` of the documents without a label, best first.

    `kernel` holds the inner products `[N, N]` of all documents, the labelled ones first; `scores`
    are the aggregates of these `[L]`, `target_keep` is the share to keep. Returns rows of the
    kernel.
    """
    num = len(scores)
    fitted = fit_ridge(kernel[:num, :num], scores[:, None])
    predicted = kernel[:, :num] @ fitted.dual[:, 0]
    distance = np.abs(predicted - np.quantile(predicted, 1 - target_keep))
    is_open = distance <= np.median(distance[num:])
    is_open[:num] = False
    own = kernel[:num, :num] + fitted.penalty * np.eye(num)
    covariance = kernel - kernel[:num].T @ np.linalg.solve(own, kernel[:num])
    covariance = covariance.astype(np.float32)
    chosen: list[int] = []
    for _ in range(min(count, int(is_open.sum()))):
        lowered = np.einsum("ij,ij->i", covariance, covariance)
        lowered /= np.diag(covariance) + fitted.penalty
        row = int(np.argmax(np.where(is_open, lowered, -1.0)))
        chosen.append(row)
        is_open[row] = False
        column = covariance[:, row].copy()
        covariance -= np.outer(column, column / (column[row] + fitted.penalty))
    return chosen
