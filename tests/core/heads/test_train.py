"""Both trainings: what they learn, what they refuse, what a kill leaves, what they report."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import HeadError, LabelError
from nmoe_core.config.quality import HeadsTable
from nmoe_core.engine import Transformer
from nmoe_core.heads.files import load_head, load_heads, read_header
from nmoe_core.heads.fit import Recipe, fit_judge, fit_probe, learning_rate, reproducible
from nmoe_core.heads.models import JudgeArch, layer_norm
from nmoe_core.heads.scoring import HeadScorer, predict
from nmoe_core.heads.states import pooled_features
from nmoe_core.heads.train import HeadKind, LabelPaths, Training, train_head
from nmoe_core.heads.training_state import SAVE_INTERVAL_S, TrainingState
from nmoe_core.labels.scores import stored
from nmoe_core.labels.slices import read_slice
from tests.core.quality import MAX_CTX, VOCAB, corpus_of, slice_all, write_labels

PROBE = {"batch_size": 32, "epochs": 40, "lr": 2e-2}
JUDGE = PROBE | {"epochs": 3, "lr": 3e-3, "mid_dim": 16, "num_heads": 4, "ffn_dim": 32}


@dataclass
class Planted:
    """Labels that are a linear function of the probe's features, rounded to grades."""

    rows: dict[str, list[tuple[str, str]]]
    data_root: Path
    labels: LabelPaths
    model: Transformer

    def train(
        self, kind: HeadKind, heads_dir: Path, labels: LabelPaths | None = None, **more: Any
    ) -> SimpleNamespace:
        """Train with the recipes above but for `more`: keys of `[heads]` and of its tables."""
        interval_s = more.pop("save_interval_s", SAVE_INTERVAL_S)
        shared = {name: more.pop(name) for name in ("use_salvaged", "cache_gib") if name in more}
        recipe = (PROBE if kind == "probe" else JUDGE) | more
        table = HeadsTable.model_validate({kind: recipe, **shared})
        labels, corpus = labels or self.labels, corpus_of(self.data_root)
        training = Training(labels, corpus, self.model, heads_dir, table, interval_s)
        done = train_head(kind, training)
        path = Path(done.facts["path"])
        return SimpleNamespace(
            path=path,
            payload=path.read_bytes(),
            header=(header := read_header(path)),
            training=header["training"],
            metrics=header["metrics"],
            head=load_head(path, self.model, MAX_CTX)[0],
            digest=done.digest,
            facts=done.facts,
        )


@pytest.fixture(scope="module")
def planted(
    tmp_path_factory: pytest.TempPathFactory, shared_data: Path, backbone: Transformer
) -> Planted:
    base = tmp_path_factory.mktemp("planted")
    slices = slice_all(shared_data, base / "slices")
    rows = {s: read_slice(slices / f"docids_{s}.jsonl") for s in ("train", "val")}
    weight = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
    paths, means = {}, None
    for split, split_rows in rows.items():
        documents = corpus_of(shared_data).read([doc_id for doc_id, _ in split_rows])
        signal = layer_norm(pooled_features(backbone, documents, 6)) @ weight
        means = means or (signal.mean(0), signal.std(0))
        grades = (2 + 1.2 * (signal - means[0]) / means[1]).round().clamp(0, 4).numpy()
        path = base / "labels" / "merged" / f"labels_{split}.jsonl"
        paths[split] = write_labels(path, split_rows, grades)
    return Planted(rows, shared_data, LabelPaths(**paths), backbone)


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

    class States:
        lengths = [1] * 60

        def of(self, rows: list[int]) -> Any:
            return features[rows][:, None], torch.ones(len(rows), dtype=torch.int64), rows

    fitted = []
    for values in (targets, targets.clamp(0, 4)):
        with reproducible(0):
            probe, _ = fit_probe(features, values, Recipe(20, 5, 1e-2))
            judge, _ = fit_judge(*(JudgeArch(8, 8, 2, 8), States(), values, Recipe(20, 2, 1e-3)))
        fitted.append(torch.cat([p.flatten() for h in (probe, judge) for p in h.parameters()]))
    assert torch.equal(*fitted)


