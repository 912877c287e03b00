"""Lightning's Trainer, stopped inside an epoch and resumed: the rest of the plan, or an error."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loader import LoaderPlan, open_loader, resolve_plan
from tests.refusals import refused

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader

from loader.torch_data import RowDataset, StepDataset

pytestmark = [
    pytest.mark.slow,  # seconds to import
    pytest.mark.skipif(not find_spec("lightning"), reason="lightning is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def plan(tree) -> LoaderPlan:
    tree.add("web", 2000)
    return resolve_plan(tree.one(batch_size=4, steps=8))


def fit(place: Path, batches: Callable[[int], Any], stop: int, epochs: int = 1) -> list[Any]:
    """The first tokens of each batch until a step, from the checkpoint if there is one; `batches`
    is given the trainer's step."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def train_dataloader(self) -> Any:
            return batches(self.trainer.global_step)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            found.append(batch[0][0].tolist())
            return self.weight * 1.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    keep = ModelCheckpoint(place, filename=f"{stop}", every_n_train_steps=stop)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, max_steps=stop, callbacks=[keep], **quiet
    )
    last = max(place.glob("*.ckpt"), default=None)
    trainer.fit(Module(), ckpt_path=last and str(last))
    return found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [StepDataset, RowDataset])
def test_batches_without_a_state_are_not_read_from_the_beginning_again(
    plan, tmp_path, kind, workers
):
    def batches(_: int) -> Any:
        if kind is RowDataset:
            return DataLoader(RowDataset(plan, form="pair"), 4, num_workers=workers)
        return DataLoader(kind(plan), batch_size=None, num_workers=workers)

    whole = [inputs[0].tolist() for inputs, _ in open_loader(plan)]
    assert fit(tmp_path, batches, 3) == whole[:3]
    with refused("E-CONFIG", naming=["3 batches", "open_loader", "StatefulDataLoader"]):
        fit(tmp_path, batches, 8)


def stateful(plan: LoaderPlan, _: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(StepDataset(plan), batch_size=None)


@pytest.mark.parametrize("batches", [lambda plan, _: open_loader(plan), stateful])
def test_what_knows_its_position_goes_on(plan, tmp_path, batches):
    whole = [inputs[0].tolist() for inputs, _ in open_loader(plan)]
    found = [fit(tmp_path, lambda step: batches(plan, step), stop) for stop in (3, 8)]
    assert found == [whole[:3], whole[3:]]


def test_an_epoch_that_was_read_to_its_end_may_be_read_again(plan, tmp_path):
    def batches(_: int) -> Any:
        return DataLoader(StepDataset(plan), batch_size=None)

    whole = fit(tmp_path, batches, 8)
    assert fit(tmp_path, batches, 16, epochs=2) == whole
