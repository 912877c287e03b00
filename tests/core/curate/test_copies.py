"""Copies that are kept lie far apart: their groups reach the order that can spread them."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from loader.files.format import load_manifest
from nmoe_core.curate.order import golden
from nmoe_core.curate.settings import curate_settings
from nmoe_core.shards.manifest import documents_digest
from tests.core.curate.corpus import Corpus
from tests.refusals import refused

pa = pytest.importorskip("pyarrow")
pytest.importorskip("numba")
duplicates = pytest.importorskip("nmoe_core.attributes.copies.duplicates")
files = pytest.importorskip("nmoe_core.shards.attribute_file")
ALL = {"include": ("drop", "band", "keep"), "order": "golden", "spread_copies": True}


def write_copies(corpus: Corpus, every: int, documents: str | None = None) -> list[int]:
    """Say that every so-manieth document of shard 0 is a copy of the first one; their numbers."""
    shard, names = corpus.shard(0), corpus.ingest_ids(0)
    numbers = range(every, len(names), every)
    near = [f"web//{names[0]}" if i in numbers else None for i in range(len(names))]
    columns = (
        [one is None for one in near],
        [None] * len(names),
        near,
        [None if one is None else 0.9 for one in near],
        *([None] * len(names) for _ in range(5)),  # of parts and passages
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, duplicates.SCHEMA)]
    rows = pa.RecordBatch.from_arrays(arrays, schema=duplicates.SCHEMA)
    made_from = {"documents": documents or documents_digest(load_manifest(shard.manifest))}
    keys = files.Documents(corpus.doc_ids(0), ["0" * 64] * len(names))
    path = shard.attribute("duplicates")
    files.write_attribute(path, "duplicates", made_from, keys, duplicates.SCHEMA, [rows])
    return list(numbers)


def test_the_groups_of_kept_copies_reach_the_order(graded: Corpus) -> None:
    copies = write_copies(graded, 9)
    assert graded.curate(0, **ALL).facts["changed"]
    lineage = graded.shard(0).lineage.read_text().splitlines()
    found = [json.loads(line)["parent_index"] for line in lineage]
    topics = np.load(graded.shard(0).topics).astype(np.int64)
    lengths = np.concatenate([file.lengths() for file in graded.files(0)])
    groups = np.full(len(topics), -1)
    groups[[0, *copies]] = 0
    assert found == golden(topics, lengths, groups=groups).tolist()
    assert found != golden(topics, lengths).tolist()
    assert not graded.curate(0, **ALL).facts["changed"]
    write_copies(graded, 7)
    assert graded.curate(0, **ALL).facts["changed"]


def test_where_the_rule_keeps_no_copy_nothing_follows_from_them(graded: Corpus) -> None:
    write_copies(graded, 9)
    select(graded, lambda i: i % 9 > 0 or i == 0)
    graded.curate(0, **ALL, where="is_survivor")
    write_copies(graded, 18)
    assert not graded.curate(0, **ALL, where="is_survivor").facts["changed"]
    select(graded, lambda i: True)
    graded.curate(0, **ALL, where="true")
    write_copies(graded, 9)
    assert graded.curate(0, **ALL, where="true").facts["changed"]


def select(corpus: Corpus, keep: Callable[[int], bool]) -> None:
    """Write a selection of shard 0."""
    shard, doc_ids = corpus.shard(0), corpus.doc_ids(0)
    kept = [keep(i) for i in range(len(doc_ids))]
    columns = {"keep": kept, "reason": pa.array([int(not one) for one in kept], pa.uint8())}
    rows = pa.RecordBatch.from_pydict(columns)
    where = "true" if all(kept) else "is_survivor"
    made_from = {"documents": documents_digest(load_manifest(shard.manifest)), "where": where}
    keys = files.Documents(doc_ids, ["0" * 64] * len(doc_ids))
    files.write_attribute(shard.selection, "selection", made_from, keys, rows.schema, [rows])


def test_copies_that_were_not_looked_for_or_are_of_other_documents_are_refused(
    graded: Corpus,
) -> None:
    with refused("E-CURATION-MISSING", match="nmoe attributes"):
        graded.curate(0, **ALL)
    write_copies(graded, 9, documents="others")
    with refused("E-CURATION-MISMATCH", match="duplicates"):
        graded.curate(0, **ALL)


@pytest.mark.parametrize(
    ("use", "order", "is_spread"),
    [
        (["duplicates"], "golden", True),
        (["duplicates"], "auto", True),
        (["duplicates"], "window_fill", False),
        (["signals"], "golden", False),
    ],
)
def test_a_run_spreads_copies_where_it_looks_for_them_and_its_order_can(
    graded: Corpus, use: list[str], order: str, is_spread: bool
) -> None:
    run = graded.configure({"order": order}).with_settings({"attributes.use": use})
    assert curate_settings(run, "web").spread_copies == is_spread