def test_trained_probe_agrees_with_val_and_its_baselines_do_not(
    tmp_path: Path, planted: Planted
) -> None:
    made = planted.train("probe", tmp_path)
    metrics = made.metrics
    assert metrics["n"] == len(planted.rows["val"])
    assert metrics["spearman"] == made.facts["spearman"] > 0.8
    assert metrics["spearman_ci95"][0] > 0.5
    assert min(metrics["r2"].values()) > 0.5
    for name, mae in metrics["mae"].items():
        assert mae < metrics["mae_mean_only"][name]
    assert abs(metrics["spearman_source_only"]) < 0.5
    num_steps = 40 * -(-len(planted.rows["train"]) // 32)
    assert made.facts["steps"] == made.facts["head_steps"] == num_steps
    ids = [doc_id for split in ("train", "val") for doc_id, _ in planted.rows[split]]
    lengths = [min(MAX_CTX, s.end - s.start - 1) for s in map(parse_doc_id, ids)]
    assert made.facts["backbone_tokens"] == sum(lengths)
    assert made.header["labels_digest"]
    found = tuple(made.header[key] for key in ("tap", "scorer_model", "rubric_hash"))
    assert found == (6, "fake", "r")
    assert made.header["backbone"]["digest"] == planted.model.digest


@pytest.mark.parametrize("kind", ["probe", "judge"])
def test_equal_inputs_give_equal_bytes_and_a_current_head_is_left_alone(
    tmp_path: Path, planted: Planted, kind: HeadKind
) -> None:
    torch.manual_seed(1)
    first = planted.train(kind, tmp_path / "a")
    torch.manual_seed(2)
    torch.rand(7)
    state = torch.get_rng_state()
    second = planted.train(kind, tmp_path / "b")
    assert first.digest == second.digest
    assert first.payload == second.payload
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is its own"
    tokens = planted.model.tokens_processed
    again = planted.train(kind, tmp_path / "a")
    assert again.digest == first.digest
    assert (again.facts["head_steps"], again.facts["backbone_tokens"]) == (0, 0)
    assert planted.model.tokens_processed == tokens
    other = planted.train(kind, tmp_path / "a", lr=1e-4)
    assert other.facts["head_steps"] > 0
    assert other.digest != first.digest


def test_the_judge_learns_from_train_what_holds_on_val(tmp_path: Path, planted: Planted) -> None:
    made = planted.train("judge", tmp_path, epochs=30, lr=5e-3)
    curve = made.training["loss_curve"]
    assert curve[-1][1] < 0.5 * curve[0][1]
    assert made.metrics["spearman"] > 0.3


def test_the_judge_is_the_same_whether_states_are_kept_or_computed_again(
    tmp_path: Path, planted: Planted
) -> None:
    kept = planted.train("judge", tmp_path / "a")
    again = planted.train("judge", tmp_path / "b", cache_gib=0.0)
    states = kept.training["states"], again.training["states"]
    assert states == ("in memory", "computed for each batch")
    assert again.facts["backbone_tokens"] > 2 * kept.facts["backbone_tokens"]
    for (name, x), y in zip(kept.head.state_dict().items(), again.head.state_dict().values()):
        torch.testing.assert_close(x, y, atol=5e-3, rtol=0, msg=name)


def test_val_labels_do_not_move_the_weights(tmp_path: Path, planted: Planted) -> None:
    rng, rows = np.random.default_rng(0), planted.rows["val"]
    others = [None, write_labels(tmp_path / "val", rows, rng.integers(0, 5, (len(rows), 5)))]
    (tmp_path / "none").write_bytes(b"")
    made = planted.train("probe", tmp_path / "heads")
    for i, val in enumerate([*others, tmp_path / "none"]):
        labels = replace(planted.labels, val=val)
        other = planted.train("probe", tmp_path / f"heads_{i}", labels)
        assert bool(other.metrics) == (i == 1)
        for name, weights in other.head.state_dict().items():
            assert torch.equal(made.head.state_dict()[name], weights)


def test_training_and_grading_see_the_same_features(tmp_path: Path, planted: Planted) -> None:
    made, model = planted.train("probe", tmp_path), planted.model
    planted.train("judge", tmp_path, replace(planted.labels, val=None))
    probe = load_heads(tmp_path, model, MAX_CTX).probe
    documents = corpus_of(planted.data_root).read([doc_id for doc_id, _ in planted.rows["val"]])
    with torch.no_grad():
        trained_on = stored(probe.from_pooled(pooled_features(model, documents, 6)).numpy())
    assert np.array_equal(predict(model, made.head, 6, documents, 32), trained_on)
    graded = HeadScorer.load(tmp_path, model, MAX_CTX, 5).score(documents)
    np.testing.assert_allclose(graded.probe, trained_on, atol=1e-4)


def test_the_rate_starts_above_zero_and_reaches_its_peak_in_short_runs_too() -> None:
    assert learning_rate(0, 20, 1.0) == 0.5
    assert learning_rate(1, 20, 1.0) == 1.0
    assert learning_rate(0, 100_000, 1.0) == 1 / 500
    assert learning_rate(499, 100_000, 1.0) == learning_rate(90_000, 100_000, 1.0) == 1.0
    assert learning_rate(0, 1, 1.0) == 1.0


@pytest.mark.parametrize("kind", ["probe", "judge"])
def test_labels_that_cannot_be_learned_from_are_refused_and_no_head_is_written(
    tmp_path: Path, planted: Planted, kind: HeadKind
) -> None:
    rows, rng = planted.rows["train"], np.random.default_rng(0)

    def code_of(labels: Path = planted.labels.train, **more: Any) -> str:
        with pytest.raises((HeadError, LabelError)) as refused:
            planted.train(kind, tmp_path, replace(planted.labels, train=labels), **more)
        assert not list(tmp_path.glob("*.safetensors"))
        return refused.value.code

    few = write_labels(tmp_path / "few.jsonl", rows[:9], rng.integers(0, 5, (9, 5)))
    assert code_of(few) == "E-HEAD-FEW"
    alike = write_labels(tmp_path / "alike.jsonl", rows[:30], np.full((30, 5), 3))
    assert code_of(alike) == "E-HEAD-CONSTANT"
    scores = rng.integers(0, 5, (30, 5))
    hashes = ["r"] * 29 + ["s"]
    mixed = write_labels(tmp_path / "mixed.jsonl", rows[:30], scores, rubric_hash=hashes)
    assert code_of(mixed) == "E-LABEL-MIXED"
    other = write_labels(tmp_path / "other.jsonl", rows[:30], scores, scorer_version="v2")
    assert code_of(other) == "E-LABEL-MIXED", "train and val of two scorers"
    assert code_of(lr=1e30, epochs=2) == "E-HEAD-NONFINITE"
    assert code_of(tap=9) == "E-HEAD-FORMAT", "the backbone has eight blocks"
    saved = planted.model.embedding.data[:500, 3].clone()
    try:
        planted.model.embedding.data[:500, 3] = torch.nan
        assert code_of() == "E-HEAD-NONFINITE"
    finally:
        planted.model.embedding.data[:500, 3] = saved


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", ["probe", "judge"])
def test_a_training_killed_at_any_step_ends_in_the_same_bytes(
    tmp_path: Path, planted: Planted, monkeypatch: pytest.MonkeyPatch, kind: HeadKind
) -> None:
    settings: dict[str, Any] = {"epochs": 3, "save_interval_s": 0.0}
    whole = planted.train(kind, tmp_path / "a", **settings)
    assert whole.facts["steps"] > 15
    save, restore, resumed = TrainingState.save, TrainingState.restore, []
    for step in (2, 9, 16):

        def killed(self: Any, head: Any, optimizer: Any, losses: list[float], step=step) -> None:
            save(self, head, optimizer, losses)
            if len(losses) == step:
                raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(TrainingState, "save", killed)
            with pytest.raises(Killed):
                planted.train(kind, tmp_path / "b", **settings)
        torch.rand(3)

    def counted(self: Any, *more: Any) -> list[float]:
        resumed.append(len(losses := restore(self, *more)))
        return losses

    monkeypatch.setattr(TrainingState, "restore", counted)
    last = planted.train(kind, tmp_path / "b", **settings)
    assert resumed == [16]
    assert last.payload == whole.payload
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
    tmp_path: Path, planted: Planted
) -> None:
    assert planted.train("probe", tmp_path / "a").facts["backbone_tokens"] > 0
    fresh = planted.train("probe", tmp_path / "b", lr=1e-3)
    kept = planted.train("probe", tmp_path / "a", lr=1e-3)
    assert kept.facts["backbone_tokens"] == 0 < kept.facts["head_steps"]
    assert kept.payload == fresh.payload
    other_tap = planted.train("probe", tmp_path / "a", tap=3)
    assert other_tap.facts["backbone_tokens"] == fresh.facts["backbone_tokens"]
    assert other_tap.header["tap"] == 3


