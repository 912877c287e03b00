"""The training loops of both heads: seeded and single-threaded, so equal inputs give equal bytes.

Recipe: AdamW with gradients clipped to norm 1. The learning rate rises linearly over the first
min(500, a tenth of all) steps, and is then constant. A batch of more than `PASS_TOKENS` padded
tokens runs in several passes, whose gradients are added up. So the memory is that of one pass (or
of one longer document): 60 kB per token at the default widths, 2 GB in all. Targets are clamped.
Predictions are not, because a clamped prediction has no gradient outside the scale. If a loss is
not finite, training fails.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from loader.files.checksummed_json import content_hash
from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.progress import Meter
from nmoe_core.labels.scores import QUALITY, Scale
from nmoe_core.quality.heads import PASS_TOKENS
from nmoe_core.quality.heads.head_files import read_tensors, tensors_digest, write_tensors
from nmoe_core.quality.heads.models import Judge, Probe, layer_norm
from nmoe_core.quality.heads.scores import one_thread
from nmoe_core.quality.heads.shapes import JudgeArch, ProbeArch, Recipe
from nmoe_core.quality.kept_states import TokenStates

MAX_WARMUP_STEPS = 500
MAX_CURVE_POINTS = 100
POOL_BATCHES = 16
CLIP_NORM = 1.0
SMOOTH_L1_BETA = 0.5
SECOND_PASS_WEIGHT = 0.5
SAVE_INTERVAL_S = 60.0
_KEY = "state"
_OPTIMIZER = ("step", "exp_avg", "exp_avg_sq")


class TrainingState:
    """State from which a killed training resumes: weights, optimiser, generators and losses.

    The file is written at most once per `SAVE_INTERVAL_S`. A file that is damaged or has other
    fingerprints is ignored. On a CPU a resumed training gives the same bytes as an uninterrupted
    one.
    """

    def __init__(self, path: Path, fingerprints: Fingerprints) -> None:
        self.path = path
        self._fingerprints = fingerprints
        self._saved_at = time.monotonic()

    def save(self, head: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
        """Write the state after `len(losses)` steps, unless the last save is younger than
        `SAVE_INTERVAL_S`."""
        if time.monotonic() - self._saved_at < SAVE_INTERVAL_S:
            return
        tensors = {f"head.{name}": value for name, value in head.state_dict().items()}
        for i, parameter in enumerate(head.parameters()):
            state = optimizer.state[parameter]
            tensors |= {f"optimizer.{i}.{n}": state[n] for n in _OPTIMIZER if n in state}
        tensors["generator"] = torch.get_rng_state()
        if (device := _device(head)).type == "cuda":
            tensors["generator_cuda"] = torch.cuda.get_rng_state(device)
        made = {"fingerprints": self._fingerprints, "losses": losses}
        arrays = {name: value.detach().cpu().numpy() for name, value in tensors.items()}
        write_tensors(self.path, arrays, _KEY, made)
        self._saved_at = time.monotonic()

    def restore(self, head: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """Set head, optimiser and generators to the saved state; return the losses so far."""
        try:
            header, arrays = read_tensors(self.path, _KEY)
            digests = header["content_hash"], header["tensors_sha256"]
            is_whole = digests == (content_hash(header), tensors_digest(arrays))
            if not is_whole or header["fingerprints"] != self._fingerprints:
                return []
        except (FileNotFoundError, SafetensorError, KeyError, TypeError, ValueError):
            return []
        tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
        head.load_state_dict({name: tensors[f"head.{name}"] for name in head.state_dict()})
        for i, parameter in enumerate(head.parameters()):
            for name in _OPTIMIZER:
                if (value := tensors.get(f"optimizer.{i}.{name}")) is not None:
                    place = "cpu" if name == "step" else parameter.device
                    optimizer.state[parameter][name] = value.to(place)
        torch.set_rng_state(tensors["generator"])
        if "generator_cuda" in tensors:
            torch.cuda.set_rng_state(tensors["generator_cuda"], _device(head))
        return header["losses"]


def _device(head: nn.Module) -> torch.device:
    return next(head.parameters()).device


@contextmanager
def reproducible(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch and use one thread inside the context; restore the caller's generators and threads
    afterwards."""
    place = torch.device(device)
    with torch.random.fork_rng([place] if place.type == "cuda" else []), one_thread():
        torch.manual_seed(seed)
        yield


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Learning rate of a step; steps count from 0."""
    warmup = max(1, min(MAX_WARMUP_STEPS, num_steps // 10))
    return peak * min(1.0, (step + 1) / warmup)


def _batches(lengths: list[int], recipe: Recipe) -> Iterator[list[int]]:
    """Yield random batches; each epoch uses each document once. Documents are sorted by length
    within pools of 16 batches."""
    size = recipe.batch_size
    pool_size = recipe.batch_size * POOL_BATCHES
    for epoch in range(recipe.epochs):
        generator = torch.Generator().manual_seed((recipe.seed << 20) + epoch)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        for start in range(0, len(order), pool_size):
            pool = sorted(order[start : start + pool_size], key=lambda i: lengths[i])
            parts = [pool[i : i + size] for i in range(0, len(pool), size)]
            for i in torch.randperm(len(parts), generator=generator).tolist():
                yield parts[i]


def fit_probe(
    features: Tensor,
    targets: Tensor,
    recipe: Recipe,
    state: TrainingState | None = None,
    scale: Scale = QUALITY,
) -> tuple[Probe, list[float]]:
    """Fit the linear probe to pooled states `[N, H]` by mean squared error; also return the loss of
    each step.

    Inputs are standardised for the optimiser. Afterwards the standardisation is folded into the
    weights, so the probe stays one linear map of the normalised state. `targets` are the oracle's
    scores `[N, D]` on the `scale`; a killed training resumes from `state`.
    """
    inputs = layer_norm(features)
    mean = inputs.mean(0)
    std = inputs.std(0, correction=0)
    std = std.clamp_min(1e-3 * float(std.mean()) + 1e-12)
    inputs = (inputs - mean) / std
    targets = _clamped(targets, scale)
    probe = Probe(ProbeArch(features.shape[1], num_scores=len(scale))).to(features.device)
    nn.init.zeros_(probe.proj.weight)
    probe.proj.bias.data.copy_(targets.mean(0))

    def loss_of(rows: list[int]) -> tuple[Tensor, int]:
        return F.mse_loss(probe.proj(inputs[rows]), targets[rows]), len(rows)

    losses = _optimise(probe, [0] * len(inputs), loss_of, recipe, state)
    with torch.no_grad():
        probe.proj.weight.div_(std)
        probe.proj.bias.sub_(probe.proj.weight @ mean)
    return probe.eval(), losses


def fit_judge(
    arch: JudgeArch,
    states: TokenStates,
    targets: Tensor,
    recipe: Recipe,
    state: TrainingState | None = None,
    scale: Scale = QUALITY,
) -> tuple[Judge, list[float]]:
    """Fit the judge by SmoothL1 loss (beta 0.5) on both passes; the second pass has weight one
    half.

    Arguments and results are as for `fit_probe`, but `arch` gives the judge's shape and `states`
    its input.
    """
    judge = Judge(replace(arch, num_scores=len(scale))).to(targets.device).train()
    targets = _clamped(targets, scale)
    low, high = _bounds(targets, scale)
    shares = (targets - low) / (high - low)
    judge.shared_head.bias.data.copy_(targets.mean(0))

    def loss_of(rows: list[int]) -> tuple[Tensor, int]:
        hidden, row_lengths, rows = states.of(rows)
        if not rows:
            return judge.shared_head.bias.sum() * 0.0, 0
        first, second = judge.forward_with_teacher(hidden, row_lengths, shares[rows])
        near = F.smooth_l1_loss(first, targets[rows], beta=SMOOTH_L1_BETA)
        told = F.smooth_l1_loss(second, targets[rows], beta=SMOOTH_L1_BETA)
        return near + SECOND_PASS_WEIGHT * told, len(rows)

    losses = _optimise(judge, states.lengths, loss_of, recipe, state)
    return judge.eval(), losses


def _bounds(targets: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """The lowest and the highest score per dimension, `[D]` each, on the device of the targets."""
    return targets.new_tensor(scale.lowest), targets.new_tensor(scale.highest)


def _clamped(targets: Tensor, scale: Scale) -> Tensor:
    return targets.clamp(*_bounds(targets, scale))


def _optimise(
    head: nn.Module,
    lengths: list[int],
    loss_of: Callable[[list[int]], tuple[Tensor, int]],
    recipe: Recipe,
    state: TrainingState | None,
) -> list[float]:
    """Train `head`. `loss_of` returns the mean loss over some documents and the number of documents
    that it counted."""
    num_steps = recipe.epochs * -(-len(lengths) // recipe.batch_size)
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=recipe.weight_decay)
    losses = state.restore(head, optimizer) if state is not None else []
    meter = Meter(f"train {type(head).__name__.lower()}", num_steps - len(losses), "steps")
    for rows in itertools.islice(_batches(lengths, recipe), len(losses), None):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(len(losses), num_steps, recipe.lr)
        optimizer.zero_grad()
        losses.append(_backward(rows, lengths, loss_of, head, len(losses)))
        nn.utils.clip_grad_norm_(head.parameters(), CLIP_NORM)
        optimizer.step()
        if state is not None:
            state.save(head, optimizer, losses)
        meter.add()
    return losses


def _backward(
    rows: list[int],
    lengths: list[int],
    loss_of: Callable[[list[int]], tuple[Tensor, int]],
    head: nn.Module,
    step: int,
) -> float:
    """Add up the gradients of a batch's mean loss, pass by pass; returns the mean loss."""
    total = 0.0
    num_good = 0
    for part in _passes(rows, lengths):
        loss, count = loss_of(part)
        loss = loss * (count / len(rows))
        if not torch.isfinite(loss):
            raise HeadError(
                "training loss is not finite",
                where=f"step {step}",
                found=float(loss.detach()),
                do="use a smaller learning rate, and check the backbone",
                code="E-HEAD-NONFINITE",
            )
        loss.backward()
        total = total + float(loss.detach())
        num_good = num_good + count
    if not 0 < num_good < len(rows):
        return total
    for parameter in head.parameters():  # only documents with finite states are counted
        if parameter.grad is not None:
            parameter.grad.mul_(len(rows) / num_good)
    return total * len(rows) / num_good


def _passes(rows: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Split a batch into parts of at most `PASS_TOKENS` padded tokens, or of one longer
    document."""
    part: list[int] = []
    longest = 0
    for i in rows:
        longest = max(longest, lengths[i])
        if part and longest * (len(part) + 1) > PASS_TOKENS:
            yield part
            part = []
            longest = lengths[i]
        part.append(i)
    yield part


def thin_curve(losses: list[float]) -> list[list[float]]:
    """At most 100 points of (step, mean loss since the previous point)."""
    width = -(-len(losses) // MAX_CURVE_POINTS)
    parts = [losses[start : start + width] for start in range(0, len(losses), width)]
    ends = itertools.accumulate(map(len, parts))
    return [[float(end), round(sum(part) / len(part), 6)] for end, part in zip(ends, parts)]
