"""One rank of a trainer: writes the numbers of the rows that it was given, or the error.

Run by `forks.py`. `sys.argv`: the plan, "--checkpoint", a directory for `RANK.json`, "--steps", a
number, and JSON: a list of ways to read, one after the other; see `Way`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset

from loader import DeterministicLoader, NmoeError, open_loader, resolve_plan
from loader.rows.stream import Split
from loader.torch_data import RowDataset, StepDataset, WorkerLoader

PLAN, PLACE = sys.argv[1], Path(sys.argv[3])


@dataclass
class Way:
    """trainer, data: names of functions below. batch_size: rows of a rank's batch; None: whole
    batches of the plan. keys: of the DataLoader. options: of the trainer. shuffle: by a sampler
    that deals to ranks. first: the first index. passes: over the data."""

    trainer: str
    data: str
    split: Split = "train"
    batch_size: int | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    shuffle: bool | None = None
    first: int = 0
    passes: int = 1


def dataset(way: Way) -> Any:
    """A data set that is told no rank."""
    match way.data:
        case "row":
            data: Any = RowDataset(PLAN, way.split, form="pair")
        case _:
            data = StepDataset(PLAN, split=way.split)
    return Subset(data, range(way.first, len(data))) if way.first else data


def batches(way: Way) -> Any:
    """What gives batches, of one of the kinds that are told no rank."""
    plan = resolve_plan(PLAN)
    openers: dict[str, Callable[[], Any]] = {
        "open_loader": lambda: open_loader(plan, way.split),
        "num_workers": lambda: open_loader(plan, way.split, num_workers=1),
        "DeterministicLoader": lambda: DeterministicLoader(plan, split=way.split),
        "WorkerLoader": lambda: WorkerLoader(plan, split=way.split, num_workers=1),
    }
    if way.data in openers:
        return openers[way.data]()
    data = dataset(way)
    sampler = None if way.shuffle is None else DistributedSampler(data, shuffle=way.shuffle)
    torch.manual_seed(0)  # an order whose second step follows the first one in no worker
    return DataLoader(data, way.batch_size, sampler=sampler, **way.keys)


def plain(way: Way, take: Callable[[Any], None]) -> None:
    """A loop under torch.distributed, whose environment names no rank. early: what reads is made
    before the ranks are up."""
    place = [int(os.environ.pop(key, "-1")) for key in ("RANK", "WORLD_SIZE")]
    made = batches(way) if way.options.get("early") else None
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=place[0], world_size=place[1])
        dist.barrier()  # a rank that is refused at once would end while the other one connects
    made = made or batches(way)
    for _ in range(way.passes):
        run(made, take)


def environment(way: Way, take: Callable[[Any], None]) -> None:
    """A loop without torch.distributed."""
    run(batches(way), take)


def accelerate(way: Way, take: Callable[[Any], None]) -> None:
    """`prepare`."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**way.options))
    made = accelerator.prepare(batches(way))
    for _ in range(way.passes):
        run(made, take)


def fabric(way: Way, take: Callable[[Any], None]) -> None:
    """`setup_dataloaders`."""
    import lightning

    made = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    made.launch()
    run(made.setup_dataloaders(batches(way), **way.options), take)


def trainer(way: Way, take: Callable[[Any], None]) -> None:
    """Lightning's Trainer."""
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def train_dataloader(self) -> Any:
            return batches(way)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            take(batch)
            return self.weight * 1.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet, **way.options
    ).fit(Module())


def run(given: Iterable[Any], take: Callable[[Any], None]) -> None:
    """One pass."""
    for batch in given:
        take(batch)


def read(way: Way) -> dict[str, Any]:
    """The rows of each batch by their numbers, and the error."""
    numbers: dict[bytes, int] = {}
    for inputs, _ in open_loader(PLAN, way.split, rank=0, world_size=1):
        for row in inputs:
            numbers[row.numpy().tobytes()] = len(numbers)
    rows: list[list[int]] = []

    def take(batch: Any) -> None:
        rows.append([numbers[row.numpy().tobytes()] for row in batch[0]])

    try:
        globals()[way.trainer](way, take)
    except (NmoeError, RuntimeError) as error:  # of torch, where another rank has ended
        return {"rows": rows, "error": str(error)}
    return {"rows": rows, "error": None}


def main() -> None:
    """Read as the last argument says."""
    rank = os.environ["RANK"]
    found = [read(Way(**way)) for way in json.loads(sys.argv[6])]
    PLACE.mkdir(parents=True, exist_ok=True)
    (PLACE / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
