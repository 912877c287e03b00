"""Families of documents, such as sites or packages, from `[calibration.family]`.

The family of a document is looked up by its id when figures are made, and is not stored in labels.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from loader.files.format import load_manifest
from nmoe_core.base.docid import DocId, parse_doc_id
from nmoe_core.base.errors import CalibrationError, FormatError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.config.quality import FamilyTable
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths, Tree
from nmoe_core.labels.label_files import Labels
from nmoe_core.shards.documents import document_numbers, ingest_ids_at
from nmoe_core.shards.manifest import column_files


class FamilyNames:
    """Looks up the families of the documents of a run."""

    def __init__(self, table: FamilyTable, tree: Tree) -> None:
        self._table = table
        self._tree = tree

    @property
    def fingerprints(self) -> Fingerprints:
        """The settings that figures with families depend on."""
        return {"families": self._table.identity}

    def __call__(self, doc_ids: Sequence[str]) -> np.ndarray:
        """The family of each document, strings `[N]`. An id that is not of a shard counts as its
        own ingest id.

        Raises CalibrationError if no document has the column, or the pattern matches none of them
        (E-CALIBRATION-FAMILY), and FormatError if a document is not in its shard.
        """
        table = self._table
        values = np.full(len(doc_ids), None, object)
        for rows, found in self._by_shard(doc_ids):
            values[rows] = found
        alone = [f"alone: {doc_id}" for doc_id in doc_ids]
        names = list(alone)
        for i, value in enumerate(values):
            match = None if value is None else re.search(table.pattern, str(value))
            if match is not None and (name := match[1 if match.re.groups else 0]):
                names[i] = name
        kept = [value for value in values if value is not None]
        if doc_ids and not kept:
            do = "correct calibration.family.column, or add it to [attributes] columns and prepare "
            do += "the sources again"
            raise _no_family("no document has the column of families", table.column, do)
        if names == alone and doc_ids:
            found = f"{table.pattern!r}, and such values as {kept[0]!r}"
            do = "correct calibration.family.pattern"
            raise _no_family("the pattern of families matches no document", found, do)
        return np.array(names, np.str_)

    def _by_shard(self, doc_ids: Sequence[str]) -> Iterator[tuple[list[int], list[object]]]:
        """Positions of the documents of each shard, and what their families are read from."""
        places: dict[ShardPaths, list[tuple[int, DocId]]] = {}
        is_ingest_id = self._table.column == "ingest_id"
        for i, doc_id in enumerate(doc_ids):
            try:
                parsed = parse_doc_id(doc_id)
            except FormatError:
                if is_ingest_id:
                    yield [i], [doc_id]
                continue
            places.setdefault(self._tree.shard_of(parsed.rel), []).append((i, parsed))
        for shard, documents in places.items():
            manifest = load_manifest(shard.manifest)
            numbers = document_numbers(self._tree.data, manifest, [one for _, one in documents])
            order = np.argsort(numbers)
            rows = [documents[i][0] for i in order]
            if is_ingest_id:
                yield rows, list(ingest_ids_at(manifest, numbers[order]))
                continue
            from nmoe_core.shards.attribute_file import read_attribute

            for path in column_files(manifest):
                table = read_attribute(path, [self._table.column])
                if table.num_columns:
                    yield rows, table.column(0).take(numbers[order]).to_pylist()


def _no_family(what: str, found: str, do: str) -> CalibrationError:
    where = "[calibration.family]"
    return CalibrationError(what, where=where, found=found, do=do, code="E-CALIBRATION-FAMILY")


def with_families(labels: Labels, families: FamilyNames | None) -> Labels:
    """Labels with the families of their documents; raises as `FamilyNames`."""
    if families is None:
        return labels
    return replace(labels, families=families(labels.doc_ids))


def families_of(run: Run) -> FamilyNames | None:
    """The families of a run's documents; None if documents count as independent."""
    table = run.config.calibration.family
    return None if table is None else FamilyNames(table, run.tree)
