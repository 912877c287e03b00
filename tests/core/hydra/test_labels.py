from __future__ import annotations

import dataclasses
import json
import random
import shutil
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import FormatError, LabelError
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.document_texts import ShardDocuments
from nmoe_core.labels.files import merge_labels, read_labels
from nmoe_core.labels.label import LabelReport, label_shard
from nmoe_core.labels.noise import agreement, label_again, merge_noise
from nmoe_core.labels.records import read_records
from nmoe_core.labels.slices import read_slice
from nmoe_core.labels.status import label_status


class Labelling:
    """Labels slice shards of one tree, with the fakes."""

    def __init__(self, base: Path, data_root: Path, world: SimpleNamespace, rubric: Rubric) -> None:
        self.world, self.rubric, self.data_root = world, rubric, data_root
        self.labels = base / "labels"
        self.slices = world.slice_all(data_root, base / "slices")

    def shard(self, i: int, split: str = "train") -> Path:
        return self.labels / split / f"shard_{i}"

    def documents(self, i: int, split: str, max_doc_tokens: int = 16) -> ShardDocuments:
        return ShardDocuments(
            self.slices / f"{split}_shard_{i:02d}",
            self.data_root,
            self.world.FakeTokenizer(),
            max_doc_tokens,
            self.world.EOS,
        )

    def run(self, i: int = 0, split: str = "train", oracle: Any = None, **more: Any) -> LabelReport:
        documents = self.documents(i, split, more.pop("max_doc_tokens", 16))
        rubric = more.pop("rubric", self.rubric)
        return label_shard(
            documents, self.shard(i, split), oracle or self.world.FakeOracle(), rubric, **more
        )

    def run_all(self, **more: Any) -> None:
        for split in ("train", "val"):
            for i in range(8):
                self.run(i, split, **more)

    def files(self, i: int = 0) -> dict[str, bytes]:
        return {
            p.name: p.read_bytes() for p in sorted(self.shard(i).iterdir()) if p.name != ".lock"
        }


@pytest.fixture
def labelling(tmp_path: Path, data_root: Path, world: SimpleNamespace, rubric: Rubric) -> Labelling:
    return Labelling(tmp_path, data_root, world, rubric)


