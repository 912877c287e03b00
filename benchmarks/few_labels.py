"""What a few labels buy: student, probe and both by the number of labels.

`python -m benchmarks.few_labels nmoe.toml --most 2000` reads the labels of a run, and the states of
its backbone, which are computed once and kept. For each number of train labels it prints Spearman
with the oracle on the test labels: medians of `DRAWS` samples of the labels, the interval of the
median one. `both` adds the scores of student and probe with a weight fitted on the val labels.
The last column is a task about meaning: the share of test documents whose source is told from so
many documents with a known source, by n-grams and by pooled states.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.linear_model import RidgeClassifierCV
from sklearn.preprocessing import StandardScaler

from nmoe_core.base.intervals import spearman, spearman_interval
from nmoe_core.cli.output import print_rows
from nmoe_core.config.run import Run
from nmoe_core.labels.label_files import read_labels
from nmoe_core.quality.heads.ngrams import TokenTable, ngrams
from nmoe_core.quality.heads.scores import DocumentTokens, one_thread
from nmoe_core.quality.heads.shapes import probe_blocks, tap_of
from nmoe_core.quality.heads.student import fit_student
from nmoe_core.quality.heads.student_file import token_table
from nmoe_core.quality.heads.train import FEATURES_DIR
from nmoe_core.quality.kept_states import KeptStates
from nmoe_core.quality.ridge_probe import fit_ridge_probe
from nmoe_core.tasks.backbone import load_backbone
from nmoe_core.tasks.hydra import head_corpus, student_corpus
from nmoe_core.text.tokenizer import load_tokenizer

NUM_LABELS = (60, 120, 250, 500, 1000, 2000)
DRAWS = 3
_PENALTIES = np.logspace(-3, 4, 15)


class Split(NamedTuple):
    """Labelled documents: pooled states `[N, blocks, H]`, tokens that the student reads, scores
    `[N, D]`, and sources."""

    pooled: np.ndarray
    tokens: list[np.ndarray]
    scores: np.ndarray
    sources: np.ndarray

    def take(self, rows: np.ndarray) -> Split:
        """Some of the documents."""
        tokens = [self.tokens[i] for i in rows.tolist()]
        return Split(self.pooled[rows], tokens, self.scores[rows], self.sources[rows])


def kept_states(run: Run) -> KeptStates:
    """The states of a run's backbone, computed once."""
    model = load_backbone(run)
    blocks = probe_blocks(model.config.num_hidden_layers)
    limit = int(run.config.heads.cache_gib * 2**30)
    tap = tap_of("judge", model, run.config.heads.judge.tap)
    return KeptStates(model, run.tree.heads / FEATURES_DIR, limit, blocks, tap)


def read_split(run: Run, split: str, kept: KeptStates, most: int) -> Split:
    """At most so many labels of a split, drawn at random."""
    labels = read_labels(run.tree.merged_labels(split))
    order = np.random.default_rng(0).permutation(len(labels.doc_ids))[:most].tolist()
    ids = [labels.doc_ids[i] for i in order]
    seen = head_corpus(run).read(ids)
    with one_thread():
        pooled = kept.pooled(DocumentTokens(ids, seen.tokens))
    tokens = student_corpus(run, run.config.oracle.max_doc_tokens).read(ids).tokens
    sources = np.array([labels.sources[i] for i in order])
    return Split(pooled, list(tokens), labels.scores[order], sources)


def aggregates(
    train: Split, blocks: Sequence[int], table: TokenTable, asked: Sequence[Split]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The aggregates of student and probe for the documents of splits."""
    student = fit_student(train.tokens, train.scores, table)
    probe = fit_ridge_probe(train.pooled, train.scores, blocks)
    places = [blocks.index(tap) for tap in probe.taps]
    found = []
    for split in asked:
        read = torch.from_numpy(split.pooled[:, places].reshape(len(split.pooled), -1))
        with torch.no_grad():
            given = np.clip(probe.head.from_pooled(read).numpy(), 0, 4)
        found.append((student.predict(split.tokens, table).mean(1), given.mean(1)))
    return found


def weight_of_probe(student: np.ndarray, probe: np.ndarray, oracle: np.ndarray) -> float:
    """The weight of the probe, in [0, 1], with which the weighted mean has the least squared
    error."""
    apart = probe - student
    return float(np.clip(apart @ (oracle - student) / max(apart @ apart, 1e-12), 0, 1))


def told_sources(train: Split, test: Split, table: TokenTable) -> tuple[float, float]:
    """The share of test documents whose source n-grams tell, and pooled states."""
    model = RidgeClassifierCV(_PENALTIES)
    grams = model.fit(ngrams(train.tokens, table), train.sources)
    by_grams = grams.score(ngrams(test.tokens, table), test.sources)
    scaler = StandardScaler().fit(train.pooled.reshape(len(train.pooled), -1))
    states = [scaler.transform(one.pooled.reshape(len(one.pooled), -1)) for one in (train, test)]
    by_states = model.fit(states[0], train.sources).score(states[1], test.sources)
    return float(by_grams), float(by_states)


def curve(run: Run, most: int) -> list[dict[str, Any]]:
    """A row per number of labels."""
    kept = kept_states(run)
    blocks = kept.blocks
    pool = read_split(run, "train", kept, most)
    val, test = (read_split(run, split, kept, 10**9) for split in ("val", "test"))
    table = token_table(load_tokenizer(run.tokenizer))
    oracle = test.scores.mean(1)
    rows = []
    for num in [one for one in NUM_LABELS if one < len(pool.tokens)] + [len(pool.tokens)]:
        drawn: dict[str, list[tuple[float, str]]] = {"student": [], "probe": [], "both": []}
        sources = []
        for draw in range(DRAWS if num < len(pool.tokens) else 1):
            train = pool.take(np.random.default_rng(draw).permutation(len(pool.tokens))[:num])
            of_val, (student, probe) = aggregates(train, blocks, table, (val, test))
            weight = weight_of_probe(*of_val, val.scores.mean(1))
            both = weight * probe + (1 - weight) * student
            for name, given in (("student", student), ("probe", probe), ("both", both)):
                low, high = spearman_interval(given, oracle) or (0.0, 0.0)
                value = spearman(given, oracle) or 0.0
                drawn[name].append((value, f"{value:.3f} ({low:.2f} to {high:.2f})"))
            sources.append(told_sources(train, test, table))
        shown = {name: sorted(found)[len(found) // 2][1] for name, found in drawn.items()}
        grams, states = np.median(sources, axis=0)
        rows.append({"labels": num, **shown, "source": f"{grams:.3f}, {states:.3f}"})
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--most", type=int, default=2000, help="maximum number of train labels")
    arguments = parser.parse_args()
    print_rows(curve(Run(arguments.config), arguments.most))


if __name__ == "__main__":
    main()
