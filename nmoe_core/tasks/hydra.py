"""Tasks of HYDRA, from labels to scores. torch is imported when a task runs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from loader.files.format import MANIFEST_NAME, load_manifest
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import local_digest, sha256_file
from nmoe_core.base.result import Result
from nmoe_core.base.settings import GraderKind
from nmoe_core.config.run import Run
from nmoe_core.quality.families import families_of
from nmoe_core.quality.grading.rules_only import keep_documents, require_grader
from nmoe_core.tasks.backbone import (
    found_states,
    ids_for_model,
    kept_states,
    load_backbone,
    state_workers,
)
from nmoe_core.tasks.graph.require import require_inputs
from nmoe_core.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from nmoe_core.engine import Transformer
    from nmoe_core.quality.grading.grade import Grader
    from nmoe_core.quality.heads.scores import Corpus, Scorer
    from nmoe_core.quality.heads.scoring import HeadScorer
    from nmoe_core.quality.heads.student_scoring import StudentScorer
    from nmoe_core.text.models import ModelIds
    from nmoe_core.text.tokenizer import Tokenizer

HeadKind = Literal["probe", "judge"]
LabelFiles = Mapping[str, Path | None]
NO_FILES: LabelFiles = MappingProxyType({})


def label_slices(
    run: Run,
    sources: Sequence[str],
    keys: Iterable[str] | None = None,
    *,
    is_whole_budget: bool = False,
) -> dict[str, Result]:
    """Label slices (named `train-00` and so on, by default all) with the run's oracle.

    `is_whole_budget`: `max_cost` limits the remaining cost of all slices, not only of the named
    slices. Raises as `Labelling.label`, and ConfigError for an unknown slice.
    """
    from nmoe_core.labels.jobs import labelling_of

    require_inputs(run, "label", sources)
    keys = None if keys is None else list(keys)
    outputs = {}
    slices = labelling_of(run).label_slices(sources, keys, is_whole_budget=is_whole_budget)
    for job, made in slices:
        facts = {
            "documents": made.facts["total"],
            "parse_rate": made.facts["parsed"] / max(made.facts["total"], 1),
            "salvaged": made.facts["salvaged"],
            "failures": made.facts["failed"],
            "oracle_calls": made.facts["num_new"],
            "labels_reused": made.facts["num_reused"],
            "requests": made.facts["replies"],
            **{key: made.facts[key] for key in ("retries", "tokens_in", "tokens_out", "scorer")},
        }
        if made.facts["cost"] is not None:
            facts["spent"] = made.facts["cost"]
        if job.relabel:
            facts["relabelled"] = made.facts["relabelled"]
        outputs[job.name] = Result(made.digest, facts)
    return outputs


def plan_labels(run: Run, budget: int, by: Literal["student", "probe"] = "student") -> Result:
    """Add `budget` documents to the planned ones, which are labelled beside the sample; chosen by
    the n-grams of the student or by the states that the probe reads. Raises as `next_labels`."""
    from nmoe_core.labels.label_files import read_labels
    from nmoe_core.labels.sample import add_planned
    from nmoe_core.quality.heads.scores import DocumentTokens
    from nmoe_core.quality.heads.student import fit_student
    from nmoe_core.quality.heads.student_file import token_table
    from nmoe_core.quality.next_labels import next_labels

    train = read_labels(_merged(run, "train"), run.config.heads.use_salvaged)

    def ngrams_of(documents: DocumentTokens, scores: np.ndarray) -> Any:
        table = token_table(load_tokenizer(run.tokenizer))
        student = fit_student(documents.tokens[: len(scores)], scores, table, train.scale)
        return student.features(documents.tokens, table)

    def states_of(documents: DocumentTokens, scores: np.ndarray) -> np.ndarray:
        from nmoe_core.quality.ridge_probe import standardised

        pooled = kept_states(run).pooled(documents)[:, ::2].reshape(len(documents), -1)
        return standardised(np.nan_to_num(pooled))[0]

    if by == "student":
        corpus = student_corpus(run, run.config.oracle.max_doc_tokens)
        rows = next_labels(run, train, corpus, ngrams_of, budget)
    else:
        rows = next_labels(run, train, head_corpus(run), states_of, budget)
    path = add_planned(run.tree, rows)
    facts = {"labels": len(train.doc_ids), "planned": len(rows), "path": shown(path)}
    counts = Counter(source for _, source in rows)
    return Result(sha256_file(path), facts | {name: counts[name] for name in sorted(counts)})


def merge_split(run: Run, split: str) -> Result:
    """Merge the labels of a split into one file; a current file is kept."""
    from nmoe_core.labels.agreement import merge_noise
    from nmoe_core.labels.label_files import merge_labels

    made = merge_labels(run.tree, split)
    counts = {key: made.facts[key] for key in ("parsed", "salvaged", "changed")}
    facts = {"labels": made.facts["total"], **counts}
    if (noise := merge_noise(run.tree, split)) is not None:
        kinds = noise["kinds"].items()
        facts |= {f"oracle_reliability_{kind}": one["reliability"] for kind, one in kinds}
    return Result(made.digest, facts | {"path": shown(run.tree.merged_labels(split))})


def train_student(run: Run, labels: LabelFiles = NO_FILES) -> Result:
    """Fit the student on the part of each document that the oracle reads; a current student is
    kept. `labels`: label files by split, instead of the merged files; None if a split has no
    labels."""
    from nmoe_core.quality.heads.student_file import make_student

    require_inputs(run, "student")
    corpus = student_corpus(run, run.config.oracle.max_doc_tokens)
    paths = _label_paths(run, labels)
    tokenizer = load_tokenizer(run.tokenizer)
    use_salvaged = run.config.heads.use_salvaged
    return make_student(paths, corpus, tokenizer, run.tree.heads, use_salvaged)


def train_head(run: Run, kind: HeadKind, labels: LabelFiles = NO_FILES) -> Result:
    """Train the probe or the judge, and the student for comparison; heads and students that are
    current are kept. `labels`: see `train_student`."""
    from nmoe_core.quality.heads.train import HeadTraining

    if run.has_file:  # if a run has only flags and no file, the flags may omit the tokenizer
        train_student(run, labels)
    require_inputs(run, "heads")
    paths = _label_paths(run, labels)
    model = load_backbone(run)
    corpus = head_corpus(run)
    training = HeadTraining(kind, paths, corpus, model, run.tree.heads, run.config.heads)
    return training.run(state_workers(run))


def import_head(run: Run, path: Path) -> Result:
    """Convert a pickled head to the head file of its kind; only tensors are unpickled."""
    from nmoe_core.quality.heads.convert import import_pickle

    sizes = run.config.heads.max_ctx, run.config.heads.judge.num_heads
    made = import_pickle(path, run.tree.heads, load_backbone(run), *sizes)
    return Result(sha256_file(made), {"path": shown(made)})


def calibrate_heads(run: Run, labels: LabelFiles = NO_FILES) -> Result:
    """Fit weights and thresholds on the grader's scores of val documents; test documents are only
    used for reports. `labels`: see `train_student`. Raises the errors of `require_grader`."""
    require_grader(run)
    require_inputs(run, "calibration")
    from nmoe_core.quality.calibration.calibrate import calibrate
    from nmoe_core.quality.calibration.targets import Targets
    from nmoe_core.quality.grading.languages import shard_languages

    val = labels.get("val") or _merged(run, "val")
    test = _labels(run, labels, "test")
    targets = Targets(**run.config.calibration.targets)
    languages = shard_languages(run.tree)
    out = run.tree.calibration
    return calibrate(val, _graders(run), out, targets, test, languages)


def grade_shards(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Grade shards of a source; current shards are kept."""
    if run.config.grading.is_off:
        return {bucket: keep_documents(run.tree.shard(source, bucket)) for bucket in buckets}
    from nmoe_core.quality.grading.grade import grade_documents
    from nmoe_core.quality.grading.inputs import shard_input
    from nmoe_core.quality.grading.languages import grouped_by
    from nmoe_core.quality.heads.student_file import require_tokenizer

    grader = load_grader(run)
    results = {}
    model = ids_for_grader(run, grader.scorer.kind)
    if grader.scorer.kind == "student":
        require_tokenizer(run.tree.data, [source], load_tokenizer(run.tokenizer))
    for bucket in buckets:
        shard = run.tree.shard(source, bucket)
        manifest = load_manifest(shard.manifest)
        made_from = grouped_by(grader.calibration, shard)
        documents = shard_input(manifest, run.tree.data, source, model, made_from)
        results[bucket] = grade_documents(grader, documents, shard.graded)
    return results


