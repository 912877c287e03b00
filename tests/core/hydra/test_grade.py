from __future__ import annotations

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
from nmoe_core.hydra.calibrate import CalibrationReport, calibrate
from nmoe_core.hydra.decide import decide
from nmoe_core.hydra.features import read_documents
from nmoe_core.hydra.grade import Grader, GradeReport, grade_rows, grade_shard
from nmoe_core.hydra.head_files import load_heads, save_head
from nmoe_core.hydra.heads import Judge, JudgeArch, Probe, ProbeArch
from nmoe_core.hydra.scores import UNIFORM_WEIGHTS, aggregate, as_vector
from nmoe_core.hydra.scoring import HeadScores, score_documents
from nmoe_core.hydra.slices import documents_of, read_slice
from nmoe_core.hydra.thresholds import Calibration, Thresholds


class Grading:
    """Heads of random weights, a calibration with real exits, and shards to grade."""

    def __init__(self, base: Path, data: Path, model: Transformer, world: SimpleNamespace) -> None:
        self.base, self.data, self.model, self.world = base, data, model, world
        self.heads, self.calibration = base / "heads", base / "calibration"
        slices = world.slice_all(data, base / "slices")
        self.rows = [r for s in ("train", "val") for r in read_slice(slices / f"docids_{s}.jsonl")]
        self.make_heads(seed=0)
        rng = np.random.default_rng(0)
        grades = rng.integers(0, 5, (len(self.rows), 5))
        self.labels = world.write_labels(base / "labels_val.jsonl", self.rows, grades)

    def make_heads(self, seed: int) -> None:
        torch.manual_seed(seed)
        header = {
            "backbone": {"digest": self.model.digest},
            "max_ctx": self.world.MAX_CTX,
            "scorer_model": "fake",
        }
        probe, judge = Probe(ProbeArch(32)), Judge(JudgeArch(32, 16, 4, 32))
        for head, layer in ((probe, probe.proj), (judge, judge.shared_head)):
            # Around the middle of the scale, so that the clamp does not hide differences.
            torch.nn.init.constant_(layer.bias, 2.0)
            name = head.arch.as_dict()["kind"]
            save_head(self.heads / f"hydra_{name}.safetensors", head, header)

    def calibrate(self, **more: Any) -> CalibrationReport:
        settings = {"max_ctx": self.world.MAX_CTX, "max_false_drop": 0.36, "target_keep": 0.4}
        return calibrate(
            self.labels,
            self.heads,
            self.model,
            self.data,
            self.calibration,
            eos_token_id=self.world.EOS,
            **settings | more,
        )

    def part_by_hand(self) -> None:
        """Thresholds that send documents every way; random heads would let none leave early."""
        grader = Grader.load(
            self.model, self.heads, self.calibration, self.world.MAX_CTX, 32, early_exit=False
        )
        ids = [doc_id for doc_id, _ in self.rows]
        rows = list(grader.rows(DocumentReader(self.data), ids, "all", self.world.EOS))
        judged = [row["aggregated"] for row in rows]
        path = self.calibration / "calibration_summary.json"
        taus = {
            "tau_probe": float(np.quantile([row["q_probe"] for row in rows], 0.3)),
            "tau_drop": float(np.quantile(judged, 0.3)),
            "tau_keep": float(np.quantile(judged, 0.6)),
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | taus))

    def manifest(self, source: str, shard: int) -> Path:
        return self.data / source / "train" / f"shard_{shard:04d}" / "manifest.json"

    def grade(self, source: str = "web", shard: int = 0, **more: Any) -> GradeReport:
        settings: dict[str, Any] = {"max_ctx": self.world.MAX_CTX, "max_batch": 8} | more
        return grade_shard(
            self.data,
            source,
            self.manifest(source, shard),
            self.base / "quality" / source / f"shard_{shard:04d}",
            self.model,
            self.heads,
            self.calibration,
            **settings,
        )

    def graded(self, report: GradeReport) -> list[dict[str, Any]]:
        return [json.loads(line) for line in report.path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def grading(
    tmp_path_factory: pytest.TempPathFactory,
    shared_data: Path,
    backbone: Transformer,
    world: SimpleNamespace,
) -> Grading:
    """Calibrated once; tests that change it make their own."""
    made = Grading(tmp_path_factory.mktemp("grading"), shared_data, backbone, world)
    made.calibrate()
    made.part_by_hand()
    return made


@pytest.fixture
def own(
    tmp_path: Path, shared_data: Path, backbone: Transformer, world: SimpleNamespace
) -> Grading:
    made = Grading(tmp_path, shared_data, backbone, world)
    made.calibrate()
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


def test_rows_come_in_document_order_and_every_number_can_be_recomputed(grading: Grading) -> None:
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


def test_the_summary_counts_the_rows_and_names_what_they_were_made_from(grading: Grading) -> None:
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


def test_a_document_gets_its_decision_alone_or_in_any_company(grading: Grading) -> None:
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
    own: Grading, block_tokens: BlockTokens
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


def test_survivors_score_as_if_nobody_had_left(grading: Grading) -> None:
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


def test_a_current_shard_costs_nothing_and_a_new_calibration_grades_again(own: Grading) -> None:
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


def test_a_calibration_of_other_heads_is_refused_with_both_digests(own: Grading) -> None:
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


def test_another_context_than_in_training_is_refused(own: Grading) -> None:
    with pytest.raises(HeadError) as refused:
        own.grade(max_ctx=own.world.MAX_CTX + 1)
    assert refused.value.code == "E-HEAD-CONTEXT"


def test_a_shard_without_documents_is_graded_to_an_empty_file(
    tmp_path: Path, grading: Grading, world: SimpleNamespace
) -> None:
    world.write_source(tmp_path / "data", "web", [[1, 2, 3, 4]], num_shards=2)
    own = Grading.__new__(Grading)
    own.__dict__.update(grading.__dict__ | {"data": tmp_path / "data", "base": tmp_path})
    report = own.grade(shard=1)
    assert (report.total, report.kept, report.early_exits) == (0, 0, 0)
    assert report.path.read_bytes() == b""
    assert own.grade(shard=1).is_current


def test_a_document_of_nothing_but_its_eos_is_graded_too(
    tmp_path: Path, grading: Grading, world: SimpleNamespace
) -> None:
    world.write_source(tmp_path / "data", "web", [[], [1, 2, 3]], num_shards=1)
    own = Grading.__new__(Grading)
    own.__dict__.update(grading.__dict__ | {"data": tmp_path / "data", "base": tmp_path})
    assert own.grade().total == 2


def test_states_that_are_not_finite_fail_by_document_and_commit_nothing(own: Grading) -> None:
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


def test_calibration_writes_what_users_know_and_does_no_work_twice(own: Grading) -> None:
    path = own.calibration / "calibration_summary.json"
    summary = json.loads(path.read_text())
    assert set(summary["weights"].values()) == {0.2}
    assert summary["weights_source"].startswith("uniform")
    assert summary["tau_drop"] <= summary["tau_keep"]
    assert summary["count"] == len(own.rows)
    assert abs(summary["achieved_keep"] - 0.4) <= 0.01
    assert summary["false_drop_rate"] <= 0.36
    assert summary["scorer_model"] == "fake"
    assert len(summary["keep_curve"]) == 99
    before = path.stat().st_mtime_ns
    tokens = own.model.tokens_processed
    assert own.calibrate().is_current
    assert (path.stat().st_mtime_ns, own.model.tokens_processed) == (before, tokens)


def test_thresholds_are_those_of_the_deployed_path(own: Grading) -> None:
    """Grading the calibration's own documents keeps the share that it says it keeps."""
    grader = Grader.load(own.model, own.heads, own.calibration, own.world.MAX_CTX, 16)
    ids = [doc_id for doc_id, _ in own.rows]
    rows = list(grader.rows(DocumentReader(own.data), ids, "all", own.world.EOS))
    summary = json.loads((own.calibration / "calibration_summary.json").read_text())
    shares = {d: np.mean([r["decision"] == d for r in rows]) for d in ("keep", "drop")}
    assert shares["keep"] == pytest.approx(summary["achieved_keep"], abs=1e-6)
    assert shares["drop"] == pytest.approx(summary["achieved_drop"], abs=1e-6)
    exits = np.mean([r["early_exit"] for r in rows])
    assert exits == pytest.approx(summary["early_exit_rate"], abs=1e-6)


def test_an_independent_target_in_the_labels_sets_the_weights(own: Grading) -> None:
    rng = np.random.default_rng(1)
    grades = rng.integers(0, 5, (len(own.rows), 5))
    targets = (grades / 4 @ np.array([0.6, 0.4, 0, 0, 0])).tolist()
    own.labels = own.world.write_labels(own.labels, own.rows, grades, target=targets)
    summary = own.calibrate().summary
    assert list(summary["weights"].values()) == pytest.approx([0.6, 0.4, 0, 0, 0], abs=1e-6)
    assert "target" in summary["weights_source"]


def test_too_few_documents_constant_scores_and_odd_targets_are_refused(own: Grading) -> None:
    path = own.calibration / "calibration_summary.json"
    payload = path.read_bytes()

    def code_of(**more: Any) -> str:
        with pytest.raises(CalibrationError) as refused:
            own.calibrate(**more)
        assert path.read_bytes() == payload
        return refused.value.code

    for odd in ({"target_keep": 0.0}, {"target_keep": 1.0}, {"max_false_drop": 1.0}):
        assert code_of(**odd) == "E-CALIBRATION-TARGET"
    labels = own.labels
    grades = np.random.default_rng(0).integers(0, 5, (19, 5))
    own.labels = own.world.write_labels(own.base / "few.jsonl", own.rows[:19], grades)
    assert code_of() == "E-CALIBRATION-FEW"
    own.labels = labels
    torch.manual_seed(0)
    dead = Probe(ProbeArch(32))
    torch.nn.init.zeros_(dead.proj.weight)
    header = {"backbone": {"digest": own.model.digest}, "max_ctx": own.world.MAX_CTX}
    save_head(own.heads / "hydra_probe.safetensors", dead, header)
    assert code_of() == "E-CALIBRATION-CONSTANT"
