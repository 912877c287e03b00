"""Trains the probe and the judge on oracle labels, over a frozen backbone.

The probe needs one backbone pass: pooled states are kept on disk, and its epochs cost seconds. The
judge reads every position: its states are kept in memory while they take at most `cache_gib`,
else computed again for each batch. A killed training goes on where it was. Val and test labels are
only reported on, never fitted; a document counts where its content was not trained on. A head whose
recorded fingerprints are those of this call is left as it is; on failure no head is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from nmoe_core.base.atomic import output_lock, write_bytes
from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints, sha256_file, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.quality import HeadsTable
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine.weights.config import tap_layers
from nmoe_core.heads import TRAIN_CODE
from nmoe_core.heads.card import head_card
from nmoe_core.heads.features import Backbone, Corpus, DocumentTokens, device_of
from nmoe_core.heads.files import Header, read_head, save_head
from nmoe_core.heads.fit import Recipe, fit_judge, fit_probe, reproducible, thin_curve
from nmoe_core.heads.metrics import head_metrics, held_out, require_same_scorer
from nmoe_core.heads.models import Judge, JudgeArch, Probe
from nmoe_core.heads.scoring import predict
from nmoe_core.heads.states import FEATURE_BATCH, TapStates, pooled_features
from nmoe_core.heads.training_state import SAVE_INTERVAL_S, TrainingState
from nmoe_core.labels.files import Labels, read_labels
from nmoe_core.labels.scores import aggregate, stored
from nmoe_core.labels.slices import data_digest

MIN_LABELS = 10
FEATURES_DIR = ".features"
_REPORTED_ON = ("labels_val", "labels_test")
HeadKind = Literal["probe", "judge"]


@dataclass(frozen=True, slots=True)
class LabelPaths:
    """Merged label files: `train` is fitted, the others are only reported on where they are."""

    train: Path
    val: Path | None = None
    test: Path | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """What a head is trained from, and where it goes.

    Attributes:
        labels: The oracle's labels.
        corpus: The labelled documents.
        model: The frozen backbone.
        heads_dir: Directory of the head files.
        table: The recipes of both heads; the corpus's `max_ctx` counts, not the table's.
        save_interval_s: Seconds between saves of an unfinished training.
    """

    labels: LabelPaths
    corpus: Corpus
    model: Backbone
    heads_dir: Path
    table: HeadsTable
    save_interval_s: float = SAVE_INTERVAL_S


class _Fitted(NamedTuple):
    head: Probe | Judge
    losses: list[float]
    states: str
    num_failed: int


def train_head(kind: HeadKind, training: Training) -> Result:
    """Train `hydra_probe.safetensors` or `hydra_judge.safetensors`, and write its card beside it.

    Facts: the numbers of its agreement on val, `labels`, `steps`, `head_steps` and
    `backbone_tokens` (both 0 of a head that is current), `path`.

    Raises:
        LabelError: Labels are missing, mixed, or of another scorer in val (E-LABEL-...).
        HeadError: Too few labels (E-HEAD-FEW), all alike (E-HEAD-CONSTANT), the tap is no block
            (E-HEAD-FORMAT), or states or a loss that are not finite (E-HEAD-NONFINITE).
    """
    run = _Run(kind, training)
    path = training.heads_dir / (PROBE_NAME if kind == "probe" else JUDGE_NAME)
    files, use_salvaged = asdict(training.labels), training.table.use_salvaged
    reported = {split: read_labels(f, use_salvaged) for split, f in files.items() if f is not None}
    _check(train := reported.pop("train"))
    for labels in reported.values():
        require_same_scorer(labels, train.scorer)
    fingerprints = run.fingerprints(train, reported)
    header = _current_header(path, fingerprints)
    if header is not None:
        return _result(path, header, backbone_tokens=0, head_steps=0)
    tokens_before = training.model.tokens_processed
    seeded = reproducible(run.recipe.seed, device_of(training.model))
    with output_lock(path.parent / f".{kind}"), seeded:
        state_path = path.with_name(f".{path.stem}.training.safetensors")
        # Val and test labels do not move the weights, so with others the training is the same.
        made_from = {k: v for k, v in fingerprints.items() if k not in _REPORTED_ON}
        state = TrainingState(state_path, made_from, training.save_interval_s)
        documents = training.corpus.read(train.doc_ids)
        fitted = run.fit(train, documents, state)
        contents = documents.digests()
        header = {
            **run.header(train),
            **run.figures(fitted.head, train, reported, contents),
            "training": {
                "num_documents": len(train.doc_ids) - fitted.num_failed,
                "num_failed_documents": fitted.num_failed,
                "num_salvaged_left_out": train.num_salvaged,
                "num_steps": len(fitted.losses),
                "states": fitted.states,
                "loss_curve": thin_curve(fitted.losses),
            },
            "fingerprints": fingerprints,
        }
        digest = save_head(path, fitted.head, header, contents)
        write_bytes(path.with_suffix(".md"), head_card(path.name, digest, header).encode())
        state.clear()
    tokens = training.model.tokens_processed - tokens_before
    return _result(path, header, backbone_tokens=tokens, head_steps=len(fitted.losses))


class _Run:
    """One training: its recipe, its shape and its inputs."""

    def __init__(self, kind: HeadKind, training: Training) -> None:
        table, self.arch = training.table.probe, None
        if kind == "judge":
            judge = table = training.table.judge
            sizes = judge.mid_dim, judge.num_heads, judge.ffn_dim
            self.arch = JudgeArch(training.model.config.hidden_size, *sizes)
        self.recipe = Recipe(table.batch_size, table.epochs, table.lr, seed=training.table.seed)
        self.settings = asdict(self.recipe) | (asdict(self.arch) if self.arch is not None else {})
        self.tap = _checked_tap(table.tap, training.model, kind)
        self.training, self.model, self.corpus = training, training.model, training.corpus

    def fit(self, labels: Labels, documents: DocumentTokens, state: TrainingState) -> _Fitted:
        """Fit the head on documents and their labels."""
        targets = torch.from_numpy(labels.scores).to(device_of(self.model))
        if self.arch is None:
            features = self.pooled(labels, documents)
            good = torch.isfinite(features).all(dim=1)
            probe, losses = fit_probe(features[good], targets[good], self.recipe, state)
            return _Fitted(probe, losses, "pooled, on disk", int((~good).sum()))
        cache_bytes = int(self.training.table.cache_gib * 2**30)
        states = TapStates(self.model, documents, self.tap, cache_bytes)
        judge, losses = fit_judge(self.arch, states, targets, self.recipe, state)
        held = "in memory" if states.is_cached else "computed for each batch"
        return _Fitted(judge, losses, held, len(states.failed))

    def pooled(self, labels: Labels, documents: DocumentTokens) -> torch.Tensor:
        """Pooled states of the labelled documents, from disk where they were computed before."""
        weights, corpus = next(iter(self.model.parameters())), self.corpus
        made_from = {
            "documents": labels.doc_ids,
            "data": data_digest(corpus.data_root, sorted(set(labels.sources))),
            "backbone": self.model.digest,
            "arithmetic": f"{weights.dtype} {weights.device.type}",
            "settings": [self.tap, corpus.max_ctx, corpus.eos_token_id, FEATURE_BATCH],
        }
        cache = self.training.heads_dir / FEATURES_DIR / sha256_json(made_from)[:32]
        return pooled_features(self.model, documents, self.tap, cache)

    def fingerprints(self, train: Labels, reported: Mapping[str, Labels]) -> Fingerprints:
        """What the head is made from."""
        read = [train, *reported.values()]
        sources = sorted({source for labels in read for source in labels.sources})
        settings = {"max_ctx": self.corpus.max_ctx, "tap": self.tap, **self.settings}
        return {
            "code": TRAIN_CODE,
            "labels_train": train.digest,
            "labels_val": reported["val"].digest if "val" in reported else "",
            "labels_test": reported["test"].digest if "test" in reported else "",
            "data": data_digest(self.corpus.data_root, sources),
            "backbone": self.model.digest,
            "settings": sha256_json(settings),
        }

    def figures(
        self, head: Probe | Judge, train: Labels, reported: Mapping[str, Labels], seen: np.ndarray
    ) -> dict[str, dict[str, Any]]:
        """Agreement on val and on test, by the path that grades; empty where there are no labels.

        A document counts where its content was not trained on, and in test not in val either.
        """
        found: dict[str, dict[str, Any]] = {"metrics": {}, "test_metrics": {}}
        for name, split in zip(found, ("val", "test")):
            labels = reported.get(split)
            if labels is not None and labels.doc_ids:
                documents = self.corpus.read(labels.doc_ids)
                contents = documents.digests()
                fresh = held_out(contents, seen)
                if isinstance(head, Probe):
                    with torch.no_grad():
                        outputs = head.from_pooled(self.pooled(labels, documents))
                    predicted = stored(outputs.cpu().numpy())
                else:
                    predicted = predict(self.model, head, self.tap, documents, FEATURE_BATCH)
                found[name] = head_metrics(predicted, labels, train, fresh)
                seen = np.concatenate([seen, contents])
        return found

    def header(self, train: Labels) -> Header:
        """What the head's file says of its inputs."""
        config = self.model.config
        return {
            "tap": self.tap,
            "max_ctx": self.corpus.max_ctx,
            "backbone": {
                "digest": self.model.digest,
                "num_hidden_layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
            },
            "labels_digest": train.digest,
            **dict(zip(("scorer_model", "scorer_version", "rubric_hash"), train.scorer)),
            "settings": self.settings,
        }


