"""Which documents to label next: labels that strategies need, compared with random choice.

`python -m benchmarks.plan_labels nmoe.toml` replays the labels of a run: it begins with `START`
random labels, and adds `--batch` at a time from the other train documents as a strategy says, by
the n-grams of the student. After each batch a ridge regression is fitted and ranked against the
oracle on the val and test labels: the student or, with `--states`, the probe on the pooled states
that `benchmarks.few_labels` kept (`--states both`: strategies read the states, too). Printed is the
number of labels with which a strategy reaches the Spearman of random choice, medians of `SEEDS`
first samples, and its share of random's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.few_labels import kept_states, read_split
from nmoe_core.base.intervals import spearman
from nmoe_core.cli.output import print_rows
from nmoe_core.config.run import Run
from nmoe_core.labels.label_files import read_labels
from nmoe_core.quality.heads.ngrams import ngrams, scalars, standardised
from nmoe_core.quality.heads.student_file import token_table
from nmoe_core.quality.next_labels import choose_next
from nmoe_core.quality.ridge import fit_ridge
from nmoe_core.tasks.hydra import student_corpus
from nmoe_core.text.tokenizer import load_tokenizer

START = 60
MOST = 660
SEEDS = 10
REACHED = (0.3, 0.5, 0.7, 0.9)


class Pool(NamedTuple):
    """Inner products of the train documents `[N, N]` that strategies read; those of the learner,
    and of val and test with train `[M, N]`; the oracle's scores of both, `[N, D]` and `[M, D]`."""

    kernel: np.ndarray
    learned: np.ndarray
    others: np.ndarray
    scores: np.ndarray
    others_scores: np.ndarray


class Learned(NamedTuple):
    """What a strategy knows: the labelled rows, the predicted aggregates of all train documents,
    the penalty of the regression, and the number of documents to choose."""

    rows: list[int]
    predicted: np.ndarray
    penalty: float
    batch: int


Strategy = Callable[[Pool, Learned, np.random.Generator], list[int]]


def pool_of(run: Run, states: str) -> Pool:
    """The documents of a run with labels; `states`: who reads states, `none`, `probe` or `both`."""
    kernel, others, *scores = _read(run, states != "none")
    chosen_by = _read(run, with_states=False)[0] if states == "probe" else kernel
    return Pool(chosen_by, kernel, others, *scores)


def _read(run: Run, with_states: bool) -> tuple[np.ndarray, ...]:
    if with_states:
        kept = kept_states(run)
        train, val, test = (read_split(run, name, kept, 10**9) for name in ("train", "val", "test"))
        pooled = np.concatenate([train.pooled, val.pooled, test.pooled])
        read = pooled[:, :8:2].reshape(len(pooled), -1).astype(np.float64)
        deviation = np.maximum(read[: len(train.pooled)].std(0), 1e-6)
        features: Any = (read - read[: len(train.pooled)].mean(0)) / deviation
        features /= np.sqrt(features.shape[1])
        scores = [split.scores for split in (train, val, test)]
    else:
        table = token_table(load_tokenizer(run.tokenizer))
        labels = [read_labels(run.tree.merged_labels(name)) for name in ("train", "val", "test")]
        corpus = student_corpus(run, run.config.oracle.max_doc_tokens)
        tokens = [one for split in labels for one in corpus.read(split.doc_ids).tokens]
        found = scalars(tokens, table)
        scores = [split.scores for split in labels]
        own = found[: len(scores[0])]
        from scipy.sparse import csr_array, hstack

        more = standardised(found, own.mean(0), np.maximum(own.std(0), 1e-6))
        features = hstack([ngrams(tokens, table), csr_array(more)], format="csr")
    num = len(scores[0])
    kernel = features @ features[:num].T
    kernel = kernel if isinstance(kernel, np.ndarray) else kernel.toarray()
    return kernel[:num], kernel[num:], scores[0], np.concatenate(scores[1:])


def learn(pool: Pool, rows: list[int], batch: int) -> tuple[Learned, float]:
    """Fit on the labels of rows; also return Spearman on val and test."""
    fitted = fit_ridge(pool.learned[np.ix_(rows, rows)], pool.scores[rows])
    given = pool.others[:, rows] @ fitted.dual.mean(1)
    found = spearman(given, pool.others_scores.mean(1)) or 0.0
    if pool.kernel is not pool.learned:
        fitted = fit_ridge(pool.kernel[np.ix_(rows, rows)], pool.scores[rows])
    return Learned(rows, pool.kernel[:, rows] @ fitted.dual.mean(1), fitted.penalty, batch), found


def _free(pool: Pool, known: Learned) -> np.ndarray:
    return np.setdiff1d(np.arange(len(pool.kernel)), known.rows)


def random(pool: Pool, known: Learned, rng: np.random.Generator) -> list[int]:
    """Any documents."""
    return rng.permutation(_free(pool, known))[: known.batch].tolist()


