"""Where the facts of a document lie: its shard, its label, its place in the curated tree."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from loader.files.format import load_manifest
from nmoe_core.base.docid import DocId
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.lineage import read_lineage
from nmoe_core.labels.files import checked_digest
from nmoe_core.labels.records import read_records
from nmoe_core.labels.slices import SPLITS
from nmoe_core.shards.documents import ShardFile, shard_files

Facts = dict[str, Any]


class Shard:
    """A committed shard of the data tree or the curated tree.

    Raises:
        FormatError: It is missing or broken.
    """

    def __init__(self, paths: ShardPaths, *, is_curated: bool = False) -> None:
        tree, self.paths = paths.tree, paths
        self.manifest = load_manifest(paths.curated_manifest if is_curated else paths.manifest)
        self.files = shard_files(tree.curated if is_curated else tree.data, self.manifest)

    def number(self, rel: str, document: int) -> int:
        """Number in the shard of a document that is `document` in its file."""
        before = 0
        for file in self.files:
            if file.rel == rel:
                return before + document
            before += len(file.spans)
        raise ValueError(f"{rel} is not a file of {self.manifest.path}")

    def file_of(self, number: int) -> tuple[ShardFile, int]:
        """The file of document `number` of the shard, and its number in the file."""
        for file in self.files:
            if number < len(file.spans):
                return file, number
            number -= len(file.spans)
        raise IndexError(f"{self.manifest.path} has no document {number}")


class Place(NamedTuple):
    """Where a document of the data tree lies in the curated tree, and its topic."""

    path: Path
    doc_id: DocId
    number: int
    topic: int


def curated_place(run: Run, shard: Shard, doc_id: DocId) -> Place | None:
    """Where a document of a data shard went; None where curation left it out.

    Raises:
        FormatError: The curated shard is missing or broken.
        CurationError: Its lineage is not its own (E-CURATION-LINEAGE).
    """
    curated = Shard(shard.paths, is_curated=True)
    with closing(read_lineage(curated.manifest)) as lineage:
        for number, row in enumerate(lineage):
            if row["parent_doc_id"] == str(doc_id):
                file, document = curated.file_of(number)
                curated_id = DocId(shard.paths.source, file.rel, *file.spans[document].tolist())
                return Place(run.tree.curated / file.rel, curated_id, number, row["topic"])
    return None


def find_labels(run: Run, doc_ids: Collection[str]) -> dict[str, Facts]:
    """The merged label records of those documents that have one.

    Raises:
        LabelError: A line is not a record, or the file was changed (E-LABEL-CORRUPT).
    """
    found: dict[str, Facts] = {}
    for split in SPLITS:
        path = run.tree.merged_labels(split)
        if not path.is_file():
            continue
        checked_digest(path)
        for record in read_records(path):
            if record["doc_id"] in doc_ids:
                found[record["doc_id"]] = record
    return found