def _check(train: Labels) -> None:
    if len(train.doc_ids) < MIN_LABELS:
        raise HeadError(
            "too few labels to train on",
            where=train.path,
            found=len(train.doc_ids),
            expected=f"at least {MIN_LABELS}",
            do="label more documents",
            code="E-HEAD-FEW",
        )
    train.require_coverage()
    if np.ptp(aggregate(train.scores)) == 0:
        raise HeadError(
            "all labels are equal, so a head cannot learn from them",
            where=train.path,
            found=f"aggregate {aggregate(train.scores)[0]} for {len(train.doc_ids)} documents",
            do="check the oracle",
            code="E-HEAD-CONSTANT",
        )


def _checked_tap(tap: int | None, model: Backbone, kind: HeadKind) -> int:
    depth = model.config.num_hidden_layers
    if tap is None:
        return tap_layers(depth)[kind == "judge"]
    if not 1 <= tap <= depth:
        raise HeadError(
            "the backbone has no such block to read",
            found=f"tap {tap}",
            expected=f"1 to {depth}",
            code="E-HEAD-FORMAT",
        )
    return tap


def _current_header(path: Path, fingerprints: Fingerprints) -> Header | None:
    """The header of a head that was made from these inputs and is as it was written."""
    if not path.is_file():
        return None
    try:
        header, _ = read_head(path)
    except HeadError as error:
        if error.code != "E-HEAD-CHANGED":
            raise
        return None
    return header if header.get("fingerprints") == fingerprints else None


def _result(path: Path, header: Header, *, backbone_tokens: int, head_steps: int) -> Result:
    training, metrics = header["training"], header["metrics"]
    facts = {
        key: value
        for key, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    facts |= {
        "labels": training["num_documents"],
        "steps": training["num_steps"],
        "head_steps": head_steps,
        "backbone_tokens": backbone_tokens,
        "path": str(path),
    }
    return Result(sha256_file(path), facts)
