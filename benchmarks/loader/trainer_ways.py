"""One rank of a trainer that reads a plan, for `benchmarks.loader.trainers`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SOURCES = ("a", "b")
BATCH_SIZE, SEQ_LEN, STEPS = 6, 16, 8
EXTRAS = ("source_index", "sequence_index", "lr_scale")
Take = Callable[[Any], None]


@dataclass
class Cell:
    """framework: a function below. data: what it is given. options: of the framework. start, stop:
    the steps that are read; a start above 0 resumes what the run before it saved."""

    framework: str
    data: str
    form: str = "pair"
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    start: int = 0
    stop: int = STEPS

    def title(self) -> str:
        """How the table names what the framework is given."""
        words = [f"{key}={value}" for key, value in self.options.items()]
        return f"`{self.data}`, {self.form}" + "".join(f", `{word}`" for word in words)


def ways() -> Iterable[Cell]:
    """The rows of the table."""
    forms = ("pair", "dict", "batch")
    undealt = {"use_distributed_sampler": False}
    for framework in ("own", "accelerate", "lightning", "fabric"):
        for form in forms:
            yield Cell(framework, "open_loader", form)
        yield Cell(framework, "open_loader", options={"prefetch": 2})
        yield Cell(framework, "open_loader", "dict", 2)
    yield Cell("jax", "open_loader")
    yield Cell("transformers", "open_loader", "dict")
    for workers in (0, 2):
        for form in forms:
            yield Cell("dataloader", "StepDataset", form, workers)
            yield Cell("stateful", "StepDataset", form, workers)
        for framework in ("accelerate", "lightning", "fabric"):
            yield Cell(framework, "StepDataset", "pair", workers)
        for framework in ("lightning", "fabric"):
            yield Cell(framework, "StepDataset", "pair", workers, undealt)
        for framework in ("dataloader", "stateful", "accelerate", "lightning", "fabric"):
            yield Cell(framework, "RowDataset", "pair", workers)
        for data in ("RowDataset", "StepDataset"):
            yield Cell("transformers", data, "dict", workers)


WAYS = sorted(ways(), key=lambda cell: cell.framework)


def read_cell(cell: Cell, plan: Path, place: Path, rows: list[list[int]]) -> None:
    """Add the numbers of the rows of each step of a rank."""

    def take(batch: Any) -> None:
        rows.append(numbers(batch))

    globals()[cell.framework](cell, plan, place, take)


def numbers(batch: Any) -> list[int]:
    """Each row's number in the stream, from its tokens; -1 if they are not a row of the plan, or
    the batch says something else of the row."""
    if isinstance(batch, dict):
        known = {key: np.asarray(batch[key]) for key in EXTRAS}
        inputs, targets = np.asarray(batch["input_ids"]), np.asarray(batch["shift_labels"])
    else:
        known = {}
        inputs, targets = np.asarray(batch[0]), np.asarray(batch[1])
        if len(batch) > 2:
            known = {key: np.asarray(getattr(batch, key)) for key in EXTRAS[:2]}
    found = []
    for i, (row, expected) in enumerate(zip(inputs, targets, strict=True)):
        source, position = divmod(int(row[0]) - 1, STEPS * BATCH_SIZE * SEQ_LEN)
        number = position // SEQ_LEN * len(SOURCES) + source  # sources take turns
        is_row = (row == row[0] + np.arange(SEQ_LEN)).all() and (expected == row + 1).all()
        is_row &= position % SEQ_LEN == 0
        if known:
            is_row &= known["source_index"][i] == source
            is_row &= known["sequence_index"][i] // BATCH_SIZE == number // BATCH_SIZE
            is_row &= known["lr_scale"][i] == 1.0 if "lr_scale" in known else True
        found.append(number if is_row else -1)
    return found


def ranks() -> tuple[int, int]:
    """Rank, and number of ranks, that the launcher has set."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def group() -> None:
    """Start torch.distributed if there are several ranks."""
    import torch.distributed as dist

    if ranks()[1] > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")


def opened(cell: Cell, plan: Path) -> Any:
    """What the cell is given; no rank is named."""
    from loader import open_loader
    from loader.torch_data import RowDataset, StepDataset

    keys: dict[str, Any] = {"form": cell.form}
    if cell.form == "dict":
        keys["extras"] = EXTRAS
    match cell.data:
        case "open_loader":
            ahead = cell.options.get("prefetch", 0)
            return open_loader(plan, prefetch=ahead, num_workers=cell.workers, **keys)
        case "RowDataset":
            return RowDataset(plan, **keys)
    return StepDataset(plan, **keys)


def is_loader(cell: Cell) -> bool:
    """Whether the cell is given a loader and not a data set."""
    return cell.data == "open_loader"


def in_dataloader(cell: Cell, plan: Path, kind: Any = None, num_rows: int | None = None) -> Any:
    """A DataLoader over a data set; num_rows: of a batch of rows, by default a rank's."""
    from torch.utils.data import DataLoader

    data = opened(cell, plan)
    own = num_rows or BATCH_SIZE // ranks()[1]
    batch_size = own if cell.data == "RowDataset" else None
    return (kind or DataLoader)(data, batch_size=batch_size, num_workers=cell.workers)


