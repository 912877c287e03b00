import dataclasses
import gc
import json
import random
import shutil
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import LabelError
from nmoe_core.labels.agreement import merge_noise
from nmoe_core.labels.documents import Documents
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.label_files import label_status, merge_labels, read_labels
from nmoe_core.labels.oracle import read_records
from nmoe_core.labels.scores import QUALITY
from nmoe_core.labels.slices import read_slice
from nmoe_core.shards.documents import Text
from tests.core.labels.labelling import Labelling
from tests.core.small_gradings import EOS, FakeOracle, random_documents, slice_all, write_source
from tests.project import json_lines, read_rows
from tests.refusals import refused


def test_records_name_what_was_scored_by_whom_and_are_made_once(labelling: Labelling) -> None:
    oracle = FakeOracle()
    made = labelling.run(oracle)
    records, summary = labelling.records(), labelling.summary()
    rows = read_slice(labelling.tree.slice("train", 0))
    assert [(r["doc_id"], r["source"]) for r in records] == rows
    assert list(records[0]) == [
        *("doc_id", "source", "ok", "snippet", "scores", "aggregated"),
        *("scorer_model", "scorer_version", "rubric_hash", "finish_reason"),
        *("attempts", "num_new_tokens", "salvaged", "truncated", "text_sha256"),
    ]
    for text, record in zip(oracle.asked, records):
        assert f"w{EOS}" not in text
        assert record["snippet"] == text[:256]
        assert record["aggregated"] == pytest.approx(sum(record["scores"].values()) / 20)
    assert max(len(text.split()) for text in oracle.asked) == 16
    counts = {"total": len(rows), "parsed": len(rows), "salvaged": 0, "num_reused": 0}
    spent = {"replies": len(rows), "retries": 0, "tokens_in": 0, "tokens_out": 0, "failed": ""}
    assert made.facts == counts | spent | {"num_new": len(rows)}
    assert summary["total"] == summary["parsed"] == len(rows)
    assert summary["scores_sha256"] == made.digest
    assert sum(s["count"] for s in summary["per_source"].values()) == len(rows)
    assert (summary["scorer_model"], summary["resumed_from"]) == ("fake", None)

    before = {p: p.stat().st_mtime_ns for p in labelling.shard().iterdir()}
    again = labelling.run(oracle)
    assert (again.digest, len(oracle.asked)) == (made.digest, len(rows))
    assert again.facts == made.facts | {"num_new": 0, "replies": 0}
    assert {p: p.stat().st_mtime_ns for p in labelling.shard().iterdir()} == before


def test_memory_does_not_grow_with_the_length_of_the_answers(tmp_path: Path) -> None:
    rows = [(f"document {i}", "web") for i in range(1500)]
    oracle, bytes_at = FakeOracle(), dict[int, int]()
    oracle.change = lambda found: ((i, dataclasses.replace(r, raw="x" * 20_000)) for i, r in found)

    def text(doc_id: str) -> Text:
        return Text(f"w1 w{doc_id.split()[1]}", False)

    def measure(num_done: int, _: int) -> None:
        if num_done in (500, 1500):
            oracle.asked.clear()
            oracle.attempts.clear()
            gc.collect()
            bytes_at[num_done] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        documents = Documents(rows, {}, text, lambda doc_id: 2)
        label_shard(documents, tmp_path, oracle, progress=measure)
    finally:
        tracemalloc.stop()
    assert bytes_at[1500] - bytes_at[500] < 600 * 1000, "600 bytes per answer of 20,000"


@pytest.mark.parametrize("torn", [b"", b'{"text_sha256": "we', b"\0\0\0\0"])
def test_a_killed_run_ends_in_the_bytes_of_a_whole_one(labelling: Labelling, torn: bytes) -> None:
    labelling.run()
    whole, lines = labelling.files(), labelling.lines()
    labelling.break_off(*lines[:3], torn)
    with pytest.raises(LabelError):
        labelling.run(FakeOracle(change=lambda results: islice(results, 2)))
    # Killed a second time: a reply glued to the torn line would be none.
    assert len(labelling.lines()) == 5
    # A second reply to a question that was answered does not count.
    other = json.loads(lines[0])
    other["body"] = json.dumps(json.loads(other["body"]) | {"scores": None})
    labelling.break_off(*labelling.lines(), json.dumps(other).encode() + b"\n")
    oracle = FakeOracle()
    assert labelling.run(oracle, max_retries=1).facts["num_reused"] == 5
    assert labelling.files() == whole
    assert len(oracle.asked) == len(lines) - 5


