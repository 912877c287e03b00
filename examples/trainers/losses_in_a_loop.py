"""The loss of every sequence, logged by a loop of one's own.

    python examples/trainers/losses_in_a_loop.py PLAN --checkpoint /tmp/run.pt
    nmoe losses /tmp/run.losses --plan PLAN --spike auto

The batch of the form "batch" has the numbers of its sequences. A resumed run logs the steps after
its checkpoint again: the later losses count.
"""

import torch
from tiny import VOCAB, Run

from loader import IGNORE_INDEX, LossLog, open_loader
from loader.torch_data import row_losses


def main() -> None:
    """Train, from the checkpoint if there is one."""
    run = Run(__doc__)
    loader = open_loader(run.plan, rank=run.rank, world_size=run.world_size, form="batch")
    loader.seek_step(run.restore().get("step", 0))
    log = LossLog(run.arguments.checkpoint.with_suffix(".losses"), loader.plan, rank=run.rank)
    layers = getattr(run.model, "module", run.model).layers
    for step in range(loader.step, run.ends_at(len(loader))):
        batch = loader.next()
        with torch.no_grad():  # a model that returns its logits needs no second pass
            logits = layers(batch.inputs % VOCAB)
        targets = torch.where(batch.targets == IGNORE_INDEX, batch.targets, batch.targets % VOCAB)
        log.add(step, batch.sequence_index, row_losses(logits, targets))
        run.update(step, batch.inputs, batch.targets)
        if run.saves_at(step + 1):
            run.save(step=step + 1)
    log.close()


if __name__ == "__main__":
    main()
