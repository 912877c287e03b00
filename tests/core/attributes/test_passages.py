"""Passages that several documents have, against plain searches of all pairs of documents."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("numba")
pytest.importorskip("pyarrow")
pytest.importorskip("pydivsufsort")
from numba.typed import List

from loader.files.format import load_manifest
from nmoe_core.attributes.contamination import contamination
from nmoe_core.attributes.copies.passages import licences
from nmoe_core.attributes.copies.windows import shared_windows
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.shards.attribute_file import read_attribute
from nmoe_core.shards.documents import ingest_ids, shard_files
from nmoe_core.shards.suffixes import suffix_array
from nmoe_core.tasks.attributes import make_duplicates
from nmoe_core.text.tokenizer import load_tokenizer
from tests.project import Project, contents, jsonl_source, write_project

LEAST = 20
EOS = 0
Texts = dict[str, dict[str, str]]
Rows = dict[str, dict[str, Any]]


def prepared(directory: Path, texts: Texts, **duplicates: Any) -> Project:
    sources = [
        jsonl_source(name, [{"id": i, "text": text} for i, text in found.items()])
        for name, found in texts.items()
    ]
    settings = {
        "attributes": {"use": ["duplicates"]},
        "duplicates": {"repeated_tokens": LEAST, **duplicates},
        "seen": {"part_tokens": 300},
        "prep": {"num_shards": 3},
    }
    project = write_project(directory, sources, settings)
    assert main(["prep-mixture", "--config", str(project.config), "--force"]) == 0
    assert main(["attributes", "--config", str(project.config)]) == 0
    return project


def shards_of(run: Run) -> list[Any]:
    names = sorted(path.name for path in run.tree.data.iterdir())
    return [shard for name in names for shard in run.tree.shards(name, 3)]


def rows_of(project: Project) -> Rows:
    """The rows of duplicates, by source and ingest id."""
    found = {}
    for shard in shards_of(project.run):
        ids = [name for name, _ in ingest_ids(load_manifest(shard.manifest))]
        rows = read_attribute(shard.attribute("duplicates")).to_pylist()
        found |= {f"{shard.source}//{i}": row for i, row in zip(ids, rows, strict=True)}
    return found


def tokens_of(run: Run) -> dict[str, list[int]]:
    """The tokens of each document without its EOS."""
    found = {}
    for shard in shards_of(run):
        for file in shard_files(run.tree.data, load_manifest(shard.manifest)):
            for _, tokens, (name, _) in file.documents():
                found[f"{shard.source}//{name}"] = tokens.tolist()[:-1]
    return found


def covered(own: Sequence[int], other: Sequence[int], size: int) -> set[int]:
    """Places of tokens in windows that both have, by comparing all pairs of windows."""
    found: set[int] = set()
    for i in range(len(own) - size + 1):
        if any(own[i : i + size] == other[k : k + size] for k in range(len(other) - size + 1)):
            found.update(range(i, i + size))
    return found


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"{rng.choice('bcdfgklmnprst')}{rng.randrange(10**4)}" for _ in range(count))


def test_windows_of_any_parts_are_those_of_a_search_of_all_pairs() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        documents = [
            [rng.randrange(1, rng.choice((3, 9))) for _ in range(rng.randrange(0, 40))]
            for _ in range(rng.randrange(1, 14))
        ]
        size = rng.randrange(2, 7)
        ranks = [*range(len(documents))]
        rng.shuffle(ranks)
        ranks = [-1 if rng.random() < 0.2 else rank for rank in ranks]
        cuts = sorted({0, len(documents), *(rng.randrange(len(documents)) for _ in range(3))})
        parts: list[list[np.ndarray]] = [[], [], []]
        for first, last in pairwise(cuts):
            part = [[*tokens, EOS] for tokens in documents[first:last]]
            flat = np.array([token for one in part for token in one], np.uint16)
            parts[0].append(flat)
            parts[1].append(suffix_array(flat))
            parts[2].append(np.cumsum([0, *map(len, part)]))
        lists = tuple(map(List, parts))
        marks = np.array([EOS, -1])
        found = shared_windows(lists, np.array(cuts[:-1]), np.array(ranks), size, marks)
        expected = set()
        for i, own in enumerate(documents):
            for place in range(len(own) - size + 1):
                window = own[place : place + size]
                others = [
                    k
                    for k, other in enumerate(documents)
                    if 0 <= ranks[k] < ranks[i]
                    and any(other[m : m + size] == window for m in range(len(other)))
                ]
                holders = sorted(others, key=ranks.__getitem__)[:4]
                expected |= {(i, place, k) for k in holders}
        assert {tuple(row) for row in found.tolist()} == expected
        assert len(found) == len(expected)


def test_shares_are_those_of_a_search_of_all_pairs_of_documents(tmp_path: Path) -> None:
    rng = random.Random(7)
    texts: Texts = {"books": {}, "code": {}, "web": {}}
    passages = [words(rng, rng.randrange(5, 30)) for _ in range(12)]
    for source in texts:
        for i in range(9):
            chosen = rng.sample(passages, rng.randrange(3))
            pieces = [piece for one in chosen for piece in (words(rng, rng.randrange(9)), one)]
            texts[source][f"d{i}"] = " ".join([*pieces, words(rng, rng.randrange(5, 25))])
    texts["web"]["copy"] = texts["books"]["d1"]
    project = prepared(tmp_path, texts, priority=["web"], contained=0.6)
    rows = rows_of(project)
    tokens = tokens_of(project.run)
    order = sorted(
        (name for name in rows if rows[name]["is_survivor"]),
        key=lambda name: (
            not name.startswith("web"),
            name.split("//")[0],
            -len(tokens[name]),
            name.split("//")[1],
        ),
    )
    assert rows["books//d1"]["exact_of"] == "web//copy"
    assert rows["books//d1"]["repeated_share"] is None
    found = 0
    for i, name in enumerate(order):
        places = {other: covered(tokens[name], tokens[other], LEAST) for other in order[:i]}
        share = len(set().union(*places.values())) / len(tokens[name])
        assert rows[name]["repeated_share"] == pytest.approx(share)
        most = max((len(one) for one in places.values()), default=0)
        first = next((other for other in places if len(places[other]) == most), None)
        assert rows[name]["repeated_of"] == (first if most else None)
        if most:
            found += 1
            assert rows[name]["repeated_of_share"] == pytest.approx(most / len(tokens[name]))
        is_part = most / len(tokens[name]) >= 0.6
        assert rows[name]["contained_in"] == (first if is_part else None)
    assert found >= 5
    assert not [*(tmp_path / "out" / "attributes").glob("tmp*")]


FIVE_SCRIPTS = {
    "latin": "The river rose in the night, and before morning it had carried away the old bridge "
    "together with two of the boats that the ferryman kept below the mill for the summer.",
    "chinese": "夜里河水涨了起来，天还没有亮，旧桥就被冲走了，"
    "磨坊下面船夫夏天用的两条船也一起漂到了下游。",
    "arabic": "ارتفع النهر في الليل، وقبل الصباح جرف الجسر القديم مع قاربين كان صاحب العبارة يحتفظ "
    "بهما تحت الطاحونة لفصل الصيف؟ لم يصدق أحد ما حدث هناك في تلك الليلة الطويلة.",
    "hindi": "रात में नदी का पानी बढ़ गया और सुबह होने से पहले ही पुराना पुल बह गया। चक्की के नीचे "
    "नाविक की दो नावें भी उसके साथ चली गईं॥",
    "khmer": "នៅពេលយប់ទឹកទន្លេបានឡើងខ្ពស់ ហើយមុនពេលព្រឹកវាបានបោកស្ពានចាស់ទៅជាមួយទូកពីរ។",
}


def test_a_passage_is_found_in_every_script_and_the_first_document_keeps_it(tmp_path: Path) -> None:
    rng = random.Random(3)
    texts: Texts = {"web": {}}
    for name, passage in FIVE_SCRIPTS.items():
        texts["web"][f"{name} long"] = f"{words(rng, 60)} {passage} {words(rng, 60)}"
        texts["web"][f"{name} part"] = f"{passage}"
        texts["web"][f"{name} end"] = f"{words(rng, 30)} {passage}"
    rows = rows_of(prepared(tmp_path, texts, contained=0.9, jaccard=1))
    for name in FIVE_SCRIPTS:
        longest, part, end = (rows[f"web//{name} {kind}"] for kind in ("long", "part", "end"))
        assert longest["repeated_share"] == 0
        assert longest["repeated_of"] is None
        assert part["contained_in"] == f"web//{name} long"
        assert part["repeated_share"] > 0.9
        assert end["repeated_of"] == f"web//{name} long"
        assert end["contained_in"] is None
        assert 0 < end["repeated_share"] < 0.9


MIT = """# Copyright (c) {year} {owner}
#
# Permission is hereby granted, free of charge, to any person obtaining a copy
# of this software and associated documentation files (the "Software"), to deal
# in the Software without restriction, including without limitation the rights
# to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
# copies of the Software, and to permit persons to whom the Software is
# furnished to do so, subject to the following conditions:
"""
APACHE = """/*
 * Licensed under the Apache License, Version 2.0 (the "License");
 * you may not use this file except in compliance with the License.
 * You may obtain a copy of the License at
 *
 *     http://www.apache.org/licenses/LICENSE-2.0
 *
 * Unless required by applicable law or agreed to in writing, software
 * distributed under the License is distributed on an "AS IS" BASIS,
 * WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
 */
