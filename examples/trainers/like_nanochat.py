"""A loop like nanochat's: a generator gives inputs, targets and the state to resume from.

    torchrun --nproc-per-node 2 examples/trainers/like_nanochat.py PLAN --checkpoint /tmp/run.pt

The loop fetches the next batch before it saves, so each batch has the state before it: a resumed
run reads again only the batch that was fetched but not trained on.
"""

import json
from collections.abc import Iterator
from typing import Any

from tiny import Run

from loader import open_loader


def batches_with_state(loader: Any, state: dict[str, Any] | None = None) -> Iterator[Any]:
    """Yield inputs, targets and the state before them; at the end only the state."""
    if state:
        loader.load_state_dict(state)
    while loader.step < len(loader):
        before = loader.state_dict()
        yield *loader.next(), before
    yield None, None, loader.state_dict()


def main() -> None:
    """Train, from the checkpoint if there is one."""
    run = Run(__doc__)
    saved = run.restore()
    loader = open_loader(run.plan, rank=run.rank, world_size=run.world_size)
    batches = batches_with_state(loader, saved and json.loads(saved["dataloader"]))
    step, end = saved.get("step", 0), run.ends_at(len(loader))
    inputs, targets, state = next(batches)
    while True:
        if run.saves_at(step):
            run.save(step=step, dataloader=json.dumps(state))
        if step == end:
            break
        run.update(step, inputs, targets)
        step += 1
        inputs, targets, state = next(batches)


if __name__ == "__main__":
    main()
