"""Finds tokenisation defects in shards: `nmoe inspect`.

Counts tokens, EOS and doubled EOS per file. On request, also shows the token distribution and a
seeded sample of tokens in context. The input is a manifest, or a directory without one, in which
index files give the document counts. A file that cannot be read is reported as an issue of that
file. Files are read in chunks, so memory does not grow with the shard, except for one counter per
vocabulary id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.addresses import as_path
from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from loader.files.shard import IndexReader, open_shard
from loader.plan.settings import DEFAULT_TOKENIZER
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import FormatError, TokenizerError
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.shards.verify import CHUNK_TOKENS
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

_CONTEXT_TOKENS = 8
_MAX_POSITIONS = 3


@dataclass(slots=True)
class ShardInspection:
    """Findings in one `.npy` file, with the first three positions of each kind."""

    path: Path
    num_documents: int | None
    """Number of documents; None if neither a manifest nor an index has it."""
    num_tokens: int = 0
    num_eos: int = 0
    num_double_eos: int = 0
    double_eos: list[int] = field(default_factory=list)
    num_out_of_vocabulary: int = 0
    out_of_vocabulary: list[int] = field(default_factory=list)
    is_terminated: bool = True
    unreadable: FormatError | None = None

    def issues(self) -> list[str]:
        """Descriptions of the problems; empty if the file is correct."""
        if self.unreadable is not None:
            return [f"[{self.unreadable.code}] {self.unreadable}"]
        found = []
        if self.num_double_eos:
            found.append(f"{self.num_double_eos} doubled EOS")
        if self.num_documents is not None and self.num_eos != self.num_documents:
            found.append(f"{self.num_eos} EOS for {self.num_documents} documents")
        if self.num_out_of_vocabulary:
            found.append(f"{self.num_out_of_vocabulary} token ids outside the vocabulary")
        if not self.is_terminated:
            found.append("last document has no EOS")
        return found

    def row(self) -> dict[str, Any]:
        """Names and counts of the file."""
        return {
            "directory": self.path.parent.name,
            "file": self.path.name,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "eos": self.num_eos,
            "double_eos": self.num_double_eos,
            "out_of_vocabulary": self.num_out_of_vocabulary,
        }


def files_of_manifest(manifest: Manifest) -> list[ShardInspection]:
    """The files that a manifest lists, to be inspected."""
    return [ShardInspection(manifest.shard_path(s), s.num_documents) for s in manifest.shards]


def files_of_directory(directory: Path) -> list[ShardInspection]:
    """All `.npy` files below a directory, except hidden ones, which may be incomplete. Raises
    FormatError if there are none (E-SHARD-MISSING)."""
    files: list[Path] = []
    for path in directory.rglob("*.npy"):
        parts = path.relative_to(directory).parts
        if not any(part.startswith(".") for part in parts):
            files.append(path)
    files.sort()
    if not files:
        raise FormatError("the directory has no .npy file", where=directory, code="E-SHARD-MISSING")
    indexes = [path.with_suffix(".idx") for path in files]
    counts = [IndexReader(index).num_docs if index.is_file() else None for index in indexes]
    return list(map(ShardInspection, files, counts))


def inspect_shards(manifest: str | PathLike[str]) -> list[ShardInspection]:
    """Inspect the shard files of a manifest, given by its file or directory. Raises FormatError if
    the manifest is missing or cannot be read."""
    path = as_path(manifest)
    named = load_manifest(path / MANIFEST_NAME if path.is_dir() else path)
    for file in (files := files_of_manifest(named)):
        inspect_file(file, named.eos_token_id, named.vocab_size)
    return files


def inspect_file(
    seen: ShardInspection, eos_token_id: int, vocab_size: int, counts: np.ndarray | None = None
) -> None:
    """Inspect one file, and add the counts of its tokens to `counts`, int64 `[vocab_size]`."""
    try:
        tokens = open_shard(seen.path)
    except FormatError as error:
        seen.unreadable = error
        return
    seen.num_tokens = len(tokens)
    last_is_eos = False
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        is_eos = chunk == eos_token_id
        seen.num_eos += int(is_eos.sum())
        # A doubled EOS across two chunks is counted with the later chunk.
        before = np.concatenate([[last_is_eos], is_eos[:-1]])
        seen.num_double_eos += _note(seen.double_eos, is_eos & before, start)
        last_is_eos = bool(is_eos[-1])
        outside = chunk >= vocab_size
        seen.num_out_of_vocabulary += _note(seen.out_of_vocabulary, outside, start)
        if counts is not None:
            counts += np.bincount(chunk[~outside], minlength=vocab_size)
    seen.is_terminated = last_is_eos or not len(tokens)


def token_statistics(counts: np.ndarray) -> dict[str, Any]:
    """Share of the vocabulary that is used, and its most frequent tokens."""
    used = int((counts > 0).sum())
    top = np.argsort(-counts, kind="stable")[:10]
    return {
        "tokens": int(counts.sum()),
        "unique_tokens": used,
        "vocab_coverage": used / len(counts),
        "most_frequent": [[int(i), int(counts[i])] for i in top if counts[i]],
    }


def open_tokenizer(own: str | None, asked: str | None) -> Tokenizer:
    """The tokenizer that decodes shards: the requested tokenizer, else `own`, the tokenizer that
    their manifest names. Raises TokenizerError if a tokenizer file is requested or needed and
    differs from the shards' tokenizer (E-TOKENIZER-OTHER), or as `load_tokenizer`."""
    name = asked or own or DEFAULT_TOKENIZER
    tokenizer = load_tokenizer(TokenizerSettings(name, needs_eos=False))
    is_of_file = any((n or "").startswith("tokenizer-") for n in (own, tokenizer.name))
    if own is not None and is_of_file and tokenizer.name != own:
        raise TokenizerError(
            "the shards were made with another tokenizer",
            where=name,
            found=tokenizer.name,
            expected=own,
            do="pass the file of their tokenizer (--tokenizer)",
            code="E-TOKENIZER-OTHER",
        )
    return tokenizer


def sample_tokens(
    files: Sequence[ShardInspection], tokenizer: Tokenizer, vocab_size: int, count: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """A seeded sample of tokens of each file, with their text and the surrounding text.

    Files of equal length have the same positions; tokens outside the vocabulary have no text.
    """
    found: dict[str, list[dict[str, Any]]] = {}

    def text(tokens: np.ndarray) -> str:
        return tokenizer.decode(tokens[tokens < vocab_size])

    for path in (file.path for file in files):
        tokens = open_shard(path)
        rng = np.random.default_rng(seed)
        chosen = rng.choice(len(tokens), min(count, len(tokens)), replace=False)
        found[shown(path)] = [
            {
                "position": at,
                "token": int(tokens[at]),
                "text": text(tokens[at : at + 1]),
                "context": text(tokens[max(0, at - _CONTEXT_TOKENS) : at + _CONTEXT_TOKENS + 1]),
            }
            for at in sorted(chosen.tolist())
        ]
    return found


def _note(positions: list[int], found: np.ndarray, start: int) -> int:
    """Add the first few positions at which `found` is true to a list; return the number of all
    these positions."""
    places = np.flatnonzero(found)
    positions += (start + places[: _MAX_POSITIONS - len(positions)]).tolist()
    return len(places)
