"""The loss of every sequence, logged by a LightningModule.

    python examples/trainers/losses_with_lightning.py PLAN --checkpoint /tmp/run
    nmoe losses /tmp/run.losses --plan PLAN --spike auto

The loader gives a dict that has the numbers of its sequences beside inputs and targets.
"""

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import VOCAB, Model, read_arguments, show

from loader import IGNORE_INDEX, LossLog, open_loader, resolve_plan
from loader.torch_data import row_losses


class Module(lightning.LightningModule):
    """The model, the data of this rank, and its log."""

    def __init__(self, plan: str, losses: Any) -> None:
        super().__init__()
        self.model, self.plan, self.losses = Model(), resolve_plan(plan), losses

    def train_dataloader(self) -> Any:
        """Open the loader here, after Lightning has started its ranks."""
        return open_loader(self.plan, form="dict", extras=("sequence_index",))

    def on_train_start(self) -> None:
        """Start a file of this rank, as the data are opened."""
        self.log_of_losses = LossLog(self.losses, self.plan, rank=self.global_rank)

    def on_train_end(self) -> None:
        """Close it."""
        self.log_of_losses.close()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """The loss of one step."""
        inputs, targets = batch["input_ids"], batch["shift_labels"]
        loss = self.model(inputs, targets)
        with torch.no_grad():  # a model that returns its logits needs no second pass
            logits = self.model.layers(inputs % VOCAB)
        folded = torch.where(targets == IGNORE_INDEX, targets, targets % VOCAB)
        self.log_of_losses.add(
            self.global_step, batch["sequence_index"], row_losses(logits, folded)
        )
        show(self.global_step, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    arguments = read_arguments(__doc__)
    lightning.seed_everything(0, verbose=False)
    directory = arguments.checkpoint
    every = arguments.save_every
    keep = ModelCheckpoint(
        directory, filename="{step}", every_n_train_steps=every, save_top_k=-1, save_last="link"
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=arguments.steps,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = directory / "last.ckpt"
    module = Module(arguments.plan, directory.with_suffix(".losses"))
    trainer.fit(module, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