def diverse(pool: Pool, known: Learned, rng: np.random.Generator) -> list[int]:
    """Farthest first: the document that is farthest from all chosen ones (k-centre)."""
    own = np.diag(pool.kernel)
    distance = own[:, None] + own[known.rows] - 2 * pool.kernel[:, known.rows]
    nearest = distance.min(1)
    chosen: list[int] = []
    for _ in range(known.batch):
        row = int(np.argmax(nearest))
        chosen.append(row)
        nearest = np.minimum(nearest, own + own[row] - 2 * pool.kernel[:, row])
    return chosen


def uncertain(pool: Pool, known: Learned, rng: np.random.Generator) -> list[int]:
    """The highest variance of the prediction, given all chosen ones (D-optimal)."""
    return _greedy(pool, known, lambda covariance: np.diag(covariance).copy())


def covering(pool: Pool, known: Learned, rng: np.random.Generator) -> list[int]:
    """The document that lowers the variance of all predictions most (V-optimal)."""
    return _greedy(pool, known, lambda covariance: _lowered(covariance, known.penalty))


def _lowered(covariance: np.ndarray, penalty: float) -> np.ndarray:
    total = np.einsum("ij,ij->i", covariance, covariance)
    return total / (np.diag(covariance) + penalty)


def near_threshold(pool: Pool, known: Learned, rng: np.random.Generator) -> list[int]:
    """The predictions that are nearest to the threshold of the better half."""
    free = _free(pool, known)
    distance = np.abs(known.predicted[free] - np.median(known.predicted))
    return free[np.argsort(distance, kind="stable")[: known.batch]].tolist()


def mixed(pool: Pool, known: Learned, rng: np.random.Generator) -> list[int]:
    """As `covering`, among the half that is nearer to the threshold: `nmoe hydra plan-labels`."""
    order = np.concatenate([known.rows, _free(pool, known)])
    scores = pool.scores[known.rows].mean(1)
    return order[choose_next(pool.kernel[np.ix_(order, order)], scores, known.batch)].tolist()


STRATEGIES: tuple[Strategy, ...] = (random, diverse, uncertain, covering, near_threshold, mixed)


def _greedy(pool: Pool, known: Learned, value: Callable[[np.ndarray], np.ndarray]) -> list[int]:
    """A batch of the documents with the highest value, one after the other; `value` reads the
    covariance `[N, N]` of the predictions given the documents so far."""
    own = pool.kernel[np.ix_(known.rows, known.rows)] + known.penalty * np.eye(len(known.rows))
    across = pool.kernel[known.rows]
    covariance = (pool.kernel - across.T @ np.linalg.solve(own, across)).astype(np.float32)
    chosen: list[int] = []
    for _ in range(known.batch):
        worth = value(covariance)
        worth[[*known.rows, *chosen]] = -np.inf
        row = int(np.argmax(worth))
        chosen.append(row)
        column = covariance[:, row].copy()
        covariance -= np.outer(column, column / (column[row] + known.penalty))
    return chosen


def replay(pool: Pool, strategy: Strategy, seed: int, batch: int) -> list[float]:
    """Spearman after each batch."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(pool.kernel))[:START].tolist()
    found = []
    while len(rows) <= MOST:
        known, value = learn(pool, rows, batch)
        found.append(value)
        rows = rows + strategy(pool, known, rng)
    return found


def labels_for(curve: np.ndarray, wanted: float, batch: int) -> float:
    """The number of labels at which a curve reaches a value; infinite if it does not."""
    reached = np.maximum.accumulate(curve)
    sizes = np.arange(len(curve)) * batch + START
    if reached[-1] < wanted:
        return np.inf
    return float(np.interp(wanted, reached, sizes))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    who = ("none", "probe", "both")
    parser.add_argument("--states", nargs="?", const="probe", default="none", choices=who)
    names = [strategy.__name__ for strategy in STRATEGIES]
    parser.add_argument("--batch", type=int, default=60, help="documents chosen at a time")
    parser.add_argument("--strategies", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    batch = arguments.batch
    with threadpool_limits(1):
        pool = pool_of(Run(arguments.config), arguments.states)
        base = np.median(
            [replay(pool, random, 1000 + seed, batch) for seed in range(SEEDS)], axis=0
        )
        rows = []
        for strategy in STRATEGIES:
            if strategy.__name__ not in arguments.strategies:
                continue
            curves = np.array([replay(pool, strategy, seed, batch) for seed in range(SEEDS)])
            row: dict[str, Any] = {"strategy": strategy.__name__}
            for place in sorted({round(share * (len(base) - 1)) for share in REACHED}):
                size = START + place * batch
                found = [labels_for(curve, base[place], batch) for curve in curves]
                needed = float(np.median(found))
                row[f"as {size} random ({base[place]:.3f})"] = f"{needed:.0f} ({needed / size:.2f})"
            rows.append(row | {"at the end": f"{np.median(curves[:, -1]):.3f}"})
            print(row, flush=True)
    print_rows(rows)


if __name__ == "__main__":
    main()
