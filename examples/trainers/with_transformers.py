"""transformers' Trainer: rows of the stream, in its order.

    torchrun --nproc-per-node 2 examples/trainers/with_transformers.py PLAN --checkpoint /tmp/run

Three settings matter. `train_sampling_strategy="sequential"`: the default draws rows at random, and
the data set refuses that. `remove_unused_columns=False`: the default drops `shift_labels`, and the
model then does not learn the last target of a row. `ignore_data_skip` must stay False, or a resumed
run would begin again with the first batch.
"""

import os
import sys
from typing import Any

import torch
from tiny import VOCAB, read_arguments, show
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from loader import resolve_plan
from loader.torch_data import RowDataset


class Printing(Trainer):
    """A Trainer that prints each loss with every digit."""

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """One step."""
        loss = super().training_step(*arguments, **named)
        show(self.state.global_step, loss)
        return loss


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    arguments = read_arguments(__doc__)
    plan, num_ranks = resolve_plan(arguments.plan), int(os.environ.get("WORLD_SIZE", "1"))
    if plan.batch_size % num_ranks:  # the Trainer gives each rank equally many rows
        sys.exit(f"{num_ranks} ranks cannot divide the plan's batches of {plan.batch_size} rows")
    config = LlamaConfig(
        vocab_size=max(VOCAB, plan.vocab_size),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=plan.seq_len,
    )
    torch.manual_seed(0)
    settings = TrainingArguments(
        str(arguments.checkpoint),
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        per_device_train_batch_size=plan.batch_size // num_ranks,
        max_steps=arguments.steps,
        save_steps=arguments.save_every,
        dataloader_num_workers=arguments.workers,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Printing(LlamaForCausalLM(config), settings, train_dataset=RowDataset(plan))
    last = get_last_checkpoint(str(arguments.checkpoint)) if arguments.checkpoint.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
