"""A text that an oracle has labelled is not asked about again, wherever its document lies now."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.labels.answers import Ledger
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.oracle import OracleResult, Record, read_records
from nmoe_core.labels.slices import LABEL_SHARDS
from nmoe_core.shards.documents import Text
from tests.core.labels.labelling import Labelling
from tests.core.small_gradings import (
    FakeOracle,
    FakeTokenizer,
    random_documents,
    slice_all,
    write_source,
)
from tests.project import contents, json_lines, read_rows

COUNT, MAX_DOC_TOKENS = 400, 64


def _label(labelling: Labelling, oracle: FakeOracle, **more: Any) -> int:
    """Label all slices of the tree; the number of records taken over."""
    slice_all(labelling.tree.data, labelling.tree.slices)
    num_reused = 0
    for split, i in LABEL_SHARDS:
        made = labelling.run(oracle, i, split, MAX_DOC_TOKENS, **more)
        num_reused += made.facts["num_reused"]
    return num_reused


def _records(labelling: Labelling) -> list[Record]:
    paths = (labelling.shard(i, split) / "scores.jsonl" for split, i in LABEL_SHARDS)
    return [record for path in paths for record in read_records(path)]


@pytest.fixture
def documents(labelling: Labelling) -> list[list[int]]:
    """Two sources of unlike documents, labelled; those of `web`."""
    documents = [[i, *row] for i, row in enumerate(random_documents(3, COUNT))]
    write_source(labelling.tree.data, "web", documents)
    assert _label(labelling, FakeOracle()) == 0
    return documents


def _grown(documents: list[list[int]]) -> list[list[int]]:
    """1 % changed, two deleted, and a new one in front, so that every document lies elsewhere."""
    changed = [
        [*row[:1], 499, *row[2:]] if i % 100 == 50 else row for i, row in enumerate(documents)
    ]
    return [[450, 451, 452, 453, 454], *changed[2:]]


def test_one_percent_changed_is_one_percent_asked_and_the_bytes_are_those_of_a_fresh_labelling(
    labelling: Labelling, documents: list[list[int]], tmp_path: Path
) -> None:
    before = {record["text_sha256"]: record["scores"] for record in _records(labelling)}
    write_source(labelling.tree.data, "web", _grown(documents), num_shards=3)
    oracle = FakeOracle()
    total = COUNT - 2 + 1 + 20
    assert _label(labelling, oracle) == total - len(oracle.asked)
    assert len(oracle.asked) == COUNT // 100 + 1
    after = _records(labelling)
    assert len(after) == total
    kept = [record for record in after if record["text_sha256"] in before]
    assert len(kept) == total - len(oracle.asked)
    assert all(record["scores"] == before[record["text_sha256"]] for record in kept)

    fresh = Labelling(tmp_path / "fresh", labelling.tree.data)
    _label(fresh, FakeOracle())
    assert _records(fresh) == after
    # Back again: all of the first texts are known still.
    write_source(labelling.tree.data, "web", documents)
    _label(labelling, oracle := FakeOracle())
    assert oracle.asked == []


def test_a_text_whose_answer_is_known_is_read_once(
    labelling: Labelling, documents: list[list[int]]
) -> None:
    first = contents(labelling.shard())
    shutil.rmtree(labelling.shard())
    read: list[str] = []
    known = labelling.documents(0, "train", MAX_DOC_TOKENS)

    def text(doc_id: str) -> Text:
        read.append(doc_id)
        return known.text(doc_id)

    ledger = Ledger(labelling.tree.answers)
    label_shard(replace(known, text=text), labelling.shard(), FakeOracle(), ledger=ledger)
    assert read == [doc_id for doc_id, _ in known.rows]
    assert contents(labelling.shard()) == first


def test_another_tokenizer_that_gives_the_same_texts_costs_no_question(
    labelling: Labelling, documents: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shifted(FakeTokenizer):
        def decode(self, ids: np.ndarray) -> str:
            return super().decode(np.asarray(ids, np.int64) - 1)

    write_source(labelling.tree.data, "web", [[t + 1 for t in row] for row in documents])
    shift = lambda: Shifted(fingerprint="shifted")  # noqa: E731
    monkeypatch.setattr("tests.core.labels.labelling.FakeTokenizer", shift)
    _label(labelling, oracle := FakeOracle())
    assert len(oracle.asked) == 20  # the books', whose ids are as they were


@pytest.mark.parametrize("oracle", [FakeOracle(version="v2"), FakeOracle(rubric_hash="other")])
def test_answers_of_another_oracle_or_rubric_are_not_taken_over(
    labelling: Labelling, documents: list[list[int]], oracle: FakeOracle
) -> None:
    assert _label(labelling, oracle) == 0
    assert len(oracle.asked) == COUNT + 20


def test_answers_of_an_oracle_with_the_same_name_and_another_fingerprint_are_not_taken_over(
    labelling: Labelling, documents: list[list[int]]
) -> None:
    class Other(FakeOracle):
        fingerprint = "other weights"

    assert _label(labelling, other := Other()) == 0
    assert len(other.asked) == COUNT + 20


class TestLabelsOfAnEarlierVersion:
    """Records beside `started.json`, and no ledger."""

    def _age(self, labelling: Labelling, *, is_finished: bool = True) -> None:
        for split, i in LABEL_SHARDS:
            shard = labelling.shard(i, split)
            summary = json.loads((shard / "summary.json").read_text())
            started = {"fingerprints": summary["fingerprints"]}
            (shard / "started.json").write_text(json.dumps(started))
            if not is_finished:
                (shard / "summary.json").unlink()
                lines = (shard / "scores.jsonl").read_bytes().splitlines(keepends=True)
                (shard / "scores.jsonl").write_bytes(b"".join(lines[:3]) + b'{"doc_id": "torn')
        shutil.rmtree(labelling.tree.answers)

    def test_stay_as_they_are(self, labelling: Labelling, documents: list[list[int]]) -> None:
        self._age(labelling)
        before = contents(labelling.tree.labels)
        _label(labelling, oracle := FakeOracle())
        assert oracle.asked == []
        assert contents(labelling.tree.labels) == before

    def test_are_answers_for_all_slices(
        self, labelling: Labelling, documents: list[list[int]]
    ) -> None:
        self._age(labelling)
        write_source(labelling.tree.data, "web", _grown(documents), num_shards=3)
        _label(labelling, oracle := FakeOracle())
        assert len(oracle.asked) == COUNT // 100 + 1
        # Back again, and all shards have new files now: nothing was lost.
        assert not list(labelling.tree.labels.rglob("started.json"))
        write_source(labelling.tree.data, "web", documents)
        _label(labelling, oracle := FakeOracle())
        assert oracle.asked == []

    def test_are_not_lost_to_another_oracle(
        self, labelling: Labelling, documents: list[list[int]]
    ) -> None:
        first = _records(labelling)
        self._age(labelling)
        _label(labelling, FakeOracle(version="v2"))
        _label(labelling, oracle := FakeOracle())
        assert oracle.asked == []
        assert _records(labelling) == first

    def test_are_continued_after_a_kill(
        self, labelling: Labelling, documents: list[list[int]]
    ) -> None:
        first = _records(labelling)
        self._age(labelling, is_finished=False)
        _label(labelling, oracle := FakeOracle())
        assert len(oracle.asked) == len(first) - 3 * len(LABEL_SHARDS)
        assert _records(labelling) == first

    def test_with_another_or_no_digest_of_the_text_are_asked_about_again(
        self, labelling: Labelling, documents: list[list[int]]
    ) -> None:
        path = labelling.shard() / "scores.jsonl"
        self._age(labelling)
        first, second, *rest = read_rows(path)
        first["text_sha256"] = "0" * 64
        del second["text_sha256"]
        path.write_text(json_lines([first, second, *rest]))
        write_source(labelling.tree.data, "web", _grown(documents), num_shards=3)
        _label(labelling, oracle := FakeOracle())
        assert len(oracle.asked) == COUNT // 100 + 1 + 2


def test_a_beginning_that_is_all_of_another_document_does_not_make_it_a_cut_one(
    labelling: Labelling,
) -> None:
    beginning, data_root = list(range(100, 116)), labelling.tree.data
    write_source(data_root, "books", [])
    for end, num_asked in (([200, 201], 1), ([], 0), ([7], 0)):
        write_source(data_root, "web", [[*beginning, *end]] * 40)
        slice_all(data_root, labelling.tree.slices)
        oracle = FakeOracle()
        labelling.run(oracle, max_doc_tokens=16)
        assert bool(oracle.asked) == bool(num_asked)
        assert {record["truncated"] for record in labelling.records()} == {bool(end)}


def test_failed_answers_keep_their_number_of_attempts(
    labelling: Labelling, documents: list[list[int]]
) -> None:
    failing = FakeOracle(fails_on=lambda text: "w7 " in text)
    write_source(labelling.tree.data, "web", [[7, *row] for row in documents])
    _label(labelling, failing)
    num_failed = sum(not record["ok"] for record in _records(labelling))
    assert num_failed >= COUNT
    write_source(labelling.tree.data, "web", [[7, *row] for row in documents], num_shards=5)
    _label(labelling, again := FakeOracle(fails_on=lambda text: "w7 " in text), max_retries=1)
    assert set(again.attempts) == {1}
    assert len(again.asked) == num_failed


def test_a_failure_of_the_server_is_no_answer_for_other_documents_of_the_text(
    labelling: Labelling,
) -> None:
    """And once there is an answer, it is taken over by those that failed."""
    words = [7, 8, 9, 10]
    write_source(labelling.tree.data, "web", [words] * 200)
    slice_all(labelling.tree.data, labelling.tree.slices)

    def fail(results: Any) -> Any:
        return ((i, OracleResult(None, "OOM", "http_500", is_answer=False)) for i, _ in results)

    def label(i: int, oracle: FakeOracle) -> dict[str, Any]:
        return labelling.run(oracle, i).facts

    failing, oracle = FakeOracle(change=fail), FakeOracle()
    assert label(0, failing)["parsed"] == 0
    text = FakeTokenizer().decode(np.array(words))
    assert failing.asked.count(text) == 1
    for i in (1, 2, 0):
        facts = label(i, oracle)
        assert facts["parsed"] == facts["total"] == facts["num_new"] + facts["num_reused"]
    assert oracle.asked.count(text) == 1
    assert set(oracle.attempts) == {0}
