"""Several ranks over one stream with torch.distributed; their number may change between runs.

    python examples/train_elastic.py PLAN --ranks 4 --steps 10 --checkpoint /tmp/elastic.pt
    python examples/train_elastic.py PLAN --ranks 3 --steps 20 --checkpoint /tmp/elastic.pt

The second command continues with three ranks after four: every sequence of the stream is
read once, in order. Prints a digest of the stream, equal for any number of ranks, and the loss,
summed over ranks. Needs torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from loader import IGNORE_INDEX, SourceLosses, open_loader

VOCAB, WIDTH = 512, 32


def train(arguments: argparse.Namespace) -> None:
    """The work of one rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=os.environ["STORE"], rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    loader = open_loader(
        arguments.plan, rank=rank, world_size=world_size, backend="torch", prefetch=2
    )
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, digest = SourceLosses(loader.source_names), ""
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["loader"]))
        digest = saved["digest"]
    while loader.step < min(arguments.steps, loader.num_steps):
        batch = loader.next_with_meta()
        logits = model(batch.inputs % VOCAB).flatten(0, 1)
        predicted = batch.targets != IGNORE_INDEX
        targets = torch.where(predicted, batch.targets % VOCAB, IGNORE_INDEX).reshape(-1)
        rows = nn.functional.cross_entropy(logits, targets, reduction="none").view(
            len(batch.inputs), -1
        )
        optimizer.zero_grad()
        # Over the whole batch: ranks may hold different numbers of rows, and rows of targets.
        num_targets = predicted.sum()
        dist.all_reduce(num_targets)
        (rows.sum() / num_targets.clamp(min=1)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.add(batch.source_index, rows, predicted.sum(1))
        digest = _stream_digest(digest, batch.inputs.contiguous())
    found = losses.read()
    if rank == 0:
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": json.dumps(loader.state_dict()),
            "digest": digest,
        }
        part = arguments.checkpoint.with_suffix(".part")
        torch.save(saved, part)
        os.replace(part, arguments.checkpoint)
        shown = "  ".join(f"{name} {loss:.6f}" for name, loss in found.items())
        print(f"step {loader.step}, {world_size} ranks, stream {digest[:16]}, {shown}")
    dist.barrier()
    loader.close()
    dist.destroy_process_group()


def _stream_digest(digest: str, rows: torch.Tensor) -> str:
    """Digest of all rows so far, in the order of the stream: ranks hold consecutive runs of it."""
    gathered: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    parts = [part.numpy().tobytes() for part in gathered if part is not None]
    return hashlib.sha256(digest.encode() + b"".join(parts)).hexdigest()


def main() -> None:
    """Start the ranks and wait for them; the run fails if a rank fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="total steps")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        train(arguments)
        return
    with tempfile.TemporaryDirectory() as directory:
        shared = {"WORLD_SIZE": str(arguments.ranks), "STORE": f"file://{directory}/store"}
        ranks = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env=os.environ | shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(arguments.ranks)
        ]
        exits = [rank.wait() for rank in ranks]
        if any(exits):
            sys.exit(1)


if __name__ == "__main__":
    main()
