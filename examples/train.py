"""A bigram model in numpy over a loader plan: it saves, stops and resumes exactly.

    python examples/train.py build/demo/mixture/loader_plan.json --checkpoint /tmp/bigram --steps 20
    python examples/train.py build/demo/mixture/loader_plan.json --checkpoint /tmp/bigram --steps 40

The second command continues from the first one's checkpoint. In one run or in two, and at any
world size, the script prints the same digest of the batches that it has read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np

from loader import IGNORE_INDEX, open_loader

BUCKETS = 512


def main() -> None:
    """Train for some steps, from a checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20, help="total steps, including resumed ones")
    parser.add_argument("--probe", type=int, nargs=2, metavar="ID", help="print P(second | first)")
    arguments = parser.parse_args()

    loader = open_loader(arguments.plan, backend="numpy")
    plan = loader.plan
    counts = np.ones((BUCKETS, BUCKETS))
    digest = ""
    state_file = arguments.checkpoint.with_suffix(".json")
    if state_file.exists():
        state = json.loads(state_file.read_text())
        loader.load_state_dict(state["loader"])
        digest = state["digest"]
        counts = np.load(arguments.checkpoint.with_suffix(".npy"))
        print(f"resumed at step {loader.step}")
    while loader.step < min(arguments.steps, plan.num_sequences // plan.batch_size):
        inputs, targets = loader.next()
        digest = hashlib.sha256(digest.encode() + inputs.tobytes()).hexdigest()
        counted = targets != IGNORE_INDEX
        a, b = inputs[counted] % BUCKETS, targets[counted] % BUCKETS
        loss = -np.log(counts[a, b] / counts[a].sum(axis=1)).mean()
        np.add.at(counts, (a, b), 1.0)
        if loader.step % 10 == 0:
            print(f"step {loader.step}  loss {loss:.4f}")
    np.save(arguments.checkpoint.with_suffix(".npy"), counts)
    state_file.write_text(json.dumps({"loader": loader.state_dict(), "digest": digest}))
    print(f"step {loader.step}, batches {digest[:16]}")
    if arguments.probe:
        first, second = (token % BUCKETS for token in arguments.probe)
        print(f"P({second} | {first}) = {counts[first, second] / counts[first].sum():.6f}")


if __name__ == "__main__":
    main()
