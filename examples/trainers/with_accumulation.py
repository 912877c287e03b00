"""Gradient accumulation: a step of the plan in micro-batches, in a loop of one's own.

    torchrun --nproc-per-node 2 examples/trainers/with_accumulation.py PLAN --checkpoint /tmp/run.pt

`batch_size` of the plan is one optimizer step's, so steps, phases and checkpoints count optimizer
steps. All micro-batches are divided by the targets of the whole step: the sum of their gradients is
the gradient of the step, although they have different numbers of targets.
"""

from contextlib import nullcontext

import torch
from tiny import Run, show

from loader import open_loader
from loader.torch_data import targets_per_rank

MICRO_BATCH = 2  # rows of a rank that are in memory at once


def main() -> None:
    """Train, from the checkpoint if there is one."""
    run = Run(__doc__)
    loader = open_loader(run.plan, rank=run.rank, world_size=run.world_size)
    loader.seek_step(run.restore().get("step", 0))
    for step in range(loader.step, run.ends_at(len(loader))):
        inputs, targets = loader.next()
        divisor = targets_per_rank(targets)  # of all ranks and micro-batches
        parts = list(zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH)))
        total = torch.zeros(())
        run.optimizer.zero_grad()
        for number, (tokens, expected) in enumerate(parts, 1):
            # Ranks exchange gradients once, with the last micro-batch.
            waits = number < len(parts) and run.world_size > 1
            with run.model.no_sync() if waits else nullcontext():
                loss = run.model(tokens, expected, divisor)
                loss.backward()
            total += loss.detach()
        run.optimizer.step()
        show(step, total)
        if run.saves_at(step + 1):
            run.save(step=step + 1)


if __name__ == "__main__":
    main()
