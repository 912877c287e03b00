"""Looks into shards for defects of tokenisation: `nmoe inspect`.

Counts tokens, EOS and doubled EOS file by file, and on request the token distribution and a seeded
sample of documents as text. Works with a manifest, or on a bare directory. Chunked: memory does not
grow with the shard, except for one counter a vocabulary id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loader.format import Manifest, open_shard
from nmoe_core.errors import FormatError
from nmoe_core.shards.verify import CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class InspectedFile:
    """One `.npy` file to look into; the count is None where no manifest gives it."""

    path: Path
    num_documents: int | None


@dataclass(slots=True)
class ShardInspection:
    """What was seen in one file."""

    path: Path
    num_tokens: int = 0
    num_eos: int = 0
    double_eos: list[int] = field(default_factory=list)
    num_documents: int | None = None
    out_of_vocabulary: int = 0
    is_terminated: bool = True

    def issues(self) -> list[str]:
        """Problems in words; empty when all is well."""
        found = []
        if self.double_eos:
            found.append(f"{len(self.double_eos)} doubled EOS")
        if self.num_documents is not None and self.num_eos != self.num_documents:
            found.append(f"{self.num_eos} EOS for {self.num_documents} documents")
        if self.out_of_vocabulary:
            found.append(f"{self.out_of_vocabulary} token ids outside the vocabulary")
        if not self.is_terminated:
            found.append("last document has no EOS")
        return found


def files_of_manifest(manifest: Manifest) -> list[InspectedFile]:
    """The files a manifest lists."""
    return [InspectedFile(manifest.shard_path(s), s.num_documents) for s in manifest.shards]


def files_of_directory(directory: Path) -> list[InspectedFile]:
    """All `.npy` files below a directory.

    Raises:
        FormatError: There is none (E-SHARD-MISSING).
    """
    files = sorted(directory.rglob("*.npy"))
    if not files:
        raise FormatError("no .npy file below it", where=directory, code="E-SHARD-MISSING")
    return [InspectedFile(path, None) for path in files]


def inspect_file(
    file: InspectedFile, eos_token_id: int, vocab_size: int, counts: np.ndarray | None = None
) -> ShardInspection:
    """Look into one file.

    Args:
        file: The file.
        eos_token_id: Token that ends documents.
        vocab_size: Ids must be below it.
        counts: int64 `[vocab_size]` that the file's token counts are added to.
    """
    tokens = open_shard(file.path)
    seen = ShardInspection(file.path, len(tokens), num_documents=file.num_documents)
    last_is_eos = False
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        is_eos = chunk == eos_token_id
        seen.num_eos += int(is_eos.sum())
        # The pair that straddles two chunks belongs to the later one.
        doubled = start + 1 + np.flatnonzero(is_eos[1:] & is_eos[:-1])
        if last_is_eos and is_eos[0]:
            seen.double_eos.append(start)
        seen.double_eos += doubled.tolist()
        last_is_eos = bool(is_eos[-1])
        inside = chunk < vocab_size
        seen.out_of_vocabulary += int(len(chunk) - inside.sum())
        if counts is not None:
            counts += np.bincount(chunk[inside], minlength=vocab_size)
    seen.is_terminated = last_is_eos or not len(tokens)
    return seen


def sample_tokens(file: InspectedFile, num_tokens: int, seed: int) -> list[tuple[int, int]]:
    """A seeded sample of token positions of one file: (position, token id), ascending."""
    tokens = open_shard(file.path)
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(len(tokens), min(num_tokens, len(tokens)), replace=False))
    return [(int(position), int(tokens[position])) for position in positions]
