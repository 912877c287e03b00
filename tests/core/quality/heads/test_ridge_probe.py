"""The probe as a ridge regression: the blocks it chooses, its penalty, and its file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.linear_model import Ridge as OtherRidge

from nmoe_core.config.heads import HeadsTable
from nmoe_core.engine import Transformer
from nmoe_core.labels.slices import read_slice
from nmoe_core.quality import ridge_probe
from nmoe_core.quality.heads.head_files import read_header
from nmoe_core.quality.heads.scoring import HeadScorer, load_heads
from nmoe_core.quality.heads.train import HeadTraining
from nmoe_core.quality.kept_states import KeptStates
from nmoe_core.quality.ridge import PENALTIES, fit_ridge
from nmoe_core.quality.ridge_probe import fit_ridge_probe
from tests.core.small_gradings import MAX_CTX, corpus_of, slice_all, write_labels

SIGNAL = (2, 5)  # places of the blocks that hold what the oracle sees


def planted(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """States of seven blocks, one dimension of which is huge, and scores that two blocks tell."""
    rng = np.random.default_rng(seed)
    pooled = rng.normal(size=(num, 7, 24)).astype(np.float32)
    pooled[:, :, 3] = pooled[:, :, 3] * 1e4 + 3e4
    told = pooled[:, SIGNAL[0], :5] * [1, 1, 1, 0, 1] + pooled[:, SIGNAL[1], 10:15]
    return pooled, np.clip(2 + 0.5 * told, 0, 4)


def test_the_probe_reads_the_blocks_that_hold_the_signal() -> None:
    pooled, scores = planted(900)
    blocks = (3, 6, 9, 12, 15, 18, 21)
    found = fit_ridge_probe(pooled[:600], scores[:600], blocks)
    assert found.taps == (9, 18)
    assert list(found.facts["choice"].values()) == sorted(found.facts["choice"].values())[::-1]
    with torch.no_grad():
        read = torch.from_numpy(pooled[600:, SIGNAL].reshape(300, -1))
        given = found.head.from_pooled(read).numpy()
    error = np.square(given - scores[600:]).mean(0) / scores[600:].var(0)
    assert (error < 0.1).all()
    whole = fit_ridge_probe(pooled[:600], scores[:600], blocks, is_chosen=False)
    assert whole.taps == blocks
    assert found.facts["left_out_error"] < whole.facts["left_out_error"]


def test_the_error_is_the_error_of_labels_left_out_one_by_one() -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(30, 8))
    targets = features[:, :2] + rng.normal(size=(30, 2))
    found = fit_ridge(features @ features.T, targets)

    def left_out(penalty: float) -> float:
        errors = []
        for row in range(30):
            others = np.arange(30) != row
            model = OtherRidge(alpha=penalty).fit(features[others], targets[others])
            errors.append(np.square(model.predict(features[[row]]) - targets[row]))
        return float(np.mean(errors))

    assert found.error == pytest.approx(left_out(found.penalty), rel=0.05)
    assert found.penalty in PENALTIES
    model = OtherRidge(alpha=found.penalty).fit(features, targets)
    np.testing.assert_allclose(features.T @ found.dual, model.coef_.T, atol=1e-8)


def test_many_labels_give_the_weights_of_all_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    pooled, scores = planted(400)
    blocks = (1, 2, 3, 4, 5, 6, 7)
    whole = fit_ridge_probe(pooled, scores, blocks, is_chosen=False)
    monkeypatch.setattr(ridge_probe, "MAX_DUAL", 399)
    monkeypatch.setattr(ridge_probe, "spread_rows", lambda num, most: np.arange(min(num, most)))
    sampled = fit_ridge_probe(pooled, scores, blocks, is_chosen=False)
    for one, other in zip(whole.head.parameters(), sampled.head.parameters()):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def labels(
    tmp_path_factory: pytest.TempPathFactory, shared_data: Path, backbone: Transformer
) -> dict[str, Path]:
    """Labels that blocks 2 and 5 of the backbone tell together."""
    base = tmp_path_factory.mktemp("ridge")
    slices = slice_all(shared_data, base / "slices")
    weights = np.random.default_rng(0).normal(size=(2, 32, 5))
    kept = KeptStates(backbone, base / "states", 2**30, [2, 5])
    paths = {}
    for split in ("train", "val"):
        rows = read_slice(slices / f"docids_{split}.jsonl")
        documents = corpus_of(shared_data).read([doc_id for doc_id, _ in rows])
        pooled = kept.pooled(documents).astype(np.float64)
        pooled = (pooled - pooled.mean(0)) / pooled.std(0)
        signal = np.einsum("nbh,bhd->nd", pooled, weights)
        grades = (2 + 1.2 * signal / signal.std(0)).round().clip(0, 4)
        path = base / "labels" / "merged" / f"labels_{split}.jsonl"
        paths[split] = write_labels(path, rows, grades)
    return paths


def test_a_ridge_probe_and_a_judge_are_trained_on_one_pass_and_grade_as_in_training(
    tmp_path: Path, labels: dict[str, Path], shared_data: Path, backbone: Transformer
) -> None:
    table = HeadsTable.model_validate({"judge": {"mid_dim": 16, "num_heads": 4, "ffn_dim": 32}})
    corpus = corpus_of(shared_data)
    made = HeadTraining("probe", labels, corpus, backbone, tmp_path, table).run()
    header = read_header(tmp_path / "hydra_probe.safetensors")
    assert header["metrics"]["spearman"] > 0.5
    assert len(header["tap"]) > 1
    card = (tmp_path / "hydra_probe.md").read_text()
    assert f"after block {', '.join(map(str, header['tap']))} of 8" in card
    assert "ridge regression, penalty" in card
    again = HeadTraining("probe", labels, corpus, backbone, tmp_path / "b", table).run()
    assert again.digest == made.digest
    judge = HeadTraining("judge", labels, corpus, backbone, tmp_path, table).run()
    train_tokens = made.facts["backbone_tokens"]
    assert judge.facts["backbone_tokens"] < train_tokens, "only val is read for the report"
    metrics = read_header(tmp_path / "hydra_judge.safetensors")["metrics"]
    assert metrics["spearman_probe"] == header["metrics"]["spearman"]
    assert metrics["gain_over_probe_ci95"][0] < 0
    assert (
        "does not certainly read more than the probe" in (tmp_path / "hydra_judge.md").read_text()
    )
    heads = load_heads(tmp_path, backbone, MAX_CTX)
    assert heads.probe_taps == tuple(header["tap"])
    rows = [json.loads(line) for line in labels["val"].read_text().splitlines()]
    documents = corpus.read([row["doc_id"] for row in rows])
    kept = KeptStates(backbone, tmp_path / ".states", 2**30, heads.probe_taps)
    with torch.no_grad():
        pooled = kept.pooled(documents).reshape(len(documents), -1)
        expected = heads.scale.stored(heads.probe.from_pooled(torch.from_numpy(pooled)).numpy())
    graded = HeadScorer(backbone, heads, 5).score(documents)
    np.testing.assert_allclose(graded.probe, expected, atol=1e-4)


def test_named_blocks_are_read_all_and_exclude_the_published_form(
    tmp_path: Path, labels: dict[str, Path], shared_data: Path, backbone: Transformer
) -> None:
    table = HeadsTable.model_validate({"probe": {"blocks": (2, 5)}})
    HeadTraining("probe", labels, corpus_of(shared_data), backbone, tmp_path, table).run()
    header = read_header(tmp_path / "hydra_probe.safetensors")
    assert header["tap"] == [2, 5]
    assert header["metrics"]["spearman"] > 0.8
    for other in ({"tap": 3}, {"lr": 1e-3}, {"epochs": 2}, {"batch_size": 8}):
        with pytest.raises(ValidationError, match="published form"):
            HeadsTable.model_validate({"probe": {"blocks": (2, 5), **other}})
    with pytest.raises(ValidationError, match="ascending"):
        HeadsTable.model_validate({"probe": {"blocks": (5, 2)}})
