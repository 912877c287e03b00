from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.files.format import load_manifest
from nmoe_core.base.errors import CalibrationError, HeadError, SourceError
from nmoe_core.calibration.decide import decide
from nmoe_core.calibration.files import Calibration
from nmoe_core.calibration.graded import PARTIAL_NAME, PartialRows
from nmoe_core.calibration.thresholds import Thresholds
from nmoe_core.engine import Transformer
from nmoe_core.grading.grade import Grader, grade_documents, grade_rows
from nmoe_core.grading.inputs import DocIdInput, GradeDocument, TextInput
from nmoe_core.heads.scoring import HeadScores
from nmoe_core.labels.scores import UNIFORM_WEIGHTS, aggregate, as_vector
from nmoe_core.shards.documents import DocumentReader, document_ids
from tests.core.quality import EOS, MAX_CTX, Grading, rows_of, write_source


@pytest.fixture(scope="module")
def grading(
    tmp_path_factory: pytest.TempPathFactory,
    shared_data: Path,
    backbone: Transformer,
) -> Any:
    """Calibrated once; tests that change it make their own."""
    made = Grading(tmp_path_factory.mktemp("grading"), shared_data, backbone)
    made.calibrate()
    made.part_by_hand()
    return made


class BlockTokens:
    """Counts the real tokens that enter each block."""

    def __init__(self, model: Transformer) -> None:
        self.counts = [0] * len(model.blocks)
        self._hooks = [
            block.register_forward_pre_hook(self._counter(i))
            for i, block in enumerate(model.blocks)
        ]

    def _counter(self, i: int):
        def count(block: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            self.counts[i] += len(arguments[0])

        return count

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.fixture
def block_tokens(backbone: Transformer) -> Iterator[BlockTokens]:
    counter = BlockTokens(backbone)
    yield counter
    counter.close()


def test_rows_come_in_document_order_and_every_number_can_be_recomputed(grading: Any) -> None:
    report = grading.grade()
    rows = grading.graded(report)
    manifest = load_manifest(grading.manifest("web", 0))
    assert [r["doc_id"] for r in rows] == [
        str(document) for document in document_ids(grading.data, manifest)
    ]
    calibration = json.loads((grading.calibration / "calibration_summary.json").read_text())
    weights, taus = calibration["weights"], calibration
    assert {r["early_exit"] for r in rows} == {True, False}
    for row in rows:
        assert list(row) == [
            *("doc_id", "source", "scores", "aggregated"),
            *("decision", "q_probe", "early_exit", "probe_scores"),
        ]
        q_probe = float(aggregate(np.array(as_vector(row["probe_scores"])), weights))
        assert row["q_probe"] == q_probe
        assert row["early_exit"] == (q_probe < taus["tau_probe"])
        if row["early_exit"]:
            expected = (None, q_probe, "drop")
        else:
            value = float(aggregate(np.array(as_vector(row["scores"])), weights))
            expected = (row["scores"], value, decide(value, taus["tau_drop"], taus["tau_keep"]))
        assert (row["scores"], row["aggregated"], row["decision"]) == expected


def test_the_summary_counts_the_rows_and_names_what_they_were_made_from(grading: Any) -> None:
    report = grading.grade()
    rows = grading.graded(report)
    summary = json.loads(report.path.with_name("summary.json").read_text())
    counts = {
        "kept": sum(r["decision"] == "keep" for r in rows),
        "dropped": sum(r["decision"] == "drop" for r in rows),
        "band": sum(r["decision"] == "band" for r in rows),
    }
    assert {key: summary[key] for key in counts} == counts
    assert min(counts.values()) > 0, "the fixture has all three decisions"
    assert summary["per_source"] == {"web": counts}
    assert summary["total"] == report.total == len(rows)
    assert summary["early_exits"] == sum(r["early_exit"] for r in rows) == report.early_exits
    assert set(summary["fingerprints"]) == {
        *("code", "shard", "backbone", "probe", "judge", "calibration", "settings")
    }


def test_a_document_that_leaves_is_dropped_whatever_its_probe_score() -> None:
    scores = HeadScores(
        probe=np.array([[3.0] * 5, [4.0] * 5]),
        judge=np.array([[np.nan] * 5, [4.0] * 5]),
        exited=np.array([True, False]),
    )
    taus = Thresholds(tau_probe=0.9, tau_drop=0.2, tau_keep=0.5)
    calibration = Calibration(Path("c"), "d", UNIFORM_WEIGHTS, taus, "h")
    documents = [GradeDocument(name, "web", np.empty(0, np.uint32)) for name in "ab"]
    left, stayed = grade_rows(documents, scores, calibration)
    assert (left["decision"], left["scores"], left["aggregated"]) == ("drop", None, 0.75)
    assert (stayed["decision"], stayed["aggregated"], stayed["q_probe"]) == ("keep", 1.0, 1.0)


def test_a_document_at_the_probes_threshold_stays() -> None:
    taus = Thresholds(tau_probe=0.5, tau_drop=0.5, tau_keep=0.6)
    calibration = Calibration(Path("none"), "", UNIFORM_WEIGHTS, taus, "")
    scores = np.repeat([[1.999995], [2.0], [2.000005]], 5, axis=1)
    assert calibration.leaves_at_probe(scores).tolist() == [True, False, False]


def test_a_document_gets_its_decision_alone_or_in_any_company(grading: Any) -> None:
    rows = grading.graded(grading.grade())
    for max_batch in (1, 3, 64):
        grader = Grader.load(grading.model, grading.heads, grading.calibration, MAX_CTX, max_batch)
        ids = [(row["doc_id"], "web") for row in rows]
        others = rows_of(grader, grading.data, ids)
        assert [r["decision"] for r in others] == [r["decision"] for r in rows]
        for a, b in zip(rows, others):
            assert abs(a["aggregated"] - b["aggregated"]) < 1e-4
            assert abs(a["q_probe"] - b["q_probe"]) < 1e-4


def test_blocks_after_the_probe_run_for_survivors_only_and_none_runs_twice(
    own: Any, block_tokens: BlockTokens
) -> None:
    own.part_by_hand()
    block_tokens.counts[:] = [0] * len(block_tokens.counts)
    report = own.grade()
    rows = own.graded(report)
    spans = [r["doc_id"].rsplit("#s=", 1)[1].split(":e=") for r in rows]
    lengths = [min(MAX_CTX, int(e) - int(s) - 1) for s, e in spans]
    survivors = [n for n, row in zip(lengths, rows) if not row["early_exit"]]
    assert 0 < len(survivors) < len(rows)
    assert block_tokens.counts[:6] == [sum(lengths)] * 6
    assert block_tokens.counts[6:] == [sum(survivors)] * 2
    assert report.backbone_tokens == sum(lengths) + sum(survivors)


def test_survivors_score_as_if_nobody_had_left(grading: Any) -> None:
    with_exits = grading.graded(grading.grade())
    grader = Grader.load(grading.model, grading.heads, grading.calibration, MAX_CTX, 8, False)
    ids = [(row["doc_id"], "web") for row in with_exits]
    without = rows_of(grader, grading.data, ids)
    assert not any(row["early_exit"] for row in without)
    for a, b in zip(with_exits, without):
        assert a["probe_scores"] == b["probe_scores"]
        if not a["early_exit"]:
            assert as_vector(a["scores"]) == pytest.approx(as_vector(b["scores"]), abs=1e-4)


def test_a_current_shard_costs_nothing_and_a_new_calibration_grades_again(own: Any) -> None:
    first = own.grade()
    payload = first.path.read_bytes()
    before = {p: p.stat().st_mtime_ns for p in first.path.parent.iterdir()}
    tokens = own.model.tokens_processed
    again = own.grade()
    assert again.is_current
    assert (again.total, again.kept, again.backbone_tokens) == (first.total, first.kept, 0)
    assert own.model.tokens_processed == tokens
    assert {p: p.stat().st_mtime_ns for p in first.path.parent.iterdir()} == before
    own.calibrate(target_keep=0.8)
    changed = own.grade()
    assert not changed.is_current
    assert changed.kept > first.kept
    own.calibrate()
    restored = own.grade()
    assert restored.path.read_bytes() == payload, "the same inputs give the same bytes"


def test_a_summary_does_not_outlive_the_rows_it_counted(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = own.grade().path.read_bytes()
    own.calibrate(target_keep=0.8)

    def killed(directory: Path, value: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("nmoe_core.grading.grade.write_summary", killed)
        with pytest.raises(KeyboardInterrupt):
            own.grade()
    own.calibrate()
    report = own.grade()
    assert not report.is_current
    assert report.path.read_bytes() == payload


def test_a_calibration_of_other_heads_is_refused_with_both_digests(own: Any) -> None:
    report = own.grade()
    payload = report.path.read_bytes()
    fitted = json.loads((own.calibration / "calibration_summary.json").read_text())
    own.make_heads(seed=1)
    with pytest.raises(CalibrationError) as refused:
        own.grade()
    assert refused.value.code == "E-CALIBRATION-HEADS"
    assert fitted["heads_digest"] in str(refused.value)
    grader_digest = own.calibrate().summary["heads_digest"]
    assert grader_digest in str(refused.value)
    assert report.path.read_bytes() == payload
    assert not own.grade().is_current


def test_another_context_than_in_training_is_refused(own: Any) -> None:
    with pytest.raises(HeadError) as refused:
        own.grade(max_ctx=MAX_CTX + 1)
    assert refused.value.code == "E-HEAD-CONTEXT"


def test_a_shard_without_documents_is_graded_to_an_empty_file(tmp_path: Path, grading: Any) -> None:
    write_source(tmp_path / "data", "web", [[1, 2, 3, 4]], num_shards=2)
    own = copy.copy(grading)
    own.data, own.base = tmp_path / "data", tmp_path
    report = own.grade(shard=1)
    assert (report.total, report.kept, report.early_exits) == (0, 0, 0)
    assert report.path.read_bytes() == b""
    assert own.grade(shard=1).is_current


def test_a_document_of_nothing_but_its_eos_is_graded_too(tmp_path: Path, grading: Any) -> None:
    write_source(tmp_path / "data", "web", [[], [1, 2, 3]], num_shards=1)
    own = copy.copy(grading)
    own.data, own.base = tmp_path / "data", tmp_path
    assert own.grade().total == 2


def test_a_document_without_finite_states_fails_alone_and_says_so(own: Any) -> None:
    rows = own.graded(own.grade())
    tokens = {r["doc_id"]: DocumentReader(own.data).tokens(r["doc_id"])[:24] for r in rows}
    counts = np.bincount(np.concatenate([np.unique(t) for t in tokens.values()]), minlength=500)
    token = int(np.flatnonzero(counts == 1)[0])
    (victim,) = [doc_id for doc_id, ids in tokens.items() if token in ids]
    saved = own.model.embedding.data[token].clone()
    try:
        own.model.embedding.data[token] = torch.inf
        report = own.grade(early_exit=False)
    finally:
        own.model.embedding.data[token] = saved
    summary = json.loads(report.path.with_name("summary.json").read_text())
    assert report.failed == summary["failed"] == 1
    for row, before in zip(own.graded(report), rows):
        if row["doc_id"] != victim:
            assert "failed" not in row
            assert row["probe_scores"] == before["probe_scores"], "the others are as they were"
            continue
        assert (row["decision"], row["scores"], row["aggregated"]) == ("drop", None, 0.0)
        assert "after block 6 are not finite: " in row["failed"]
        assert (row["q_probe"], row["probe_scores"], row["early_exit"]) == (None, None, False)


def test_states_that_are_not_finite_everywhere_are_an_error_that_commits_nothing(own: Any) -> None:
    report = own.grade()
    payload = report.path.read_bytes()
    saved = own.model.embedding.data[:500, 3].clone()
    try:
        own.model.embedding.data[:500, 3] = torch.nan
        with pytest.raises(HeadError, match=r"web//web/train\S+: backbone states after") as refused:
            own.grade(early_exit=False)
    finally:
        own.model.embedding.data[:500, 3] = saved
    assert refused.value.code == "E-HEAD-NONFINITE"
    assert report.path.read_bytes() == payload
    assert json.loads(report.path.with_name("summary.json").read_text())["failed"] == 0
    assert own.grade().is_current


class Killed(Exception):
    pass


def test_a_grading_killed_after_any_buffer_ends_in_the_same_bytes_and_repeats_no_work(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.part_by_hand()
    monkeypatch.setattr("nmoe_core.grading.grade.BUFFER_BATCHES", 1)
    whole = own.grade(max_batch=16)
    payload, summary = _files(whole)
    shutil.rmtree(whole.path.parent)
    append, num_appended = PartialRows.append, 0

    def killed(self: PartialRows, rows: Any) -> None:
        nonlocal num_appended
        append(self, rows)
        num_appended += 1
        if num_appended in (1, 2):
            if num_appended == 2:  # a torn row, as a kill in a write leaves it
                with open(whole.path.with_name(PARTIAL_NAME), "ab") as file:
                    file.write(b'{"doc_id": "web//')
            raise Killed

    monkeypatch.setattr(PartialRows, "append", killed)
    for _ in range(2):
        with pytest.raises(Killed):
            own.grade(max_batch=16)
        assert not whole.path.exists()
    last = own.grade(max_batch=16)
    assert _files(last) == (payload, summary)
    assert num_appended == -(-whole.total // 16), "no buffer was computed twice"
    assert 0 < last.backbone_tokens < whole.backbone_tokens
    assert sorted(p.name for p in last.path.parent.iterdir() if p.name[0] != ".") == [
        "quality_scores.jsonl",
        "summary.json",
    ]
    assert not last.path.with_name(PARTIAL_NAME).exists()


def _files(report: Any) -> tuple[bytes, bytes]:
    return report.path.read_bytes(), report.path.with_name("summary.json").read_bytes()


def test_rows_of_another_calibration_are_not_gone_on_from(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.grading.grade.BUFFER_BATCHES", 1)
    append = PartialRows.append

    def killed(self: PartialRows, rows: Any) -> None:
        append(self, rows)
        raise Killed

    monkeypatch.setattr(PartialRows, "append", killed)
    with pytest.raises(Killed):
        own.grade()
    monkeypatch.setattr(PartialRows, "append", append)
    own.calibrate(target_keep=0.8)
    other = own.grade()
    payload = other.path.read_bytes()
    shutil.rmtree(other.path.parent)
    assert own.grade().path.read_bytes() == payload


def test_the_probes_false_drops_are_counted_when_nothing_leaves(own: Any) -> None:
    own.part_by_hand()
    gate = json.loads(own.grade(early_exit=False).path.with_name("summary.json").read_text())
    rows = own.graded(own.grade(early_exit=False))
    taus = json.loads((own.calibration / "calibration_summary.json").read_text())
    would_exit = [row for row in rows if row["q_probe"] < taus["tau_probe"]]
    lost = [row for row in would_exit if row["decision"] == "keep"]
    found = gate["probe_gate"]
    assert (found["would_exit"], found["judge_keeps"]) == (len(would_exit), len(lost))
    assert (
        found["false_drop_rate"]
        == len(lost) / len(would_exit)
        <= (found["false_drop_rate_upper95"])
    )
    exits = own.grade().early_exits
    assert exits == len(would_exit)


def test_a_slice_of_several_sources_is_graded_as_its_shards_are(own: Any) -> None:
    own.part_by_hand()
    grader = Grader.load(own.model, own.heads, own.calibration, MAX_CTX, 8)
    report = grade_documents(grader, DocIdInput(own.rows, own.data), own.base / "slice")
    rows = {row["doc_id"]: row for row in own.graded(report)}
    assert list(rows) == [doc_id for doc_id, _ in own.rows]
    summary = json.loads(report.path.with_name("summary.json").read_text())
    assert set(summary["per_source"]) == {"web", "books"}
    for row in own.graded(own.grade("books", 1)):
        if row["doc_id"] in rows:
            assert row["decision"] == rows[row["doc_id"]]["decision"]
            assert row["source"] == "books"
    sample = DocIdInput(own.rows, own.data, sample=25)
    chosen = [d.doc_id for d in sample.documents(0, 24)]
    assert len(chosen) == sample.count() == 25
    assert chosen == [doc_id for doc_id in rows if doc_id in set(chosen)], "in the slice's order"
    assert grade_documents(grader, DocIdInput(own.rows, own.data), own.base / "slice").is_current


def test_text_is_graded_as_the_shard_made_of_it(own: Any, tmp_path: Path) -> None:
    class Tokenizer:
        fingerprint, eos_token_id = "fake", EOS

        def encode_long(self, text: str, max_tokens: int) -> np.ndarray:
            return np.array([int(w) for w in text.split()], np.uint32)[:max_tokens]

    reader = DocumentReader(own.data)
    tokens = {doc_id: reader.tokens(doc_id, EOS) for doc_id, _ in own.rows[:40]}
    path = tmp_path / "texts.jsonl"
    lines = [{"doc_id": i, "text": " ".join(map(str, t))} for i, t in tokens.items()]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n" + '{"text": "1 2 3"}\n')
    grader = Grader.load(own.model, own.heads, own.calibration, MAX_CTX, 8)
    texts = own.graded(grade_documents(grader, TextInput(path, Tokenizer()), tmp_path / "t"))
    shards = rows_of(grader, own.data, own.rows[:40])
    assert [r["decision"] for r in texts[:40]] == [r["decision"] for r in shards]
    for text, shard in zip(texts, shards):
        assert as_vector(text["probe_scores"]) == pytest.approx(as_vector(shard["probe_scores"]))
    assert (texts[40]["doc_id"], texts[40]["source"]) == ("texts/texts.jsonl:41", "texts")
    path.write_text('{"txt": "1"}\n')
    with pytest.raises(SourceError, match=r"texts.jsonl:1: "):
        grade_documents(grader, TextInput(path, Tokenizer()), tmp_path / "u")
