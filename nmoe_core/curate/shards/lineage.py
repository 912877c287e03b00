"""`lineage.jsonl` of a curated shard: the origin of each document and the reason it was kept.

Row i belongs to document i of the shard's manifest. Each row holds the document's id and number in
the parent shard, its topic, and every field of the quality row: score, decision, probe. The file is
committed together with the shard, and the manifest's `source_info` holds its checksum.
`verify_curated_shard` reads it to find each parent document.
"""

from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any

import numpy as np
import orjson

from loader.files.format import Manifest, load_manifest
from loader.files.regular import open_file
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.config.tree import LINEAGE_NAME, ShardPaths
from nmoe_core.curate.shards.inputs import (
    document_lengths,
    load_quality,
    load_selection,
    select_documents,
    times_read,
)
from nmoe_core.curate.takedown.record import load_takedown
from nmoe_core.shards.documents import shard_files


def lineage_line(quality_row: bytes, parent_index: int, topic: int) -> bytes:
    """Make one line of the file from a line of `quality_scores.jsonl`."""
    row = orjson.loads(quality_row)
    parent = {"parent_doc_id": row.pop("doc_id"), "parent_index": parent_index, "topic": topic}
    row.pop("source", None)
    return orjson.dumps(parent | row) + b"\n"


def read_lineage(manifest: Manifest) -> Generator[dict[str, Any], None, None]:
    """Yield the rows of a curated shard, in document order; close the generator if you do not read
    it to the end. Raises CurationError if the file differs from the checksum in the manifest
    (E-CURATION-LINEAGE)."""
    with closing(lineage_lines(manifest)) as lines:
        yield from map(orjson.loads, lines)


def lineage_lines(manifest: Manifest) -> Generator[bytes, None, None]:
    """Yield the rows of a curated shard as lines; raises as `read_lineage`."""
    path = manifest.path.parent / LINEAGE_NAME
    expected = manifest.extra.get("source_info", {}).get("lineage_checksum")
    found = sha256_file(path) if path.is_file() else "no file"
    if found != expected:
        raise CurationError(
            "lineage.jsonl does not match the manifest of the shard",
            where=path,
            found=found,
            expected=expected or "a shard made by curation",
            do="curate this shard again",
            code="E-CURATION-LINEAGE",
        )
    with open_file(path) as file:
        yield from file


def arranged_documents(shards: Iterable[ShardPaths]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The documents of curated shards, one shard after another, in the order of the parent shards.

    Returns:
        Three arrays, int64 `[N]`: the topic and the number of tokens (EOS included) of each
        document, and the curated order.

    Raises:
        FormatError: A shard is missing or broken.
        CurationError: As `read_lineage`.
    """
    empty = np.empty(0, np.int64)
    topics = [empty]
    tokens = [empty]
    order = [empty]
    num_documents = 0
    for shard in shards:
        manifest = load_manifest(shard.curated_manifest)
        rows = [(row["topic"], row["parent_index"]) for row in read_lineage(manifest)]
        topic, number = np.asarray(rows, np.int64).reshape(-1, 2).T
        lengths = document_lengths(shard_files(shard.tree.curated, manifest))
        before = np.argsort(number, kind="stable")
        topics.append(topic[before])
        tokens.append(lengths[before])
        order.append(num_documents + np.argsort(before))
        num_documents += len(rows)
    return np.concatenate(topics), np.concatenate(tokens), np.concatenate(order)


def verify_curated_shard(shard: ShardPaths) -> int:
    """Check that a curated shard holds exactly the kept documents of its parent, each as often as
    the selection says.

    Tokens, ingest id and text hash of each document are compared with the parent document that its
    lineage names. A consumed document is compared with the parent document of the same id and text,
    if the parent still has it. Both shards are read completely.

    Returns:
        The number of documents compared; one that is read three times counts three times.

    Raises:
        CurationError: A document was not kept, occurs too often or too rarely, or differs
            (E-CURATION-VERIFY, which names the first such document); or scores or lineage are
            missing or belong to another shard.
        FormatError: A shard is missing or broken.
    """
    parent = load_manifest(shard.manifest)
    curated = load_manifest(shard.curated_manifest)
    quality = load_quality(shard, parent)
    originals = {}
    for file in shard_files(shard.tree.data, parent):
        for doc_id, tokens, ids in file.documents():
            originals[doc_id] = (tokens, ids)
    info = curated.extra["source_info"]
    include = info["include"]
    num_frozen = info["frozen_documents"]
    names = list(originals)
    where = info.get("where")
    selection = None if where is None else load_selection(shard, parent, where)
    times = times_read(selection, load_takedown(shard, parent))
    chosen = select_documents(quality.path, names, include, times).indices
    missing = Counter(names[k] for k in chosen)
    places = {originals[name][1]: name for name in missing}
    copies = (row for file in shard_files(shard.tree.curated, curated) for row in file.documents())
    with closing(read_lineage(curated)) as lineage:
        rows = zip(copies, lineage, strict=True)
        for number, ((doc_id, tokens, ids), row) in enumerate(rows):
            parent_doc_id = row["parent_doc_id"]
            if number < num_frozen:
                # Consumed documents come from an earlier version of the parent. The current parent
                # may lack them or hold them elsewhere.
                parent_doc_id = places.get(ids)
                if parent_doc_id is None or not missing[parent_doc_id]:
                    continue
            if not missing[parent_doc_id]:
                raise _refuse(doc_id, f"{parent_doc_id}: not kept, or written too often")
            missing[parent_doc_id] -= 1
            if not np.array_equal(tokens, originals[parent_doc_id][0]):
                raise _refuse(doc_id, f"tokens that differ from {parent_doc_id}")
            if ids != originals[parent_doc_id][1]:
                raise _refuse(doc_id, f"other id or text hash than {parent_doc_id}: {ids}")
    if missing.total() != info["deferred_documents"]:
        example = next(missing.elements(), "deferred ones")
        raise _refuse(curated.path, f"{missing.total()} kept documents missing: {example}")
    return len(chosen)


def _refuse(where: object, found: str) -> CurationError:
    return CurationError(
        "curated shard is not the kept part of its parent",
        where=where,
        found=found,
        do="curate this shard again",
        code="E-CURATION-VERIFY",
    )
