"""torchdata's StatefulDataLoader with worker processes, which keeps its own state.

    python examples/trainers/with_stateful_dataloader.py PLAN --checkpoint /tmp/run.pt --workers 2

The number of ranks may change between two runs. The number of workers must not change, because the
state depends on it. If it has to change, save the step instead (with_dataloader.py).
"""

import json

from tiny import Run
from torchdata.stateful_dataloader import StatefulDataLoader

from loader.torch_data import StepDataset


def main() -> None:
    """Train, from the checkpoint if there is one."""
    run = Run(__doc__)
    saved = run.restore()
    data = StepDataset(run.plan, run.rank, run.world_size)
    batches = StatefulDataLoader(data, batch_size=None, num_workers=run.arguments.workers)
    if saved:
        batches.load_state_dict(json.loads(saved["batches"]))
    steps = range(saved.get("step", 0), run.ends_at(len(data)))
    for step, (inputs, targets) in zip(steps, batches):
        run.update(step, inputs, targets)
        if run.saves_at(step + 1):
            run.save(step=step + 1, batches=json.dumps(batches.state_dict()))


if __name__ == "__main__":
    main()
