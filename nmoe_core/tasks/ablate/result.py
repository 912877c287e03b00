"""Runs an ablation and describes its results with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.atomic import replacing, write_json
from nmoe_core.base.errors import CurationError
from nmoe_core.base.progress import Meter
from nmoe_core.config.run import Run
from nmoe_core.labels.ranks import bootstrap
from nmoe_core.tasks.ablate.arms import ARMS, Texts
from nmoe_core.tasks.ablate.model import BATCH, CONTEXT, document_bits, train, windows_of
from nmoe_core.tasks.selection.outcome import rule_of

FORMAT = "nmoe-ablation/1"
NAME = "ablation.json"
_MIN_STEPS = 20
_SETS = {"kept": "kept text", "all": "text of all documents", "own": "your own text"}


@dataclass(frozen=True, slots=True)
class Settings:
    """The size of an ablation."""

    tokens: int = 100_000  # tokens per arm, counted with the run's tokenizer
    seeds: int = 3
    documents: int = 150  # per evaluation set
    own: Path | None = None  # JSONL file with an additional evaluation set


def ablate(run: Run, settings: Settings) -> dict[str, Any]:
    """Train a decoder per arm and seed, evaluate each, and commit `ablation.json` in the root.

    Returns the content of the file. Raises the errors of `Texts` and `Texts.arms`, and
    CurationError if an arm is too short to train on (E-CURATION-ABLATE); after an error, no file is
    written.
    """
    texts = Texts(run, settings.documents, settings.own)
    seeds = [run.loader.seed + k for k in range(settings.seeds)]
    drawn = [
        {arm: windows_of(of_arm) for arm, of_arm in texts.arms(settings.tokens, seed).items()}
        for seed in seeds
    ]
    steps = min(len(windows) for arms in drawn for windows in arms.values()) // BATCH
    if steps < _MIN_STEPS:
        raise CurationError(
            "an arm is too short to train on",
            where=run.path,
            found=f"{steps} steps of {BATCH * CONTEXT} bytes",
            expected=f"at least {_MIN_STEPS}",
            do="set a higher --tokens",
            code="E-CURATION-ABLATE",
        )
    bits = {(name, arm): [] for name in texts.evaluation for arm in ARMS}
    meter = Meter("ablate", len(seeds) * len(ARMS) * steps, "steps")
    for seed, arms in zip(seeds, drawn):
        for arm in ARMS:
            model = train(arms[arm][: steps * BATCH], seed, meter.add)
            for name, documents in texts.evaluation.items():
                bits[name, arm].append(document_bits(model, documents))
    sizes = {name: np.array([*map(len, docs)]) for name, docs in texts.evaluation.items()}
    found = {
        "format": FORMAT,
        "rule": rule_of(run),
        "tokens_per_arm": settings.tokens,
        "trained_bytes_per_arm": steps * BATCH * CONTEXT,
        "seeds": seeds,
        "own_documents_left_out": texts.left_out,
        "evaluation": {
            name: {
                "documents": len(size),
                "bytes": int(size.sum()),
                **_figures({arm: np.stack(bits[name, arm]) for arm in ARMS}, size),
            }
            for name, size in sizes.items()
        },
    }
    found["says"] = [_says(name, one) for name, one in found["evaluation"].items()]
    path = run.tree.root / NAME
    with replacing(path):
        write_json(path, found)
    return found


def _figures(bits: dict[str, np.ndarray], sizes: np.ndarray) -> dict[str, Any]:
    """Bits per byte of each arm, and the reduction of the loss by kept and dropped text as a share
    of the loss of random text. `bits`: `[seeds, documents]` per arm; `sizes`: bytes of each
    document."""
    each = {arm: found.sum(1) / sizes.sum() for arm, found in bits.items()}
    result: dict[str, Any] = {
        "bits_per_byte": {arm: round(float(of_arm.mean()), 4) for arm, of_arm in each.items()},
        "of_seeds": {arm: of_arm.round(4).tolist() for arm, of_arm in each.items()},
    }
    for arm in ("kept", "dropped"):
        ours = bits[arm].mean(0)
        random = bits["random"].mean(0)

        def saved(rows: np.ndarray, ours: np.ndarray = ours, random: np.ndarray = random) -> float:
            return 1 - float(ours[rows].sum() / random[rows].sum())

        result[f"{arm}_saves"] = {
            "share": round(saved(np.arange(len(sizes))), 6),
            "ci95_seeds": t_interval(1 - each[arm] / each["random"]),
            "ci95_documents": bootstrap(saved, len(sizes), edges=(-np.inf, np.inf)),
        }
    return result


def t_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float] | None:
    """95 % interval of a mean by Student's t; None for fewer than two values."""
    from scipy import stats

    if len(values) < 2:
        return None
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    mean = float(np.mean(values))
    return round(mean - float(half), 6), round(mean + float(half), 6)


def _says(name: str, found: dict[str, Any]) -> str:
    one = found["kept_saves"]
    intervals = [i for i in (one["ci95_seeds"], one["ci95_documents"]) if i is not None]
    if not intervals:
        return f"On {_SETS[name]}, documents are too few to measure the effect of kept text."
    low = min(i[0] for i in intervals)
    high = max(i[1] for i in intervals)
    verdict = "it lowers the loss" if low > 0 else "it raises the loss"
    if low <= 0 <= high:
        verdict = "the difference is not significant"
    effect = f"{one['share']:.2%} [{low:.2%}, {high:.2%}] of random text's loss at equal tokens"
    return f"On {_SETS[name]}, kept text saves {effect}: {verdict}."
