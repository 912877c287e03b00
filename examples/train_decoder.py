"""A small decoder trained over a loader plan: phases, per-source loss, checkpoint, exact resume.

    python examples/train_decoder.py PLAN --checkpoint /tmp/decoder.pt --steps 40
    python examples/train_decoder.py PLAN --checkpoint /tmp/decoder.pt --steps 80

The second command continues the first one. If it is killed at any step and started again, it prints
the same losses as an uninterrupted run, bit for bit on a CPU. PLAN is a plan's JSON file or a run's
TOML file. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from loader import IGNORE_INDEX, Batch, SourceLosses, count_metrics, open_loader

LEARNING_RATE = 3e-3


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and around a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, time, width]."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A language model over token ids folded into `vocab` buckets, to stay small."""

    def __init__(self, vocab: int, seq_len: int, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.vocab = vocab
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss of each token, 0 at masked targets: [batch, time]."""
        x = self.embed(inputs % self.vocab) + self.place.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        folded = torch.where(targets == IGNORE_INDEX, targets, targets % self.vocab)
        return F.cross_entropy(logits.flatten(0, 1), folded.reshape(-1), reduction="none").view(
            targets.shape
        )


class Trainer:
    """Model, optimiser and loader, with one checkpoint for all three."""

    def __init__(self, plan: str, checkpoint: Path, vocab: int, prefetch: int) -> None:
        torch.manual_seed(0)
        self.loader = open_loader(plan, backend="torch", prefetch=prefetch)
        self.plan = self.loader.plan
        self.model = Decoder(vocab, self.plan.seq_len)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.losses = SourceLosses(self.loader.source_names)
        self.checkpoint = checkpoint
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.loader.load_state_dict(json.loads(saved["loader"]))

    def step(self) -> dict[str, float]:
        """One update; returns `loss/NAME` and `loss/total`."""
        batch: Batch = self.loader.next_with_meta()
        # The factor belongs to the step: set the rate from the base, do not multiply it again.
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * batch.lr_scale
        losses = self.model.losses(batch.inputs, batch.targets)
        predicted = (batch.targets != IGNORE_INDEX).sum(1)
        self.optimizer.zero_grad()
        (losses.sum() / predicted.sum()).backward()
        self.optimizer.step()
        self.losses.add(batch.source_index, losses, predicted)
        return self.losses.read()

    def save(self) -> None:
        """Write the checkpoint; a kill leaves the old one or the new one."""
        saved: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": json.dumps(self.loader.state_dict()),
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(saved, part)
        os.replace(part, self.checkpoint)


def main() -> None:
    """Train up to a step, from the checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40, help="total steps, including resumed ones")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--prefetch", type=int, default=2)
    arguments = parser.parse_args()

    trainer = Trainer(arguments.plan, arguments.checkpoint, arguments.vocab, arguments.prefetch)
    while (step := trainer.loader.step) < min(arguments.steps, trainer.loader.num_steps):
        found = trainer.step()
        # Every digit, so that two runs can be compared bit for bit.
        losses = "  ".join(f"{name} {loss!r}" for name, loss in found.items())
        print(f"step {step}  {losses}", flush=True)
        if trainer.loader.step % arguments.save_every == 0:
            trainer.save()
    trainer.save()
    counts = count_metrics(trainer.loader.metrics())
    print("  ".join(f"{key} {value:g}" for key, value in counts.items()))
    trainer.loader.close()


if __name__ == "__main__":
    main()
