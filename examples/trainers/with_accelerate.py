"""accelerate: `prepare` divides a batch's rows among ranks, `skip_first_batches` resumes.

    torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py PLAN --checkpoint /tmp/run

Give it rows, not the batches of a rank, which it would divide again. With `split_batches` the batch
size is the plan's, at any number of ranks.
"""

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from tiny import Model, read_arguments, show
from torch.utils.data import DataLoader

from loader import resolve_plan
from loader.torch_data import RowDataset


def main() -> None:
    """Train, from the checkpoint if there is one."""
    arguments = read_arguments(__doc__)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    torch.manual_seed(0)
    model, plan = Model(), resolve_plan(arguments.plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = DataLoader(RowDataset(plan, form="pair"), plan.batch_size, num_workers=arguments.workers)
    model, optimizer, batches = accelerator.prepare(model, optimizer, rows)
    # The number of the last whole checkpoint: `save_state` writes many files.
    start, latest = 0, arguments.checkpoint / "latest"
    if latest.exists():
        start = int(latest.read_text())
        accelerator.load_state(str(arguments.checkpoint / f"{start}"))
    steps = range(start, min(arguments.steps, len(batches)))
    for step, (inputs, targets) in zip(steps, skip_first_batches(batches, start)):
        loss = model(inputs, targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        show(step, loss)
        if (step + 1) % arguments.save_every == 0:
            accelerator.save_state(str(arguments.checkpoint / f"{step + 1}"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                latest.with_suffix(".part").write_text(f"{step + 1}")
                latest.with_suffix(".part").replace(latest)


if __name__ == "__main__":
    main()
