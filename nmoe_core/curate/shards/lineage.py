"""`lineage.jsonl` of a curated shard: where each document came from and why it was kept.

Row i belongs to document i of the shard's manifest. It holds the parent's document id and number,
the topic, and every number of the quality row: score, decision, probe. The file is swapped in with
the shard and its checksum is in the manifest's `source_info`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from loader.files.format import Manifest, load_manifest
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.config.tree import LINEAGE_NAME, ShardPaths
from nmoe_core.shards.documents import shard_files


@dataclass(frozen=True, slots=True)
class ArrangedDocuments:
    """Curated documents in training order.

    Attributes:
        topics: int64 `[N]`.
        tokens: int64 `[N]`, EOS included.
        source_order: int64 `[N]`: positions in the order the parents have; `topics[source_order]`
            is the sequence before curation.
    """

    topics: np.ndarray
    tokens: np.ndarray
    source_order: np.ndarray

    def orders(self) -> dict[str, np.ndarray]:
        """Permutations of these documents: the order before curation, and this one."""
        return {"before": self.source_order, "after": np.arange(len(self.topics))}


def lineage_line(quality_row: bytes, parent_index: int, topic: int) -> bytes:
    """One line of the file, from a line of `quality_scores.jsonl`."""
    row = orjson.loads(quality_row)
    parent = {"parent_doc_id": row.pop("doc_id"), "parent_index": parent_index, "topic": topic}
    row.pop("source", None)
    return orjson.dumps(parent | row) + b"\n"


def read_lineage(manifest: Manifest) -> Generator[dict[str, Any], None, None]:
    """Rows of a curated shard, in document order; close it when leaving it early.

    Raises:
        CurationError: The file is not the one that the manifest names (E-CURATION-LINEAGE).
    """
    with closing(lineage_lines(manifest)) as lines:
        yield from map(orjson.loads, lines)


def lineage_lines(manifest: Manifest) -> Generator[bytes, None, None]:
    """Rows of a curated shard as lines; raises as `read_lineage` does."""
    path = manifest.path.parent / LINEAGE_NAME
    expected = manifest.extra.get("source_info", {}).get("lineage_checksum")
    found = sha256_file(path) if path.is_file() else "no file"
    if found != expected:
        raise CurationError(
            "lineage is not that of the shard",
            where=path,
            found=found,
            expected=expected or "a shard made by curation",
            do="curate this shard again",
            code="E-CURATION-LINEAGE",
        )
    with open(path, "rb") as file:
        yield from file


def arranged_documents(shards: Iterable[ShardPaths]) -> ArrangedDocuments:
    """Topics and lengths of curated shards one after another, and the order they had before.

    Raises:
        FormatError: A shard is missing or broken.
        CurationError: As `read_lineage`.
    """
    empty = np.empty(0, np.int64)
    topics, tokens, source_order = [empty], [empty], [empty]
    num_documents = 0
    for shard in shards:
        manifest = load_manifest(shard.curated_manifest)
        rows = [(row["topic"], row["parent_index"]) for row in read_lineage(manifest)]
        columns = np.asarray(rows, np.int64).reshape(-1, 2)
        topics.append(columns[:, 0])
        source_order.append(num_documents + np.argsort(columns[:, 1]))
        tokens += [file.lengths() for file in shard_files(shard.tree.curated, manifest)]
        num_documents += len(rows)
    return ArrangedDocuments(*map(np.concatenate, (topics, tokens, source_order)))
