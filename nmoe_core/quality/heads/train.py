"""Trains the probe and the judge on oracle labels, over a frozen backbone.

The probe needs one backbone pass: pooled states are cached on disk, and then its epochs take
seconds. The judge reads every position: its states are cached in memory if they take at most
`cache_gib`, else computed again for each batch. A killed training can resume. torch is imported
only when a training runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from nmoe_core.base.atomic import remove_leftovers, replacing
from nmoe_core.base.fingerprint import sha256_file, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.quality import HeadsTable
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME, STUDENT_NAME
from nmoe_core.labels.label_files import Labels
from nmoe_core.labels.slices import data_digest
from nmoe_core.quality.heads import PASS_TOKENS, TRAIN_CODE
from nmoe_core.quality.heads.head_files import (
    current_header,
    header_of,
    result_of,
    save_head,
    training_state,
)
from nmoe_core.quality.heads.labelled import REPORTED_ON, Labelled, Reported
from nmoe_core.quality.heads.scores import Corpus, DocumentTokens
from nmoe_core.quality.heads.shapes import JudgeArch, Recipe, arch_to_dict, tap_of
from nmoe_core.quality.heads.student_file import student_beside

if TYPE_CHECKING:
    import torch

    from nmoe_core.engine import Transformer
    from nmoe_core.quality.heads.fit import TrainingState
    from nmoe_core.quality.heads.models import Judge, Probe

FEATURES_DIR = ".features"
HeadKind = Literal["probe", "judge"]


class HeadTraining:
    """One training of a head, from merged label files by split.

    The head is fitted on `train`. On `val` and `test`, if given, it is measured and compared with
    the student in `heads_dir` that was fitted on the same labels. `max_ctx` is read from the
    corpus, not from the table. Raises as `Labelled` and `load_student`, and HeadError if the tap is
    not a block of the backbone (E-HEAD-FORMAT).
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
        self.kind = kind
        self.corpus = corpus
        self.model = model
        self.table = table
        self.path = heads_dir / (PROBE_NAME if kind == "probe" else JUDGE_NAME)
        own = table.probe
        self.arch = None
        if kind == "judge":
            own = judge = table.judge
            sizes = judge.mid_dim, judge.num_heads, judge.ffn_dim
            self.arch = JudgeArch(model.config.hidden_size, *sizes)
        self.recipe = Recipe(own.batch_size, own.epochs, own.lr, seed=table.seed)
        self.settings = asdict(self.recipe) | ({} if self.arch is None else arch_to_dict(self.arch))
        self.tap = tap_of(kind, model, own.tap)
        self.labelled = Labelled(labels, table.use_salvaged)
        self.student = student_beside(heads_dir, self.labelled.digests)
        student = sha256_file(heads_dir / STUDENT_NAME) if self.student is not None else ""
        sizes = dict(self.settings)
        if kind == "judge" and self.recipe.batch_size * corpus.max_ctx > PASS_TOKENS:
            sizes["pass_tokens"] = PASS_TOKENS  # the split into passes changes the dropout masks
        self.fingerprints = {
            "code": TRAIN_CODE,
            **self.labelled.fingerprints(corpus),
            "student": student,
            "backbone": model.digest,
            "settings": sha256_json({"max_ctx": corpus.max_ctx, "tap": self.tap, **sizes}),
        }

    def run(self) -> Result:
        """Train the head and write it with its card, unless the existing head is current.

        Facts: agreement on val, `labels`, `steps`, `head_steps` and `backbone_tokens` (both 0 if
        the head was current already), `path`. Raises HeadError if states or a loss are not finite
        (E-HEAD-NONFINITE); in this case no head is written.
        """
        from nmoe_core.quality.heads.features import device_of
        from nmoe_core.quality.heads.fit import TrainingState, reproducible, thin_curve

        path = self.path
        model = self.model
        train = self.labelled.train
        header = current_header(path, self.fingerprints)
        state_path = training_state(path)
        if header is not None:
            state_path.unlink(missing_ok=True)  # left by a run killed after it wrote the head
            steps = header["training"]["num_steps"]
            return result_of(path, header, steps=steps, head_steps=0, backbone_tokens=0)
        tokens_before = model.tokens_processed
        seeded = reproducible(self.recipe.seed, device_of(model))
        with replacing(path, path.with_suffix(".md"), state_path), seeded:
            # The labels of val and test do not affect the training.
            made_from = {k: v for k, v in self.fingerprints.items() if k not in REPORTED_ON}
            state = TrainingState(state_path, made_from)
            documents = self.corpus.read(train.doc_ids)
            head, losses, states, num_failed = self._fit(documents, state)
            reported = self._report(head, documents)
            header = {
                **header_of(model, self.tap, self.corpus.max_ctx, train.digest, train.scorer),
                **train.scale.in_file(),
                "settings": self.settings,
                **reported.figures,
                "training": {
                    "num_documents": len(train.doc_ids) - num_failed,
                    "num_failed_documents": num_failed,
                    "num_salvaged_left_out": train.num_salvaged,
                    "use_salvaged": self.labelled.use_salvaged,
                    "num_steps": len(losses),
                    "states": states,
                    "loss_curve": thin_curve(losses),
                },
                "fingerprints": self.fingerprints,
            }
            save_head(path, head, header, reported.contents, has_card=True)
            state.path.unlink(missing_ok=True)
        tokens = model.tokens_processed - tokens_before
        steps = len(losses)
        return result_of(path, header, steps=steps, head_steps=steps, backbone_tokens=tokens)

    def _fit(
        self, documents: DocumentTokens, state: TrainingState
    ) -> tuple[Probe | Judge, list[float], str, int]:
        """Returns the head, the loss of each step, the place of the states, and the number of
        failed documents."""
        import torch

        from nmoe_core.quality.heads.features import TapStates, device_of
        from nmoe_core.quality.heads.fit import fit_judge, fit_probe

        targets = torch.from_numpy(self.labelled.train.scores).to(device_of(self.model))
        scale = self.labelled.train.scale
        if self.arch is None:
            features = self._pooled(self.labelled.train, documents)
            good = torch.isfinite(features).all(dim=1)
            probe, losses = fit_probe(features[good], targets[good], self.recipe, state, scale)
            return probe, losses, "pooled, on disk", int((~good).sum())
        cache_bytes = int(self.table.cache_gib * 2**30)
        states = TapStates(self.model, documents, self.tap, cache_bytes)
        judge, losses = fit_judge(self.arch, states, targets, self.recipe, state, scale)
        held = "in memory" if states.is_cached else "computed for each batch"
        return judge, losses, held, len(states.failed)

    def _pooled(self, labels: Labels, documents: DocumentTokens) -> torch.Tensor:
        """Pooled states of the labelled documents, read from the cache on disk if they are
        cached."""
        from nmoe_core.quality.heads.features import FEATURE_BATCH, arithmetic, pooled_features

        corpus = self.corpus
        made_from = {
            "documents": labels.doc_ids,
            "data": data_digest(corpus.data_root, sorted(set(labels.sources))),
            **corpus.fingerprints,
            "backbone": self.model.digest,
            "arithmetic": arithmetic(self.model),
            "settings": [self.tap, corpus.max_ctx, corpus.eos_token_id, FEATURE_BATCH],
        }
        cache = self.path.parent / FEATURES_DIR
        remove_leftovers(cache)  # safe: this head's lock is held, and no other process writes here
        directory = cache / sha256_json(made_from)[:32]
        return pooled_features(self.model, documents, self.tap, directory)

    def _report(self, head: Probe | Judge, fitted: DocumentTokens) -> Reported:
        student = None if self.student is None else self.student.scores

        def predict(split: str, labels: Labels, documents: DocumentTokens) -> np.ndarray:
            return self._predict(head, labels, documents)

        return self.labelled.report(self.corpus, fitted, predict, student)

    def _predict(
        self, head: Probe | Judge, labels: Labels, documents: DocumentTokens
    ) -> np.ndarray:
        import torch

        from nmoe_core.quality.heads.features import FEATURE_BATCH
        from nmoe_core.quality.heads.models import Judge
        from nmoe_core.quality.heads.scoring import predict

        if isinstance(head, Judge):
            return predict(self.model, head, self.tap, documents, FEATURE_BATCH, labels.scale)
        with torch.no_grad():
            outputs = head.from_pooled(self._pooled(labels, documents))
        return labels.scale.stored(outputs.cpu().numpy())
