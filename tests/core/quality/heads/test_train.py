"""Both trainings: what they learn, what they refuse, what a kill leaves, what they report."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nmoe_core.base.docid import parse_doc_id
from nmoe_core.config.heads import HeadsTable
from nmoe_core.engine import Transformer
from nmoe_core.labels.scores import QUALITY
from nmoe_core.labels.slices import read_slice
from nmoe_core.quality.heads import fit, models
from nmoe_core.quality.heads.fit import TrainingState, fit_judge, fit_probe, reproducible
from nmoe_core.quality.heads.head_files import load_head, read_header
from nmoe_core.quality.heads.models import Probe, layer_norm
from nmoe_core.quality.heads.scoring import HeadScorer, load_heads
from nmoe_core.quality.heads.shapes import JudgeArch, ProbeArch, Recipe
from nmoe_core.quality.heads.train import FEATURES_DIR, HeadKind, HeadTraining
from nmoe_core.quality.kept_states import KeptStates
from tests.core.small_gradings import (
    MAX_CTX,
    corpus_of,
    slice_all,
    spoiled,
    token_of,
    write_labels,
    write_student,
)
from tests.project import read_rows
from tests.refusals import refused

PROBE = {"batch_size": 32, "epochs": 40, "lr": 2e-2}
NOISE = {"count": 500, "reliability": 0.81, "reliability_ci95": [0.79, 0.83]}
JUDGE = PROBE | {"epochs": 3, "lr": 3e-3, "mid_dim": 16, "num_heads": 4, "ffn_dim": 32}


def pooled_features(model: Transformer, documents: Any, tap: int, directory: Path) -> torch.Tensor:
    """Pooled states after one block, kept in a directory."""
    kept = KeptStates(model, directory, 2**30, [tap])
    return torch.from_numpy(kept.pooled(documents)[:, 0])


@dataclass
class Planted:
    """Labels that are a linear function of the probe's features, rounded to grades."""

    rows: dict[str, list[tuple[str, str]]]
    data_root: Path
    labels: dict[str, Path]
    model: Transformer

    def train(
        self, kind: HeadKind, heads_dir: Path, labels: Any = None, **more: Any
    ) -> SimpleNamespace:
        """Train with the recipes above but for `more`: keys of `[heads]` and of its tables.

        `labels` stand in for those of the same splits; None for no labels.
        """
        shared = {name: more.pop(name) for name in ("use_salvaged", "cache_gib") if name in more}
        recipe = (PROBE if kind == "probe" else JUDGE) | more
        table = HeadsTable.model_validate({kind: recipe, **shared})
        labels, corpus = self.labels | (labels or {}), corpus_of(self.data_root)
        done = HeadTraining(kind, labels, corpus, self.model, heads_dir, table).run()
        path = Path(done.facts["path"])
        return SimpleNamespace(
            path=path,
            payload=path.read_bytes(),
            header=(header := read_header(path)),
            training=header["training"],
            metrics=header["metrics"],
            head=load_head(path, self.model, MAX_CTX).head,
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
        signal = layer_norm(pooled_features(backbone, documents, 6, base / split)) @ weight
        means = means or (signal.mean(0), signal.std(0))
        grades = (2 + 1.2 * (signal - means[0]) / means[1]).round().clamp(0, 4).numpy()
        path = base / "labels" / "merged" / f"labels_{split}.jsonl"
        paths[split] = write_labels(path, split_rows, grades)
    paths["val"].with_name("noise_val.json").write_text(json.dumps({"kinds": {"order": NOISE}}))
    return Planted(rows, shared_data, paths, backbone)


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


def of_one_token(features: torch.Tensor) -> Any:
    """States of documents of one token each, in the place of `TokenStates`."""

    def of(rows: list[int]) -> Any:
        return features[rows][:, None], torch.ones(len(rows), dtype=torch.int64), rows

    return SimpleNamespace(lengths=[1] * len(features), of=of)


def test_targets_outside_the_scale_count_as_its_ends() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(60, 8, generator=generator)
    targets = 12 * torch.rand(60, 5, generator=generator) - 4

    fitted = []
    for values in (targets, targets.clamp(0, 4)):
        with reproducible(0):
            probe, _ = fit_probe(features, values, Recipe(20, 5, 1e-2))
            states = of_one_token(features)
            judge, _ = fit_judge(JudgeArch(8, 8, 2, 8), states, values, Recipe(20, 2, 1e-3))
        fitted.append(torch.cat([p.flatten() for h in (probe, judge) for p in h.parameters()]))
    assert torch.equal(*fitted)


def test_a_judge_learns_grades_from_one_as_it_learns_those_from_zero() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(60, 8, generator=generator)
    targets = 4 * torch.rand(60, 5, generator=generator)
    lowest = tuple(low + 1 for low in QUALITY.lowest)
    higher = replace(QUALITY, lowest=lowest, highest=tuple(high + 1 for high in QUALITY.highest))

    curves = []
    for scale, values in ((QUALITY, targets), (higher, targets + 1)):
        with reproducible(0):
            states, recipe = of_one_token(features), Recipe(20, 3, 1e-3)
            _, losses = fit_judge(JudgeArch(8, 8, 2, 8), states, values, recipe, scale=scale)
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)


