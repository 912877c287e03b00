"""What both trainings share: inputs and their checks, figures, and the commit of the head.

A head whose recorded fingerprints are those of this call is left as it is; on failure no head is
written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from nmoe_core.base.atomic import output_lock, write_bytes
from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints, sha256_file, sha256_json
from nmoe_core.heads.card import head_card
from nmoe_core.heads.codes import TRAIN_CODE
from nmoe_core.heads.features import Backbone, content_digests, device_of, read_documents
from nmoe_core.heads.files import (
    Header,
    read_header,
    require_whole,
    save_head,
)
from nmoe_core.heads.fit import reproducible, thin_curve
from nmoe_core.heads.metrics import head_metrics, require_same_scorer
from nmoe_core.heads.models import Judge, Probe
from nmoe_core.heads.scoring import predict
from nmoe_core.heads.states import FEATURE_BATCH, pooled_features
from nmoe_core.heads.training_state import TrainingState
from nmoe_core.labels.files import Labels, read_labels
from nmoe_core.labels.scores import aggregate, stored
from nmoe_core.labels.slices import data_digest
from nmoe_core.shards.documents import DocumentReader

MIN_LABELS = 10
FEATURES_DIR = ".features"
_REPORTED_ON = ("labels_val", "labels_test")


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a training made.

    `loss_curve` holds at most 100 (step, loss) points; `metrics` is agreement with the oracle on
    val beside the baselines; `backbone_tokens` counts tokens that the backbone was given now (0
    when the head was current, or its features were); `states` says how the states were held.
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


@dataclass(frozen=True, slots=True)
class Fitted:
    head: Probe | Judge
    losses: list[float]
    states: str
    num_failed: int


Fit = Callable[[Labels, TrainingState], Fitted]


@dataclass(frozen=True, slots=True)
class Training:
    """What both trainings share: inputs, checks, report, commit."""

    kind: str
    labels_train: Path
    labels_val: Path | None
    labels_test: Path | None
    model: Backbone
    data_root: Path
    heads_dir: Path
    eos_token_id: int
    max_ctx: int
    tap: int
    save_interval_s: float
    use_salvaged: bool

    def documents(self, labels: Labels) -> list[np.ndarray]:
        reader = DocumentReader(self.data_root)
        return read_documents(reader, labels.doc_ids, self.eos_token_id, self.max_ctx)

    def targets(self, labels: Labels) -> Tensor:
        return torch.from_numpy(labels.scores).to(device_of(self.model))

    def pooled(self, labels: Labels) -> Tensor:
        """Pooled states of the labelled documents, from disk where they were computed before."""
        weights = next(iter(self.model.parameters()))
        made_from = {
            "documents": labels.doc_ids,
            "data": data_digest(self.data_root, sorted(set(labels.sources))),
            "backbone": self.model.digest,
            "arithmetic": f"{weights.dtype} {weights.device.type}",
            "settings": [self.tap, self.max_ctx, self.eos_token_id, FEATURE_BATCH],
        }
        cache = self.heads_dir / FEATURES_DIR / sha256_json(made_from)[:32]
        documents = self.documents(labels)
        return pooled_features(self.model, documents, labels.doc_ids, self.tap, cache)

    def commit(self, path: Path, settings: dict[str, Any], seed: int, fit: Fit) -> TrainReport:
        """Fit, measure and write the head, unless the file was made from the same inputs."""
        train = read_labels(self.labels_train, self.use_salvaged)
        val, test = self._read(self.labels_val), self._read(self.labels_test)
        self._check(train)
        for labels in (val, test):
            if labels is not None:
                require_same_scorer(labels, train.scorer)
        fingerprints = self._fingerprints(train, val, test, settings)
        if path.is_file() and (header := _current_header(path, fingerprints)) is not None:
            return _report(path, sha256_file(path), header, 0, is_current=True)
        tokens_before = self.model.tokens_processed
        with output_lock(path.parent / f".{self.kind}"), reproducible(seed, device_of(self.model)):
            state_path = path.with_name(f".{path.stem}.training.safetensors")
            # These labels do not move the weights, so other ones are no other training.
            made_from = {k: v for k, v in fingerprints.items() if k not in _REPORTED_ON}
            state = TrainingState(state_path, made_from, self.save_interval_s)
            fitted = fit(train, state)
            training = {
                "num_documents": len(train.doc_ids) - fitted.num_failed,
                "num_failed_documents": fitted.num_failed,
                "num_salvaged_left_out": train.num_salvaged,
                "num_steps": len(fitted.losses),
                "states": fitted.states,
                "loss_curve": thin_curve(fitted.losses),
            }
            contents = content_digests(self.documents(train))
            figures = self._figures(fitted.head, train, (val, test), contents)
            header = self._header(train, settings, figures, training, fingerprints)
            digest = save_head(path, fitted.head, header, contents)
            write_bytes(path.with_suffix(".md"), head_card(path.name, digest, header).encode())
            state.clear()
        tokens = self.model.tokens_processed - tokens_before
        return _report(path, digest, header, tokens, is_current=False)

    def _read(self, labels: Path | None) -> Labels | None:
        return read_labels(labels, self.use_salvaged) if labels is not None else None

    def _check(self, train: Labels) -> None:
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
                "all labels are alike, so there is nothing to learn",
                where=train.path,
                found=f"aggregate {aggregate(train.scores)[0]} for {len(train.doc_ids)} documents",
                do="check the oracle",
                code="E-HEAD-CONSTANT",
            )

    def _fingerprints(
        self, train: Labels, val: Labels | None, test: Labels | None, settings: dict[str, Any]
    ) -> Fingerprints:
        read = [labels for labels in (train, val, test) if labels is not None]
        sources = sorted({source for labels in read for source in labels.sources})
        return {
            "code": TRAIN_CODE,
            "labels_train": train.digest,
            "labels_val": val.digest if val is not None else "",
            "labels_test": test.digest if test is not None else "",
            "data": data_digest(self.data_root, sources),
            "backbone": self.model.digest,
            "settings": sha256_json({"max_ctx": self.max_ctx, "tap": self.tap, **settings}),
        }

    def _figures(
        self,
        head: Probe | Judge,
        train: Labels,
        reported: tuple[Labels | None, Labels | None],
        trained_on: np.ndarray,
    ) -> dict[str, dict[str, Any]]:
        """Agreement on val and on test, by the path that grades; empty where there are no labels.

        A document counts where its content was not trained on, and in test not in val either.
        """
        seen, figures = trained_on, {}
        for name, labels in zip(("metrics", "test_metrics"), reported):
            figures[name] = {}
            if labels is not None and labels.doc_ids:
                contents = content_digests(self.documents(labels))
                predicted = self._predicted(head, labels)
                figures[name] = head_metrics(predicted, labels, train, contents, seen)
                seen = np.concatenate([seen, contents])
        return figures

    def _predicted(self, head: Probe | Judge, val: Labels) -> np.ndarray:
        if isinstance(head, Probe):
            with torch.no_grad():
                outputs = head.from_pooled(self.pooled(val)).cpu().numpy()
            return stored(outputs)
        documents = self.documents(val)
        return predict(self.model, head, self.tap, documents, val.doc_ids, FEATURE_BATCH)

    def _header(
        self,
        train: Labels,
        settings: dict[str, Any],
        figures: dict[str, dict[str, Any]],
        training: dict[str, Any],
        fingerprints: Fingerprints,
    ) -> Header:
        config = self.model.config
        model, version, rubric_hash = train.scorer
        return {
            "tap": self.tap,
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
            **figures,
            "training": training,
            "fingerprints": fingerprints,
        }


def _current_header(path: Path, fingerprints: Fingerprints) -> Header | None:
    """The header of a head made from these inputs; None also where the file was damaged since."""
    try:
        header = read_header(path)
        if header.get("fingerprints") != fingerprints:
            return None
        require_whole(path, header, load_file(str(path)))
    except HeadError as error:
        if error.code != "E-HEAD-CHANGED":
            raise
        return None
    return header


def _report(path: Path, digest: str, header: Header, tokens: int, is_current: bool) -> TrainReport:
    training = header["training"]
    return TrainReport(
        path=path,
        digest=digest,
        num_documents=training["num_documents"],
        num_steps=training["num_steps"],
        backbone_tokens=tokens,
        states=training["states"],
        loss_curve=training["loss_curve"],
        metrics=header["metrics"],
        is_current=is_current,
    )