def load_grader(run: Run) -> Grader:
    """The run's scorer with its fitted thresholds; raises the errors of `require_grader`,
    `load_calibration`, `load_scorer`, `load_student_scorer` and `Grader.fitted`."""
    from nmoe_core.quality.calibration.summary_file import load_calibration
    from nmoe_core.quality.grading.grade import Grader
    from nmoe_core.quality.grading.languages import shard_languages

    table = run.config.grading
    calibration = None
    if (kind := require_grader(run)) == "auto":
        calibration = load_calibration(run.tree.calibration)
        kind = calibration.grader
    scorer = load_student_scorer(run) if kind == "student" else load_scorer(run)
    # If heads and calibration are missing, report the heads first: calibration needs them.
    calibration = calibration or load_calibration(run.tree.calibration)
    if kind == "hydra" and table.early_exit and calibration.student_digest:
        scorer = load_scorer(run, with_student=True)
    if kind == "stacked":
        student = load_student_scorer(run, reads_as_model=True)
        scorer = _load_heads(run)
        given = {"probe_weight": calibration.probe_weight, "kept": found_states(run, scorer)}
        scorer = replace(scorer, student=student, **given)
    fitted = Grader.fitted(
        scorer, calibration, table.early_exit, allow_foreign=table.allow_foreign_calibration
    )
    return replace(fitted, languages=shard_languages(run.tree))


