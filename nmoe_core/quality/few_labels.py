"""What a few labels buy: the rank correlation on val of graders that were fitted on samples of the
train labels, by the number of labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nmoe_core.base.intervals import spearman, spearman_interval
from nmoe_core.labels.label_files import Labels
from nmoe_core.labels.scores import rounded

NUM_LABELS = (60, 120, 250, 500, 1000, 2000)
FEW_LABELS_SAID = (
    "What labels buy: Spearman on val after training on samples of the labels; both: the mean of "
    "student and probe. The probes read the blocks that all labels chose."
)
# Number of labels -> scores `[N, D]` of the val documents by each grader.
Curve = Mapping[int, Mapping[str, np.ndarray]]


def samples(num_labels: int) -> dict[int, np.ndarray]:
    """The rows of each sample of so many labels, ascending, by the size of the sample. A larger
    sample contains all smaller ones."""
    order = np.random.default_rng(0).permutation(num_labels)
    return {num: np.sort(order[:num]) for num in NUM_LABELS if num < num_labels}


def few_labels(curve: Curve, val: Labels, rows: np.ndarray) -> list[dict[str, Any]]:
    """A row per number of labels: Spearman of each grader on the val documents `rows` (bool `[N]`),
    and its 95 % interval."""
    found = []
    for num, graders in sorted(curve.items()):
        row: dict[str, Any] = {"labels": num}
        for name, scores in graders.items():
            good = rows & np.isfinite(scores).all(axis=1)
            given, oracle = (val.scale.aggregate(of[good]) for of in (scores, val.scores))
            row[name] = rounded(spearman(given, oracle))
            families = None if val.families is None else val.families[good]
            row[f"{name}_ci95"] = spearman_interval(given, oracle, families)
        found.append(row)
    return found


def few_labels_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The header and the cells of a table of `few_labels`."""
    names = [name for name in ("student", "probe", "both") if any(name in row for row in rows)]
    return ["labels", *names], [[row["labels"], *(_cell(row, n) for n in names)] for row in rows]


def _cell(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        return "not known"
    bounds = row[f"{name}_ci95"]
    return f"{row[name]:.2f}" + (f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else "")
