"""`loader.next()` against copying the same rows and widening them, the least it could do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.prep import Row
from loader import build_loader
from nmoe_core.atomic import write_json
from nmoe_core.shards.manifest import ShardFormat, combine_shards
from nmoe_core.shards.writer import ShardWriter

SEQ_LEN, BATCH_SIZE, STEPS = 2048, 32, 300
TOKENS = (SEQ_LEN * BATCH_SIZE * STEPS) // 2 + SEQ_LEN * BATCH_SIZE


def rows(directory: Path) -> Iterator[Row]:
    """One row: two sources 70/30 with window crossing, numpy batches."""
    _shards(directory)
    (directory / "mixture.toml").write_text(
        "[mixtures.m]\ntotal_tokens_b = 0.03\n"
        '[[mixtures.m.sources]]\nid = "a"\ntokens_b = 0.7\n'
        '[[mixtures.m.sources]]\nid = "b"\ntokens_b = 0.3\n'
    )
    (directory / "flows.toml").write_text(
        f"[flow.f]\nmode = 'f'\nstages = ['pretrain']\ntokens_b = {TOKENS * 1e-9}\n"
        "[flow.f.mixture]\npretrain = 'm'\n"
    )
    config = {
        "data_root": str(directory / "data"),
        "mixture_toml": str(directory / "mixture.toml"),
        "flow_profiles_toml": str(directory / "flows.toml"),
        "flow_mode": "f",
        "seq_len": SEQ_LEN,
        "batch_size": BATCH_SIZE,
    }

    def ours() -> float:
        loader, plan = build_loader(config, backend="numpy")
        num_steps = plan.num_sequences // plan.batch_size
        started = time.process_time()
        for _ in range(num_steps):
            loader.next()
        return num_steps / (time.process_time() - started)

    def floor() -> float:
        shard = np.load(next((directory / "data").rglob("*.npy")), mmap_mode="r")
        tokens = np.asarray(shard)
        batch = np.empty((BATCH_SIZE, SEQ_LEN + 1), np.int64)
        num_steps = TOKENS // (SEQ_LEN * BATCH_SIZE)
        last = len(tokens) - SEQ_LEN - 1
        started = time.process_time()
        for step in range(num_steps):
            for i in range(BATCH_SIZE):
                start = (step * BATCH_SIZE + i) * SEQ_LEN % last
                batch[i] = tokens[start : start + SEQ_LEN + 1]
        return num_steps / (time.process_time() - started)

    yield "loader, L=2048 B=32", "row copies widened to int64", ours, floor


def _shards(directory: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        fmt = ShardFormat(name, "v1", "o200k_harmony", 201_088, 199_999, "bench")
        split = directory / "data" / name / "train"
        writer = ShardWriter(split / "shard_0000", fmt)
        for i in range(TOKENS // 50_000 + 1):
            writer.add_document(rng.integers(0, 199_000, 49_999, np.uint32), str(i), "")
        writer.finish({}, {})
        write_json(split / "manifest.json", combine_shards(split, fmt, 1, {}))
