"""Trains the probe and the judge on oracle labels, over a frozen backbone.

The probe needs one backbone pass: pooled states are kept on disk, and its epochs cost seconds. The
judge reads every position: its states are kept in memory while they take at most `cache_bytes`,
else computed again for each batch. A killed training goes on where it was. Val and test labels are
only reported on, never fitted; of their documents those count whose content was not trained on. A
head whose recorded fingerprints are those of this call is left as it
is; on failure no head is written.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from nmoe_core.base.errors import HeadError
from nmoe_core.engine.weights.config import tap_layers
from nmoe_core.heads.features import Backbone
from nmoe_core.heads.files import (
    JUDGE_NAME,
    PROBE_NAME,
)
from nmoe_core.heads.fit import Recipe, fit_judge, fit_probe
from nmoe_core.heads.models import JudgeArch
from nmoe_core.heads.states import TapStates
from nmoe_core.heads.training import Fitted, Training, TrainReport
from nmoe_core.heads.training_state import SAVE_INTERVAL_S, TrainingState
from nmoe_core.labels.files import Labels

DEFAULT_CACHE_BYTES = 512 * 2**20


def train_probe(
    labels_train: Path,
    labels_val: Path | None,
    model: Backbone,
    data_root: Path,
    heads_dir: Path,
    *,
    eos_token_id: int,
    max_ctx: int,
    labels_test: Path | None = None,
    tap: int | None = None,
    batch_size: int = 256,
    epochs: int = 1,
    lr: float = 1e-3,
    seed: int = 0,
    save_interval_s: float = SAVE_INTERVAL_S,
    use_salvaged: bool = False,
) -> TrainReport:
    """Train `heads_dir/hydra_probe.safetensors`.

    Args:
        labels_train: Merged labels to fit.
        labels_val: Merged labels to report on; None reports nothing.
        model: The frozen backbone.
        data_root: Directory that document ids are relative to.
        heads_dir: Where the head goes.
        eos_token_id: Token that ends every document.
        max_ctx: Tokens of a document that the head sees, from its start.
        labels_test: Merged labels of the test split, reported on apart: nothing is chosen by them.
        tap: Number of the block whose states it reads; as `tap_layers` says when left out.
        batch_size: Documents a step.
        epochs: Passes over the labels.
        lr: Peak learning rate.
        seed: Of the order of documents.
        save_interval_s: Seconds between saves of an unfinished training.
        use_salvaged: Use labels too whose scores stood among other words.

    Raises:
        LabelError: Labels are missing, mixed, or of another scorer in val (E-LABEL-...).
        HeadError: Too few labels (E-HEAD-FEW), all alike (E-HEAD-CONSTANT), the tap is no block
            (E-HEAD-FORMAT), or states or a loss that are not finite (E-HEAD-NONFINITE).
    """
    recipe = Recipe(batch_size, epochs, lr, seed=seed)
    tap = _checked_tap(tap, model, 0)
    run = Training(
        *("probe", labels_train, labels_val, labels_test, model, data_root, heads_dir),
        *(eos_token_id, max_ctx, tap, save_interval_s, use_salvaged),
    )

    def fit(labels: Labels, state: TrainingState) -> Fitted:
        features = run.pooled(labels)
        good = torch.isfinite(features).all(dim=1)
        probe, losses = fit_probe(features[good], run.targets(labels)[good], recipe, state)
        return Fitted(probe, losses, "pooled, on disk", int((~good).sum()))

    return run.commit(heads_dir / PROBE_NAME, asdict(recipe), recipe.seed, fit)


def train_judge(
    labels_train: Path,
    labels_val: Path | None,
    model: Backbone,
    data_root: Path,
    heads_dir: Path,
    *,
    eos_token_id: int,
    max_ctx: int,
    labels_test: Path | None = None,
    tap: int | None = None,
    batch_size: int = 128,
    epochs: int = 1,
    lr: float = 5e-4,
    seed: int = 0,
    mid_dim: int = 512,
    num_heads: int = 8,
    ffn_dim: int = 2048,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    save_interval_s: float = SAVE_INTERVAL_S,
    use_salvaged: bool = False,
) -> TrainReport:
    """Train `heads_dir/hydra_judge.safetensors`.

    Args:
        mid_dim: Width of the judge's encoder.
        num_heads: Its attention heads; they divide `mid_dim`.
        ffn_dim: Width of its feed-forward layers.
        cache_bytes: Most memory for kept states.

    The other arguments, and the errors, are those of `train_probe`.
    """
    recipe = Recipe(batch_size, epochs, lr, seed=seed)
    arch = JudgeArch(model.config.hidden_size, mid_dim, num_heads, ffn_dim)
    if mid_dim % num_heads:
        raise HeadError(
            "attention heads do not divide the judge's width",
            found=f"mid_dim {mid_dim}, num_heads {num_heads}",
            code="E-HEAD-FORMAT",
        )
    tap = _checked_tap(tap, model, 1)
    run = Training(
        *("judge", labels_train, labels_val, labels_test, model, data_root, heads_dir),
        *(eos_token_id, max_ctx, tap, save_interval_s, use_salvaged),
    )

    def fit(labels: Labels, state: TrainingState) -> Fitted:
        states = TapStates(model, run.documents(labels), labels.doc_ids, tap, cache_bytes)
        targets = run.targets(labels)
        judge, losses = fit_judge(arch, states.of, states.lengths, targets, recipe, state)
        held = "in memory" if states.is_cached else "computed for each batch"
        return Fitted(judge, losses, held, len(states.failed))

    return run.commit(heads_dir / JUDGE_NAME, asdict(recipe) | asdict(arch), recipe.seed, fit)


def _checked_tap(tap: int | None, model: Backbone, which: int) -> int:
    depth = model.config.num_hidden_layers
    if tap is None:
        return tap_layers(depth)[which]
    if not 1 <= tap <= depth:
        raise HeadError(
            "the backbone has no such block to read",
            found=f"tap {tap}",
            expected=f"1 to {depth}",
            code="E-HEAD-FORMAT",
        )
    return tap
