"""The benchmark's tokens: two sources of 36 million random tokens, as shards with manifests.

Every contender reads these files, or a copy of the same tokens in its own format.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SOURCES = ("a", "b")
WEIGHTS = (0.7, 0.3)
NUM_TOKENS = 36_000_000
VOCAB_SIZE, EOS = 201_088, 199_999
DOCUMENT_TOKENS = 1_000
TOKENIZER = ("random", VOCAB_SIZE, EOS, "0" * 64)


def write_tokens(directory: Path, files_per_source: int) -> None:
    """Write the sources where they are not there yet."""
    if (directory / "data" / SOURCES[-1] / "train" / "manifest.json").exists():
        return
    # Here, since the interpreters of peers have no more than numpy.
    from nmoe_core.base.atomic import write_json
    from nmoe_core.config.tree import shard_dir_name
    from nmoe_core.shards.manifest import ShardFormat, combine_shards
    from nmoe_core.shards.writer import ShardWriter

    for seed, name in enumerate(SOURCES):
        tokens = np.random.default_rng(seed).integers(0, 199_000, NUM_TOKENS, np.uint32)
        split, fmt = directory / "data" / name / "train", ShardFormat(name, "v1", *TOKENIZER)
        documents = tokens.reshape(-1, DOCUMENT_TOKENS)[:, :-1]  # the writer adds the last token
        for i, part in enumerate(np.array_split(documents, files_per_source)):
            writer = ShardWriter(split / shard_dir_name(i), fmt)
            for n, document in enumerate(part):
                writer.add_document(document, f"{name}:{i}:{n}", f"{n:064x}")
            writer.finish({}, {})
        write_json(split / "manifest.json", combine_shards(split, fmt, files_per_source, {}))


def token_files(directory: Path, source: str) -> list[Path]:
    """The `.npy` files of a source, in order."""
    return sorted((directory / "data" / source / "train").rglob("*.npy"))


def all_tokens(directory: Path, source: str) -> np.ndarray:
    """Tokens of a source: uint32, in memory."""
    return np.concatenate([np.load(path) for path in token_files(directory, source)])


def plan_config(directory: Path, seq_len: int, batch_size: int) -> dict[str, object]:
    """Settings of a run without end over both sources."""
    (directory / "mixture.toml").write_text(
        "[mixtures.m]\ntotal_tokens_b = 1.0\n"
        + "".join(
            f'[[mixtures.m.sources]]\nid = "{name}"\ntokens_b = {weight}\n'
            for name, weight in zip(SOURCES, WEIGHTS)
        )
    )
    (directory / "flows.toml").write_text(
        "[flow.f]\nmode = 'f'\nstages = ['pretrain']\ntokens_b = 50000\n"
        "[flow.f.mixture]\npretrain = 'm'\n"
    )
    return {
        "data_root": str(directory / "data"),
        "mixture_toml": str(directory / "mixture.toml"),
        "flow_profiles_toml": str(directory / "flows.toml"),
        "flow_mode": "f",
        "seq_len": seq_len,
        "batch_size": batch_size,
        "on_exhaust": "wrap",
    }
