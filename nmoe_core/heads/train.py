"""Trains the probe and the judge on oracle labels, over a frozen backbone.

The probe needs one backbone pass: pooled states are kept on disk, and its epochs cost seconds. The
judge reads every position: its states are kept in memory while they take at most `cache_gib`,
else computed again for each batch. A killed training goes on where it was.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nmoe_core.base.atomic import replacing, write_bytes
from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints, sha256_file, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.quality import HeadsTable
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME
from nmoe_core.engine import Transformer
from nmoe_core.heads import TRAIN_CODE
from nmoe_core.heads.features import (
    FEATURE_BATCH,
    Corpus,
    DocumentTokens,
    TapStates,
    arithmetic,
    device_of,
    pooled_features,
)
from nmoe_core.heads.files import Header, header_of, read_head, save_head, tap_of
from nmoe_core.heads.fit import (
    Recipe,
    TrainingState,
    fit_judge,
    fit_probe,
    reproducible,
    thin_curve,
)
from nmoe_core.heads.metrics import head_card, head_metrics, held_out, require_same_scorer
from nmoe_core.heads.models import Judge, JudgeArch, Probe
from nmoe_core.heads.scoring import predict
from nmoe_core.heads.student import fit_student
from nmoe_core.labels.files import Labels, read_labels
from nmoe_core.labels.scores import aggregate, stored
from nmoe_core.labels.slices import data_digest

MIN_LABELS = 10
FEATURES_DIR = ".features"
_REPORTED_ON = ("labels_val", "labels_test")
HeadKind = Literal["probe", "judge"]


class HeadTraining:
    """One training of a head, from merged label files by split.

    `train` is fitted; `val` and `test` are only reported on, where they are there. The corpus's
    `max_ctx` counts, not that of the table.

    Raises:
        LabelError: Labels are missing, mixed, or of another scorer in val (E-LABEL-...).
        HeadError: Too few labels (E-HEAD-FEW), all alike (E-HEAD-CONSTANT), or the tap is no block
            (E-HEAD-FORMAT).
    """

    def __init__(
        self,
        kind: HeadKind,
        labels: Mapping[str, Path | None],
        corpus: Corpus,
        model: Transformer,
        heads_dir: Path,
        table: HeadsTable,
    ) -> None:
        self.kind, self.corpus, self.model, self.table = kind, corpus, model, table
        self.path = heads_dir / (PROBE_NAME if kind == "probe" else JUDGE_NAME)
        own, self.arch = table.probe, None
        if kind == "judge":
            own = judge = table.judge
            sizes = judge.mid_dim, judge.num_heads, judge.ffn_dim
            self.arch = JudgeArch(model.config.hidden_size, *sizes)
        self.recipe = Recipe(own.batch_size, own.epochs, own.lr, seed=table.seed)
        self.settings = asdict(self.recipe) | (asdict(self.arch) if self.arch is not None else {})
        self.tap = tap_of(kind, model, own.tap)
        files = {split: path for split, path in labels.items() if path is not None}
        self.reported = {s: read_labels(path, table.use_salvaged) for s, path in files.items()}
        self.train = self.reported.pop("train")
        _require_learnable(self.train)
        for others in self.reported.values():
            require_same_scorer(others, self.train.scorer)
        read = [self.train, *self.reported.values()]
        sources = sorted({source for part in read for source in part.sources})
        digests = {split: labels.digest for split, labels in self.reported.items()}
        self.fingerprints = {
            "code": TRAIN_CODE,
            "labels_train": self.train.digest,
            "labels_val": digests.get("val", ""),
            "labels_test": digests.get("test", ""),
            "data": data_digest(corpus.data_root, sources),
            **corpus.fingerprints,
            "backbone": model.digest,
            "settings": sha256_json({"max_ctx": corpus.max_ctx, "tap": self.tap, **self.settings}),
        }

    def run(self) -> Result:
        """Train the head and write it, with its card beside it; a current one is left as it is.

        Facts: the numbers of its agreement on val, `labels`, `steps`, `head_steps` and
        `backbone_tokens` (both 0 of a head that is current), `path`. Raises HeadError: states or a
        loss are not finite (E-HEAD-NONFINITE); no head is written.
        """
        path, model, train = self.path, self.model, self.train
        header = _current_header(path, self.fingerprints)
        if header is not None:
            return _result(path, header, backbone_tokens=0, head_steps=0)
        tokens_before = model.tokens_processed
        seeded = reproducible(self.recipe.seed, device_of(model))
        with replacing(path), seeded:
            # Val and test labels do not move the weights, so with others the training is the same.
            made_from = {k: v for k, v in self.fingerprints.items() if k not in _REPORTED_ON}
            state = TrainingState(path.with_name(f".{path.stem}.training.safetensors"), made_from)
            documents = self.corpus.read(train.doc_ids)
            head, losses, states, num_failed = self._fit(documents, state)
            contents = documents.digests()
            header = {
                **header_of(model, self.tap, self.corpus.max_ctx, train.digest, train.scorer),
                "settings": self.settings,
                **self._figures(head, documents, contents),
                "training": {
                    "num_documents": len(train.doc_ids) - num_failed,
                    "num_failed_documents": num_failed,
                    "num_salvaged_left_out": train.num_salvaged,
                    "num_steps": len(losses),
                    "states": states,
                    "loss_curve": thin_curve(losses),
                },
                "fingerprints": self.fingerprints,
            }
            digest = save_head(path, head, header, contents)
            write_bytes(path.with_suffix(".md"), head_card(path.name, digest, header).encode())
            state.path.unlink(missing_ok=True)
        tokens = model.tokens_processed - tokens_before
        return _result(path, header, backbone_tokens=tokens, head_steps=len(losses))

    def _fit(
        self, documents: DocumentTokens, state: TrainingState
    ) -> tuple[Probe | Judge, list[float], str, int]:
        """The head, the loss of each step, where states were kept, how many documents failed."""
        targets = torch.from_numpy(self.train.scores).to(device_of(self.model))
        if self.arch is None:
            features = self._pooled(self.train, documents)
            good = torch.isfinite(features).all(dim=1)
            probe, losses = fit_probe(features[good], targets[good], self.recipe, state)
            return probe, losses, "pooled, on disk", int((~good).sum())
        cache_bytes = int(self.table.cache_gib * 2**30)
        states = TapStates(self.model, documents, self.tap, cache_bytes)
        judge, losses = fit_judge(self.arch, states, targets, self.recipe, state)
        held = "in memory" if states.is_cached else "computed for each batch"
        return judge, losses, held, len(states.failed)

    def _pooled(self, labels: Labels, documents: DocumentTokens) -> torch.Tensor:
        """Pooled states of the labelled documents, from disk where they were computed before."""
        corpus = self.corpus
        made_from = {
            "documents": labels.doc_ids,
            "data": data_digest(corpus.data_root, sorted(set(labels.sources))),
            **corpus.fingerprints,
            "backbone": self.model.digest,
            "arithmetic": arithmetic(self.model),
            "settings": [self.tap, corpus.max_ctx, corpus.eos_token_id, FEATURE_BATCH],
        }
        cache = self.path.parent / FEATURES_DIR / sha256_json(made_from)[:32]
        return pooled_features(self.model, documents, self.tap, cache)

    def _figures(
        self, head: Probe | Judge, fitted: DocumentTokens, seen: np.ndarray
    ) -> dict[str, dict[str, Any]]:
        """Agreement on the contents of val not in train, and of test in neither; else empty.
        `fitted` are the documents of train, `seen` their contents."""
        found: dict[str, dict[str, Any]] = {"metrics": {}, "test_metrics": {}}
        student = None
        for name, split in zip(found, ("val", "test")):
            labels = self.reported.get(split)
            if labels is not None and labels.doc_ids:
                documents = self.corpus.read(labels.doc_ids)
                contents = documents.digests()
                fresh = held_out(contents, seen)
                predicted = self._predict(head, labels, documents)
                student = student or fit_student(fitted.tokens, self.train.scores)
                by_student = student.predict(documents.tokens)
                found[name] = head_metrics(predicted, by_student, labels, self.train, fresh)
                seen = np.concatenate([seen, contents])
        return found

    def _predict(
        self, head: Probe | Judge, labels: Labels, documents: DocumentTokens
    ) -> np.ndarray:
        if isinstance(head, Judge):
            return predict(self.model, head, self.tap, documents, FEATURE_BATCH)
        with torch.no_grad():
            outputs = head.from_pooled(self._pooled(labels, documents))
        return stored(outputs.cpu().numpy())


def _require_learnable(train: Labels) -> None:
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
        **{key: value for key, value in metrics.items() if isinstance(value, int | float)},
        "labels": training["num_documents"],
        "steps": training["num_steps"],
        "head_steps": head_steps,
        "backbone_tokens": backbone_tokens,
        "path": str(path),
    }
    return Result(sha256_file(path), facts)
