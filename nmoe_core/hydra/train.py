"""Trains the probe and the judge on oracle labels, over a frozen backbone.

The probe needs one backbone pass: pooled states are kept, and its epochs are cheap. The judge reads
every position: its states are kept in memory while they take at most `cache_bytes`, else computed
again for each batch. Val labels are only reported on, never fitted. A head whose recorded
fingerprints are those of this call is left as it is; on failure nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmoe_core.atomic import output_lock
from nmoe_core.docid import DocumentReader, parse_doc_id
from nmoe_core.engine.config import tap_layers
from nmoe_core.errors import HeadError, LabelError
from nmoe_core.fingerprint import Fingerprints, sha256_file, sha256_json
from nmoe_core.hydra.features import Backbone, device_of, read_documents
from nmoe_core.hydra.fit import Recipe, fit_judge, fit_probe, reproducible, thin_curve
from nmoe_core.hydra.head_files import JUDGE_NAME, PROBE_NAME, Header, read_header, save_head
from nmoe_core.hydra.heads import Judge, JudgeArch, Probe
from nmoe_core.hydra.label_files import Labels, read_labels
from nmoe_core.hydra.metrics import agreement, baselines
from nmoe_core.hydra.scores import aggregate
from nmoe_core.hydra.scoring import predict
from nmoe_core.hydra.slices import data_digest
from nmoe_core.hydra.states import FEATURE_BATCH, TapStates, pooled_features

TRAIN_CODE = "train-heads/1"
MIN_LABELS = 10
DEFAULT_CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a training made.

    `loss_curve` holds at most 100 (step, loss) points; `metrics` is agreement with the oracle on
    val beside the baselines; `backbone_tokens` counts tokens that the backbone was given now (0
    when the head was current); `states` says how the states were held.
    """

    path: Path
    digest: str
    num_documents: int
    num_steps: int
    backbone_tokens: int
    states: str
    loss_curve: list[list[float]]
    metrics: dict[str, Any]
    is_current: bool


def train_probe(
    labels_train: Path,
    labels_val: Path,
    model: Backbone,
    data_root: Path,
    heads_dir: Path,
    *,
    eos_token_id: int,
    max_ctx: int,
    batch_size: int = 256,
    epochs: int = 1,
    lr: float = 1e-3,
    seed: int = 0,
) -> TrainReport:
    """Train `heads_dir/hydra_probe.safetensors`.

    Args:
        labels_train: Merged labels to fit.
        labels_val: Merged labels to report on.
        model: The frozen backbone.
        data_root: Directory that document ids are relative to.
        heads_dir: Where the head goes.
        eos_token_id: Token that ends every document.
        max_ctx: Tokens of a document that the head sees, from its start.
        batch_size: Documents a step.
        epochs: Passes over the labels.
        lr: Peak learning rate.
        seed: Of the order of documents.

    Raises:
        LabelError: Labels are missing, mixed, or of another scorer in val (E-LABEL-...).
        HeadError: Too few labels (E-HEAD-FEW), all alike (E-HEAD-CONSTANT), or states or a loss
            that are not finite (E-HEAD-NONFINITE).
    """
    recipe = Recipe(batch_size, epochs, lr, seed=seed)
    run = _Training("probe", labels_train, labels_val, model, data_root, eos_token_id, max_ctx)

    def fit(labels: Labels) -> tuple[Probe, list[float], str]:
        documents = run.documents(labels)
        features = pooled_features(model, documents, labels.doc_ids)
        probe, losses = fit_probe(features, run.targets(labels), recipe)
        return probe, losses, "pooled, in memory"

    return run.commit(heads_dir / PROBE_NAME, asdict(recipe), recipe.seed, fit)


