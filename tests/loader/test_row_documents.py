"""The documents of many rows at once are those that `origins` finds row by row."""

from collections import Counter
from contextlib import closing

import numpy as np
import pytest

from loader import resolve_plan, twin
from loader.rows.documents import DocumentTable
from loader.rows.origins import origins
from loader.rows.stream import Stream

SETTINGS = [
    {},
    {"shuffle": True},
    {"window_stride": "seq_len+1"},
    {"on_exhaust": "wrap", "steps": 60},
    {"on_exhaust": "wrap", "steps": 60, "shuffle": True},
    {"on_exhaust": "wrap", "steps": 6, "seq_len": 700},
    {"packing": "best_fit", "seq_len": 24},
    {"packing": "best_fit_cropped", "seq_len": 24, "steps": 9},
    {"policy": "epoch_weighted", "steps": 60},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_documents_of_rows_are_those_of_each_row(tree, settings):
    for name in ("web", "code"):
        tree.add(name, 600)
    cfg = {"datasets": tree.rows("web", "code"), "batch_size": 4, "seq_len": 16, "steps": 8}
    check(resolve_plan(cfg | settings))


def test_documents_of_rows_of_a_twin_are_those_of_each_row(tree, tmp_path, lib):
    tree.add("web", 2000)
    plan = resolve_plan(tree.one(batch_size=4, steps=8))
    check(twin(plan, {"web": tree.root / "web"}, 24))


def check(plan) -> None:
    with closing(Stream(plan, "train")) as stream:
        table = DocumentTable(stream)
        paths = stream.files.paths()
        found = {n: Counter() for n in range(stream.num_sequences)}
        for source, numbers, parts in table.each(0, stream.num_sequences):
            assert (np.diff(parts.rows) >= 0).all()
            files = table.files(source)
            edges = table.edges(source)
            for row, document, tokens in zip(*(column.tolist() for column in parts)):
                file = next(f for f in files if f.first <= document < f.stop)
                start = int(edges[document] - stream.index.file_starts[file.number])
                assert (paths[file.number], start) not in found[numbers[row]]
                found[numbers[row]][paths[file.number], start] = tokens
        for n, own in found.items():
            expected = Counter()
            for part in origins(stream, n).documents:
                expected[part.path, part.start] += part.stop - part.first
            assert own == expected, n
