"""Trains the probe and the judge on oracle labels, over a frozen backbone.

Both read the states of one backbone pass, which are kept on disk (see `kept_states`). From these,
the probe is fitted in seconds. A killed training can resume. torch is imported only when a training
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from nmoe_core.base.atomic import replacing
from nmoe_core.base.fingerprint import sha256_file, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.heads import HeadsTable
from nmoe_core.config.tree import JUDGE_NAME, PROBE_NAME, STUDENT_NAME
from nmoe_core.labels.label_files import Labels
from nmoe_core.quality.few_labels import Curve, samples
from nmoe_core.quality.heads import PASS_TOKENS, TRAIN_CODE
from nmoe_core.quality.heads.head_files import (
    current_header,
    header_of,
    result_of,
    save_head,
    training_state,
)
from nmoe_core.quality.heads.labelled import REPORTED_ON, Labelled, Predict, Reported
from nmoe_core.quality.heads.scores import Corpus, DocumentTokens, stacked
from nmoe_core.quality.heads.shapes import (
    JudgeArch,
    Recipe,
    arch_to_dict,
    probe_blocks,
    tap_of,
    taps_of,
)
from nmoe_core.quality.heads.student_file import student_beside

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer
    from nmoe_core.quality.heads.fit import TrainingState
    from nmoe_core.quality.heads.models import Judge, Probe
    from nmoe_core.quality.kept_states import KeptStates, Workers

FEATURES_DIR = ".features"
HeadKind = Literal["probe", "judge"]


class Fitted(NamedTuple):
    """A fitted head, the blocks that it reads, and facts about its training."""

    head: Probe | Judge
    taps: tuple[int, ...]
    facts: dict[str, Any]


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
        self._workers: Workers | None = None
        self.corpus = corpus
        self.model = model
        self.table = table
        self.path = heads_dir / (PROBE_NAME if kind == "probe" else JUDGE_NAME)
        own = table.probe
        self.is_ridge = kind == "probe" and not own.is_published
        self.arch = None
        asked = list(own.blocks)
        if own.is_published:
            asked = [tap_of("probe", model, own.tap)]
        self.asked = taps_of(model, asked) if asked else ()
        self.settings = own.recorded
        self.judge_tap = tap_of("judge", model, table.judge.tap)
        if kind == "judge":
            judge = table.judge
            self.recipe = Recipe(judge.batch_size, judge.epochs, judge.lr, seed=table.seed)
            sizes = judge.mid_dim, judge.num_heads, judge.ffn_dim
            self.arch = JudgeArch(model.config.hidden_size, *sizes)
            self.settings = asdict(self.recipe) | arch_to_dict(self.arch)
        elif own.is_published:
            steps = (self.settings[name] for name in ("batch_size", "epochs", "lr"))
            self.recipe = Recipe(*steps, seed=table.seed)
            self.settings |= asdict(self.recipe)
        taps = [self.judge_tap] if kind == "judge" else asked
        self.labelled = Labelled(labels, table.use_salvaged)
        self.student = student_beside(heads_dir, self.labelled.digests)
        student = sha256_file(heads_dir / STUDENT_NAME) if self.student is not None else ""
        made_with = {"max_ctx": corpus.max_ctx, **self.settings, "tap": taps}
        if kind == "judge" and self.recipe.batch_size * corpus.max_ctx > PASS_TOKENS:
            made_with["pass_tokens"] = (
                PASS_TOKENS  # the split into passes changes the dropout masks
            )
        self.fingerprints = {
            "code": TRAIN_CODE,
            **self.labelled.fingerprints(corpus),
            "student": student,
            "backbone": model.digest,
            "settings": sha256_json(made_with),
        }

    def run(self, workers: Workers | None = None) -> Result:
        """Train the head and write it with its card, unless the existing head is current. `workers`
        compute the states, by default this process.

        Facts: agreement on val, `labels`, `steps`, `head_steps` and `backbone_tokens` (both 0 if
        the head was current already), `path`. Raises HeadError if states or a loss are not finite
        (E-HEAD-NONFINITE); in this case no head is written.
        """
        from nmoe_core.quality.heads.features import device_of
        from nmoe_core.quality.heads.fit import TrainingState, reproducible

        self._workers = workers
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
        seeded = reproducible(self.table.seed, device_of(model))
        with replacing(path, path.with_suffix(".md"), state_path), seeded:
            # The labels of val and test do not affect the training.
            made_from = {k: v for k, v in self.fingerprints.items() if k not in REPORTED_ON}
            state = TrainingState(state_path, made_from)
            documents = self.corpus.read(train.doc_ids)
            self._states.compute(self.corpus.read(self.labelled.doc_ids))
            fitted = self._fit(documents, state)
            reported = self._report(fitted, documents)
            tap = fitted.taps[0] if len(fitted.taps) == 1 else list(fitted.taps)
            steps = fitted.facts["num_steps"]
            header = {
                **header_of(model, tap, self.corpus.max_ctx, train.digest, train.scorer),
                **train.scale.in_file(),
                "settings": self.settings,
                **reported.figures,
                "training": {
                    "num_documents": len(train.doc_ids) - fitted.facts["num_failed_documents"],
                    "num_salvaged_left_out": train.num_salvaged,
                    "use_salvaged": self.labelled.use_salvaged,
                    **fitted.facts,
                },
                "fingerprints": self.fingerprints,
            }
            save_head(path, fitted.head, header, reported.contents, has_card=True)
            state.path.unlink(missing_ok=True)
        tokens = model.tokens_processed - tokens_before
        return result_of(path, header, steps=steps, head_steps=steps, backbone_tokens=tokens)

    @cached_property
    def _states(self) -> KeptStates:
        from nmoe_core.quality.kept_states import KeptStates

        blocks = sorted({*probe_blocks(self.model.config.num_hidden_layers), *self.asked})
        directory = self.path.parent / FEATURES_DIR
        most_bytes = int(self.table.cache_gib * 2**30)
        given = self.model, directory, most_bytes, blocks, self.judge_tap
        return KeptStates(*given, self._workers)

    def _fit(self, documents: DocumentTokens, state: TrainingState) -> Fitted:
        import torch

        from nmoe_core.quality.heads.features import device_of
        from nmoe_core.quality.heads.fit import fit_judge, fit_probe, thin_curve

        train = self.labelled.train
        if self.is_ridge:
            return self._fit_ridge(documents)
        targets = torch.from_numpy(train.scores).to(device_of(self.model))
        if self.arch is None:
            taps = self.asked
            features = torch.from_numpy(self._pooled(documents, taps)).to(targets.device)
            good = torch.isfinite(features).all(dim=1)
            num_failed = int((~good).sum())
            given = features[good], targets[good]
            head, losses = fit_probe(*given, self.recipe, state, train.scale)
            held = "pooled, on disk"
        else:
            taps = (self.judge_tap,)
            states = self._states.tokens(documents)
            head, losses = fit_judge(self.arch, states, targets, self.recipe, state, train.scale)
            num_failed = len(states.failed)
            held = f"on disk of {states.num_kept} documents of {len(documents)}"
        facts = {"num_failed_documents": num_failed, "num_steps": len(losses), "states": held}
        return Fitted(head, taps, facts | {"loss_curve": thin_curve(losses)})

    def _fit_ridge(self, documents: DocumentTokens) -> Fitted:
        """The probe as a ridge regression."""
        from nmoe_core.quality.ridge_probe import fit_ridge_probe

        train = self.labelled.train
        asked = self.asked if self.is_ridge else ()
        blocks = asked or probe_blocks(self.model.config.num_hidden_layers)
        pooled = self._pooled(documents, blocks)
        good = np.isfinite(pooled).all(axis=1)
        by_block = pooled.reshape(len(documents), len(blocks), -1)[good]
        targets = train.scores[good]
        found = fit_ridge_probe(by_block, targets, blocks, train.scale, is_chosen=not asked)
        facts = {"num_failed_documents": int((~good).sum()), "num_steps": 1, "loss_curve": []}
        return Fitted(found.head, found.taps, facts | found.facts)

    def _pooled(self, documents: DocumentTokens, taps: Sequence[int]) -> np.ndarray:
        """Pooled states after the blocks `taps` side by side: float32 `[N, blocks * H]`."""
        places = [self._states.blocks.index(tap) for tap in taps]
        return self._states.pooled(documents)[:, places].reshape(len(documents), -1)

    def _report(self, fitted: Fitted, documents: DocumentTokens) -> Reported:
        """Measure the head; a judge also beside a probe on the same labels and states."""
        beside: dict[str, Predict] = {}
        if self.student is not None:
            scores = self.student.scores
            beside["student"] = lambda split, labels, documents: scores[split]
        if self.kind == "judge" and self.labelled.reported:
            probe = self._fit_ridge(documents)
            beside["probe"] = partial(self._predict, probe)
        curve = partial(self._few_labels, fitted, documents) if self.is_ridge else None
        predict = partial(self._predict, fitted)
        return self.labelled.report(self.corpus, documents, predict, beside, curve)

    def _few_labels(self, fitted: Fitted, documents: DocumentTokens, val: DocumentTokens) -> Curve:
        """The scores of val by probes of fewer labels, by the student, and their mean. The probes
        read the blocks that all labels chose."""
        import torch

        from nmoe_core.quality.ridge_probe import fit_ridge_probe

        train = self.labelled.train
        shape = len(fitted.taps), self.model.config.hidden_size
        pooled = self._pooled(documents, fitted.taps).reshape(-1, *shape)
        of_val = torch.from_numpy(self._pooled(val, fitted.taps))
        is_good = np.asarray(np.isfinite(pooled).all(axis=(1, 2)))
        every = len(train.doc_ids)
        by_student = {}
        if self.student is not None:
            by_student = {**self.student.curve, every: self.student.scores["val"]}
        probes: dict[int, Any] = {every: fitted.head}
        for num, rows in samples(every).items():
            good = rows[is_good[rows]]
            given = pooled[good], train.scores[good], fitted.taps, train.scale
            probes[num] = fit_ridge_probe(*given, is_chosen=False).head
        found: dict[int, dict[str, np.ndarray]] = {}
        for num, probe in probes.items():
            with torch.no_grad():
                scores = train.scale.stored(probe.from_pooled(of_val).numpy())
            found[num] = {"probe": scores}
            if num in by_student:
                both = stacked(by_student[num], scores, 0.5, train.scale)
                found[num] = {"student": by_student[num], "probe": scores, "both": both}
        return found

    def _predict(
        self, fitted: Fitted, split: str, labels: Labels, documents: DocumentTokens
    ) -> np.ndarray:
        import torch

        from nmoe_core.quality.heads.features import BATCH_DOCUMENTS, device_of, padded_batches
        from nmoe_core.quality.heads.models import Judge

        head = fitted.head
        if not isinstance(head, Judge):
            pooled = torch.from_numpy(self._pooled(documents, fitted.taps))
            with torch.no_grad():
                outputs = head.from_pooled(pooled.to(device_of(self.model)))
            return labels.scale.stored(outputs.cpu().numpy())
        scores = np.full((len(documents), len(labels.scale)), np.nan)
        states = self._states.tokens(documents)
        order = np.argsort(states.lengths, kind="stable")
        lengths = np.array(states.lengths)[order]
        for some in padded_batches(lengths, BATCH_DOCUMENTS, PASS_TOKENS):
            hidden, of_rows, rows = states.of(order[some].tolist())
            if rows:
                with torch.no_grad():
                    outputs = head(hidden, of_rows)
                scores[rows] = labels.scale.stored(outputs.cpu().numpy())
        return scores
