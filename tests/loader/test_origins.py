"""From a row back to the files its tokens lie in, and from a document to the rows that read it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import loader.rows.origins
from loader import DeterministicLoader, resolve_plan
from loader.files.shard import IndexReader, open_shard
from loader.order.policies import POLICIES
from loader.rows.origins import origins, readings
from loader.rows.stream import Stream

CASES = [
    case
    for case in itertools.product(POLICIES, ("concat", "best_fit"), (False, True))
    if case[:2] != ("least_consumed", "best_fit")
]


@pytest.fixture(scope="module")
def tables(lib, tmp_path_factory) -> list[dict[str, object]]:
    tree = lib.Tree(tmp_path_factory.mktemp("origins"))
    for name, num_tokens in (("web", 2001), ("code", 801), ("math", 401)):
        tree.add(name, num_tokens)
    return tree.rows(web=5, code=2, math=1)


# `wrap` reads the small sources more than once, so that rows run over the end of their source.
@pytest.fixture(scope="module", params=CASES, ids=lambda p: f"{p[0]}-{p[1]}{'-shuffle' * p[2]}")
def plan(tables, request):
    policy, packing, shuffle = request.param
    chosen = {"policy": policy, "packing": packing, "shuffle": shuffle, "on_exhaust": "wrap"}
    return resolve_plan({"datasets": tables, "batch_size": 12, "seq_len": 16, "steps": 20} | chosen)


def test_the_tokens_that_origins_name_are_the_rows_that_the_loader_gives(plan):
    stream = Stream(plan, "train")
    with DeterministicLoader(plan, backend="numpy") as batches:
        rows = np.concatenate([inputs.copy() for inputs, _ in batches])
    for n, row in enumerate(rows):
        found = origins(stream, n)
        assert found.sequence == n
        at = 0
        for part in found.documents:
            tokens = open_shard(part.path)[part.first : part.stop]
            index = IndexReader(part.path.with_suffix(".idx"))  # of the whole document
            assert index.get_document(part.document) == (part.start, part.end)
            assert part.start <= part.first < part.stop <= part.end
            assert part.row_start == at
            np.testing.assert_array_equal(row[at : at + len(tokens)], tokens)
            at += len(tokens)
            assert f"/{found.source}/" in str(part.path)
        assert at == 16 or (row[at:] == 999).all()


def test_readings_of_a_document_are_all_sequences_that_name_it(plan, monkeypatch):
    monkeypatch.setattr(loader.rows.origins, "_SCAN", 50)  # several rounds
    stream = Stream(plan, "train")
    expected: dict[tuple, list[int]] = {}
    for n in range(stream.num_sequences):
        row = origins(stream, n)
        for part in row.documents:
            key = (row.source, part.path, part.start, part.end)
            if n not in expected.setdefault(key, []):
                expected[key].append(n)
    assert len(expected) > 60
    for (source, path, start, end), sequences in expected.items():
        assert list(readings(stream, source, path, start, end)) == sequences


def test_what_no_row_reads_has_no_readings_or_is_refused(tables, tmp_path):
    plan = resolve_plan({"datasets": tables, "batch_size": 8, "seq_len": 16, "steps": 2})
    stream = Stream(plan, "train")
    path = stream.files.paths()[2]  # the last file of the largest source
    start, end = IndexReader(path.with_suffix(".idx")).get_document(3)
    assert list(readings(stream, "web", path, start, end)) == []
    with pytest.raises(ValueError, match=r"other\.npy"):
        next(readings(stream, "web", tmp_path / "other.npy", 0, 1))
    with pytest.raises(IndexError):
        origins(stream, stream.num_sequences)
