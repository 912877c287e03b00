"""Compares recorded and current inputs of the outputs made with models: backbone, labels, student,
heads, thresholds and scores.

Loads no model: backbone and heads are identified by the digests of their files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from nmoe_core.base.errors import FormatError, HeadError
from nmoe_core.base.fingerprint import Fingerprints, read_recorded, recorded, sha256_file
from nmoe_core.base.settings import GraderKind, expert_fingerprints
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.tasks.graph import made_with, settings
from nmoe_core.tasks.graph.differences import Look, Settings
from nmoe_core.tasks.graph.looked import Reads, whole

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer
    from nmoe_core.engine.weights.config import ModelConfig
    from nmoe_core.labels.label_files import Labels
    from nmoe_core.quality.calibration.summary_file import Calibration
    from nmoe_core.quality.calibration.targets import Targets
    from nmoe_core.quality.heads.labelled import Labelled

_LABELS = ("labels_train", "labels_val", "labels_test", "labels")


def backbone(run: Run) -> Look:
    """The recorded and current inputs of the checkpoint: a tiny checkpoint can be made again; any
    other checkpoint must exist."""
    from nmoe_core.engine.weights.weight_files import read_checkpoint_json
    from nmoe_core.tasks.backbone import tiny_recipe

    path = run.tree.checkpoint / "config.json"
    now = {"checkpoint": "there"}
    if not path.is_file():
        return Look(None, now)
    if run.config.backbone.kind != "tiny":
        return Look(now, now)
    there = read_checkpoint_json(path)
    wanted = tiny_recipe(run)
    then, now = ({"recipe": str(sorted(one.items()))} for one in (there, wanted))
    return Look(then, now, made_with.backbone(there), made_with.backbone(wanted))


def models_read(run: Run) -> Reads:
    """What the states of labels, student, heads and thresholds depend on."""
    from nmoe_core.labels.jobs import labelling_of
    from nmoe_core.text.tokenizer import load_tokenizer

    tree = run.tree
    # labels can name sources that the run has no longer
    places = [tree.slices, tree.labels, tree.heads, tree.calibration, tree.checkpoint]
    places += sorted(tree.data.glob("*/train"))
    if run.config.calibration.target_by == "language":
        places += sorted(tree.attributes.glob("*"))

    def made_with() -> list[Any]:
        oracle = labelling_of(run).without_key().oracle(run.rubric)
        opened = oracle.fingerprint, oracle.facts, load_tokenizer(run.tokenizer).fingerprint
        return [settings.labels(run), settings.calibration(run), *opened, *whole(run)]

    return Reads(made_with, tuple(places))


def labels(run: Run) -> Iterator[tuple[str, list[Look]]]:
    """The recorded and current inputs of the labels of each slice, and of the labels that measure
    the oracle's noise."""
    from nmoe_core.labels.jobs import labelling_of
    from nmoe_core.labels.label import is_answered, label_fingerprints
    from nmoe_core.labels.label_files import SCORES_NAME, SUMMARY_NAME

    labelling = labelling_of(run).without_key()
    for job in labelling.planned_jobs():
        looks = []
        for documents, directory, oracle in labelling.parts(job):
            summary = directory / SUMMARY_NAME
            now = label_fingerprints(documents, oracle)
            then, value = read_recorded(summary)
            former = now | {"data": documents.former_data or ""}
            if then == former:
                now = former
            is_whole = then is None or (bool(value) and (directory / SCORES_NAME).is_file())
            damage = "" if is_whole else "its files are damaged"
            if then is not None and is_whole and not is_answered(directory):
                damage = "the server failed on some documents; they will be labelled again"
            looks.append(
                Look(
                    then,
                    now,
                    made_with.labels(summary),
                    made_with.asked(oracle.facts, oracle.scorer._asdict(), now),
                    {"slice": "docid_slices", "planned": "docid_slices", "data": "shards"},
                    damage=damage,
                )
            )
        yield job.name, looks


class Described(NamedTuple):
    """A backbone described by digests, without loading it."""

    config: ModelConfig
    digest: str