def train_judge(
    labels_train: Path,
    labels_val: Path,
    model: Backbone,
    data_root: Path,
    heads_dir: Path,
    *,
    eos_token_id: int,
    max_ctx: int,
    batch_size: int = 128,
    epochs: int = 1,
    lr: float = 5e-4,
    seed: int = 0,
    mid_dim: int = 512,
    num_heads: int = 8,
    ffn_dim: int = 2048,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> TrainReport:
    """Train `heads_dir/hydra_judge.safetensors`.

    Args:
        mid_dim: Width of the judge's encoder.
        num_heads: Its attention heads; they divide `mid_dim`.
        ffn_dim: Width of its feed-forward layers.
        cache_bytes: Most memory for kept states.

    The other arguments, and the errors, are those of `train_probe`.
    """
    recipe = Recipe(batch_size, epochs, lr, seed=seed)
    arch = JudgeArch(model.config.hidden_size, mid_dim, num_heads, ffn_dim)
    if mid_dim % num_heads:
        raise HeadError(
            "attention heads do not divide the judge's width",
            found=f"mid_dim {mid_dim}, num_heads {num_heads}",
            code="E-HEAD-FORMAT",
        )
    run = _Training("judge", labels_train, labels_val, model, data_root, eos_token_id, max_ctx)

    def fit(labels: Labels) -> tuple[Judge, list[float], str]:
        states = TapStates(model, run.documents(labels), labels.doc_ids, cache_bytes)
        judge, losses = fit_judge(arch, states.of, states.lengths, run.targets(labels), recipe)
        return judge, losses, "in memory" if states.is_cached else "computed for each batch"

    return run.commit(heads_dir / JUDGE_NAME, asdict(recipe) | asdict(arch), recipe.seed, fit)


@dataclass(frozen=True, slots=True)
class _Training:
    """What both trainings share: inputs, checks, report, commit."""

    kind: str
    labels_train: Path
    labels_val: Path
    model: Backbone
    data_root: Path
    eos_token_id: int
    max_ctx: int

    def documents(self, labels: Labels) -> list[np.ndarray]:
        reader = DocumentReader(self.data_root)
        return read_documents(reader, labels.doc_ids, self.eos_token_id, self.max_ctx)

    def targets(self, labels: Labels) -> Tensor:
        return torch.from_numpy(labels.scores).to(device_of(self.model))

    def commit(
        self,
        path: Path,
        settings: dict[str, Any],
        seed: int,
        fit: Callable[[Labels], tuple[Probe | Judge, list[float], str]],
    ) -> TrainReport:
        """Fit, measure and write the head, unless the file was made from the same inputs."""
        train, val = read_labels(self.labels_train), read_labels(self.labels_val)
        self._check(train, val)
        fingerprints = self._fingerprints(train, val, settings)
        if path.is_file() and (header := _current_header(path, fingerprints)) is not None:
            return _report(path, sha256_file(path), header, is_current=True)
        tokens_before = self.model.tokens_processed
        with output_lock(path.parent / f".{self.kind}"), reproducible(seed, device_of(self.model)):
            head, losses, states = fit(train)
            training = {
                "num_documents": len(train.doc_ids),
                "num_steps": len(losses),
                "states": states,
                "loss_curve": thin_curve(losses),
            }
            metrics = self._metrics(head, train, val)
            training["backbone_tokens"] = self.model.tokens_processed - tokens_before
            header = self._header(train, settings, metrics, training, fingerprints)
            digest = save_head(path, head, header)
        return _report(path, digest, header, is_current=False)

    def _check(self, train: Labels, val: Labels) -> None:
        if len(train.doc_ids) < MIN_LABELS:
            raise HeadError(
                "too few labels to train on",
                where=train.path,
                found=len(train.doc_ids),
                expected=f"at least {MIN_LABELS}",
                do="label more documents",
                code="E-HEAD-FEW",
            )
        if np.ptp(aggregate(train.scores)) == 0:
            raise HeadError(
                "all labels are alike, so there is nothing to learn",
                where=train.path,
                found=f"aggregate {aggregate(train.scores)[0]} for {len(train.doc_ids)} documents",
                do="check the oracle",
                code="E-HEAD-CONSTANT",
            )
        if val.doc_ids and val.scorer != train.scorer:
            raise LabelError(
                "train and val labels have different scorers or rubrics",
                where=val.path,
                found="/".join(val.scorer),
                expected="/".join(train.scorer),
                code="E-LABEL-MIXED",
            )

    def _fingerprints(self, train: Labels, val: Labels, settings: dict[str, Any]) -> Fingerprints:
        sources = sorted({*train.sources, *val.sources})
        return {
            "code": TRAIN_CODE,
            "labels_train": train.digest,
            "labels_val": val.digest,
            "data": data_digest(self.data_root, sources),
            "backbone": self.model.digest,
            "settings": sha256_json({"max_ctx": self.max_ctx, **settings}),
        }

    def _metrics(self, head: Probe | Judge, train: Labels, val: Labels) -> dict[str, Any]:
        """Agreement on val by the path that grades; empty where val has no labels."""
        if not val.doc_ids:
            return {}
        documents = self.documents(val)
        predicted = predict(self.model, head, documents, val.doc_ids, FEATURE_BATCH)
        known = [(x.scores, x.sources, _document_lengths(x)) for x in (train, val)]
        return agreement(predicted, val.scores, val.sources) | baselines(*known)

    def _header(
        self,
        train: Labels,
        settings: dict[str, Any],
        metrics: dict[str, Any],
        training: dict[str, Any],
        fingerprints: Fingerprints,
    ) -> Header:
        config = self.model.config
        probe_tap, judge_tap = tap_layers(config.num_hidden_layers)
        model, version, rubric_hash = train.scorer
        return {
            "tap": probe_tap if self.kind == "probe" else judge_tap,
            "max_ctx": self.max_ctx,
            "backbone": {
                "digest": self.model.digest,
                "num_hidden_layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
            },
            "labels_digest": train.digest,
            "scorer_model": model,
            "scorer_version": version,
            "rubric_hash": rubric_hash,
            "settings": settings,
            "metrics": metrics,
            "training": training,
            "fingerprints": fingerprints,
        }


def _current_header(path: Path, fingerprints: Fingerprints) -> Header | None:
    header = read_header(path)
    return header if header.get("fingerprints") == fingerprints else None


def _report(path: Path, digest: str, header: Header, is_current: bool) -> TrainReport:
    training = header["training"]
    return TrainReport(
        path=path,
        digest=digest,
        num_documents=training["num_documents"],
        num_steps=training["num_steps"],
        backbone_tokens=0 if is_current else training["backbone_tokens"],
        states=training["states"],
        loss_curve=training["loss_curve"],
        metrics=header["metrics"],
        is_current=is_current,
    )


def _document_lengths(labels: Labels) -> np.ndarray:
    spans = [parse_doc_id(doc_id) for doc_id in labels.doc_ids]
    return np.array([span.end - span.start for span in spans])
