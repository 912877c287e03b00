from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loader.format import load_manifest
from nmoe_core.docid import DocumentReader
from nmoe_core.engine import Transformer
from nmoe_core.errors import CalibrationError, HeadError
from nmoe_core.hydra.decide import decide
from nmoe_core.hydra.features import read_documents
from nmoe_core.hydra.grade import Grader, grade_rows
from nmoe_core.hydra.head_files import load_heads
from nmoe_core.hydra.scores import UNIFORM_WEIGHTS, aggregate, as_vector
from nmoe_core.hydra.scoring import HeadScores, score_documents
from nmoe_core.hydra.slices import documents_of
from nmoe_core.hydra.thresholds import Calibration, Thresholds


@pytest.fixture(scope="module")
def grading(
    tmp_path_factory: pytest.TempPathFactory,
    shared_data: Path,
    backbone: Transformer,
    world: SimpleNamespace,
) -> Any:
    """Calibrated once; tests that change it make their own."""
    made = world.Grading(tmp_path_factory.mktemp("grading"), shared_data, backbone, world)
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
        str(document) for document in documents_of(manifest, grading.data, "web")
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
    left, stayed = grade_rows(["a", "b"], "web", scores, calibration)
    assert (left["decision"], left["scores"], left["aggregated"]) == ("drop", None, 0.75)
    assert (stayed["decision"], stayed["aggregated"], stayed["q_probe"]) == ("keep", 1.0, 1.0)


def test_a_document_gets_its_decision_alone_or_in_any_company(grading: Any) -> None:
    rows = grading.graded(grading.grade())
    for max_batch in (1, 3, 64):
        grader = Grader.load(
            grading.model, grading.heads, grading.calibration, grading.world.MAX_CTX, max_batch
        )
        ids = [row["doc_id"] for row in rows]
        reader = DocumentReader(grading.data)
        others = list(grader.rows(reader, ids, "web", grading.world.EOS))
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
    lengths = [min(own.world.MAX_CTX, int(e) - int(s) - 1) for s, e in spans]
    survivors = [n for n, row in zip(lengths, rows) if not row["early_exit"]]
    assert 0 < len(survivors) < len(rows)
    assert block_tokens.counts[:6] == [sum(lengths)] * 6
    assert block_tokens.counts[6:] == [sum(survivors)] * 2
    assert report.backbone_tokens == sum(lengths) + sum(survivors)


def test_survivors_score_as_if_nobody_had_left(grading: Any) -> None:
    with_exits = grading.graded(grading.grade())
    grader = Grader.load(
        grading.model, grading.heads, grading.calibration, grading.world.MAX_CTX, 8, False
    )
    ids = [row["doc_id"] for row in with_exits]
    without = list(grader.rows(DocumentReader(grading.data), ids, "web", grading.world.EOS))
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

    def killed(path: Path, value: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("nmoe_core.hydra.grade.write_json", killed)
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
        own.grade(max_ctx=own.world.MAX_CTX + 1)
    assert refused.value.code == "E-HEAD-CONTEXT"


def test_a_shard_without_documents_is_graded_to_an_empty_file(
    tmp_path: Path, grading: Any, world: SimpleNamespace
) -> None:
    world.write_source(tmp_path / "data", "web", [[1, 2, 3, 4]], num_shards=2)
    own = copy.copy(grading)
    own.data, own.base = tmp_path / "data", tmp_path
    report = own.grade(shard=1)
    assert (report.total, report.kept, report.early_exits) == (0, 0, 0)
    assert report.path.read_bytes() == b""
    assert own.grade(shard=1).is_current


def test_a_document_of_nothing_but_its_eos_is_graded_too(
    tmp_path: Path, grading: Any, world: SimpleNamespace
) -> None:
    world.write_source(tmp_path / "data", "web", [[], [1, 2, 3]], num_shards=1)
    own = copy.copy(grading)
    own.data, own.base = tmp_path / "data", tmp_path
    assert own.grade().total == 2


def test_states_that_are_not_finite_fail_by_document_and_commit_nothing(own: Any) -> None:
    rows = own.graded(own.grade())
    victim = rows[5]["doc_id"]
    token = int(DocumentReader(own.data).tokens(victim)[0])
    saved = own.model.embedding.data[token].clone()
    report = own.grade("web", 1)
    payload = report.path.read_bytes()
    report.path.with_name("summary.json").unlink()
    try:
        own.model.embedding.data[token] = torch.inf
        what = r"web//web/train\S+: backbone states after block [68]"
        with pytest.raises(HeadError, match=what) as refused:
            own.grade("web", 0, early_exit=False)
        assert refused.value.code == "E-HEAD-NONFINITE"
        (document,) = read_documents(
            DocumentReader(own.data), [victim], own.world.EOS, own.world.MAX_CTX
        )
        heads = load_heads(own.heads, own.model, own.world.MAX_CTX)
        with pytest.raises(HeadError, match=victim):
            score_documents(own.model, heads.probe, heads.judge, [document], [victim], 8)
    finally:
        own.model.embedding.data[token] = saved
    assert report.path.read_bytes() == payload
    assert not list((own.base / "quality").rglob("*.tmp.*"))
    assert json.loads((own.base / "quality" / "web" / "shard_0000" / "summary.json").read_text()), (
        "the grades made before are still there"
    )
