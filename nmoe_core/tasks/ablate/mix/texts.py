"""The sources of a loader plan as text: a pool to train small decoders on, and held-out documents.

The documents are those that the plan's data hold, so after curation. Held-out documents are drawn
by seed; a training document that is a near copy of one is left out. Memory: the lengths of all
documents, and of each source a pool of as many tokens as `POOL_RUNS` runs read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loader.plan.check import open_data
from loader.plan.records import LoaderPlan, SourceData
from nmoe_core.base.errors import CurationError
from nmoe_core.labels.documents import JsonlTexts
from nmoe_core.shards.documents import shard_files
from nmoe_core.tasks.ablate.documents import (
    COPY_TOKENS,
    EVAL_BYTES,
    MAX_TOKENS,
    FileDocuments,
    text_of,
)
from nmoe_core.text.near_copies import near_copies
from nmoe_core.text.tokenizer import Tokenizer

POOL_RUNS = 4
_LEAST_HELD_OUT = 5


@dataclass(frozen=True, slots=True)
class Domain:
    """A source of the plan. num_tokens: tokens of its data. pool: texts of documents, cut at
    `MAX_TOKENS` tokens. lengths: tokens of each text of the pool: int64 `[texts]`. held_out: the
    first `EVAL_BYTES` bytes of documents that are not in the pool."""

    name: str
    num_tokens: int
    pool: list[bytes]
    lengths: np.ndarray
    held_out: list[bytes]

    def draw(self, num_tokens: int, rng: np.random.Generator) -> tuple[list[bytes], int]:
        """Texts with this number of tokens in random order, and how often the whole pool was read
        before its last pass; the last text is cut."""
        texts: list[bytes] = []
        passes = -1
        while num_tokens > 0:
            passes += 1
            for i in rng.permutation(len(self.pool)).tolist():
                if num_tokens <= 0:
                    break
                part = min(1.0, num_tokens / int(self.lengths[i]))
                texts.append(self.pool[i][: max(1, round(part * len(self.pool[i])))])
                num_tokens -= int(self.lengths[i])
        return texts, max(passes, 0)


def read_domains(
    plan: LoaderPlan, tokenizer: Tokenizer, num_tokens: int, num_held_out: int, seed: int
) -> list[Domain]:
    """The sources of a plan. num_tokens: tokens of one run. num_held_out: documents to hold out of
    each source, at most a fifth of its documents.

    Raises:
        CurationError: A source has under 25 documents (E-MIX-TEXT).
        PlanError, FormatError: The data of the plan changed, or are damaged.
    """
    opened = [_documents(plan, source) for source in plan.sources]
    held = [
        _held_out(source, documents, num_held_out, seed)
        for source, documents in zip(plan.sources, opened)
    ]
    seen = [
        documents.tokens(i, COPY_TOKENS)
        for documents, numbers in zip(opened, held)
        for i in numbers.tolist()
    ]
    domains = []
    for source, documents, numbers in zip(plan.sources, opened, held):
        free = _shuffled_without(numbers, documents, seed)
        rows = _pool(documents, free, seen, POOL_RUNS * num_tokens)
        if not rows:
            found = "only copies of held-out documents"
            raise _too_few(f"source {source.name!r}", found, "other text")
        pool = [text_of(row, tokenizer) for row in rows]
        lengths = np.array([len(row) for row in rows])
        held_out = [text_of(documents.tokens(i, COPY_TOKENS), tokenizer) for i in numbers.tolist()]
        held_out = [text[:EVAL_BYTES] for text in held_out]
        domains.append(Domain(source.name, source.num_tokens, pool, lengths, held_out))
    return domains


def read_target(path: Path) -> list[bytes]:
    """The first bytes of each text of a JSON lines file. Raises CurationError if the file has under
    ten texts (E-MIX-TEXT), and the errors of `JsonlTexts`."""
    lines = JsonlTexts(path)
    texts = [lines.text(doc_id) for doc_id, _ in lines.rows]
    found = [text.encode("utf-8", "replace")[:EVAL_BYTES] for text in texts if text]
    if len(found) < 10:
        raise _too_few(str(path), f"{len(found)} texts", "at least 10")
    return found


def _documents(plan: LoaderPlan, source: SourceData) -> FileDocuments:
    manifest = open_data(plan, source)
    return FileDocuments(shard_files(manifest.path.parent, manifest))


def _held_out(source: SourceData, documents: FileDocuments, count: int, seed: int) -> np.ndarray:
    """Numbers of the documents that no run reads."""
    usable = np.flatnonzero(documents.lengths > 0)
    count = min(count, len(usable) // 5)
    if count < _LEAST_HELD_OUT:
        found = f"{len(usable)} documents"
        raise _too_few(f"source {source.name!r}", found, f"at least {5 * _LEAST_HELD_OUT}")
    return np.random.default_rng([seed, 3]).permutation(usable)[:count]


def _shuffled_without(held: np.ndarray, documents: FileDocuments, seed: int) -> np.ndarray:
    """Numbers of the documents that runs may read, in random order."""
    is_free = documents.lengths > 0
    is_free[held] = False
    return np.random.default_rng([seed, 4]).permutation(np.flatnonzero(is_free))


def _pool(
    documents: FileDocuments, numbers: np.ndarray, seen: Sequence[np.ndarray], most_tokens: int
) -> list[np.ndarray]:
    """The tokens of the first documents of `numbers`, without near copies of `seen`."""
    taken = np.cumsum(np.minimum(documents.lengths[numbers], MAX_TOKENS))
    chosen = numbers[: int(np.searchsorted(taken, most_tokens)) + 1].tolist()
    rows = [documents.tokens(i, MAX_TOKENS) for i in chosen]
    is_copy = near_copies([row[:COPY_TOKENS] for row in rows], seen)
    return [row for row, is_one in zip(rows, is_copy.tolist()) if not is_one]


def _too_few(where: str, found: str, expected: str) -> CurationError:
    return CurationError(
        "too little text to try mixtures",
        where=where,
        found=found,
        expected=expected,
        do="prepare more documents, give the source weight 0, or merge small buckets by a higher "
        "least_tokens in [mixture.buckets]",
        code="E-MIX-TEXT",
    )
