"""torch's DataLoader with worker processes: an index is a step, and the next step is the state.

    python examples/trainers/with_dataloader.py PLAN --checkpoint /tmp/run.pt --workers 2
    torchrun --nproc-per-node 2 examples/trainers/with_dataloader.py PLAN --checkpoint /tmp/run.pt

The number of workers and of ranks may change between two runs.
"""

from tiny import Run
from torch.utils.data import DataLoader, Subset

from loader.torch_data import StepDataset


def main() -> None:
    """Train, from the checkpoint if there is one."""
    run = Run(__doc__)
    start = run.restore().get("step", 0)
    data = StepDataset(run.plan, run.rank, run.world_size)
    steps = range(start, run.ends_at(len(data)))
    batches = DataLoader(Subset(data, steps), batch_size=None, num_workers=run.arguments.workers)
    for step, (inputs, targets) in zip(steps, batches):
        run.update(step, inputs, targets)
        if run.saves_at(step + 1):
            run.save(step=step + 1)


if __name__ == "__main__":
    main()