def test_a_change_of_oracle_or_rubric_loses_no_answer_and_the_way_back_asks_nothing(
    labelling: Labelling,
) -> None:
    labelling.run()
    first = labelling.files()
    oracles = [FakeOracle(version="v2"), FakeOracle(rubric_hash="other")]
    for oracle in oracles:
        labelling.run(oracle)
        assert len(oracle.asked) == len(read_slice(labelling.tree.slice("train", 0)))
        assert {r["scorer_version"] for r in labelling.records()} == {oracle.version}
    for oracle in (FakeOracle(), *oracles, FakeOracle()):
        oracle.asked.clear()
        labelling.run(oracle)
        assert oracle.asked == []
    assert labelling.files() == first


def test_other_documents_slices_or_lengths_are_labelled_anew(labelling: Labelling) -> None:
    labelling.run()
    # Other documents under the same ids: the lengths stay, the tokens change.
    documents = [[(t + 7) % 500 for t in d] for d in random_documents(1, 40)]
    write_source(labelling.tree.data, "web", documents)
    path = labelling.tree.slice("train", 0)
    before = path.read_bytes()
    slice_all(labelling.tree.data, labelling.tree.slices)
    assert path.read_bytes() == before
    made = labelling.run()
    num_changed = sum(b'"web"' in row for row in before.splitlines())
    assert made.facts["num_new"] == num_changed

    write_source(labelling.tree.data, "web", random_documents(5, 30))
    slice_all(labelling.tree.data, labelling.tree.slices)
    assert labelling.run().facts["num_new"] > 0
    rows = read_slice(path)
    assert [r["doc_id"] for r in labelling.records()] == [doc_id for doc_id, _ in rows]

    oracle = FakeOracle()
    labelling.run(oracle, max_doc_tokens=4)
    assert {len(text.split()) for text in oracle.asked} <= set(range(5))
    assert len(oracle.asked) == len(rows)


def test_refused_answers_are_kept_raw_and_asked_again_only_on_request(labelling: Labelling) -> None:
    failing = FakeOracle(fails_on=lambda text: True)
    total = labelling.run(failing).facts["total"]
    outcomes = {(r["ok"], r["raw"], r["finish_reason"]) for r in labelling.records()}
    assert outcomes == {(False, "no scores", "length")}
    assert labelling.run().facts["num_new"] == 0
    # No document is asked about more often than allowed, and the oracle knows how often it was.
    for _ in range(4):
        labelling.run(failing, max_retries=2)
    assert sorted(failing.attempts) == [0] * total + [1] * total + [2] * total
    again = FakeOracle()
    facts = labelling.run(again, max_retries=3).facts
    assert (facts["parsed"], facts["num_new"], again.attempts) == (total, total, [3] * total)
    records, rows = labelling.records(), read_slice(labelling.tree.slice("train", 0))
    assert [r["doc_id"] for r in records] == [doc_id for doc_id, _ in rows]
    assert {r["attempts"] for r in records} == {4}
    assert labelling.run(max_retries=3).facts["num_new"] == 0


def test_a_broken_line_inside_the_ledger_is_refused_with_its_place(labelling: Labelling) -> None:
    labelling.run()
    first, *others = labelling.lines()
    labelling.break_off(first, b"{broken\n", *others)
    with refused("E-LABEL-CORRUPT", match=rf"shard_0\.jsonl, byte {len(first)}"):
        labelling.run()


def test_a_slice_of_ones_own_may_be_empty_and_names_no_document_twice(labelling: Labelling) -> None:
    (labelling.tree.slices / "slices_manifest.json").unlink()
    path = labelling.tree.slice("train", 0)
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[0])
    with refused("E-DOCID", match="occurs twice"):
        labelling.run()
    assert not labelling.shard().exists()
    path.write_bytes(b"")
    facts = labelling.run().facts
    assert (facts["total"], facts["parsed"]) == (0, 0)
    assert labelling.files()["scores.jsonl"] == b""
    assert labelling.summary()["parse_rate"] == 1.0