def ids_for_grader(run: Run, kind: GraderKind) -> ModelIds | None:
    """The result of `ids_for_model`; None for the student, which reads the token ids of shards."""
    return None if kind == "student" else ids_for_model(run)


def _graders(run: Run) -> list[tuple[Scorer, Corpus]]:
    """The graders that calibration chooses from, each with the documents in its token ids."""
    asked = run.config.grading.grader
    found = []
    if asked != "student":
        heads = load_scorer(run, with_student=run.has_file)
        found.append((heads, replace(head_corpus(run), max_ctx=heads.max_ctx)))
    if asked != "hydra":
        student = load_student_scorer(run)
        found.append((student, student_corpus(run, student.max_ctx)))
    return found


def load_student_scorer(run: Run, *, reads_as_model: bool = False) -> StudentScorer:
    """The run's student, loaded once per process; raises as `load_student`.

    It reads the ids of shards or, with `reads_as_model`, the ids of the backbone.
    """
    path = run.tree.student
    size = run.config.grading.batch_size
    digest = local_digest(path) if path.is_file() else ""
    model = ids_for_model(run) if reads_as_model else None
    tokenizer = load_tokenizer(run.tokenizer) if model is None else model.model
    return _loaded_student(path, tokenizer, size, digest)


@functools.lru_cache(maxsize=2)
def _loaded_student(
    path: Path, tokenizer: Tokenizer, batch_size: int, digest: str
) -> StudentScorer:
    """Load a student. `digest` is part of the cache key: a changed file is loaded again."""
    from nmoe_core.quality.heads.student_scoring import StudentScorer

    return StudentScorer.load(path, tokenizer, batch_size)


