"""The loss of every sequence, logged by transformers' Trainer.

    python examples/trainers/losses_with_transformers.py PLAN --checkpoint /tmp/run
    nmoe losses /tmp/run.losses --plan PLAN --spike auto

Rows have their numbers if the data set has the extra `sequence_index`. `compute_loss` takes them
out, since the model does not know them, and reads the logits of the same pass.
"""

from typing import Any

import torch
from tiny import VOCAB, read_arguments, show
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from loader import LossLog, resolve_plan
from loader.torch_data import RowDataset, row_losses


class Logging(Trainer):
    """A Trainer that logs the loss of each sequence."""

    log_of_losses: LossLog

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **named: Any
    ) -> Any:
        """The Trainer's own loss."""
        numbers = inputs.pop("sequence_index", None)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
        if numbers is not None and model.training:
            losses = row_losses(outputs.logits, inputs["shift_labels"])
            self.log_of_losses.add(self.state.global_step, numbers, losses)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """One step, whose loss is printed."""
        loss = super().training_step(*arguments, **named)
        show(self.state.global_step, loss)
        return loss


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    arguments = read_arguments(__doc__)
    plan = resolve_plan(arguments.plan)
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
        per_device_train_batch_size=plan.batch_size,
        max_steps=arguments.steps,
        save_steps=arguments.save_every,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    rows = RowDataset(plan, extras=("sequence_index",))
    trainer = Logging(LlamaForCausalLM(config), settings, train_dataset=rows)
    last = get_last_checkpoint(str(arguments.checkpoint)) if arguments.checkpoint.exists() else None
    with LossLog(arguments.checkpoint.with_suffix(".losses"), plan) as trainer.log_of_losses:
        trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
