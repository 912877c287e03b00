"""Shared by the examples: arguments, a small model, its update over all ranks, a checkpoint."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loader import IGNORE_INDEX, LoaderPlan, resolve_plan
from loader.torch_data import targets_per_rank

VOCAB, WIDTH = 512, 32


class Model(nn.Module):
    """Next-token logits over ids folded into `VOCAB` buckets. The mean of its loss over
    ranks is the loss of the whole batch, although ranks may have different numbers of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, divisor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """inputs, targets: [batch, time]. divisor: `targets_per_rank` of a whole step, if these are
        one of its micro-batches."""
        folded = torch.where(targets == IGNORE_INDEX, targets, targets % VOCAB)
        logits = self.layers(inputs % VOCAB)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), folded.flatten(), reduction="sum")
        return loss / (targets_per_rank(targets) if divisor is None else divisor)


def read_arguments(description: str) -> argparse.Namespace:
    """The command line of every example."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20, help="total steps, including resumed ones")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of a DataLoader")
    return parser.parse_args()


def show(step: int, loss: torch.Tensor) -> None:
    """Print the mean of the ranks' losses of a step, with every digit."""
    loss, num_ranks = loss.detach().clone(), 1
    if dist.is_initialized():
        num_ranks = dist.get_world_size()
        dist.all_reduce(loss)
        loss /= num_ranks
    if num_ranks == 1 or dist.get_rank() == 0:
        print(f"step {step}, ranks {num_ranks}, loss {loss.item()!r}", flush=True)


class Run:
    """A run on one rank, or on the ranks that torchrun started."""

    def __init__(self, description: str) -> None:
        self.arguments = read_arguments(description)
        self.plan: LoaderPlan = resolve_plan(self.arguments.plan)
        self.rank, self.world_size = 0, 1
        torch.manual_seed(0)
        self.model: nn.Module = Model()
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)

    def update(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One step of training; prints its loss."""
        loss = self.model(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        show(step, loss)

    def ends_at(self, num_steps: int) -> int:
        """The step to stop at."""
        return min(self.arguments.steps, num_steps)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due before this step."""
        return step % self.arguments.save_every == 0

    def save(self, **position: Any) -> None:
        """Write the checkpoint, on rank 0: model, optimizer and the position in the data. After a
        kill the file is the old or the new checkpoint."""
        if self.rank:
            return
        model = getattr(self.model, "module", self.model).state_dict()
        saved = {"model": model, "optimizer": self.optimizer.state_dict(), **position}
        part = self.arguments.checkpoint.with_suffix(".part")
        torch.save(saved, part)
        os.replace(part, self.arguments.checkpoint)

    def restore(self) -> dict[str, Any]:
        """Load the checkpoint; return the position in the data, empty at the start of a run."""
        if not self.arguments.checkpoint.exists():
            return {}
        saved = torch.load(self.arguments.checkpoint, weights_only=True)
        getattr(self.model, "module", self.model).load_state_dict(saved.pop("model"))
        self.optimizer.load_state_dict(saved.pop("optimizer"))
        return saved
