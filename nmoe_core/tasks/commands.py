"""Tasks that only commands use: whole splits, files named by the user, all sources at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.compute.api import kept_pools
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.config.tree import SCORES_NAME
from nmoe_core.prep.mixture import SPLITS, SourcePlan, prep_settings, run_sources
from nmoe_core.prep.progress import logged_progress
from nmoe_core.prep.run import Existing, prep_shards, write_manifest
from nmoe_core.quality.families import families_of
from nmoe_core.shards.manifest import left_out
from nmoe_core.sources.open import open_source
from nmoe_core.tasks.hydra import ids_for_grader, load_grader
from nmoe_core.tasks.shards import chosen_sources, outputs_of
from nmoe_core.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from nmoe_core.labels.jobs import LabelJob

Job = tuple[SourcePlan, str]


def splits_of(run: Run, names: Sequence[str], stage: str | None = None) -> list[Job]:
    """The splits to prepare for each source of the run, or of one stage of training; a source may
    have no validation split. Raises ConfigError for an unknown split or stage."""
    for name in names:
        if name not in SPLITS:
            raise ConfigError("unknown split", found=repr(name), expected=" or ".join(SPLITS))
    sources = run_sources(run, stage=stage)
    return [(s, name) for s in sources for name in names if name == "train" or s.has_valid]


def make_split(
    run: Run, job: Job, output: Path | None = None, *, is_forced: bool = False
) -> Result:
    """Prepare one split, by default in the run's tree, and commit its manifest; raises the errors
    of `prep_shards`. `is_forced`: make all shards again, also current ones."""
    plan, split = job
    started = time.monotonic()
    output = (output or run.tree.split(plan.name, split)).absolute()
    opened = open_source(plan.spec, run.base, split)
    settings = prep_settings(run, plan, split)
    existing: Existing = "remake" if is_forced else "grow"
    progress = logged_progress(f"prep {settings.name}/{split}")
    report = prep_shards(opened, settings, output, existing=existing, progress=progress)
    manifest, _ = write_manifest(settings, output)
    facts = {
        "source": settings.name,
        "split": split,
        "documents": manifest["total_documents"],
        "tokens": manifest["total_tokens"],
        **left_out(output, manifest["total_documents"]),
        "bad_records": report.outcomes["bad"],
        "bad_examples": report.bad_examples,
        "replaced_records": report.num_replaced,
        **{what: dict(sorted(counts.items())) for what, counts in report.notes.items()},
        "shards_made": len(report.made),
        "shards_kept": len(report.skipped),
        "documents_tokenized": report.documents_tokenized,
        "documents_reused": report.documents_reused,
        "seconds": round(time.monotonic() - started, 1),
        "manifest": str(output / "manifest.json"),
    }
    return Result(manifest["content_hash"], facts)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of documents to label or grade, one row per document. A row is the id of a document in
    the run's shards (`sample`: number of rows to use) or, with `is_text`, a JSON object with a
    text. The default of `id_field` is `doc_id`, else `id`."""

    path: Path
    is_text: bool
    text_field: str = "text"
    id_field: str | None = None
    sample: int | None = None


def label_job(run: Run, file: InputFile, out: Path) -> "LabelJob":
    """A job that labels the documents of a file and writes the labels to `out`."""
    from nmoe_core.labels.answers import ANSWERS_NAME
    from nmoe_core.labels.documents import JsonlTexts, jsonl_documents, shard_documents
    from nmoe_core.labels.jobs import LabelJob

    table = run.config.oracle
    tokenizer = load_tokenizer(run.tokenizer)
    most = table.max_doc_tokens
    if file.is_text:
        texts = JsonlTexts(file.path, file.text_field, file.id_field)
        documents = jsonl_documents(texts, tokenizer, most)
    else:
        documents = shard_documents(file.path, run.tree.data, tokenizer, most)
    return LabelJob(str(out), documents, out, out / ANSWERS_NAME, table.relabel)


def label_file(run: Run, file: InputFile, out: Path) -> Result:
    """Label the documents of a file into `out` with the run's oracle; raises the errors of
    `Labelling.label`."""
    from nmoe_core.labels.jobs import labelling_of

    job = label_job(run, file, out)
    ((_, made),) = labelling_of(run).label([job])
    return made