def load_scorer(run: Run, *, with_student: bool = False) -> HeadScorer:
    """The run's backbone and heads, loaded once per process; raises as `load_checkpoint` and
    `load_heads`. A file is hashed again only if its size, inode or times changed.

    `with_student`: if the run's student was fitted on the labels of the heads, it scores before the
    heads.
    """
    scorer = _load_heads(run)
    if not with_student or not run.tree.student.is_file():
        return scorer
    student = load_student_scorer(run, reads_as_model=True)
    is_of_these = student.loaded.header.get("labels_digest") == scorer.heads.labels_digest
    return replace(scorer, student=student) if is_of_these else scorer


def _load_heads(run: Run) -> HeadScorer:
    heads = run.tree.probe, run.tree.judge
    digests = tuple(local_digest(path) if path.is_file() else "" for path in heads)
    is_given = run.has_file or run.is_given("heads.max_ctx")
    max_ctx = run.config.heads.max_ctx if is_given else None
    sizes = max_ctx, run.config.grading.batch_size
    return _loaded_scorer(load_backbone(run), run.tree.heads, sizes, digests)


@functools.lru_cache(maxsize=1)
def _loaded_scorer(
    model: Transformer, heads_dir: Path, sizes: tuple[int | None, int], digests: tuple[str, ...]
) -> HeadScorer:
    """Load heads. `digests` are part of the cache key: changed files are loaded again."""
    from nmoe_core.quality.heads.scoring import HeadScorer, load_heads

    max_ctx, batch_size = sizes
    return HeadScorer(model, load_heads(heads_dir, model, max_ctx), batch_size)


def _label_paths(run: Run, files: LabelFiles) -> LabelFiles:
    """The label files for training, by split."""
    paths = {split: _labels(run, files, split) for split in ("val", "test")}
    return {"train": files.get("train") or _merged(run, "train"), **paths}


def _labels(run: Run, files: LabelFiles, split: str) -> Path | None:
    """The labels of a split; None for a test split without labels."""
    if split in files:
        return files[split]
    return _merged(run, split) if split in labelled_splits(run) else None


def labelled_splits(run: Run) -> list[str]:
    """The splits with labels for heads; older runs have no test labels."""
    from nmoe_core.labels.label_files import SUMMARY_NAME
    from nmoe_core.labels.slices import NUM_LABEL_SHARDS

    shards = [run.tree.label_shard("test", i) for i in range(NUM_LABEL_SHARDS)]
    has_test = all((shard / SUMMARY_NAME).is_file() for shard in shards)
    return ["train", "val", *["test"] * has_test]


def _merged(run: Run, split: str) -> Path:
    from nmoe_core.labels.label_files import merge_labels, require_current_labels

    require_current_labels(run.tree, split)
    merge_labels(run.tree, split)
    return run.tree.merged_labels(split)


def student_corpus(run: Run, max_tokens: int) -> Corpus:
    """Documents for the student: the part that the oracle reads, in the ids of the shards."""
    from nmoe_core.quality.heads.scores import Corpus

    eos = load_tokenizer(run.tokenizer).eos_token_id
    return Corpus(run.tree.data, eos, max_tokens, families=families_of(run))


def head_corpus(run: Run) -> Corpus:
    """The directory of the documents and their EOS id. A run that has only flags and no file names
    no tokenizer, so the EOS id is read from the shards."""
    from nmoe_core.quality.heads.scores import Corpus

    data = run.tree.data
    max_ctx = run.config.heads.max_ctx
    if run.has_file:
        tokenizer = load_tokenizer(run.tokenizer)
        given = data, tokenizer.eos_token_id, max_ctx, ids_for_model(run)
        return Corpus(*given, families_of(run))
    manifests = sorted(data.glob(f"*/train/{MANIFEST_NAME}"))
    found = sorted({load_manifest(path).eos_token_id for path in manifests})
    if len(found) != 1:
        raise ConfigError(
            "sources use different EOS tokens",
            where=data,
            found=", ".join(map(str, found)) or "no manifest",
            do="give the directory that contains {source}/train/manifest.json",
        )
    return Corpus(data, found[0], max_ctx, ids_for_model(run), families_of(run))
