"""Rows, decisions, summaries, what is refused, and what a kill leaves."""

import copy
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nmoe_core.engine import Transformer
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.graded import PARTIAL_NAME, PARTIAL_NAMES
from nmoe_core.quality.calibration.summary_file import Calibration
from nmoe_core.quality.calibration.thresholds import Thresholds
from nmoe_core.quality.grading.grade import grade_rows
from nmoe_core.quality.grading.inputs import GradeDocument, docid_input, text_input
from nmoe_core.quality.heads.scores import HeadScores
from nmoe_core.shards.documents import DocumentReader, document_ids
from tests.core.small_gradings import (
    EOS,
    MAX_CTX,
    FakeTokenizer,
    Grading,
    killed_after_a_buffer,
    spoiled,
    token_of,
    write_source,
)
from tests.refusals import refused


@pytest.fixture(scope="module")
def grading(
    tmp_path_factory: pytest.TempPathFactory, shared_data: Path, backbone: Transformer
) -> Grading:
    """Calibrated once; tests that change it make their own."""
    made = Grading(tmp_path_factory.mktemp("grading"), shared_data, backbone)
    made.calibrate()
    made.part_by_hand()
    return made


@pytest.fixture
def block_tokens(backbone: Transformer) -> Iterator[list[int]]:
    """Counts the real tokens that enter each block."""
    counts = [0] * len(backbone.blocks)

    def counter(i: int) -> Any:
        def count(block: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            counts[i] += len(arguments[0])

        return count

    hooks = [block.register_forward_pre_hook(counter(i)) for i, block in enumerate(backbone.blocks)]
    yield counts
    for hook in hooks:
        hook.remove()


def test_rows_come_in_document_order_and_every_number_and_count_can_be_recomputed(
    grading: Grading,
) -> None:
    graded = grading.grade()
    assert [r["doc_id"] for r in graded.rows] == [
        str(document) for document in document_ids(grading.data, grading.manifest())
    ]
    calibration = json.loads((grading.calibration / "calibration_summary.json").read_text())
    taus = Thresholds(*(calibration[f"tau_{name}"] for name in ("probe", "drop", "keep")))
    weighted = QUALITY.weighted(calibration["weights"])
    for row in graded.rows:
        assert list(row) == [
            *("doc_id", "source", "scores", "aggregated"),
            *("decision", "q_probe", "early_exit", "probe_scores"),
        ]
        q_probe, value = (
            float(weighted.aggregate(np.array(QUALITY.vector(row[key])))) if row[key] else None
            for key in ("probe_scores", "scores")
        )
        assert row["q_probe"] == q_probe
        assert row["early_exit"] == (q_probe < taus.tau_probe) == (value is None)
        expected = (q_probe, "drop") if value is None else (value, taus.decide(value))
        assert (row["aggregated"], row["decision"]) == expected
    found = Counter(row["decision"] for row in graded.rows)
    counts = {"kept": found["keep"], "dropped": found["drop"], "band": found["band"]}
    assert min(counts.values()) > 0, "the fixture has all three decisions"
    exits = {"early_exits": sum(row["early_exit"] for row in graded.rows)}
    total, summary = len(graded.rows), graded.summary
    assert summary | counts | exits | {"total": total, "per_source": {"web": counts}} == summary
    assert graded.facts | counts | exits | {"documents": total} == graded.facts
    assert set(summary["fingerprints"]) == {
        *("code", "shard", "backbone", "probe", "judge", "calibration", "settings")
    }


def test_a_document_at_a_threshold_stays_and_one_below_the_probe_s_is_dropped() -> None:
    taus = Thresholds(tau_probe=0.5, tau_drop=0.3, tau_keep=0.6)
    assert [taus.decide(x) for x in (0.29, 0.3, 0.59, 0.6)] == ["drop", "band", "band", "keep"]
    calibration = Calibration(Path("c"), "d", QUALITY, taus, "h")
    probe = np.repeat([[1.999995], [2.0], [2.000005]], 5, axis=1)
    exited = calibration.exits([None] * 3).probe(probe, range(3))
    assert exited.tolist() == [True, False, False]
    judge, no_student = np.full((3, 5), 4.0), np.full((3, 5), np.nan)
    documents = [GradeDocument(name, "web", np.empty(0, np.uint32)) for name in "abc"]
    left, stayed, _ = grade_rows(
        documents, HeadScores(probe, judge, exited, no_student), calibration, [None] * 3
    )
    assert (left["decision"], left["scores"], left["aggregated"]) == ("drop", None, 0.499999)
    assert (stayed["decision"], stayed["aggregated"], stayed["q_probe"]) == ("keep", 1.0, 0.5)


@pytest.mark.parametrize("grader", [{"batch_size": 1}, {"batch_size": 64}, {"early_exit": False}])
def test_a_decision_does_not_depend_on_the_other_documents(
    grading: Grading, grader: dict[str, Any]
) -> None:
    rows = grading.grade().rows
    others = grading.rows_of([(row["doc_id"], "web") for row in rows], **grader)
    for a, b in zip(rows, others, strict=True):
        assert a["probe_scores"] == pytest.approx(b["probe_scores"], abs=1e-4)
        if a["early_exit"] and grader == {"early_exit": False}:
            continue  # it has a judge's score now
        assert a["decision"] == b["decision"]
        assert abs(a["aggregated"] - b["aggregated"]) < 1e-4


def test_blocks_after_the_probe_run_for_survivors_only_and_none_runs_twice(
    grading: Grading, block_tokens: list[int]
) -> None:
    shutil.rmtree(grading.base / "quality", ignore_errors=True)
    graded = grading.grade()
    spans = [r["doc_id"].rsplit("#s=", 1)[1].split(":e=") for r in graded.rows]
    lengths = [min(MAX_CTX, int(e) - int(s) - 1) for s, e in spans]
    survivors = [n for n, row in zip(lengths, graded.rows) if not row["early_exit"]]
    assert 0 < len(survivors) < len(lengths)
    assert block_tokens == [sum(lengths)] * 6 + [sum(survivors)] * 2
    assert graded.facts["backbone_tokens"] == sum(lengths) + sum(survivors)


def test_a_current_shard_costs_nothing_and_a_new_calibration_decides_again(own: Grading) -> None:
    first = own.grade()
    payload = first.path.read_bytes()
    before = {p: p.stat().st_mtime_ns for p in first.directory.iterdir()}
    for name in (*PARTIAL_NAMES, "summary.json.tmp.4194305"):
        (first.directory / name).touch()  # left by a killed grading of other documents
    again = own.grade()
    assert again.facts == first.facts | {
        "backbone_documents": 0,
        "backbone_tokens": 0,
        "changed": False,
    }
    assert {p: p.stat().st_mtime_ns for p in first.directory.iterdir()} == before
    own.calibrate(target_keep=0.8)
    changed = own.grade()
    assert changed.facts["changed"]
    assert changed.facts["kept"] > first.facts["kept"]
    own.calibrate()
    assert own.grade().path.read_bytes() == payload, "the same inputs give the same bytes"


def test_a_summary_does_not_outlive_the_rows_it_counted(
    own: Grading, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = own.grade().path.read_bytes()
    own.calibrate(target_keep=0.8)

    with monkeypatch.context() as patched:
        killed = Mock(side_effect=KeyboardInterrupt)  # the rows are renamed by then
        patched.setattr("nmoe_core.quality.calibration.graded.fsync_dir", killed)
        with pytest.raises(KeyboardInterrupt):
            own.grade()
    own.calibrate()
    graded = own.grade()
    assert graded.facts["changed"]
    assert graded.path.read_bytes() == payload


def test_a_calibration_of_other_heads_is_refused_with_both_digests(own: Grading) -> None:
    graded = own.grade()
    payload = graded.path.read_bytes()
    fitted = json.loads((own.calibration / "calibration_summary.json").read_text())
    own.make_heads(seed=1)
    with refused("E-CALIBRATION-HEADS", naming=[fitted["heads_digest"]]) as error:
        own.grade()
    assert own.calibrate()["heads_digest"] in str(error.value)
    assert graded.path.read_bytes() == payload
    assert own.grade().facts["changed"]


def test_shards_without_documents_and_documents_of_only_an_eos_are_graded(
    tmp_path: Path, grading: Grading
) -> None:
    write_source(tmp_path / "data", "web", [[1, 2, 3, 4]], num_shards=2)
    write_source(tmp_path / "data", "books", [[], [1, 2, 3]], num_shards=1)
    own = copy.copy(grading)
    own.data, own.base = tmp_path / "data", tmp_path
    empty = own.grade(shard=1)
    assert [empty.facts[k] for k in ("documents", "kept", "early_exits")] == [0, 0, 0]
    assert empty.path.read_bytes() == b""
    assert not own.grade(shard=1).facts["changed"]
    assert own.grade("books").facts["documents"] == 2


def test_a_document_without_finite_states_fails_alone_and_says_so(own: Grading) -> None:
    rows = own.grade().rows
    tokens = {r["doc_id"]: DocumentReader(own.data).tokens(r["doc_id"])[:24] for r in rows}
    token = token_of(tokens.values(), 1)
    (victim,) = [doc_id for doc_id, ids in tokens.items() if token in ids]
    shutil.rmtree(own.base / "quality")
    with spoiled(own.model, token, np.inf):
        graded = own.grade()
    assert graded.facts["failed"] == graded.summary["failed"] == 1
    for row, before in zip(graded.rows, rows):
        if row["doc_id"] != victim:
            assert "failed" not in row
            assert row["probe_scores"] == before["probe_scores"], "the others are as they were"
            continue
        assert (row["decision"], row["scores"], row["aggregated"]) == ("drop", None, 0.0)
        assert "after block 6 are not finite: " in row["failed"]
        assert (row["q_probe"], row["probe_scores"], row["early_exit"]) == (None, None, False)


def test_states_that_are_not_finite_everywhere_are_an_error_that_commits_nothing(
    own: Grading,
) -> None:
    graded = own.grade(batch_size=8)
    payload = graded.path.read_bytes()
    nan, first = (slice(500), 3), r"web//web/train\S+: backbone states after"
    with spoiled(own.model, nan, np.nan), refused("E-HEAD-NONFINITE", first):
        own.grade(batch_size=7, early_exit=False)
    assert graded.path.read_bytes() == payload
    assert graded.summary["failed"] == 0
    assert not own.grade().facts["changed"]


def test_a_grading_killed_after_any_buffer_ends_in_the_same_bytes_and_repeats_no_work(
    own: Grading, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.part_by_hand()
    monkeypatch.setattr("nmoe_core.quality.grading.grade.BUFFER_BATCHES", 1)
    whole = own.grade(batch_size=16)
    files = [whole.path.read_bytes(), whole.summary]
    shutil.rmtree(whole.directory)
    for _ in range(2):
        with killed_after_a_buffer():
            own.grade(batch_size=16)
    assert not whole.path.exists()
    with open(whole.directory / PARTIAL_NAME, "r+b") as file:
        assert len(file.readlines()) == 2 * 16, "no buffer was computed twice"
        file.write(b'{"doc_id": "web//')  # a torn row, as a kill in a write leaves it
    last = own.grade(batch_size=16)
    assert [last.path.read_bytes(), last.summary] == files
    assert 0 < last.facts["backbone_tokens"] < whole.facts["backbone_tokens"]
    visible = sorted(p.name for p in last.directory.iterdir() if p.name[0] != ".")
    assert visible == ["quality_scores.jsonl", "summary.json"]
    assert not (last.directory / PARTIAL_NAME).exists()
    shutil.rmtree(whole.directory)
    with killed_after_a_buffer():
        own.grade(batch_size=16)
    own.calibrate(target_keep=0.8)
    payload = own.grade(batch_size=16).path.read_bytes()
    shutil.rmtree(whole.directory)
    assert own.grade(batch_size=16).path.read_bytes() == payload, "rows of another calibration"


def test_the_probes_false_drops_are_counted_where_no_document_leaves(own: Grading) -> None:
    own.part_by_hand()
    graded = own.grade(early_exit=False)
    taus = json.loads((own.calibration / "calibration_summary.json").read_text())
    would_exit = [row for row in graded.rows if row["q_probe"] < taus["tau_probe"]]
    lost = [row for row in would_exit if row["decision"] == "keep"]
    found = graded.summary["probe_gate"]
    assert (found["would_exit"], found["judge_keeps"]) == (len(would_exit), len(lost))
    assert found["false_drop_rate"] == len(lost) / len(would_exit)
    assert found["false_drop_rate"] <= found["false_drop_rate_upper95"]
    assert own.grade().facts["early_exits"] == len(would_exit)


def test_a_slice_of_several_sources_is_graded_as_its_shards_are(own: Grading) -> None:
    own.part_by_hand()
    graded = own.grade_into(own.base / "slice", docid_input(own.rows, own.data))
    rows = {row["doc_id"]: row for row in graded.rows}
    assert list(rows) == [doc_id for doc_id, _ in own.rows]
    assert set(graded.summary["per_source"]) == {"web", "books"}
    for row in own.grade("books", 1).rows:
        if row["doc_id"] in rows:
            assert row["decision"] == rows[row["doc_id"]]["decision"]
            assert row["source"] == "books"
    sample = docid_input(own.rows, own.data, sample=25)
    chosen = [d.doc_id for d in sample.documents(0, 24)]
    assert len(chosen) == sample.count == 25
    assert chosen == [doc_id for doc_id in rows if doc_id in set(chosen)], "in the slice's order"


def test_text_is_graded_as_the_shard_made_of_it(own: Grading, tmp_path: Path) -> None:
    tokenizer: Any = FakeTokenizer()
    reader = DocumentReader(own.data)
    tokens = {doc_id: reader.tokens(doc_id, EOS) for doc_id, _ in own.rows[:40]}
    path = tmp_path / "texts.jsonl"
    lines = [{"doc_id": i, "text": tokenizer.decode(t)} for i, t in tokens.items()]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n" + '{"text": "w1 w2 w3"}\n')
    texts = own.grade_into(tmp_path / "t", text_input(path, tokenizer)).rows
    shards = own.rows_of(own.rows[:40])
    assert [r["decision"] for r in texts[:40]] == [r["decision"] for r in shards]
    for text, shard in zip(texts, shards):
        assert text["probe_scores"] == pytest.approx(shard["probe_scores"])
    assert (texts[40]["doc_id"], texts[40]["source"]) == ("texts/texts.jsonl:41", "texts")
    path.write_text('{"txt": "1"}\n')
    with refused("E-SOURCE-RECORD", r"texts.jsonl:1: "):
        own.grade_into(tmp_path / "u", text_input(path, tokenizer))