def test_a_record_names_document_scores_and_scorer_and_never_shows_the_eos(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    oracle = world.FakeOracle()
    report = labelling.run(oracle=oracle)
    records = read_records(labelling.shard(0) / "scores.jsonl")
    rows = read_slice(labelling.slices / "train_shard_00")
    assert [(r["doc_id"], r["source"]) for r in records] == rows
    assert list(records[0]) == [
        *("doc_id", "source", "ok", "snippet", "scores", "aggregated"),
        *("scorer_model", "scorer_version", "rubric_hash", "finish_reason"),
        *("attempts", "num_new_tokens", "salvaged", "truncated"),
    ]
    for text, record in zip(oracle.asked, records):
        assert f"w{world.EOS}" not in text
        assert len(text.split()) <= 16
        assert record["snippet"] == text[:256]
        assert record["aggregated"] == pytest.approx(sum(record["scores"].values()) / 20)
    assert any(len(text.split()) == 16 for text in oracle.asked)
    summary = json.loads((labelling.shard(0) / "summary.json").read_text())
    assert summary["total"] == summary["parsed"] == report.total == len(rows)
    assert sum(s["count"] for s in summary["per_source"].values()) == len(rows)
    assert (summary["scorer_model"], summary["resumed_from"]) == ("fake", None)


@pytest.mark.parametrize("torn", [b"", b'{"doc_id": "web//we', b"\0\0\0\0"])
def test_a_killed_run_resumes_to_the_bytes_of_an_uninterrupted_one(
    labelling: Labelling, world: SimpleNamespace, torn: bytes
) -> None:
    labelling.run(0)
    whole = labelling.files()
    scores = labelling.shard(0) / "scores.jsonl"
    lines = whole["scores.jsonl"].splitlines(keepends=True)
    scores.write_bytes(b"".join(lines[:3]) + torn)
    (labelling.shard(0) / "summary.json").unlink()
    oracle = world.FakeOracle()
    report = labelling.run(0, oracle=oracle)
    assert labelling.files() == whole
    assert report.resumed_from == 3
    assert len(oracle.asked) == len(lines) - 3


def test_a_torn_line_is_gone_before_the_next_record_is_written(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    class Stops(world.FakeOracle):
        def label(self, questions):
            return islice(super().label(questions), 2)

    labelling.run(0)
    whole = labelling.files()
    scores = labelling.shard(0) / "scores.jsonl"
    first = whole["scores.jsonl"].splitlines(keepends=True)[0]
    scores.write_bytes(first + b'{"doc_id": "web//we')
    (labelling.shard(0) / "summary.json").unlink()
    with pytest.raises(LabelError):
        labelling.run(0, oracle=Stops())
    # Killed a second time: a record glued to the torn line would be none.
    assert [bool(record["ok"]) for record in read_records(scores)] == [True] * 3
    assert labelling.run(0).resumed_from == 3
    assert labelling.files() == whole


def test_a_failed_record_after_a_parsed_one_of_the_same_document_does_not_count(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    labelling.run(0)
    whole = labelling.files()
    scores = labelling.shard(0) / "scores.jsonl"
    lines = whole["scores.jsonl"].splitlines(keepends=True)
    failed = json.loads(lines[0]) | {"ok": False, "raw": "?"}
    scores.write_bytes(b"".join(lines[:4]) + json.dumps(failed).encode() + b"\n")
    (labelling.shard(0) / "summary.json").unlink()
    oracle = world.FakeOracle()
    assert labelling.run(0, oracle=oracle, retry_failed=1).resumed_from == 4
    assert labelling.files() == whole
    assert len(oracle.asked) == len(lines) - 4


def test_an_oracle_that_stops_early_leaves_its_records_and_the_next_run_goes_on(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    class Stops(world.FakeOracle):
        def label(self, questions):
            return islice(super().label(questions), 2)

    # As if the records of a finished shard had been lost: its summary may not outlive them.
    labelling.run()
    (labelling.shard(0) / "scores.jsonl").unlink()
    with pytest.raises(LabelError) as refused:
        labelling.run(oracle=Stops())
    assert refused.value.code == "E-LABEL-ORACLE"
    assert not (labelling.shard(0) / "summary.json").exists()
    assert labelling.run().resumed_from == 2


def test_a_second_run_asks_nothing_and_writes_nothing(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    labelling.run()
    before = {p: p.stat().st_mtime_ns for p in labelling.shard(0).iterdir()}
    oracle = world.FakeOracle()
    assert labelling.run(oracle=oracle).is_current
    assert not oracle.asked
    assert {p: p.stat().st_mtime_ns for p in labelling.shard(0).iterdir()} == before


def test_labels_of_another_scorer_or_rubric_are_refused_unless_replaced(
    labelling: Labelling, world: SimpleNamespace, rubric: Rubric, tmp_path: Path
) -> None:
    labelling.run()
    kept = labelling.files()
    other_text = world.RUBRIC.read_text("utf-8").replace("Trivial", "Slight")
    (tmp_path / "other.toml").write_text(other_text)
    other_rubric = Rubric.load(tmp_path / "other.toml")
    for changes in (
        {"oracle": world.FakeOracle(scorer_version="v2")},
        {"rubric": other_rubric},
    ):
        with pytest.raises(LabelError) as refused:
            labelling.run(**changes)
        assert refused.value.code == "E-LABEL-MIXED"
        assert labelling.files() == kept
    labelling.run(oracle=world.FakeOracle(scorer_version="v2"), replace=True)
    records = read_records(labelling.shard(0) / "scores.jsonl")
    assert {record["scorer_version"] for record in records} == {"v2"}
    assert len(records) == len(read_slice(labelling.slices / "train_shard_00"))


def test_labels_that_do_not_say_where_they_come_from_are_refused(labelling: Labelling) -> None:
    labelling.run()
    (labelling.shard(0) / "started.json").unlink()
    (labelling.shard(0) / "summary.json").unlink()
    with pytest.raises(LabelError) as refused:
        labelling.run()
    assert refused.value.code == "E-LABEL-MIXED"


def test_a_changed_slice_or_changed_documents_start_over(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    labelling.run()
    # Other documents under the same ids: the lengths stay, the tokens change.
    documents = [[(t + 7) % 500 for t in d] for d in world.random_documents(1, 40)]
    world.write_source(labelling.data_root, "web", documents)
    before = (labelling.slices / "train_shard_00").read_bytes()
    world.slice_all(labelling.data_root, labelling.slices)
    assert (labelling.slices / "train_shard_00").read_bytes() == before
    oracle = world.FakeOracle()
    labelling.run(oracle=oracle)
    assert len(oracle.asked) == len(before.splitlines())
    world.write_source(labelling.data_root, "web", world.random_documents(5, 30))
    world.slice_all(labelling.data_root, labelling.slices)
    report = labelling.run()
    rows = read_slice(labelling.slices / "train_shard_00")
    records = read_records(labelling.shard(0) / "scores.jsonl")
    assert [r["doc_id"] for r in records] == [doc_id for doc_id, _ in rows]
    assert report.resumed_from == 0


def test_a_changed_context_starts_over(labelling: Labelling, world: SimpleNamespace) -> None:
    labelling.run()
    oracle = world.FakeOracle()
    labelling.run(oracle=oracle, max_doc_tokens=4)
    assert oracle.asked
    assert all(len(text.split()) <= 4 for text in oracle.asked)


def test_refused_answers_are_kept_raw_and_asked_again_only_on_request(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    failing = world.FakeOracle(fails_on=lambda text: "w" in text)
    report = labelling.run(oracle=failing)
    assert report.parsed == 0
    records = read_records(labelling.shard(0) / "scores.jsonl")
    assert {(r["ok"], r["raw"], r["finish_reason"]) for r in records} == {
        (False, "no scores", "length")
    }
    assert labelling.run().is_current
    again = world.FakeOracle()
    assert labelling.run(oracle=again, retry_failed=1).parsed == report.total
    assert len(again.asked) == report.total
    assert labelling.run(retry_failed=1).is_current
    for i in range(1, 8):
        labelling.run(i)
    assert (
        merge_labels(labelling.labels, "train").parsed
        == merge_labels(labelling.labels, "train").total
    )


def test_a_failing_document_is_not_asked_more_often_than_allowed(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    failing = world.FakeOracle(fails_on=lambda text: True)
    total = labelling.run(oracle=failing).total
    for _ in range(4):
        labelling.run(oracle=failing, retry_failed=2)
    assert len(failing.asked) == 3 * total


def test_a_broken_line_inside_the_file_is_refused_with_its_number(labelling: Labelling) -> None:
    labelling.run()
    scores = labelling.shard(0) / "scores.jsonl"
    lines = scores.read_bytes().splitlines(keepends=True)
    scores.write_bytes(b"".join([lines[0], b"{broken\n", *lines[1:]]))
    (labelling.shard(0) / "summary.json").unlink()
    with pytest.raises(LabelError, match=r"scores\.jsonl:2") as refused:
        labelling.run()
    assert refused.value.code == "E-LABEL-CORRUPT"


def test_an_empty_slice_makes_empty_labels(labelling: Labelling) -> None:
    (labelling.slices / "slices_manifest.json").unlink()
    (labelling.slices / "train_shard_00").write_bytes(b"")
    report = labelling.run()
    assert (report.total, report.parsed) == (0, 0)
    assert labelling.files()["scores.jsonl"] == b""
    assert json.loads(labelling.files()["summary.json"])["parse_rate"] == 1.0


def test_merged_labels_hold_every_document_of_the_split_once(labelling: Labelling) -> None:
    labelling.run_all()
    report = merge_labels(labelling.labels, "train")
    ids = [record["doc_id"] for record in read_records(report.path)]
    expected = [
        doc_id
        for i in range(8)
        for doc_id, _ in read_slice(labelling.slices / f"train_shard_{i:02d}")
    ]
    assert ids == expected
    payload, mtime = report.path.read_bytes(), report.path.stat().st_mtime_ns
    again = merge_labels(labelling.labels, "train")
    assert again.is_current
    assert report.path.stat().st_mtime_ns == mtime
    (labelling.labels / "merged" / "labels_train.summary.json").unlink()
    merge_labels(labelling.labels, "train")
    assert report.path.read_bytes() == payload
    labels = read_labels(report.path)
    assert labels.scores.shape == (len(ids), 5)
    assert labels.scorer[0] == "fake"
    assert labels.num_failed == 0


def test_unfinished_mixed_or_altered_shards_are_not_merged(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    labelling.run_all()
    (labelling.shard(5) / "summary.json").unlink()
    with pytest.raises(LabelError) as unfinished:
        merge_labels(labelling.labels, "train")
    assert unfinished.value.code == "E-LABEL-COVERAGE"
    labelling.run(5, oracle=world.FakeOracle(scorer_version="v2"), replace=True)
    with pytest.raises(LabelError) as mixed:
        merge_labels(labelling.labels, "train")
    assert mixed.value.code == "E-LABEL-MIXED"
    labelling.run(5, replace=True)
    scores = labelling.shard(5) / "scores.jsonl"
    scores.write_bytes(scores.read_bytes().replace(b'"helpfulness": ', b'"helpfulness":  '))
    with pytest.raises(LabelError) as altered:
        merge_labels(labelling.labels, "train")
    assert altered.value.code == "E-LABEL-CORRUPT"
    assert not (labelling.labels / "merged").exists()


def test_of_several_records_the_last_parsed_one_counts(
    tmp_path: Path, world: SimpleNamespace
) -> None:
    base = {"source": "web", "scorer_model": "m", "scorer_version": "v", "rubric_hash": "r"}

    def row(name: str, grade: int | None) -> dict[str, Any]:
        dims = ("helpfulness", "correctness", "coherence", "complexity", "density")
        scored = {"ok": False} if grade is None else {"scores": dict.fromkeys(dims, grade)}
        return {"doc_id": name, "ok": True, **base, **scored}

    path = tmp_path / "labels_val.jsonl"
    rows = [row("a", 1), row("b", None), row("c", None), row("a", 3), row("a", None), row("b", 2)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    labels = read_labels(path)
    assert labels.doc_ids == ["a", "b"]
    assert labels.scores[:, 0].tolist() == [3.0, 2.0]
    assert labels.num_failed == 1


def test_missing_or_malformed_labels_are_refused(tmp_path: Path, world: SimpleNamespace) -> None:
    with pytest.raises(LabelError) as missing:
        read_labels(tmp_path / "labels_val.jsonl")
    assert missing.value.code == "E-LABEL-MISSING"
    path = tmp_path / "labels_val.jsonl"
    record = {"doc_id": "a", "source": "s", "ok": True, "scores": {"helpfulness": 9}}
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(LabelError) as bad:
        read_labels(path)
    assert bad.value.code == "E-LABEL-SCORES"


class OutOfOrder:
    """An oracle whose answers end in another order than they were asked for."""

    def __init__(self, world: SimpleNamespace, seed: int) -> None:
        self._inner, self._seed = world.FakeOracle(), seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def label(self, questions: Any) -> Any:
        results = list(self._inner.label(questions))
        random.Random(self._seed).shuffle(results)
        return iter(results)


def test_the_order_of_answers_leaves_no_trace(labelling: Labelling, world: SimpleNamespace) -> None:
    labelling.run()
    whole = labelling.files()
    for seed in range(3):
        shutil.rmtree(labelling.shard(0))
        labelling.run(oracle=OutOfOrder(world, seed))
        assert labelling.files() == whole
    scores = labelling.shard(0) / "scores.jsonl"
    lines = whole["scores.jsonl"].splitlines(keepends=True)
    scores.write_bytes(b"".join([lines[4], lines[1], lines[2]]))
    (labelling.shard(0) / "summary.json").unlink()
    assert labelling.run(oracle=OutOfOrder(world, 9)).resumed_from == 3
    assert labelling.files() == whole


def test_an_oracle_that_answers_twice_or_about_nothing_is_refused(
    labelling: Labelling, world: SimpleNamespace
) -> None:
    class Twice(world.FakeOracle):
        def label(self, questions):
            for item in super().label(questions):
                yield item
                yield item

    with pytest.raises(LabelError) as refused:
        labelling.run(oracle=Twice())
    assert refused.value.code == "E-LABEL-ORACLE"


def test_a_slice_that_names_a_document_twice_is_refused(labelling: Labelling) -> None:
    (labelling.slices / "slices_manifest.json").unlink()
    path = labelling.slices / "train_shard_00"
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(FormatError, match="named twice"):
        labelling.run()
    assert not labelling.shard(0).exists()


def test_progress_is_on_disk_while_labelling_and_gone_after_it(
    labelling: Labelling, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.labels.label.PARTIAL_EVERY", 2)
    partial = labelling.shard(0) / "summary.partial.json"
    seen: list[dict[str, Any]] = []

    def look(done: int, total: int) -> None:
        if partial.exists():
            seen.append(json.loads(partial.read_text()))

    failing = world.FakeOracle(fails_on=lambda text: len(failing.asked) % 2 == 0)
    labelling.run(oracle=failing, progress=look)
    assert seen[0] == {"total_seen": 2, "parsed": 1, "parse_rate": 0.5}
    assert not partial.exists()


def test_a_sample_is_labelled_twice_with_the_rubric_turned_round(
    labelling: Labelling, world: SimpleNamespace, rubric: Rubric
) -> None:
    class Noisy(world.FakeOracle):
        def label(self, questions):
            for i, result in super().label(questions):
                scores = dict(result.scores)
                scores["density"] = (scores["density"] + len(self.asked) % 2) % 5
                yield i, dataclasses.replace(result, scores=scores)

    labelling.run_all()
    assert merge_noise(labelling.labels, "val") is None
    asked: list[Rubric] = []
    for i in range(8):
        documents = labelling.documents(i, "val")
        label_again(
            documents,
            3,
            labelling.shard(i, "val"),
            lambda turned: asked.append(turned) or Noisy(),
            rubric,
        )
    assert {turned.hash for turned in asked} == {rubric.turned().hash} != {rubric.hash}
    noise = merge_noise(labelling.labels, "val")
    assert noise is not None
    rows = sum(min(3, len(labelling.documents(i, "val").rows)) for i in range(8))
    assert noise["asked"] == noise["count"] == rows
    assert noise["same_grade"]["helpfulness"] == 1.0
    assert noise["same_grade"]["density"] < 1.0
    assert noise["mae"] > 0
    assert noise["ceiling"] == pytest.approx(noise["reliability"] ** 0.5)
    written = json.loads((labelling.labels / "merged" / "noise_val.json").read_text())
    assert {key: written[key] for key in noise} == noise


def test_noise_without_pairs_has_no_numbers() -> None:
    noise = agreement([])
    assert (noise["count"], noise["reliability"], noise["ceiling"]) == (0, None, None)


def test_status_tells_pending_running_and_done_shards_apart(labelling: Labelling) -> None:
    labelling.run(0)
    lines = len((labelling.slices / "train_shard_00").read_bytes().splitlines())
    labelling.run(1)
    (labelling.shard(1) / "summary.json").unlink()
    labelling.run(2)
    (labelling.shard(2) / "summary.json").unlink()
    with output_lock(labelling.shard(2)):
        rows = label_status(labelling.labels, labelling.slices)
    assert [row.state for row in rows] == ["DONE", "PENDING", "RUNNING", *["PENDING"] * 21]
    assert [(row.split, row.shard) for row in rows][7:9] == [("train", 7), ("val", 0)]
    assert (rows[0].documents, rows[0].labelled, rows[0].parsed) == (lines, lines, lines)
    assert rows[0].scorer == "fake/v1"
    assert rows[1].labelled > 0
    assert rows[9].labelled == 0
    nothing = label_status(labelling.labels, labelling.slices / "none")
    assert nothing[3].documents is None
