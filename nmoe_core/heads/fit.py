"""The training loops of the two heads: seeded and on one thread, so equal inputs give equal bytes.

Given a `TrainingState`, a killed training goes on where it was, with the same result on a CPU.

Recipe: AdamW, linear warm-up over min(500, a tenth of all steps) that starts at 1/warm-up, then a
constant rate, gradients clipped to norm 1. Only targets are clamped: a clamp on predictions would
have no gradient where they are most wrong. A loss that is not finite ends the training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmoe_core.base.errors import HeadError
from nmoe_core.heads.features import one_thread
from nmoe_core.heads.models import Judge, JudgeArch, Probe, ProbeArch, layer_norm
from nmoe_core.heads.training_state import TrainingState
from nmoe_core.labels.scores import MAX_GRADE

MAX_WARMUP_STEPS = 500
MAX_CURVE_POINTS = 100
POOL_BATCHES = 16
CLIP_NORM = 1.0
SMOOTH_L1_BETA = 0.5
SECOND_PASS_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast: documents per step, passes over the documents, peak learning rate."""

    batch_size: int
    epochs: int
    lr: float
    weight_decay: float = 1e-4
    seed: int = 0


class JudgeStates(Protocol):
    """The states that a judge learns from, such as `TapStates`."""

    lengths: list[int]
    """Tokens of each document."""

    def of(self, rows: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """States `[B, T, H]` and lengths `[B]` of documents, for those rows that have them."""
        ...


@contextmanager
def reproducible(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch and use one thread inside; restore the caller's generators and threads after."""
    place = torch.device(device)
    with torch.random.fork_rng([place] if place.type == "cuda" else []), one_thread():
        torch.manual_seed(seed)
        yield


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Rate of a step counted from 0."""
    warmup = max(1, min(MAX_WARMUP_STEPS, num_steps // 10))
    return peak * min(1.0, (step + 1) / warmup)


def epoch_batches(
    lengths: list[int], batch_size: int, seed: int = 0, epoch: int = 0
) -> Iterator[list[int]]:
    """One pass over all documents in random batches of similar length.

    Documents are shuffled, then sorted by length inside pools of 16 batches, which saves padding;
    the batches of a pool are shuffled again. The order depends on the arguments alone.
    """
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool_size = batch_size * POOL_BATCHES
    for start in range(0, len(order), pool_size):
        pool = sorted(order[start : start + pool_size], key=lambda i: lengths[i])
        parts = [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
        for i in torch.randperm(len(parts), generator=generator).tolist():
            yield parts[i]


def fit_probe(
    features: Tensor, targets: Tensor, recipe: Recipe, state: TrainingState | None = None
) -> tuple[Probe, list[float]]:
    """Fit the linear probe by mean squared error on pooled states.

    Inputs are standardised for the optimiser and the standardisation is folded into the linear
    map afterwards, so the probe stays one linear map of the normalised state.

    Args:
        features: Pooled states `[N, H]`.
        targets: The oracle's scores `[N, 5]`.
        recipe: Steps and rate.
        state: Where a killed training goes on from.

    Returns:
        The probe, and the loss of each step.
    """
    inputs = layer_norm(features)
    mean, std = inputs.mean(0), inputs.std(0, correction=0)
    std = std.clamp_min(1e-3 * float(std.mean()) + 1e-12)
    inputs, targets = (inputs - mean) / std, targets.clamp(0, MAX_GRADE)
    probe = Probe(ProbeArch(features.shape[1])).to(features.device)
    nn.init.zeros_(probe.proj.weight)
    probe.proj.bias.data.copy_(targets.mean(0))

    def loss_of(rows: list[int]) -> Tensor:
        return F.mse_loss(probe.proj(inputs[rows]), targets[rows])

    curve = _optimise(probe, [0] * len(inputs), loss_of, recipe, state)
    with torch.no_grad():
        probe.proj.weight.div_(std)
        probe.proj.bias.sub_(probe.proj.weight @ mean)
    return probe.eval(), curve


def fit_judge(
    arch: JudgeArch,
    states: JudgeStates,
    targets: Tensor,
    recipe: Recipe,
    state: TrainingState | None = None,
) -> tuple[Judge, list[float]]:
    """Fit the judge by SmoothL1 (beta 0.5) on both passes, the second weighing one half.

    Args:
        arch: Shape of the judge.
        states: Of the documents.
        targets: The oracle's scores `[N, 5]`.
        recipe: Steps and rate.
        state: Where a killed training goes on from.

    Returns:
        The judge, and the loss of each step.
    """
    judge = Judge(arch).to(targets.device).train()
    targets = targets.clamp(0, MAX_GRADE)
    judge.shared_head.bias.data.copy_(targets.mean(0))

    def loss_of(rows: list[int]) -> Tensor:
        hidden, row_lengths, rows = states.of(rows)
        if not rows:
            return judge.shared_head.bias.sum() * 0.0
        first, second = judge.forward_with_teacher(hidden, row_lengths, targets[rows])
        near = F.smooth_l1_loss(first, targets[rows], beta=SMOOTH_L1_BETA)
        told = F.smooth_l1_loss(second, targets[rows], beta=SMOOTH_L1_BETA)
        return near + SECOND_PASS_WEIGHT * told

    curve = _optimise(judge, states.lengths, loss_of, recipe, state)
    return judge.eval(), curve


def _optimise(
    head: nn.Module,
    lengths: list[int],
    loss_of: Callable[[list[int]], Tensor],
    recipe: Recipe,
    state: TrainingState | None,
) -> list[float]:
    num_steps = recipe.epochs * -(-len(lengths) // recipe.batch_size)
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=recipe.weight_decay)
    losses = state.restore(head, optimizer) if state is not None else []
    for rows in itertools.islice(_all_batches(lengths, recipe), len(losses), None):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(len(losses), num_steps, recipe.lr)
        loss = loss_of(rows)
        losses.append(_finite(loss, len(losses)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), CLIP_NORM)
        optimizer.step()
        if state is not None:
            state.save(head, optimizer, losses)
    return losses


def _all_batches(lengths: list[int], recipe: Recipe) -> Iterator[list[int]]:
    for epoch in range(recipe.epochs):
        yield from epoch_batches(lengths, recipe.batch_size, recipe.seed, epoch)


def _finite(loss: Tensor, step: int) -> float:
    value = float(loss.detach())
    if not torch.isfinite(loss):
        raise HeadError(
            "training loss is not finite",
            where=f"step {step}",
            found=value,
            do="use a smaller learning rate, and check the backbone",
            code="E-HEAD-NONFINITE",
        )
    return value


def thin_curve(losses: list[float]) -> list[list[float]]:
    """At most 100 points of (step, mean loss since the point before)."""
    width = -(-len(losses) // MAX_CURVE_POINTS)
    points = []
    for start in range(0, len(losses), width):
        part = losses[start : start + width]
        points.append([float(start + len(part)), round(sum(part) / len(part), 6)])
    return points
