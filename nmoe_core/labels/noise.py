"""The oracle's own noise: a sample labelled twice, and how well the two labellings agree.

The second labelling asks with the rubric's dimensions in reverse order (`Rubric.turned`) and lies
beside the first in `relabelled/`. Its agreement bounds what a head can reach: a head that predicted
the oracle's true opinion would correlate with one labelling at about the root of the two
labellings' own correlation.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.config.tree import Tree
from nmoe_core.labels.agreement import spearman
from nmoe_core.labels.files import SCORES_NAME, checked_digest, read_summary, write_summary
from nmoe_core.labels.oracle import Record, latest, read_records
from nmoe_core.labels.scores import DIMENSIONS
from nmoe_core.labels.slices import NUM_LABEL_SHARDS

RELABELLED_NAME = "relabelled"


def merge_noise(tree: Tree, split: str) -> dict[str, Any] | None:
    """Write `merged/noise_{split}.json` over all shards' second labels; None if there are none.

    `reliability` is the Spearman correlation of the two aggregates, `ceiling` its root; both are
    None where they are not defined (fewer than three pairs, or constant).

    Raises:
        LabelError: Labels were changed after they were finished (E-LABEL-CORRUPT).
    """
    pairs: list[tuple[Record, Record]] = []
    for i in range(NUM_LABEL_SHARDS):
        shard = tree.label_shard(split, i)
        again = shard / RELABELLED_NAME / SCORES_NAME
        if again.is_file():
            for path in (shard / SCORES_NAME, again):
                checked_digest(path)
            first, second = (latest(read_records(p)) for p in (shard / SCORES_NAME, again))
            pairs += [(first[doc_id], record) for doc_id, record in second.items()]
    path = tree.merged_labels(split).with_name(f"noise_{split}.json")
    if not pairs:
        path.unlink(missing_ok=True)
        return None
    parsed = [pair for pair in pairs if pair[0]["ok"] and pair[1]["ok"]]
    noise = {"asked": len(pairs), **agreement(parsed)}
    write_summary(path, noise)
    return noise


def read_noise(path: Path) -> dict[str, Any] | None:
    """What `merge_noise` wrote; None where no document was labelled twice.

    Raises:
        LabelError: It was changed after it was written (E-LABEL-CORRUPT).
    """
    return read_summary(path) if path.is_file() else None


def agreement(pairs: list[tuple[Record, Record]]) -> dict[str, Any]:
    """How two labellings of the same documents agree."""
    first, second = (np.array([pair[i]["aggregated"] for pair in pairs]) for i in (0, 1))
    reliability = spearman(first, second)

    def same(name: str) -> float | None:
        grades = [a["scores"][name] == b["scores"][name] for a, b in pairs]
        return sum(grades) / len(grades) if grades else None

    return {
        "count": len(pairs),
        "reliability": reliability,
        "ceiling": None if reliability is None else math.sqrt(max(0.0, reliability)),
        "mae": float(np.abs(first - second).mean()) if pairs else None,
        "same_grade": {name: same(name) for name in DIMENSIONS},
    }