@pytest.mark.parametrize(("kind", "more"), [("probe", {}), ("judge", {"cache_gib": 0.0})])
def test_a_training_document_without_finite_states_is_left_out_and_counted(
    tmp_path: Path, planted: Planted, kind: HeadKind, more: dict[str, Any]
) -> None:
    ids = [doc_id for doc_id, _ in planted.rows["train"]]
    documents = corpus_of(planted.data_root).read(ids).tokens
    counts = np.bincount(np.concatenate([np.unique(d) for d in documents]), minlength=VOCAB)
    token = int(np.flatnonzero(counts == 2)[0])
    saved = planted.model.embedding.data[token].clone()
    try:
        planted.model.embedding.data[token] = torch.inf
        made = planted.train(kind, tmp_path, replace(planted.labels, val=None), **more)
    finally:
        planted.model.embedding.data[token] = saved
    assert made.training["num_failed_documents"] == 2
    assert made.facts["labels"] == len(ids) - 2


def test_the_card_says_what_the_header_says(tmp_path: Path, planted: Planted) -> None:
    assert planted.labels.val is not None
    noise = planted.labels.val.with_name("noise_val.json")
    noise.write_text('{"count": 50, "ceiling": 0.9}')
    try:
        made = planted.train("probe", tmp_path)
    finally:
        noise.unlink()
    metrics, card = made.metrics, made.path.with_suffix(".md").read_text()
    assert metrics["share_of_ceiling"] == pytest.approx(metrics["spearman"] / 0.9)
    assert made.digest in card
    assert planted.model.digest in card
    assert f"{metrics['spearman']:.3f} [{metrics['spearman_ci95'][0]:.3f}" in card
    assert "Share of the oracle's noise ceiling" in card