def grade_file(run: Run, file: InputFile, out: Path) -> Result:
    """Grade the documents of a file into `out`; raises the errors of `load_grader` and
    `grade_documents`."""
    from nmoe_core.labels.slices import read_slice
    from nmoe_core.quality.grading.grade import grade_documents
    from nmoe_core.quality.grading.inputs import docid_input, text_input

    grader = load_grader(run)
    model = ids_for_grader(run, grader.scorer.kind)
    if file.is_text:
        tokenizer = load_tokenizer(run.tokenizer) if model is None else model.model
        documents = text_input(file.path, tokenizer, file.text_field, file.id_field)
    else:
        documents = docid_input(read_slice(file.path), run.tree.data, file.sample, model)
    done = grade_documents(grader, documents, out)
    return Result(done.digest, done.facts | {"path": shown(out / SCORES_NAME)})


def calibrate_file(run: Run, labels: Path, predictions: Path | None) -> Result:
    """Fit thresholds on rows of grades; without rows, on the labels alone by the published rule.
    Raises CalibrationError if rows are missing, or do not match the labels."""
    from nmoe_core.quality.calibration.calibrate import calibrate_compat, calibrate_predictions
    from nmoe_core.quality.calibration.targets import Targets

    table = run.config.calibration
    out = run.tree.calibration
    if predictions is None:
        done = calibrate_compat(labels, out, table.target_keep)
    else:
        given = labels, predictions, out, Targets(**table.targets)
        done = calibrate_predictions(*given, families_of(run))
    path = shown(run.tree.calibration_summary)
    return Result(done.digest, done.facts | {"path": path})


@kept_pools()
def index_sources(run: Run, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Index the curated shards of sources (default: all) for `nmoe seen`; return facts per source.
    Raises ConfigError if the extra `seen` is not installed, and the errors of `index_shard`."""
    from nmoe_core.shards.suffixes import load_sorter

    load_sorter()
    rows = []
    for name in chosen_sources(run, names):
        facts = [result.facts for result in outputs_of(run, "seen", name).values()]
        sums = {key: sum(one[key] for one in facts) for key in ("documents", "tokens", "bytes")}
        rows.append({"source": name, **sums, "written": sum(one["changed"] for one in facts)})
    return rows


@kept_pools()
def curate_sources(
    run: Run, names: Sequence[str] | None = None, *, refit: bool = False
) -> tuple[Result, dict[str, dict[str, Any]], bool]:
    """Make topics, curated shards and manifests of sources (default: all). `refit`: fit a new topic
    model even if one exists. Raises as `curate_shard`.

    Returns:
        The topic model; per source its facts, `shards_written` and `checks` (passed, found); and
        whether a blocking check failed.
    """
    from nmoe_core.tasks import checks, curate

    chosen = chosen_sources(run, names)
    model = curate.open_topics(run, chosen_sources(run), refit=refit)
    made: dict[str, dict[str, Any]] = {}
    is_blocked = False
    has_buckets = bool(run.config.mixture.buckets.by)
    # Buckets are defined over all sources, so all of them are selected first.
    for name in chosen_sources(run) if has_buckets else chosen:
        outputs_of(run, "topics", name)
        if run.config.curation.rules(name):
            outputs_of(run, "select", name)
    if has_buckets:
        from nmoe_core.tasks.selection.buckets import fit_buckets

        fit_buckets(run, chosen_sources(run), refit=refit)
    for name in chosen:
        if has_buckets:
            outputs_of(run, "buckets", name)
        shards = outputs_of(run, "curate", name)
        facts = dict(curate.combine(run, name).facts)
        found = checks.check_curated(run, name)
        failed = [check for check, verdict in found.items() if not verdict.passed]
        is_blocked |= any(checks.level_of(run, check) == "block" for check in failed)
        written = sum(bool(shard.facts["changed"]) for shard in shards.values())
        verdicts = {check: [v.passed, v.found] for check, v in found.items()}
        made[name] = {**facts, "shards_written": written, "checks": verdicts}
    return model, made, is_blocked
