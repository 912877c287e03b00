from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import HeadError, LabelError
from nmoe_core.engine import Transformer
from nmoe_core.heads.features import read_documents
from nmoe_core.heads.files import load_head, load_heads, read_header
from nmoe_core.heads.fit import Recipe, fit_judge, fit_probe, learning_rate, reproducible
from nmoe_core.heads.models import JudgeArch, layer_norm
from nmoe_core.heads.scoring import predict, score_documents
from nmoe_core.heads.states import pooled_features
from nmoe_core.heads.train import train_judge, train_probe
from nmoe_core.heads.training_state import TrainingState
from nmoe_core.labels.scores import stored
from nmoe_core.labels.slices import read_slice
from nmoe_core.shards.documents import DocumentReader
from tests.core.quality import EOS, MAX_CTX, VOCAB, slice_all, write_labels


@pytest.fixture(scope="module")
def planted(
    tmp_path_factory: pytest.TempPathFactory,
    shared_data: Path,
    backbone: Transformer,
) -> SimpleNamespace:
    """Labels that are a linear function of the probe's features, rounded to grades."""
    base = tmp_path_factory.mktemp("planted")
    slices = slice_all(shared_data, base / "slices")
    rows = {s: read_slice(slices / f"docids_{s}.jsonl") for s in ("train", "val")}
    weight = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
    paths, means = {}, None
    for split, split_rows in rows.items():
        ids = [doc_id for doc_id, _ in split_rows]
        reader = DocumentReader(shared_data)
        documents = read_documents(reader, ids, EOS, MAX_CTX)
        signal = layer_norm(pooled_features(backbone, documents, ids, 6)) @ weight
        means = means or (signal.mean(0), signal.std(0))
        grades = (2 + 1.2 * (signal - means[0]) / means[1]).round().clamp(0, 4).numpy()
        path = base / "labels" / "merged" / f"labels_{split}.jsonl"
        paths[split] = write_labels(path, split_rows, grades)
    return SimpleNamespace(rows=rows, data_root=shared_data, **paths)


def probe_arguments(planted: SimpleNamespace) -> dict[str, Any]:
    return {
        "data_root": planted.data_root,
        "eos_token_id": EOS,
        "max_ctx": MAX_CTX,
        "batch_size": 32,
        "epochs": 40,
        "lr": 2e-2,
    }


def judge_arguments(planted: SimpleNamespace) -> dict[str, Any]:
    small = {"epochs": 3, "lr": 3e-3, "mid_dim": 16, "num_heads": 4, "ffn_dim": 32}
    return probe_arguments(planted) | small


def test_the_probe_recovers_a_planted_linear_signal() -> None:
    # Dimensions of very different spread, as in the residual of a transformer.
    features = torch.randn(600, 32, generator=torch.Generator().manual_seed(1))
    features = features * torch.linspace(0.1, 4, 32) + 5
    weight = torch.randn(32, 5, generator=torch.Generator().manual_seed(2))
    targets = (2 + (layer_norm(features) @ weight) / 5).clamp(0, 4)
    with reproducible(0):
        probe, losses = fit_probe(features[:500], targets[:500], Recipe(50, 60, 1e-2))
    with torch.no_grad():
        error = ((probe.from_pooled(features[500:]) - targets[500:]) ** 2).mean(0)
    assert (1 - error / targets[500:].var(0) > 0.9).all()
    assert losses[-1] < 0.1 * losses[0]


def test_targets_outside_the_scale_count_as_its_ends() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(60, 8, generator=generator)
    targets = 12 * torch.rand(60, 5, generator=generator) - 4
    fitted = []
    for values in (targets, targets.clamp(0, 4)):
        with reproducible(0):
            probe, _ = fit_probe(features, values, Recipe(20, 5, 1e-2))
            judge, _ = fit_judge(
                JudgeArch(8, 8, 2, 8),
                lambda rows: (features[rows][:, None], torch.ones(len(rows), dtype=int), rows),
                [1] * 60,
                values,
                Recipe(20, 2, 1e-3),
            )
        fitted.append(torch.cat([p.flatten() for h in (probe, judge) for p in h.parameters()]))
    assert torch.equal(*fitted)