def test_labels_of_which_most_failed_or_were_salvaged_are_refused_unless_asked_for(
    tmp_path: Path, planted: Planted
) -> None:
    records = [json.loads(line) for line in planted.labels.train.read_text().splitlines()]
    for i, record in enumerate(records):
        record |= [{"ok": False}, {"salvaged": True}, {}][i % 3]
    labels = LabelPaths(tmp_path / "labels_train.jsonl")
    labels.train.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(LabelError) as refused:
        planted.train("probe", tmp_path / "a", labels, epochs=1)
    assert refused.value.code == "E-LABEL-COVERAGE"
    assert not (tmp_path / "a").exists()
    taken = planted.train("probe", tmp_path / "a", labels, use_salvaged=True, epochs=1)
    assert taken.facts["labels"] == sum(record["ok"] for record in records)
    parsed = (json.dumps(record | {"ok": True}) + "\n" for record in records)
    labels.train.write_text("".join(parsed))
    strict = planted.train("probe", tmp_path / "b", labels, epochs=1)
    salvaged = sum(record.get("salvaged", False) for record in records)
    assert strict.facts["labels"] == len(records) - salvaged
    card = (tmp_path / "b" / "hydra_probe.md").read_text()
    assert f"{salvaged} salvaged ones left out" in card
