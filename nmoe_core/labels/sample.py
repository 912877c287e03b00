"""The sample of documents that an oracle labels, if there are more than `[oracle] max_documents`.

Labels teach a head and calibrate it; some ten thousand are enough for any corpus. The documents
with the lowest hash of their text are drawn, from each source and split, so the sample hardly
changes when documents are added, and an answer about a text that stays is used again. Slices list
all documents; `slices/sample.jsonl` lists the drawn ones, if not all are. `slices/planned.jsonl`
lists more documents of train that are labelled too.
"""

import hashlib
import heapq
import json
import math
from collections.abc import Container, Sequence
from pathlib import Path

from loader.files.checksummed_json import sealed
from loader.files.nested import json_value
from loader.files.regular import read_file
from nmoe_core.base.atomic import atomic_file, output_lock, replacing, write_json, write_jsonl
from nmoe_core.base.docid import split_of
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import is_current, read_summary, sha256_file
from nmoe_core.config.tree import Tree
from nmoe_core.labels.slices import (
    COMBINED_NAME,
    SPLITS,
    SUMMARY_NAME,
    read_slice,
    slice_counts,
    source_manifest,
)
from nmoe_core.shards.documents import document_ids, ingest_ids

SAMPLE_NAME = "sample.jsonl"
PLANNED_NAME = "planned.jsonl"
FORMAT = "nmoe-sample/1"
MIN_PER_SOURCE = 100
Row = tuple[str, str]


def draw_sample(tree: Tree, sources: Sequence[str], max_documents: int) -> None:
    """Write the sample of the sliced documents of these sources; a current sample is kept.

    A source gets its share of `max_documents`, but at least `MIN_PER_SOURCE` documents, and a split
    gets its share of these. Raises FormatError as `document_ids` and `ingest_ids`.
    """
    path = tree.slices / SAMPLE_NAME
    summary = path.with_suffix(".json")
    counts = {s: slice_counts(tree.source_slices(s) / SUMMARY_NAME) for s in sources}
    total = sum(sum(by_split.values()) for by_split in counts.values())
    if total <= max_documents:
        summary.unlink(missing_ok=True)
        return
    made_from = _fingerprints(tree, max_documents)
    if is_current(summary, made_from) and path.is_file():
        return
    with replacing(path, summary):
        summary.unlink(missing_ok=True)
        with atomic_file(path) as file:
            for source, by_split in counts.items():
                num_documents = sum(by_split.values())
                share = max(max_documents / total, MIN_PER_SOURCE / max(1, num_documents))
                quotas = {s: math.ceil(min(1.0, share) * by_split[s]) for s in SPLITS}
                for doc_id in _lowest(tree, source, quotas):
                    file.write(json.dumps({"doc_id": doc_id}, ensure_ascii=False).encode() + b"\n")
        value = {"format": FORMAT, "total": total, "sha256": sha256_file(path)}
        write_json(summary, sealed({**value, "fingerprints": made_from}))


def drawn_ids(tree: Tree, max_documents: int) -> Container[str] | None:
    """The ids of the sample and of the planned documents; None if all documents are labelled, or
    the sample is not drawn yet. Raises FormatError if the sample was changed after it was drawn
    (E-SLICE-CHANGED), and as `read_slice` for the planned documents."""
    path = tree.slices / SAMPLE_NAME
    is_drawn = path.is_file() and path.with_suffix(".json").is_file()
    if not is_drawn or not sample_fingerprints(tree, max_documents):
        return None
    return _drawn(path) | {doc_id for doc_id, _ in _planned(tree)}


def add_planned(tree: Tree, rows: Sequence[Row]) -> Path:
    """Add (document id, source) pairs of train to the planned documents; return their file."""
    path = tree.slices / PLANNED_NAME
    with output_lock(tree.slices):
        planned = dict.fromkeys([*_planned(tree), *rows])
        write_jsonl(path, ({"doc_id": doc_id, "source": source} for doc_id, source in planned))
    return path


def _planned(tree: Tree) -> list[Row]:
    path = tree.slices / PLANNED_NAME
    rows = read_slice(path) if path.is_file() else []
    return [row for row in rows if split_of(row[0]) == "train"]


def planned_fingerprints(tree: Tree, split: str) -> dict[str, str]:
    """What labels of a split depend on beside the sample."""
    path = tree.slices / PLANNED_NAME
    is_read = split == "train" and path.is_file()
    return {"planned": sha256_file(path)} if is_read else {}


def sampled_rows(slice_file: Path, drawn: Container[str] | None) -> list[Row]:
    """The (document id, source) pairs of a slice that are labelled; `drawn`: see `drawn_ids`.
    Raises as `read_slice`."""
    rows = read_slice(slice_file)
    return rows if drawn is None else [row for row in rows if row[0] in drawn]


def sample_fingerprints(tree: Tree, max_documents: int) -> dict[str, str]:
    """What labels depend on beside their slice; nothing if all documents are labelled."""
    path = tree.slices / COMBINED_NAME
    total = sum(slice_counts(path).values()) if path.is_file() else 0
    return {"max_documents": str(max_documents)} if total > max_documents else {}


def _fingerprints(tree: Tree, max_documents: int) -> dict[str, str]:
    slices = read_summary(tree.slices / COMBINED_NAME, code="E-SLICE-CHANGED")
    return {"code": FORMAT, "max_documents": str(max_documents), **slices["fingerprints"]}


def _drawn(path: Path) -> set[str]:
    """The ids of the sample."""
    payload = read_file(path)
    expected = read_summary(path.with_suffix(".json"), code="E-SLICE-CHANGED")["sha256"]
    if (found := hashlib.sha256(payload).hexdigest()) != expected:
        raise FormatError(
            "the sample was changed after it was drawn",
            where=path,
            found=found,
            expected=expected,
            do="delete it, and label again",
            code="E-SLICE-CHANGED",
        )
    return {json_value(line)["doc_id"] for line in payload.splitlines()}


def _lowest(tree: Tree, source: str, quotas: dict[str, int]) -> list[str]:
    """The ids of the documents with the lowest hashes of each split. Directories of other tools
    have no hashes of texts: there the hash of the id decides."""
    manifest = source_manifest(tree.data, source)
    hashes = ingest_ids(manifest)
    chosen: dict[str, list[tuple[int, str]]] = {split: [] for split in SPLITS}
    for document in document_ids(tree.data, manifest):
        doc_id = str(document)
        _, digest = next(hashes, ("", ""))
        digest = digest or hashlib.sha256(doc_id.encode()).hexdigest()
        one = -int(digest[:16], 16), doc_id
        split = split_of(doc_id)
        heap = chosen[split]
        if len(heap) < quotas[split]:
            heapq.heappush(heap, one)
        elif heap and one > heap[0]:
            heapq.heapreplace(heap, one)
    return [doc_id for heap in chosen.values() for _, doc_id in sorted(heap, reverse=True)]