def test_labels_merge_once_every_shard_is_finished_by_one_scorer(labelling: Labelling) -> None:
    labelling.run_all()
    summary = labelling.shard(5) / "summary.json"
    finished = summary.read_bytes()
    summary.unlink()
    with refused("E-LABEL-COVERAGE"):
        merge_labels(labelling.tree, "train")
    labelling.run(FakeOracle(version="v2"), i=5)
    with refused("E-LABEL-MIXED"):
        merge_labels(labelling.tree, "train")
    labelling.run(i=5)
    assert summary.read_bytes() == finished
    assert not (labelling.tree.labels / "merged").exists()

    path = labelling.tree.merged_labels("train")
    assert merge_labels(labelling.tree, "train").facts["changed"]
    shards = [read_slice(labelling.tree.slice("train", i)) for i in range(8)]
    ids = [record["doc_id"] for record in read_records(path)]
    assert ids == [doc_id for rows in shards for doc_id, _ in rows]
    payload, mtime = path.read_bytes(), path.stat().st_mtime_ns
    assert not merge_labels(labelling.tree, "train").facts["changed"]
    assert path.stat().st_mtime_ns == mtime
    path.with_name("labels_train.summary.json").unlink()
    merge_labels(labelling.tree, "train")
    assert path.read_bytes() == payload
    labels = read_labels(path)
    assert labels.scores.shape == (len(ids), 5)
    assert (labels.scorer, labels.num_failed) == (("fake", "v1", "r"), 0)


def test_of_several_records_of_a_document_the_last_parsed_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "labels_val.jsonl"
    with refused("E-LABEL-MISSING"):
        read_labels(path)

    def write(*rows: tuple[str, int | None]) -> None:
        records = [{"doc_id": name, "source": "web", "ok": g is not None} for name, g in rows]
        for record, (_, grade) in zip(records, rows):
            record |= {} if grade is None else {"scores": dict.fromkeys(QUALITY.names, grade)}
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    write(("a", 1), ("b", None), ("c", None), ("a", 3), ("a", None), ("b", 2))
    labels = read_labels(path)
    assert (labels.doc_ids, labels.num_failed) == (["a", "b"], 1)
    assert labels.scores[:, 0].tolist() == [3.0, 2.0]
    write(("a", 9))
    with refused("E-LABEL-SCORES"):
        read_labels(path)


