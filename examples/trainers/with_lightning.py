"""Lightning: the loader itself, which has a length and a state.

    python examples/trainers/with_lightning.py PLAN --checkpoint /tmp/run

Lightning saves the state of a loader that has one. With a DataLoader without a state it silently
resumes with the first batch of the run.
"""

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import Model, read_arguments, show

from loader import open_loader


class Module(lightning.LightningModule):
    """The model, and the data of this rank."""

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.model, self.plan = Model(), plan

    def train_dataloader(self) -> Any:
        """Open the loader here, after Lightning has started its ranks."""
        return open_loader(self.plan)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """The loss of one step."""
        loss = self.model(*batch)
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
    keep = ModelCheckpoint(
        directory,
        filename="{step}",
        every_n_train_steps=arguments.save_every,
        save_top_k=-1,
        save_last="link",
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=arguments.steps,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = directory / "last.ckpt"
    trainer.fit(Module(arguments.plan), ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