"""
GPL = """// This program is free software: you can redistribute it and/or modify
// it under the terms of the GNU General Public License as published by
// the Free Software Foundation, either version 3 of the License, or
// (at your option) any later version.
"""


@pytest.mark.parametrize("is_counted", [False, True])
def test_licences_are_not_repeated_text_unless_they_are_asked_for(
    tmp_path: Path, is_counted: bool
) -> None:
    rng = random.Random(5)
    shared = words(rng, 40)
    texts: Texts = {"code": {}}
    for kind, header in {"mit": MIT, "apache": APACHE, "gpl": GPL}.items():
        for i in range(2):
            body = words(rng, 50 + 20 * i)
            texts["code"][f"{kind} {i}"] = header.format(year=2020, owner="The Owners") + body
    texts["code"]["a"] = f"{APACHE} {shared} {words(rng, 90)}"
    texts["code"]["b"] = f"{APACHE} {shared} {words(rng, 60)}"
    project = prepared(tmp_path, texts, count_licences=is_counted)
    rows = rows_of(project)
    for kind in ("mit", "apache", "gpl"):
        row = rows[f"code//{kind} 0"]
        assert (row["repeated_share"] > 0) == is_counted
        assert (row["repeated_of"] is not None) == is_counted
    assert rows["code//b"]["repeated_of"] == "code//a"
    tokens = load_tokenizer(project.run.tokenizer).rows([APACHE, shared, texts["code"]["b"]])
    licence, own, whole = map(len, tokens)
    expected = (own + licence * is_counted) / whole
    assert rows["code//b"]["repeated_share"] == pytest.approx(expected, abs=0.02)


def test_the_texts_of_licences_have_the_common_ones() -> None:
    texts = [
        MIT,
        APACHE,
        GPL,
        "This text of many words is about rivers, mills and the boats below.",
    ]
    column = pa.array(texts, pa.large_string())
    shares = contamination(column, licences()).column("contamination").to_pylist()
    assert [share > 0.75 for share in shares] == [True, True, True, False]


def test_after_a_change_the_rows_are_those_of_a_fresh_run(tmp_path: Path) -> None:
    rng = random.Random(1)
    passage = words(rng, 30)
    texts: Texts = {
        "books": {f"d{i}": f"{words(rng, 30 + i)} {passage}" for i in range(4)},
        "web": {f"d{i}": f"{passage} {words(rng, 50 + 9 * i)}" for i in range(4)},
    }
    project = prepared(tmp_path / "a", texts, priority=["web"])
    assert rows_of(project)["books//d0"]["repeated_of"] == "web//d3"
    texts["web"]["d3"] = words(rng, 40)
    del texts["books"]["d1"]
    again = prepared(tmp_path / "a", texts, priority=["web"])
    fresh = prepared(tmp_path / "b", texts, priority=["web"])
    assert rows_of(again) == rows_of(fresh)
    assert rows_of(again)["books//d0"]["repeated_of"] not in (None, "web//d3")
    before = contents(project.directory / "out" / "attributes", "duplicates.*")
    assert not make_duplicates(again.run).facts["changed"]
    assert contents(project.directory / "out" / "attributes", "duplicates.*") == before
