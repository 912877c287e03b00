"""Trains the probe and the judge on oracle labels, over a frozen backbone.

The probe needs one backbone pass: pooled states are kept on disk, and its epochs cost seconds. The
judge reads every position: its states are kept in memory while they take at most `cache_bytes`,
else computed again for each batch. A killed training goes on where it was. Val labels are only
reported on, never fitted. A head whose recorded fingerprints are those of this call is left as it
is; on failure no head is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loader.format import read_json_object
from nmoe_core.atomic import output_lock, write_bytes
from nmoe_core.docid import DocumentReader, parse_doc_id
from nmoe_core.engine.config import tap_layers
from nmoe_core.errors import HeadError, LabelError
from nmoe_core.fingerprint import Fingerprints, sha256_file, sha256_json
from nmoe_core.hydra.card import head_card
from nmoe_core.hydra.codes import TRAIN_CODE
from nmoe_core.hydra.features import Backbone, content_digests, device_of, read_documents
from nmoe_core.hydra.fit import Recipe, fit_judge, fit_probe, reproducible, thin_curve
from nmoe_core.hydra.head_files import JUDGE_NAME, PROBE_NAME, Header, read_header, save_head
from nmoe_core.hydra.heads import Judge, JudgeArch, Probe
from nmoe_core.hydra.label_files import Labels, read_labels
from nmoe_core.hydra.metrics import agreement, baselines
from nmoe_core.hydra.scores import aggregate, stored
from nmoe_core.hydra.scoring import predict
from nmoe_core.hydra.slices import data_digest
from nmoe_core.hydra.states import FEATURE_BATCH, TapStates, pooled_features
from nmoe_core.hydra.training_state import SAVE_INTERVAL_S, TrainingState

MIN_LABELS = 10
DEFAULT_CACHE_BYTES = 512 * 2**20
FEATURES_DIR = ".features"


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


def train_probe(
    labels_train: Path,
    labels_val: Path | None,
    model: Backbone,
    data_root: Path,
    heads_dir: Path,
    *,
    eos_token_id: int,
    max_ctx: int,
    tap: int | None = None,
    batch_size: int = 256,
    epochs: int = 1,
    lr: float = 1e-3,
    seed: int = 0,
    save_interval_s: float = SAVE_INTERVAL_S,
) -> TrainReport:
    """Train `heads_dir/hydra_probe.safetensors`.

    Args:
        labels_train: Merged labels to fit.
        labels_val: Merged labels to report on; None reports nothing.
        model: The frozen backbone.
        data_root: Directory that document ids are relative to.
        heads_dir: Where the head goes.
        eos_token_id: Token that ends every document.
        max_ctx: Tokens of a document that the head sees, from its start.
        tap: Number of the block whose states it reads; as `tap_layers` says when left out.
        batch_size: Documents a step.
        epochs: Passes over the labels.
        lr: Peak learning rate.
        seed: Of the order of documents.
        save_interval_s: Seconds between saves of an unfinished training.

    Raises:
        LabelError: Labels are missing, mixed, or of another scorer in val (E-LABEL-...).
        HeadError: Too few labels (E-HEAD-FEW), all alike (E-HEAD-CONSTANT), the tap is no block
            (E-HEAD-FORMAT), or states or a loss that are not finite (E-HEAD-NONFINITE).
    """
    recipe = Recipe(batch_size, epochs, lr, seed=seed)
    tap = _checked_tap(tap, model, 0)
    run = _Training(
        *("probe", labels_train, labels_val, model, data_root, heads_dir),
        *(eos_token_id, max_ctx, tap, save_interval_s),
    )

    def fit(labels: Labels, state: TrainingState) -> _Fitted:
        features = run.pooled(labels)
        good = torch.isfinite(features).all(dim=1)
        probe, losses = fit_probe(features[good], run.targets(labels)[good], recipe, state)
        return _Fitted(probe, losses, "pooled, on disk", int((~good).sum()))

    return run.commit(heads_dir / PROBE_NAME, asdict(recipe), recipe.seed, fit)


def train_judge(
    labels_train: Path,
    labels_val: Path | None,
    model: Backbone,
    data_root: Path,
    heads_dir: Path,
    *,
    eos_token_id: int,
    max_ctx: int,
    tap: int | None = None,
    batch_size: int = 128,
    epochs: int = 1,
    lr: float = 5e-4,
    seed: int = 0,
    mid_dim: int = 512,
    num_heads: int = 8,
    ffn_dim: int = 2048,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    save_interval_s: float = SAVE_INTERVAL_S,
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
    tap = _checked_tap(tap, model, 1)
    run = _Training(
        *("judge", labels_train, labels_val, model, data_root, heads_dir),
        *(eos_token_id, max_ctx, tap, save_interval_s),
    )

    def fit(labels: Labels, state: TrainingState) -> _Fitted:
        states = TapStates(model, run.documents(labels), labels.doc_ids, tap, cache_bytes)
        targets = run.targets(labels)
        judge, losses = fit_judge(arch, states.of, states.lengths, targets, recipe, state)
        held = "in memory" if states.is_cached else "computed for each batch"
        return _Fitted(judge, losses, held, len(states.failed))

    return run.commit(heads_dir / JUDGE_NAME, asdict(recipe) | asdict(arch), recipe.seed, fit)


@dataclass(frozen=True, slots=True)
class _Fitted:
    head: Probe | Judge
    losses: list[float]
    states: str
    num_failed: int


Fit = Callable[[Labels, TrainingState], _Fitted]


@dataclass(frozen=True, slots=True)
class _Training:
    """What both trainings share: inputs, checks, report, commit."""

    kind: str
    labels_train: Path
    labels_val: Path | None
    model: Backbone
    data_root: Path
    heads_dir: Path
    eos_token_id: int
    max_ctx: int
    tap: int
    save_interval_s: float

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
        train = read_labels(self.labels_train)
        val = read_labels(self.labels_val) if self.labels_val is not None else None
        self._check(train, val)
        fingerprints = self._fingerprints(train, val, settings)
        if path.is_file() and (header := _current_header(path, fingerprints)) is not None:
            return _report(path, sha256_file(path), header, 0, is_current=True)
        tokens_before = self.model.tokens_processed
        with output_lock(path.parent / f".{self.kind}"), reproducible(seed, device_of(self.model)):
            state_path = path.with_name(f".{path.stem}.training.safetensors")
            # Val labels do not move the weights, so another val is no other training.
            made_from = {key: v for key, v in fingerprints.items() if key != "labels_val"}
            state = TrainingState(state_path, made_from, self.save_interval_s)
            fitted = fit(train, state)
            training = {
                "num_documents": len(train.doc_ids) - fitted.num_failed,
                "num_failed_documents": fitted.num_failed,
                "num_steps": len(fitted.losses),
                "states": fitted.states,
                "loss_curve": thin_curve(fitted.losses),
            }
            metrics = self._metrics(fitted.head, train, val) if val is not None else {}
            header = self._header(train, settings, metrics, training, fingerprints)
            contents = content_digests(self.documents(train))
            digest = save_head(path, fitted.head, header, contents)
            write_bytes(path.with_suffix(".md"), head_card(path.name, digest, header).encode())
            state.clear()
        tokens = self.model.tokens_processed - tokens_before
        return _report(path, digest, header, tokens, is_current=False)

    def _check(self, train: Labels, val: Labels | None) -> None:
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
        if val is not None and val.doc_ids and val.scorer != train.scorer:
            raise LabelError(
                "train and val labels have different scorers or rubrics",
                where=val.path,
                found="/".join(val.scorer),
                expected="/".join(train.scorer),
                code="E-LABEL-MIXED",
            )

    def _fingerprints(
        self, train: Labels, val: Labels | None, settings: dict[str, Any]
    ) -> Fingerprints:
        sources = sorted({*train.sources, *(val.sources if val is not None else ())})
        return {
            "code": TRAIN_CODE,
            "labels_train": train.digest,
            "labels_val": val.digest if val is not None else "",
            "data": data_digest(self.data_root, sources),
            "backbone": self.model.digest,
            "settings": sha256_json({"max_ctx": self.max_ctx, "tap": self.tap, **settings}),
        }

    def _metrics(self, head: Probe | Judge, train: Labels, val: Labels) -> dict[str, Any]:
        """Agreement on val by the path that grades; empty where val has no labels."""
        if not val.doc_ids:
            return {}
        predicted = self._predicted(head, val)
        good = np.flatnonzero(np.isfinite(predicted).all(axis=1))
        sources = [val.sources[i] for i in good.tolist()]
        metrics = agreement(predicted[good], val.scores[good], sources)
        lengths = _document_lengths(val)[good]
        metrics |= baselines(
            (train.scores, train.sources, _document_lengths(train)),
            (val.scores[good], sources, lengths),
        )
        ceiling = noise_ceiling(val.path)
        share = metrics["spearman"] / ceiling if ceiling and metrics["spearman"] else None
        return metrics | {
            "num_failed": len(predicted) - len(good),
            "noise_ceiling": ceiling,
            "share_of_ceiling": share and round(share, 6),
        }

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
        metrics: dict[str, Any],
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
            "metrics": metrics,
            "training": training,
            "fingerprints": fingerprints,
        }


def noise_ceiling(labels: Path) -> float | None:
    """Best rank correlation that the oracle's own noise allows, where documents were asked twice.

    Read from `noise_{split}.json` beside `labels_{split}.jsonl`.
    """
    path = labels.with_name(f"{labels.stem.replace('labels', 'noise', 1)}.json")
    ceiling = read_json_object(path).get("ceiling") if path.is_file() else None
    return float(ceiling) if isinstance(ceiling, int | float) and 0 < ceiling <= 1 else None


def _checked_tap(tap: int | None, model: Backbone, which: int) -> int:
    depth = model.config.num_hidden_layers
    if tap is None:
        return tap_layers(depth)[which]
    if not 1 <= tap <= depth:
        raise HeadError(
            "the backbone has no such block to read",
            found=f"tap {tap}",
            expected=f"1 to {depth}",
            code="E-HEAD-FORMAT",
        )
    return tap


def _current_header(path: Path, fingerprints: Fingerprints) -> Header | None:
    header = read_header(path)
    return header if header.get("fingerprints") == fingerprints else None


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


def _document_lengths(labels: Labels) -> np.ndarray:
    spans = [parse_doc_id(doc_id) for doc_id in labels.doc_ids]
    return np.array([span.end - span.start for span in spans])