def batches_of(given: Iterable[Any], cell: Cell, take: Take) -> None:
    """Take the batches of the cell's steps."""
    steps = iter(given)
    for _ in range(cell.stop - cell.start):
        batch = next(steps, None)
        if batch is None:
            return
        take(batch)
    if cell.stop == STEPS:
        for batch in steps:  # none is left
            take(batch)


def loop(given: Any, cell: Cell, place: Path, take: Take) -> None:
    """A loop over what has a state."""
    file = place / f"state{ranks()[0]}.json"
    if cell.start:
        given.load_state_dict(json.loads(file.read_text()))
    batches_of(given, cell, take)
    if not cell.start:
        file.write_text(json.dumps(given.state_dict()))


def own(cell: Cell, plan: Path, place: Path, take: Take) -> None:
    """A loop of one's own."""
    group()
    loop(opened(cell, plan), cell, place, take)


def jax(cell: Cell, plan: Path, place: Path, take: Take) -> None:
    """A loop in processes of JAX."""
    import jax

    rank, world_size = ranks()
    if world_size > 1:
        address = f"127.0.0.1:{os.environ['MASTER_PORT']}"
        for key in ("RANK", "WORLD_SIZE"):
            del os.environ[key]
        jax.distributed.initialize(address, world_size, rank)

    def put(batch: Any) -> None:
        take([jax.numpy.asarray(part) for part in batch])

    from loader import open_loader

    loaded = open_loader(plan, backend="numpy")
    file = place / f"state{rank}.json"
    if cell.start:
        loaded.load_state_dict(json.loads(file.read_text()))
    batches_of(loaded, cell, put)
    file.write_text(json.dumps(loaded.state_dict()))


def dataloader(cell: Cell, plan: Path, place: Path, take: Take) -> None:
    """Torch's DataLoader; the next step is all that is saved."""
    from torch.utils.data import DataLoader, Subset

    group()
    batches = in_dataloader(cell, plan)
    if cell.start:
        data = batches.dataset
        first = cell.start * (BATCH_SIZE if cell.data == "RowDataset" else 1)
        part = Subset(data, range(first, len(data)))
        batches = DataLoader(part, batch_size=batches.batch_size, num_workers=cell.workers)
    batches_of(batches, cell, take)


def stateful(cell: Cell, plan: Path, place: Path, take: Take) -> None:
    """torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    group()
    batches = in_dataloader(cell, plan, StatefulDataLoader)
    file = place / f"state{ranks()[0]}.pt"
    import torch

    if cell.start:
        batches.load_state_dict(torch.load(file, weights_only=False))
    batches_of(batches, cell, take)
    if not cell.start:
        torch.save(batches.state_dict(), file)


def accelerate(cell: Cell, plan: Path, place: Path, take: Take) -> None:
    """`prepare`, and `skip_first_batches` to resume data sets."""
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

    chosen = DataLoaderConfiguration(split_batches=cell.data == "RowDataset")
    accelerator = Accelerator(cpu=True, dataloader_config=chosen)
    if is_loader(cell):
        loop(accelerator.prepare(opened(cell, plan)), cell, place, take)
        return
    batches = accelerator.prepare(in_dataloader(cell, plan, num_rows=BATCH_SIZE))
    batches_of(skip_first_batches(batches, cell.start) if cell.start else batches, cell, take)


def fabric(cell: Cell, plan: Path, place: Path, take: Take) -> None:
    """Lightning Fabric; `fabric.save` takes the state of what has one."""
    import lightning

    made = lightning.Fabric(accelerator="cpu", devices=ranks()[1], strategy=_strategy())
    made.launch()
    if is_loader(cell):
        loop(opened(cell, plan), cell, place, take)
        return
    batches = made.setup_dataloaders(in_dataloader(cell, plan), **cell.options)
    steps = iter(batches)
    for _ in range(cell.start):
        next(steps)
    batches_of(steps, cell, take)


def lightning(cell: Cell, plan: Path, place: Path, take: Take) -> None:
    """Lightning's Trainer."""
    import torch
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def train_dataloader(self) -> Any:
            return opened(cell, plan) if is_loader(cell) else in_dataloader(cell, plan)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            take(batch)
            return self.weight * 1.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    keep = ModelCheckpoint(place, filename="last", every_n_train_steps=cell.stop)
    options = {key: value for key, value in cell.options.items() if key != "prefetch"}
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks()[1],
        strategy=_strategy(),
        max_epochs=1,
        max_steps=cell.stop if cell.stop < STEPS else -1,
        callbacks=[keep],
        **quiet,
        **options,
    )
    trainer.fit(Module(), ckpt_path=str(place / "last.ckpt") if cell.start else None)


def _strategy() -> str:
    return "ddp" if ranks()[1] > 1 else "auto"


def transformers(cell: Cell, plan: Path, place: Path, take: Take) -> None:
    """transformers' Trainer."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, **batch: Any) -> dict[str, Any]:
            take(batch)
            return {"loss": self.weight * 1.0}

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return opened(cell, plan) if is_loader(cell) else super().get_train_dataloader()

    settings = TrainingArguments(
        str(place / "run"),
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        per_device_train_batch_size=BATCH_SIZE // ranks()[1],
        max_steps=cell.stop,
        save_steps=cell.stop,
        dataloader_num_workers=cell.workers,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = None if is_loader(cell) else opened(cell, plan)
    trainer = Own(Model(), settings, train_dataset=data)
    with contextlib.suppress(StopIteration):
        trainer.train(resume_from_checkpoint=bool(cell.start))
