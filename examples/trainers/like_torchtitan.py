"""A loop like torchtitan's: batches of `({"input": x}, y)`, and a checkpoint of torch.distributed.

    torchrun --nproc-per-node 2 examples/trainers/like_torchtitan.py PLAN --checkpoint /tmp/run

`TitanLoader` has the interface of torchtitan's `BaseDataLoader`. All ranks share one state, so
their number may change between two runs, which torchtitan's own data loader refuses.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch.distributed.checkpoint as dcp
from tiny import Run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from loader import open_loader


class TitanLoader:
    """The stream in the form of torchtitan's trainer; `rank` is the data-parallel rank."""

    def __init__(self, plan: object, rank: int, world_size: int) -> None:
        self.loader = open_loader(plan, rank=rank, world_size=world_size, prefetch=2)

    def __iter__(self) -> Iterator[Any]:
        return (({"input": inputs}, targets) for inputs, targets in self.loader)

    def state_dict(self) -> dict[str, Any]:
        """One string: a checkpoint loads only keys that the new run has too."""
        return {"loader": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at any number of ranks."""
        self.loader.load_state_dict(json.loads(state["loader"]))


class Training:
    """Model, optimizer and step, in the form of a checkpoint."""

    def __init__(self, run: Run) -> None:
        self.step, self._parts = 0, (run.model, run.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The keys are the same at any number of ranks."""
        model, optimizer = get_state_dict(*self._parts)
        return {"step": self.step, "model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load model, optimizer and step."""
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(*self._parts, model_state_dict=model, optim_state_dict=optimizer)
        self.step = state["step"]


def main() -> None:
    """Train, from the checkpoint if there is one."""
    run = Run(__doc__)
    data, training = TitanLoader(run.plan, run.rank, run.world_size), Training(run)
    parts = {"training": training, "dataloader": data}
    # Metadata is written last: a checkpoint without it was interrupted.
    whole = run.arguments.checkpoint.glob("step-*/.metadata")
    last = max((int(path.parent.name[5:]) for path in whole), default=0)
    if last:
        dcp.load(parts, checkpoint_id=run.arguments.checkpoint / f"step-{last}")
    end, batches = run.ends_at(len(data.loader)), iter(data)
    while training.step < end:
        tokens, targets = next(batches)
        run.update(training.step, tokens["input"], targets)
        training.step += 1
        if run.saves_at(training.step):
            dcp.save(parts, checkpoint_id=run.arguments.checkpoint / f"step-{training.step}")


if __name__ == "__main__":
    main()