def test_the_card_says_that_a_trained_probe_agrees_with_val_better_than_its_baselines(
    tmp_path: Path, planted: Planted
) -> None:
    write_student(planted.labels, corpus_of(planted.data_root), tmp_path)
    made = planted.train("probe", tmp_path)
    metrics = made.metrics
    assert metrics["n"] == len(planted.rows["val"])
    assert metrics["spearman"] == made.facts["spearman"] > 0.8
    assert metrics["spearman_ci95"][0] > 0.5
    assert min(metrics["r2"].values()) > 0.5
    for name, mae in metrics["mae"].items():
        assert mae < metrics["mae_mean_only"][name]
    assert abs(metrics["spearman_source_only"]) < 0.5
    student, gain = metrics["spearman_student"], metrics["gain_over_student"]
    assert gain == pytest.approx(metrics["spearman"] - student, abs=1e-5)
    assert metrics["gain_over_student_ci95"][0] <= gain <= metrics["gain_over_student_ci95"][1]
    card = (tmp_path / "hydra_probe.md").read_text()
    assert f"fitted on the same labels, reaches {student:.3f} [" in card
    num_steps = 40 * -(-len(planted.rows["train"]) // 32)
    assert made.facts["steps"] == made.facts["head_steps"] == num_steps
    ids = [doc_id for split in ("train", "val") for doc_id, _ in planted.rows[split]]
    lengths = [min(MAX_CTX, s.end - s.start - 1) for s in map(parse_doc_id, ids)]
    assert made.facts["backbone_tokens"] == sum(lengths)
    assert made.header["labels_digest"]
    found = tuple(made.header[key] for key in ("tap", "scorer_model", "rubric_hash"))
    assert found == (6, "fake", "r")
    assert made.header["backbone"]["digest"] == planted.model.digest
    assert (metrics["noise_ceiling"], metrics["noise_ceiling_documents"]) == (0.9, 500)
    assert metrics["share_of_ceiling"] is None  # val has few documents
    interval = f"{metrics['spearman']:.3f} [{metrics['spearman_ci95'][0]:.3f}"
    card = made.path.with_suffix(".md").read_text()
    for part in (
        made.digest,
        planted.model.digest,
        interval,
        "noise ceiling of Spearman: 0.900 [0.889, 0.911], from 500",
    ):
        assert part in card


@pytest.mark.parametrize("kind", ["probe", "judge"])
def test_equal_inputs_give_equal_bytes_and_none_is_computed_twice(
    tmp_path: Path, planted: Planted, kind: HeadKind
) -> None:
    torch.manual_seed(1)
    first = planted.train(kind, tmp_path / "a")
    torch.manual_seed(2)
    torch.rand(7)
    state = torch.get_rng_state()
    second = planted.train(kind, tmp_path / "b")
    assert (first.digest, first.payload) == (second.digest, second.payload)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is its own"
    tokens = planted.model.tokens_processed
    made_at = first.path.with_suffix(".md").stat().st_mtime_ns
    again = planted.train(kind, tmp_path / "a")
    assert again.path.with_suffix(".md").stat().st_mtime_ns == made_at
    assert (again.facts["head_steps"], again.facts["backbone_tokens"]) == (0, 0)
    assert (again.digest, planted.model.tokens_processed) == (first.digest, tokens)
    kept, fresh = (planted.train(kind, tmp_path / name, lr=1e-4) for name in "ac")
    assert kept.payload == fresh.payload != first.payload
    assert kept.facts["head_steps"] > 0
    assert kept.facts["backbone_tokens"] < fresh.facts["backbone_tokens"], "states are on disk"
    other_tap = planted.train(kind, tmp_path / "a", tap=3, lr=1e-4)
    needs_pass = other_tap.facts["backbone_tokens"] > kept.facts["backbone_tokens"]
    assert needs_pass == (kind == "judge"), "pooled states of this block are on disk"
    assert other_tap.header["tap"] == 3


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
    num = kept.facts["labels"]
    assert states == tuple(f"on disk of {n} documents of {num}" for n in (num, 0))
    assert again.facts["backbone_tokens"] > 2 * kept.facts["backbone_tokens"]
    for (name, x), y in zip(kept.head.state_dict().items(), again.head.state_dict().values()):
        torch.testing.assert_close(x, y, atol=5e-3, rtol=0, msg=name)


def test_training_and_grading_see_the_same_features(tmp_path: Path, planted: Planted) -> None:
    model = planted.model
    planted.train("probe", tmp_path)
    planted.train("judge", tmp_path, {"val": None})
    probe = load_heads(tmp_path, model, MAX_CTX).probe
    documents = corpus_of(planted.data_root).read([doc_id for doc_id, _ in planted.rows["val"]])
    with torch.no_grad():
        features = pooled_features(model, documents, 6, tmp_path / "features")
        trained_on = QUALITY.stored(probe.from_pooled(features).numpy())
    graded = HeadScorer(model, load_heads(tmp_path, model, MAX_CTX), 5).score(documents)
    np.testing.assert_allclose(graded.probe, trained_on, atol=1e-4)


def test_the_rate_starts_above_zero_and_reaches_its_peak_in_short_runs_too() -> None:
    steps = ((0, 20), (1, 20), (0, 10**5), (499, 10**5), (90_000, 10**5), (0, 1))
    assert [fit.learning_rate(*step, 1.0) for step in steps] == [1 / 2, 1, 1 / 500, 1, 1, 1]


@pytest.mark.parametrize("kind", ["probe", "judge"])
def test_labels_that_cannot_be_learned_from_are_refused_and_no_head_is_written(
    tmp_path: Path, planted: Planted, kind: HeadKind
) -> None:
    rows, rng = planted.rows["train"], np.random.default_rng(0)
    scores, bad = rng.integers(0, 5, (30, 5)), tmp_path / "bad.jsonl"

    def is_refused(code: str, labels: Path = planted.labels["train"], **more: Any) -> None:
        with refused(code):
            planted.train(kind, tmp_path, {"train": labels}, **more)
        assert not list(tmp_path.glob("*.safetensors"))

    is_refused("E-HEAD-FEW", write_labels(bad, rows[:9], scores))
    is_refused("E-HEAD-FEW", write_labels(bad, rows[:30], scores, ok=False))
    is_refused("E-HEAD-CONSTANT", write_labels(bad, rows[:30], np.full((30, 5), 3)))
    for mixed in ({"rubric_hash": ["r"] * 29 + ["s"]}, {"scorer_version": "v2"}):
        is_refused("E-LABEL-MIXED", write_labels(bad, rows[:30], scores, **mixed))
    is_refused("E-HEAD-NONFINITE", lr=1e30, epochs=2)
    is_refused("E-HEAD-FORMAT", tap=9)  # the backbone has eight blocks
    shutil.rmtree(tmp_path / FEATURES_DIR)  # states of the training above, before its loss
    with spoiled(planted.model, (slice(500), 3), np.nan):
        is_refused("E-HEAD-NONFINITE")


@pytest.mark.parametrize("kind", ["probe", "judge"])
def test_a_training_killed_at_any_step_ends_in_the_same_bytes(
    tmp_path: Path, planted: Planted, monkeypatch: pytest.MonkeyPatch, kind: HeadKind
) -> None:
    monkeypatch.setattr(fit, "SAVE_INTERVAL_S", 0.0)
    whole = planted.train(kind, tmp_path / "a", epochs=3)
    assert whole.facts["steps"] > 15
    save, restore, resumed = TrainingState.save, TrainingState.restore, []
    kills = [2, 9, 16]

    def killed(self: Any, head: Any, optimizer: Any, losses: list[float]) -> None:
        save(self, head, optimizer, losses)
        if len(losses) in kills:
            kills.remove(len(losses))
            raise KeyboardInterrupt

    def counted(self: Any, *more: Any) -> list[float]:
        resumed.append(len(losses := restore(self, *more)))
        return losses

    monkeypatch.setattr(TrainingState, "save", killed)
    monkeypatch.setattr(TrainingState, "restore", counted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            planted.train(kind, tmp_path / "b", epochs=3)
        torch.rand(3)
    last = planted.train(kind, tmp_path / "b", epochs=3)
    assert resumed == [0, 2, 9, 16]
    assert last.payload == whole.payload
    assert not list((tmp_path / "b").glob("*.training.*"))


def test_a_state_of_another_training_or_damaged_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "SAVE_INTERVAL_S", 0.0)
    head, path = Probe(ProbeArch(8)), tmp_path / "state"
    optimizer = torch.optim.AdamW(head.parameters())
    state, other = (TrainingState(path, {"labels": name}) for name in "ab")
    assert state.restore(head, optimizer) == []
    state.save(head, optimizer, [1.0])
    assert state.restore(head, optimizer) == [1.0]
    assert other.restore(head, optimizer) == []
    payload = path.read_bytes()
    path.write_bytes(payload[:-1] + bytes([payload[-1] ^ 1]))
    assert state.restore(head, optimizer) == []


@pytest.mark.parametrize(
    ("kind", "more"), [("probe", {}), ("judge", {}), ("judge", {"cache_gib": 0.0})]
)
def test_a_training_document_without_finite_states_is_left_out_and_counted(
    tmp_path: Path, planted: Planted, kind: HeadKind, more: dict[str, Any]
) -> None:
    ids = [doc_id for doc_id, _ in planted.rows["train"]]
    token = token_of(corpus_of(planted.data_root).read(ids).tokens, 2)
    with spoiled(planted.model, token, np.inf):
        made = planted.train(kind, tmp_path, {"val": None}, **more)
    assert made.training["num_failed_documents"] == 2
    assert made.facts["labels"] == len(ids) - 2


def test_labels_of_which_most_failed_or_were_salvaged_are_refused_unless_asked_for(
    tmp_path: Path, planted: Planted
) -> None:
    records = read_rows(planted.labels["train"])
    for i, record in enumerate(records):
        record |= [{"ok": False}, {"salvaged": True}, {}][i % 3]
    path = tmp_path / "labels_train.jsonl"
    labels = {"train": path, "val": None}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with refused("E-LABEL-COVERAGE"):
        planted.train("probe", tmp_path / "a", labels, epochs=1)
    assert not (tmp_path / "a").exists()
    taken = planted.train("probe", tmp_path / "a", labels, use_salvaged=True, epochs=1)
    assert taken.facts["labels"] == sum(record["ok"] for record in records)
    path.write_text("".join(json.dumps(record | {"ok": True}) + "\n" for record in records))
    strict = planted.train("probe", tmp_path / "b", labels, epochs=1)
    salvaged = sum(record.get("salvaged", False) for record in records)
    assert strict.facts["labels"] == len(records) - salvaged
    card = (tmp_path / "b" / "hydra_probe.md").read_text()
    assert f"{salvaged} salvaged labels excluded" in card


def test_documents_that_the_oracle_does_not_judge_are_no_failed_labels(
    tmp_path: Path, planted: Planted
) -> None:
    records = read_rows(planted.labels["train"])
    for i, record in enumerate(records):
        record |= {} if i < 20 else {"ok": False, "finish_reason": "unsupported_language"}
    path = tmp_path / "labels_train.jsonl"
    labels = {"train": path, "val": None}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert planted.train("probe", tmp_path / "a", labels, epochs=1).facts["labels"] == 20
    path.write_text("".join(json.dumps(record) + "\n" for record in records[19:]))
    with refused("E-HEAD-FEW", match="language"):
        planted.train("probe", tmp_path / "b", labels, epochs=1)


class _States:
    """States of made-up documents; those of `failed` are not finite. Notes how many tokens one call
    asks for."""

    def __init__(self, lengths: list[int], failed: int | None = None) -> None:
        self.lengths, self._failed, self.asked = lengths, failed, list[int]()
        generator = torch.Generator().manual_seed(3)
        self._states = [torch.randn(n, 8, generator=generator) for n in lengths]

    def of(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        self.asked.append(len(rows) * max(self.lengths[i] for i in rows))
        rows = [i for i in rows if i != self._failed]
        lengths = torch.tensor([self.lengths[i] for i in rows])
        padded = torch.nn.utils.rnn.pad_sequence([self._states[i] for i in rows], batch_first=True)
        return padded, lengths, rows


@pytest.mark.parametrize("failed", [None, 5])
def test_the_judge_learns_the_same_in_passes_of_few_tokens_as_in_one(
    monkeypatch: pytest.MonkeyPatch, failed: int | None
) -> None:
    monkeypatch.setattr(models, "DROPOUT", 0.0)
    lengths = [1, 3, 40, 7, 22, 9, 60, 5, 31, 2, 18, 4]
    generator = torch.Generator().manual_seed(4)
    targets = torch.rand(len(lengths), len(QUALITY), generator=generator) * 4
    found = []
    for most in (64, 2**15):
        monkeypatch.setattr(fit, "PASS_TOKENS", most)
        states: Any = _States(lengths, failed)
        with reproducible(1):
            judge, losses = fit_judge(JudgeArch(8, 8, 2, 8), states, targets, Recipe(6, 3, 1e-2))
        assert max(states.asked) <= max(most, max(lengths))
        with torch.no_grad():
            hidden, seen, _ = _States(lengths).of([*range(len(lengths))])
            found.append((judge(hidden, seen), losses))
    (in_parts, of_parts), (at_once, of_one) = found
    assert of_parts == pytest.approx(of_one, rel=1e-4)
    assert torch.allclose(in_parts, at_once, atol=1e-3)


def test_a_batch_of_long_documents_asks_for_a_bounded_number_of_tokens_at_a_time() -> None:
    lengths = [64] * 3 + [4096] * 13
    states: Any = _States(lengths)
    with reproducible(1):
        fit_judge(JudgeArch(8, 8, 2, 8), states, torch.ones(16, len(QUALITY)), Recipe(128, 1, 1e-3))
    assert max(states.asked) <= 2**15