def test_trained_probe_agrees_with_val_and_its_baselines_do_not(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    arguments = probe_arguments(planted)
    report = train_probe(planted.train, planted.val, backbone, heads_dir=tmp_path, **arguments)
    metrics = report.metrics
    assert metrics["n"] == len(planted.rows["val"])
    assert metrics["spearman"] > 0.8
    assert metrics["spearman_ci95"][0] > 0.5
    assert min(metrics["r2"].values()) > 0.5
    for name, mae in metrics["mae"].items():
        assert mae < metrics["mae_mean_only"][name]
    assert abs(metrics["spearman_source_only"]) < 0.5
    assert report.num_steps == 40 * -(-len(planted.rows["train"]) // 32)
    ids = [doc_id for split in ("train", "val") for doc_id, _ in planted.rows[split]]
    spans = [parse_doc_id(doc_id) for doc_id in ids]
    assert report.backbone_tokens == sum(min(MAX_CTX, s.end - s.start - 1) for s in spans)
    header = read_header(report.path)
    assert header["labels_digest"]
    assert (header["tap"], header["scorer_model"], header["rubric_hash"]) == (6, "fake", "r")
    assert header["backbone"]["digest"] == backbone.digest


@pytest.mark.parametrize("kind", ["probe", "judge"])
def test_equal_inputs_give_equal_bytes_and_a_current_head_is_left_alone(
    tmp_path: Path,
    planted: SimpleNamespace,
    backbone: Transformer,
    kind: str,
) -> None:
    train = train_probe if kind == "probe" else train_judge
    arguments = (probe_arguments if kind == "probe" else judge_arguments)(planted)
    labels = (planted.train, planted.val, backbone)
    torch.manual_seed(1)
    first = train(*labels, heads_dir=tmp_path / "a", **arguments)
    torch.manual_seed(2)
    torch.rand(7)
    state = torch.get_rng_state()
    second = train(*labels, heads_dir=tmp_path / "b", **arguments)
    assert first.digest == second.digest
    assert first.path.read_bytes() == second.path.read_bytes()
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is its own"
    tokens = backbone.tokens_processed
    again = train(*labels, heads_dir=tmp_path / "a", **arguments)
    assert again.is_current
    assert again.digest == first.digest
    assert backbone.tokens_processed == tokens
    other = train(*labels, heads_dir=tmp_path / "a", **arguments | {"lr": 1e-4})
    assert not other.is_current
    assert other.digest != first.digest


def test_the_judge_learns_from_train_what_holds_on_val(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    arguments = judge_arguments(planted) | {"epochs": 30, "lr": 5e-3}
    report = train_judge(planted.train, planted.val, backbone, heads_dir=tmp_path, **arguments)
    assert report.loss_curve[-1][1] < 0.5 * report.loss_curve[0][1]
    assert report.metrics["spearman"] > 0.3


def test_the_judge_is_the_same_whether_states_are_kept_or_computed_again(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    arguments = judge_arguments(planted)
    labels = (planted.train, planted.val, backbone)
    kept = train_judge(*labels, heads_dir=tmp_path / "a", **arguments)
    again = train_judge(*labels, heads_dir=tmp_path / "b", cache_bytes=0, **arguments)
    assert (kept.states, again.states) == ("in memory", "computed for each batch")
    assert again.backbone_tokens > 2 * kept.backbone_tokens
    a, _ = load_head(kept.path, backbone, MAX_CTX)
    b, _ = load_head(again.path, backbone, MAX_CTX)
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values()):
        torch.testing.assert_close(x, y, atol=5e-3, rtol=0, msg=name)


def test_val_labels_do_not_move_the_weights(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    rng = np.random.default_rng(0)
    rows = planted.rows["val"]
    other_val = write_labels(tmp_path / "val.jsonl", rows, rng.integers(0, 5, (len(rows), 5)))
    no_val = tmp_path / "none.jsonl"
    no_val.write_bytes(b"")
    arguments = probe_arguments(planted)
    weights = []
    for val in (planted.val, other_val, no_val):
        report = train_probe(
            planted.train, val, backbone, heads_dir=tmp_path / f"heads_{val.stem}", **arguments
        )
        weights.append(load_head(report.path, backbone, MAX_CTX)[0].state_dict())
    assert report.metrics == {}
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name])
        assert torch.equal(weights[0][name], weights[2][name])


def test_training_and_grading_see_the_same_features(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    report = train_probe(
        planted.train, planted.val, backbone, heads_dir=tmp_path, **probe_arguments(planted)
    )
    judge = judge_arguments(planted)
    train_judge(planted.train, None, backbone, heads_dir=tmp_path, **judge)
    heads = load_heads(tmp_path, backbone, MAX_CTX)
    probe = heads.probe
    assert report.path.with_suffix(".md").is_file()
    ids = [doc_id for doc_id, _ in planted.rows["val"]]
    reader = DocumentReader(planted.data_root)
    documents = read_documents(reader, ids, EOS, MAX_CTX)
    with torch.no_grad():
        trained_on = probe.from_pooled(pooled_features(backbone, documents, ids, 6))
    trained_on = stored(trained_on.numpy())
    assert np.array_equal(predict(backbone, probe, 6, documents, ids, 32), trained_on)
    graded = score_documents(backbone, heads, documents, ids, 5)
    np.testing.assert_allclose(graded.probe, trained_on, atol=1e-4)


def test_the_rate_starts_above_zero_and_reaches_its_peak_in_short_runs_too() -> None:
    assert learning_rate(0, 20, 1.0) == 0.5
    assert learning_rate(1, 20, 1.0) == 1.0
    assert learning_rate(0, 100_000, 1.0) == 1 / 500
    assert learning_rate(499, 100_000, 1.0) == learning_rate(90_000, 100_000, 1.0) == 1.0
    assert learning_rate(0, 1, 1.0) == 1.0


def test_labels_that_cannot_be_learned_from_are_refused_and_nothing_is_written(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    rows = planted.rows["train"]
    rng = np.random.default_rng(0)

    def code_of(labels: Path, model: Transformer = backbone, **more: Any) -> str:
        arguments = probe_arguments(planted) | more
        for train in (train_probe, train_judge):
            with pytest.raises((HeadError, LabelError)) as refused:
                train(labels, planted.val, model, heads_dir=tmp_path / "heads", **arguments)
        assert not list((tmp_path / "heads").glob("*.safetensors"))
        return refused.value.code

    few = write_labels(tmp_path / "few.jsonl", rows[:9], rng.integers(0, 5, (9, 5)))
    assert code_of(few) == "E-HEAD-FEW"
    alike = write_labels(tmp_path / "alike.jsonl", rows[:30], np.full((30, 5), 3))
    assert code_of(alike) == "E-HEAD-CONSTANT"
    scores = rng.integers(0, 5, (30, 5))
    mixed = write_labels(
        tmp_path / "mixed.jsonl", rows[:30], scores, rubric_hash=["r"] * 29 + ["s"]
    )
    assert code_of(mixed) == "E-LABEL-MIXED"
    other = write_labels(tmp_path / "other.jsonl", rows[:30], scores, scorer_version="v2")
    assert code_of(other) == "E-LABEL-MIXED", "train and val of two scorers"
    assert code_of(planted.train, lr=1e30, epochs=2) == "E-HEAD-NONFINITE"
    saved = backbone.embedding.data[:500, 3].clone()
    try:
        backbone.embedding.data[:500, 3] = torch.nan
        assert code_of(planted.train) == "E-HEAD-NONFINITE"
    finally:
        backbone.embedding.data[:500, 3] = saved


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", ["probe", "judge"])
def test_a_training_killed_at_any_step_ends_in_the_same_bytes(
    tmp_path: Path,
    planted: SimpleNamespace,
    backbone: Transformer,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    train = train_probe if kind == "probe" else train_judge
    arguments = (probe_arguments if kind == "probe" else judge_arguments)(planted)
    arguments |= {"epochs": 3, "save_interval_s": 0.0}
    whole = train(planted.train, planted.val, backbone, heads_dir=tmp_path / "a", **arguments)
    assert whole.num_steps > 15
    save = TrainingState.save
    for step in (2, 9, 16):

        def killed(self: Any, head: Any, optimizer: Any, losses: list[float], step=step) -> None:
            save(self, head, optimizer, losses)
            if len(losses) == step:
                raise Killed

        monkeypatch.setattr(TrainingState, "save", killed)
        with pytest.raises(Killed):
            train(planted.train, planted.val, backbone, heads_dir=tmp_path / "b", **arguments)
        monkeypatch.setattr(TrainingState, "save", save)
        torch.rand(3)
    resumed: list[int] = []
    restore = TrainingState.restore

    def counted(self: Any, *more: Any) -> list[float]:
        resumed.append(len(losses := restore(self, *more)))
        return losses

    monkeypatch.setattr(TrainingState, "restore", counted)
    last = train(planted.train, planted.val, backbone, heads_dir=tmp_path / "b", **arguments)
    assert resumed == [16]
    assert last.path.read_bytes() == whole.path.read_bytes()
    assert not list((tmp_path / "b").glob("*.training.*"))


def test_the_state_of_another_training_is_not_gone_on_from(tmp_path: Path) -> None:
    features = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    targets = torch.rand(40, 5, generator=torch.Generator().manual_seed(2)) * 4
    states = [TrainingState(tmp_path / "state", {"labels": name}, 0.0) for name in "ab"]
    fits = []
    for state in (states[0], states[1], None):
        with reproducible(0):
            fits.append(fit_probe(features, targets, Recipe(20, 2, 1e-2), state)[0].proj.weight)
    assert torch.equal(fits[1], fits[2])


def test_another_rate_costs_no_backbone_pass_for_the_probe(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    arguments = probe_arguments(planted)
    labels = (planted.train, planted.val, backbone)
    first = train_probe(*labels, heads_dir=tmp_path / "a", **arguments)
    assert first.backbone_tokens > 0
    fresh = train_probe(*labels, heads_dir=tmp_path / "b", **arguments | {"lr": 1e-3})
    kept = train_probe(*labels, heads_dir=tmp_path / "a", **arguments | {"lr": 1e-3})
    assert (kept.backbone_tokens, kept.is_current) == (0, False)
    assert kept.path.read_bytes() == fresh.path.read_bytes()
    other_tap = train_probe(*labels, heads_dir=tmp_path / "a", **arguments | {"tap": 3})
    assert other_tap.backbone_tokens == fresh.backbone_tokens
    assert read_header(other_tap.path)["tap"] == 3


def test_a_tap_outside_the_backbone_is_refused(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    for tap in (0, 9):
        with pytest.raises(HeadError, match="no such block"):
            train_probe(
                *(planted.train, None, backbone),
                heads_dir=tmp_path,
                **probe_arguments(planted) | {"tap": tap},
            )


@pytest.mark.parametrize("cache_bytes", [None, 0])
def test_a_training_document_without_finite_states_is_left_out_and_counted(
    tmp_path: Path,
    planted: SimpleNamespace,
    backbone: Transformer,
    cache_bytes: int | None,
) -> None:
    """`None` trains the probe, 0 the judge with states computed for each batch."""
    ids = [doc_id for doc_id, _ in planted.rows["train"]]
    reader = DocumentReader(planted.data_root)
    documents = read_documents(reader, ids, EOS, MAX_CTX)
    counts = np.bincount(np.concatenate([np.unique(d) for d in documents]), minlength=VOCAB)
    token = int(np.flatnonzero(counts == 2)[0])
    saved = backbone.embedding.data[token].clone()
    try:
        backbone.embedding.data[token] = torch.inf
        if cache_bytes is None:
            report = train_probe(
                *(planted.train, None, backbone),
                heads_dir=tmp_path,
                **probe_arguments(planted),
            )
        else:
            report = train_judge(
                *(planted.train, None, backbone),
                heads_dir=tmp_path,
                **judge_arguments(planted) | {"cache_bytes": cache_bytes},
            )
    finally:
        backbone.embedding.data[token] = saved
    training = read_header(report.path)["training"]
    assert (training["num_failed_documents"], report.num_documents) == (2, len(ids) - 2)


def test_the_card_says_what_the_header_says(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    noise = planted.val.with_name("noise_val.json")
    noise.write_text('{"count": 50, "ceiling": 0.9}')
    try:
        report = train_probe(
            planted.train,
            planted.val,
            backbone,
            heads_dir=tmp_path,
            **probe_arguments(planted),
        )
    finally:
        noise.unlink()
    assert report.metrics["share_of_ceiling"] == pytest.approx(report.metrics["spearman"] / 0.9)
    card = report.path.with_suffix(".md").read_text()
    assert report.digest in card
    assert backbone.digest in card
    assert f"{report.metrics['spearman']:.3f} [{report.metrics['spearman_ci95'][0]:.3f}" in card
    assert "Share of the oracle's noise ceiling" in card


def test_labels_of_which_most_failed_or_were_salvaged_train_nothing(
    tmp_path: Path, planted: SimpleNamespace, backbone: Transformer
) -> None:
    arguments = probe_arguments(planted) | {"epochs": 1}
    records = [json.loads(line) for line in planted.train.read_text().splitlines()]
    for i, record in enumerate(records):
        record |= [{"ok": False}, {"salvaged": True}, {}][i % 3]
    path = tmp_path / "labels_train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(LabelError) as refused:
        train_probe(path, None, backbone, heads_dir=tmp_path / "a", **arguments)
    assert refused.value.code == "E-LABEL-COVERAGE"
    assert not (tmp_path / "a").exists()
    taken = train_probe(
        path, None, backbone, heads_dir=tmp_path / "a", use_salvaged=True, **arguments
    )
    assert taken.num_documents == sum("ok" not in r or r["ok"] for r in records)
    for record in records:
        record["ok"] = True
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    strict = train_probe(path, None, backbone, heads_dir=tmp_path / "b", **arguments)
    salvaged = sum(record.get("salvaged", False) for record in records)
    assert strict.num_documents == len(records) - salvaged
    card = (tmp_path / "b" / "hydra_probe.md").read_text()
    assert f"{salvaged} salvaged ones left out" in card