class _Fit(NamedTuple):
    """The arguments of `refit`, except the directory."""

    labels: Labels
    targets: Targets
    fingerprints: Fingerprints
    graders: list[tuple[Fingerprints, int]]
    languages: Mapping[str, str]


class ModelLooks:
    """Finds the inputs of the outputs that labels and backbone determine; reads label files and
    digests once."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def labelled(self) -> Labelled:
        """The merged labels. Raises the errors of `Labelled`, and FormatError if
        labels must be merged again."""
        from nmoe_core.labels.label_files import is_merged
        from nmoe_core.quality.heads.labelled import Labelled
        from nmoe_core.tasks.hydra import labelled_splits

        tree = self.run.tree
        splits = labelled_splits(self.run)
        for split in splits:
            if not is_merged(tree, split):
                raise FormatError("labels are not merged yet", where=tree.merged_labels(split))
        paths = {split: tree.merged_labels(split) for split in splits}
        return Labelled(paths, self.run.config.heads.use_salvaged)

    @cached_property
    def described(self) -> Described:
        """The backbone."""
        from nmoe_core.engine.weights.weight_files import checkpoint_digest, read_config

        path = self.run.tree.checkpoint
        return Described(read_config(path), checkpoint_digest(path))

    def student(self) -> Look:
        """The recorded and current inputs of the student."""
        from nmoe_core.quality.heads.student_file import student_fingerprints
        from nmoe_core.tasks.hydra import student_corpus
        from nmoe_core.text.tokenizer import load_tokenizer

        run = self.run
        path = self.run.tree.student
        header, damage = _header(path)
        corpus = student_corpus(run, run.config.oracle.max_doc_tokens)
        now = student_fingerprints(self.labelled, corpus, load_tokenizer(run.tokenizer))
        most = {"oracle.max_doc_tokens": run.config.oracle.max_doc_tokens}
        wanted = {**settings.student(run).settings, **most}
        return _head_look(header, now, made_with.student(header or {}), wanted, damage)

    def head(self, kind: Literal["probe", "judge"]) -> Look:
        """The recorded and current inputs of the probe or the judge."""
        from nmoe_core.quality.heads.train import HeadTraining
        from nmoe_core.tasks.hydra import head_corpus, labelled_splits

        run = self.run
        tree = self.run.tree
        header, damage = _header(tree.probe if kind == "probe" else tree.judge)
        paths = {split: tree.merged_labels(split) for split in labelled_splits(run)}
        # raises an error unless the labels are merged and there are enough labels
        assert self.labelled
        # No training happens here, so only the fields of `Described` are read.
        model = cast("Transformer", self.described)
        training = HeadTraining(kind, paths, head_corpus(run), model, tree.heads, run.config.heads)
        has_tap = run.config.heads.model_dump()[kind]["tap"] is not None
        then = made_with.head(header or {}, kind, has_tap=has_tap)
        wanted = settings.head(run, kind).settings
        return _head_look(header, training.fingerprints, then, wanted, damage)

    @cached_property
    def _fit(self) -> _Fit:
        """Inputs of fitting the thresholds."""
        from nmoe_core.labels.label_files import read_labels
        from nmoe_core.quality.calibration.calibrate import (
            calibration_fingerprints,
            target_languages,
        )
        from nmoe_core.quality.calibration.targets import Targets
        from nmoe_core.quality.grading.languages import shard_languages
        from nmoe_core.tasks.hydra import labelled_splits

        run = self.run
        read = [read_labels(run.tree.merged_labels(split)) for split in labelled_splits(run)[1:]]
        val = read[0]
        test = read[1] if len(read) > 1 and read[1].doc_ids else None
        targets = Targets(**run.config.calibration.targets)
        doc_ids = [*val.doc_ids, *(test.doc_ids if test else ())]
        named = target_languages(targets, shard_languages(run.tree), doc_ids)
        graders = list(self._graders())
        now = calibration_fingerprints((val, test), run.tree.data, graders, targets, named)
        return _Fit(val, targets, now, graders, named)

    def calibration(self) -> Look:
        """The recorded and current inputs of the thresholds."""
        run = self.run
        path = self.run.tree.calibration_summary
        then, value = read_recorded(path)
        now = self._fit.fingerprints
        old = made_with.calibration(run.tree)
        inputs = dict.fromkeys(_LABELS, "hydra/oracle_labels")
        inputs |= {"data": "shards", "backbone": "hydra/backbone", "probe": "hydra/probe_head"}
        inputs |= {"judge": "hydra/judge_head", "languages": "attributes/language"}
        inputs["student"] = "hydra/student"
        asked = run.config.grading.grader
        # A change of a grader that calibration does not use does not count.
        if old.get("grading.grader", asked) != asked:
            for name in ("backbone", "probe", "judge", "student"):
                del inputs[name]
        damage = "" if then is None or value else "it was edited or damaged"
        return Look(then, now, old, settings.calibration(run).settings, inputs, damage=damage)

    def refitted(self) -> Calibration | None:
        """The calibration for the current targets, from the scores that the previous calibration
        stored; None if it stored no scores. Writes no file. Raises as `calibrate`."""
        from nmoe_core.base.atomic import json_bytes
        from nmoe_core.quality.calibration.calibrate import refit
        from nmoe_core.quality.calibration.summary_file import calibration_of

        tree = self.run.tree
        fit = self._fit
        made = refit(tree.calibration, *fit)
        if made is None:
            return None
        digest = hashlib.sha256(json_bytes(made)).hexdigest()
        return calibration_of(made, tree.calibration_summary, digest)

    def _graders(self) -> Iterator[tuple[Fingerprints, int]]:
        """The fingerprints and the kind of tokens of each grader that calibration chooses from."""
        from nmoe_core.quality.heads.head_files import read_header
        from nmoe_core.tasks.hydra import head_corpus, student_corpus

        run = self.run
        asked = self.run.config.grading.grader
        student = {"student": sha256_file(run.tree.student)} if run.tree.student.is_file() else {}
        if asked != "student":
            probe = read_header(run.tree.probe)
            is_asked_first = bool(student) and (
                read_header(run.tree.student).get("labels_digest") == probe["labels_digest"]
            )
            found = {**head_corpus(run).fingerprints, **head_digests(run)}
            yield found | (student if is_asked_first else {}), run.config.heads.max_ctx
        if asked != "hydra":
            max_ctx = int(read_header(run.tree.student)["max_ctx"])
            yield student_corpus(run, max_ctx).fingerprints | student, max_ctx


def head_digests(run: Run) -> Fingerprints:
    """Fingerprints of the backbone and both heads."""
    from nmoe_core.engine.weights.weight_files import checkpoint_digest

    tree = run.tree
    found = {"backbone": checkpoint_digest(tree.checkpoint)}
    found |= expert_fingerprints(run.config.backbone.moe_backend)
    return found | {"probe": sha256_file(tree.probe), "judge": sha256_file(tree.judge)}


class GradeLooks:
    """Finds the inputs of the scores of shards. Raises CalibrationError if the thresholds were
    fitted for other heads, and HeadError if a head is missing."""

    def __init__(self, run: Run, calibration: Calibration) -> None:
        from nmoe_core.quality.heads.head_files import heads_digest, read_header, stacked_digest
        from nmoe_core.tasks.hydra import ids_for_grader

        self._run = run
        self.calibration = calibration
        table = run.config.grading
        asked = run.config.grading.grader
        self.kind: GraderKind = calibration.grader if asked == "auto" else asked  # pyright: ignore
        if self.kind == "student":
            path = run.tree.student
            max_ctx = int(read_header(path)["max_ctx"])
            self.settings = max_ctx, False
            heads = sha256_file(path)
            self._digests: Fingerprints = {"student": heads}
        else:
            weight = calibration.probe_weight
            for path in (
                run.tree.probe,
                run.tree.judge,
                *[run.tree.student] * (weight is not None),
            ):
                read_header(path)
            self._digests = head_digests(run)
            heads = heads_digest(self._digests["probe"], self._digests["judge"])
            if calibration.student_digest and (table.early_exit or weight is not None):
                calibration.require_student(student := sha256_file(run.tree.student))
                self._digests["student"] = student
                if weight is not None:
                    self._digests["probe_weight"] = repr(weight)
                    heads = stacked_digest(heads, student, weight)
            self.settings = run.config.heads.max_ctx, table.early_exit
        self._wanted = settings.grades(run).settings
        calibration.require_heads(heads, allow_foreign=table.allow_foreign_calibration)
        if (model := ids_for_grader(run, self.kind)) is not None:
            self._digests |= model.fingerprints

    @property
    def shared(self) -> list[Any]:
        """The part of the current inputs that all shards share."""
        from nmoe_core.quality.grading.grade import grade_fingerprints

        digests = self._digests | {"calibration": self.calibration.digest}
        return [grade_fingerprints({}, digests, *self.settings), self.calibration.target_by]

    def shard(self, shard: ShardPaths) -> Look:
        """The recorded and current inputs of one shard."""
        from nmoe_core.quality.calibration.graded import SUMMARY_NAME, read_graded
        from nmoe_core.quality.grading.grade import grade_fingerprints
        from nmoe_core.quality.grading.languages import grouped_by
        from nmoe_core.shards.manifest import digest_of

        summary = shard.graded / SUMMARY_NAME
        damage = ""
        then = None
        if shard.scores.is_file():
            try:
                then = read_graded(shard.graded).summary.get("fingerprints")
            except FormatError as error:
                then = recorded(summary)
                damage = error.line()
        documents = {"shard": digest_of(shard.manifest)}
        documents |= grouped_by(self.calibration, shard)
        digests = self._digests | {"calibration": self.calibration.digest}
        now = grade_fingerprints(documents, digests, *self.settings)
        asked = self._run.config.grading.grader
        old = made_with.grades(shard, asked) if then != now else {}
        inputs = {"shard": f"{shard.source}/shards", "calibration": "hydra/calibration"}
        inputs |= {"backbone": "hydra/backbone", "probe": "hydra/probe_head"}
        inputs |= {"judge": "hydra/judge_head", "student": "hydra/student"}
        inputs |= {"languages": f"{shard.source}/attributes/language"}
        return Look(then, now, old, self._wanted, inputs, damage=damage)


def kept_with() -> Fingerprints:
    """The part of the current inputs that all shards of a run without a grader share."""
    from nmoe_core.quality.grading.rules_only import keep_fingerprints

    return keep_fingerprints("")


def unscored(shard: ShardPaths) -> Look:
    """The recorded and current inputs of a shard of a run without a grader."""
    from nmoe_core.quality.calibration.graded import SUMMARY_NAME
    from nmoe_core.quality.grading.rules_only import keep_fingerprints
    from nmoe_core.shards.manifest import digest_of

    summary = shard.graded / SUMMARY_NAME
    then = recorded(summary) if shard.scores.is_file() else None
    now = keep_fingerprints(digest_of(shard.manifest))
    old = made_with.grades(shard, "none")
    inputs = {"shard": f"{shard.source}/shards"}
    return Look(then, now, old, {"grading.grader": "none"}, inputs)


def _head_look(
    header: Mapping[str, Any] | None,
    now: Fingerprints,
    then: Settings,
    wanted: Settings,
    damage: str,
) -> Look:
    """The recorded and current inputs of a head file; a file without recorded inputs was not made
    by a run."""
    made_from = None if header is None else header.get("fingerprints", {"code": "not by a run"})
    inputs = dict.fromkeys(_LABELS, "hydra/oracle_labels")
    inputs |= {"data": "shards", "backbone": "hydra/backbone", "student": "hydra/student"}
    return Look(made_from, now, then, wanted, inputs, damage=damage)


def _header(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """The header of a head file, and what is wrong with the file; the header is None if the file is
    missing."""
    from nmoe_core.quality.heads.head_files import read_head

    if not path.is_file():
        return None, ""
    try:
        return read_head(path)[0], ""
    except HeadError as error:
        return {}, error.line()
