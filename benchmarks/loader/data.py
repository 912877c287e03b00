"""The benchmark's tokens: two sources of 36 million random tokens, as shards with manifests.

Every contender reads these files, or a copy of the same tokens in its own format.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

SOURCES = ("a", "b")
WEIGHTS = (0.7, 0.3)
NUM_TOKENS = 36_000_000
VOCAB_SIZE, EOS = 201_088, 199_999
DOCUMENT_TOKENS = 1_000


def write_tokens(directory: Path, files_per_source: int) -> None:
    """Write the sources where they are not there yet."""
    if (directory / "data" / SOURCES[-1] / "train" / "manifest.json").exists():
        return
    for seed, name in enumerate(SOURCES):
        tokens = np.random.default_rng(seed).integers(0, 199_000, NUM_TOKENS, np.uint32)
        tokens[DOCUMENT_TOKENS - 1 :: DOCUMENT_TOKENS] = EOS
        split = directory / "data" / name / "train"
        split.mkdir(parents=True)
        per_file = NUM_TOKENS // files_per_source // DOCUMENT_TOKENS * DOCUMENT_TOKENS
        shards = [
            _shard(split, i, tokens[i * per_file : (i + 1) * per_file])
            for i in range(files_per_source)
        ]
        (split / "manifest.json").write_text(json.dumps(_manifest(name, shards)))


def token_files(directory: Path, source: str) -> list[Path]:
    """The `.npy` files of a source, in order."""
    return sorted((directory / "data" / source / "train").glob("*.npy"))


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


def _shard(split: Path, i: int, tokens: np.ndarray) -> dict[str, object]:
    path = split / f"shard-{i:06d}.npy"
    np.save(path, tokens)
    ends = np.arange(DOCUMENT_TOKENS, len(tokens) + 1, DOCUMENT_TOKENS)
    body = np.stack([ends - DOCUMENT_TOKENS, ends], axis=1).astype("<u8")
    header = b"NMOEIDX\0" + np.array([1, len(ends), 0], "<u8").tobytes()
    path.with_suffix(".idx").write_bytes(header + body.tobytes())
    return {
        "path": path.name,
        "index_path": path.with_suffix(".idx").name,
        "num_tokens": len(tokens),
        "num_documents": len(ends),
        "checksum": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def _manifest(name: str, shards: list[dict[str, object]]) -> dict[str, object]:
    return {
        "dataset": name,
        "version": "v1",
        "tokenizer": "random",
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS,
        "dtype": "uint32",
        "created_at": "2026-01-01T00:00:00Z",
        "total_tokens": sum(int(str(shard["num_tokens"])) for shard in shards),
        "total_documents": sum(int(str(shard["num_documents"])) for shard in shards),
        "num_shards": len(shards),
        "shards": shards,
        "source_info": {"source": name},
    }