def test_labels_of_which_some_name_no_scorer_are_refused_in_those_words(tmp_path: Path) -> None:
    path, scorer = tmp_path / "labels_val.jsonl", FakeOracle().scorer._asdict()
    label = {"source": "web", "ok": False}
    rows = [label | {"doc_id": "a"}, label | scorer | {"doc_id": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with refused("E-LABEL-MIXED", "an unnamed scorer and fake/v1/r"):
        read_labels(path)


def test_the_bytes_do_not_depend_on_the_order_of_answers(labelling: Labelling) -> None:
    def out_of_order(seed: int) -> FakeOracle:
        rng = random.Random(seed)
        return FakeOracle(change=lambda results: sorted(results, key=lambda _: rng.random()))

    labelling.run()
    whole, lines = labelling.files(), labelling.lines()
    for seed in range(3):
        labelling.break_off()
        labelling.run(out_of_order(seed))
        assert labelling.files() == whole
    labelling.break_off(lines[4], lines[1], lines[2])
    assert labelling.run(out_of_order(9)).facts["num_reused"] == 3
    assert labelling.files() == whole


def test_an_oracle_that_does_not_answer_each_question_once_is_refused(labelling: Labelling) -> None:
    with refused("E-LABEL-ORACLE", match="found 2 results"):
        labelling.run(FakeOracle(change=lambda results: islice(results, 2)))
    assert not (labelling.shard() / "summary.json").exists()
    twice = FakeOracle(change=lambda results: (item for item in results for _ in range(2)))
    with refused("E-LABEL-ORACLE", match="to question 0"):
        labelling.run(twice)
    assert labelling.run().facts["num_reused"] == 3


def test_progress_is_on_disk_while_labelling_and_gone_after_it(
    labelling: Labelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.labels.label.PARTIAL_EVERY", 2)
    partial = labelling.shard() / "summary.partial.json"
    seen: list[dict[str, Any]] = []

    def look(done: int, total: int) -> None:
        if partial.exists():
            seen.append(json.loads(partial.read_text()))

    failing = FakeOracle(fails_on=lambda text: len(failing.asked) % 2 == 0)
    labelling.run(failing, progress=look)
    assert seen[0] == {"total_seen": 2, "parsed": 1, "parse_rate": 0.5}
    assert not partial.exists()
    # As runs leave them that are killed when the summary is written, and before other labels.
    lefts = [partial, *(partial.with_name(name) for name in ("known.jsonl.tmp.4194305", ".lock"))]
    for left in lefts:
        left.touch()
    labelling.run(failing)
    assert not any(left.exists() for left in lefts)


def test_a_sample_is_labelled_twice_and_its_agreement_is_written(labelling: Labelling) -> None:
    def noisy(results: Any) -> Any:
        for i, result in results:
            density = (result.scores["density"] + (i + 1) % 2) % 5
            yield i, dataclasses.replace(result, scores=result.scores | {"density": density})

    labelling.run_all()
    assert merge_noise(labelling.tree, "val") is None
    labelling.run_again(0, 3, FakeOracle(version="mute", fails_on=bool))
    none = (merge_noise(labelling.tree, "val") or {})["kinds"]["order"]
    keys = ("asked", "count", "reliability", "mae")
    assert [none[key] for key in keys] == [1, 0, None, None]
    shutil.rmtree(labelling.shard(0, "val") / "relabelled")
    num_rows = 0
    for i in range(8):
        documents = labelling.documents(i, "val")
        num_rows += min(3, len(documents.rows))
        again = FakeOracle(rubric_hash="turned", change=noisy)
        labelling.run_again(i, 3, again)
    noise = merge_noise(labelling.tree, "val") or {}
    assert list(noise["kinds"]) == ["order"]
    order = noise["kinds"]["order"]
    assert order["asked"] == order["count"] == num_rows
    assert order["same_grade"]["helpfulness"] == 1.0
    assert order["same_grade"]["density"] < 1.0
    assert order["mae"] > 0
    for i in range(8):
        oracle = FakeOracle(version="v1/sampled")
        labelling.run_again(i, 3, oracle, "resampled")
    noise = merge_noise(labelling.tree, "val") or {}
    order, sampling = noise["kinds"]["order"], noise["kinds"]["sampling"]
    assert order["reliability"] < sampling["reliability"] == pytest.approx(1)
    assert "ceiling" not in noise | sampling, "sampled answers are noisier than labels"
    written = json.loads((labelling.tree.labels / "merged" / "noise_val.json").read_text())
    assert {key: written[key] for key in noise} == noise


def test_a_sample_of_earlier_labels_counts_only_documents_whose_labels_are_of_the_same_text(
    labelling: Labelling,
) -> None:
    labelling.run_all()
    for i in range(8):
        labelling.run_again(i, 3)
    asked = (merge_noise(labelling.tree, "val") or {})["kinds"]["order"]["asked"]
    # Labelled again without the sample: one shard has none of its documents, one other texts.
    for i, more in enumerate(({"doc_id": "another"}, {"text_sha256": "0" * 64})):
        path = labelling.shard(i, "val") / "scores.jsonl"
        asked -= len(read_rows(path.with_name("relabelled") / path.name))
        path.with_name("summary.json").unlink()
        path.write_text(json_lines(row | more for row in read_rows(path)))
    assert (merge_noise(labelling.tree, "val") or {})["kinds"]["order"]["asked"] == asked > 0


def test_pending_running_and_done_are_told_apart(labelling: Labelling, tmp_path: Path) -> None:
    for i in range(3):
        labelling.run(i=i)
    for i in (1, 2):
        (labelling.shard(i) / "summary.json").unlink()
    with output_lock(labelling.shard(2)):
        rows = label_status(labelling.tree)
    assert [row.state for row in rows] == ["DONE", "PENDING", "RUNNING", *["PENDING"] * 21]
    assert [(row.split, row.shard) for row in rows][7:9] == [("train", 7), ("val", 0)]
    total = len(labelling.lines())
    assert (rows[0].documents, rows[0].labelled, rows[0].parsed) == (total, total, total)
    assert (rows[0].scorer, rows[1].labelled > 0, rows[9].labelled) == ("fake/v1", True, 0)
    unsliced = dataclasses.replace(labelling.tree, slices=tmp_path / "none")
    assert label_status(unsliced)[3].documents is None
