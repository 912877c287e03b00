"""Runs an ablation and describes its results with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.atomic import replacing, write_json
from nmoe_core.base.errors import CurationError
from nmoe_core.base.intervals import t_half_width
from nmoe_core.base.progress import Meter
from nmoe_core.config.run import Run
from nmoe_core.tasks.ablate.arms import ARMS, Texts
from nmoe_core.tasks.ablate.documents import EVAL_BYTES
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
                "sources": len({*texts.sources[name]}),
                **_figures(
                    {arm: np.stack(bits[name, arm]) for arm in ARMS},
                    size,
                    texts.sources[name],
                    {arm: texts.share_read(arm, settings.tokens) for arm in ARMS},
                ),
            }
            for name, size in sizes.items()
        },
    }
    # A verdict on each set would be wrong more often, so there is one.
    found["primary"] = "own" if "own" in texts.evaluation else "all"
    found["says"] = [
        _says(name, one, is_primary=name == found["primary"])
        for name, one in found["evaluation"].items()
    ]
    path = run.tree.root / NAME
    with replacing(path):
        write_json(path, found)
    return found


def _figures(
    bits: dict[str, np.ndarray],
    sizes: np.ndarray,
    sources: Sequence[str],
    share_read: dict[str, float],
) -> dict[str, Any]:
    """Bits per byte of each arm, and the reduction of the loss by kept and dropped text as a share
    of the loss of random text. `bits`: `[seeds, documents]` per arm; `sizes`: bytes of each
    document."""
    each = {arm: found.sum(1) / sizes.sum() for arm, found in bits.items()}
    result: dict[str, Any] = {
        "bits_per_byte": {arm: round(float(of_arm.mean()), 4) for arm, of_arm in each.items()},
        "of_seeds": {arm: of_arm.round(4).tolist() for arm, of_arm in each.items()},
    }
    for arm in ("kept", "dropped"):
        result[f"{arm}_saves"] = effect(bits[arm], bits["random"], sources, share_read[arm])
    return result


def effect(
    ours: np.ndarray, random: np.ndarray, sources: Sequence[str], share_read: float
) -> dict[str, Any]:
    """The share of the loss that an arm saves, with a 95 % interval, from bits `[seeds, documents]`
    of both arms.

    The variances of seeds and of documents add. Documents of one source count as one, if there are
    several sources. All seeds draw from one pool and read the share `share_read` of it, so more
    seeds cannot average its chance away; this part counts at most as much as one seed.
    """
    share = 1 - ours.sum() / random.sum()
    # How far each document of each seed is from the share; the mean is 0.
    off = (random * (1 - share) - ours) / random.mean()
    num_seeds, num_documents = off.shape
    of_pool = share_read / max(1 - share_read, share_read)
    of_seeds = float(off.mean(1).var(ddof=1)) * (1 / num_seeds + of_pool)
    names, places = np.unique(np.asarray(sources), return_inverse=True)
    if len(names) == 1:
        places = np.arange(num_documents)
    sums = np.bincount(places, off.mean(0)) / num_documents
    num_groups = len(sums)
    of_documents = float((sums**2).sum()) * num_groups / (num_groups - 1)
    # Each part has its own degrees of freedom: joint ones (Satterthwaite) are too many if the part
    # of few seeds or sources is small by chance.
    half = math.hypot(
        t_half_width(math.sqrt(of_seeds), num_seeds - 1),
        t_half_width(math.sqrt(of_documents), num_groups - 1),
    )
    ends = [round(float(end), 6) for end in (share - half, share + half)]
    return {"share": round(float(share), 6), "ci95": ends}


def _says(name: str, found: dict[str, Any], *, is_primary: bool) -> str:
    one = found["kept_saves"]
    low, high = one["ci95"]
    verdict = "it lowers the loss" if low > 0 else "it raises the loss"
    if low <= 0 <= high:
        verdict = f"no difference is shown, and one below {(high - low) / 2:.2%} would seldom be"
    if not is_primary:
        verdict = "this set is not the one that decides"
    effect = f"{one['share']:.2%} [{low:.2%}, {high:.2%}] of random text's loss at equal tokens"
    said = f"On {_SETS[name]} ({found['documents']} documents, {found['sources']} sources, their "
    said += f"first {EVAL_BYTES} bytes), kept text saves {effect} in small decoders"
    return f"{said}: {verdict}."
