"""Measures how well the oracle agrees with itself, with intervals.

The oracle's noise is measured on a sample that is labelled again: once with the rubric's dimensions
in reverse order (`Rubric.turned`), and once with sampled answers instead of the most likely
answers. The noise limits heads: the correlation of a perfect head with one labelling is about the
square root of the correlation between two labellings of one kind. The two orders are such a pair.
Sampled answers are not: heads learn the most likely answers, which are less noisy.
"""

from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.atomic import replacing
from nmoe_core.base.intervals import spearman, spearman_interval
from nmoe_core.config.tree import Tree
from nmoe_core.labels.label_files import SCORES_NAME, checked_digest, read_summary, write_summary
from nmoe_core.labels.oracle import Record, latest, one_scale, read_records
from nmoe_core.labels.slices import NUM_LABEL_SHARDS

NOISE_NAMES = {"order": "relabelled", "sampling": "resampled"}
"""Directories of the sample's labels, by kind of noise."""


def merge_noise(tree: Tree, split: str) -> dict[str, Any] | None:
    """Write `merged/noise_{split}.json`, from the samples of all shards; returns None if no
    document was labelled twice.

    `kinds` has each kind of noise that was measured: `reliability` is the Spearman correlation of
    the two aggregates, None if undefined. Raises as `checked_digest`.
    """
    path = tree.merged_labels(split).with_name(f"noise_{split}.json")
    kinds = {kind: _noise(tree, split, name) for kind, name in NOISE_NAMES.items()}
    found = {kind: noise for kind, noise in kinds.items() if noise is not None}
    if not found:
        path.unlink(missing_ok=True)
        return None
    noise = {"kinds": found}
    with replacing(path):
        write_summary(path, noise)
    return noise


def _noise(tree: Tree, split: str, name: str) -> dict[str, Any] | None:
    """The noise between the labels of a split and the sample's labels in the directories called
    `name`."""
    pairs: list[tuple[Record, Record]] = []
    for shard in (tree.label_shard(split, i) for i in range(NUM_LABEL_SHARDS)):
        files = [shard / SCORES_NAME, shard / name / SCORES_NAME]
        if files[1].is_file():
            for path in files:
                checked_digest(path)
            first, second = (latest(read_records(path)) for path in files)
            pairs += [(first[i], one) for i, one in second.items() if _is_of(one, first.get(i))]
    if not pairs:
        return None
    parsed = [(a, b) for a, b in pairs if a["ok"] and b["ok"]]
    first, second = (np.array([pair[i]["aggregated"] for pair in parsed]) for i in (0, 1))
    reliability = spearman(first, second)
    interval = spearman_interval(first, second)
    names = one_scale((record for pair in parsed for record in pair), tree.labels / split).names
    grades = {d: [a["scores"][d] == b["scores"][d] for a, b in parsed] for d in names}
    return {
        "asked": len(pairs),
        "count": len(parsed),
        "reliability": reliability,
        "reliability_ci95": interval and list(interval),
        "mae": float(np.abs(first - second).mean()) if parsed else None,
        "same_grade": {d: sum(same) / len(same) if same else None for d, same in grades.items()},
    }


def _is_of(again: Record, first: Record | None) -> bool:
    """Whether a second label has the same text and scale as the first. They can differ, because an
    old sample is not replaced if no new sample is requested, or if labelling ended before the
    sample."""
    if first is None or first.get("text_sha256") != again.get("text_sha256"):
        return False
    return not (first["ok"] and again["ok"]) or first.get("scale") == again.get("scale")


def read_noise(path: Path) -> dict[str, Any] | None:
    """The file that `merge_noise` wrote; None if no document was labelled twice."""
    return read_summary(path) if path.is_file() else None
