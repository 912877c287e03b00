"""Labelling, calibration and grading of files that a user names, with the settings of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.tasks.hydra import CALIBRATION_FACTS, load_backbone
from nmoe_core.text.tokenizer import load_tokenizer

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class InputFile:
    """Documents to label or to grade: one row per document.

    Attributes:
        path: Rows of document ids of the run's shards, or JSON lines with a text.
        is_text: Whether rows hold texts.
        text_field: Field of the text.
        id_field: Field of the id; by default `doc_id`, else `id`, where a row has one.
        sample: Only so many rows of document ids.
    """

    path: Path
    is_text: bool
    text_field: str = "text"
    id_field: str | None = None
    sample: int | None = None


def label_file(run: Run, file: InputFile, out: Path, progress: Progress | None = None) -> Result:
    """Label the documents of a file into `out` with the run's oracle.

    Raises:
        LabelError: As `label_shard`.
    """
    from nmoe_core.labels.document_texts import jsonl_documents, shard_documents
    from nmoe_core.labels.jsonl_texts import JsonlTexts
    from nmoe_core.labels.label import label_shard
    from nmoe_core.labels.noise import label_again
    from nmoe_core.labels.oracles import make_oracle

    table, rubric = run.config.oracle, run.rubric
    tokenizer, most = load_tokenizer(run.tokenizer), table.max_doc_tokens
    if file.is_text:
        texts = JsonlTexts(file.path, file.text_field, file.id_field)
        documents = jsonl_documents(texts, tokenizer, most)
    else:
        documents = shard_documents(file.path, run.tree.data, tokenizer, most)
    options = {"replace": table.replace, "retry_failed": table.retry_failed}
    oracle = make_oracle(table, rubric, run.resolve)
    made = label_shard(documents, out, oracle, progress=progress, **options)
    facts = made.facts | {"scorer": oracle.scorer.name}
    if table.relabel:
        turned = make_oracle(table, rubric.turned(), run.resolve)
        again = label_again(documents, table.relabel, out, turned, **options)
        facts["relabelled"] = again.facts["total"]
    return Result(made.digest, facts)


def grade_file(run: Run, file: InputFile, out: Path, progress: Progress | None = None) -> Result:
    """Grade the documents of a file into `out` with the run's heads and thresholds.

    Raises:
        NmoeError: As `grade_shard`.
    """
    from nmoe_core.grading.grade import Grader, grade_documents
    from nmoe_core.grading.inputs import DocIdInput, TextInput
    from nmoe_core.labels.slices import read_slice

    table, tree = run.config.grading, run.tree
    if file.is_text:
        tokenizer = load_tokenizer(run.tokenizer)
        documents = TextInput(file.path, tokenizer, file.text_field, file.id_field)
    else:
        documents = DocIdInput(read_slice(file.path), tree.data, file.sample)
    grader = Grader.load(
        load_backbone(run),
        tree.heads,
        tree.calibration,
        run.config.heads.max_ctx,
        table.max_batch,
        table.early_exit,
        compat=table.compat,
    )
    return Result("", asdict(grade_documents(grader, documents, out, progress)))


def calibrate_file(run: Run, labels: Path, predictions: Path | None) -> Result:
    """Fit thresholds on rows that grading wrote; without them, on the labels alone.

    The second is the published rule, which does not know the heads' scores.

    Raises:
        CalibrationError: Rows are missing, or are not those of the labels.
    """
    from nmoe_core.calibration.calibrate import calibrate_compat, calibrate_predictions

    table, out = run.config.calibration, run.tree.calibration
    if predictions is None:
        report = calibrate_compat(labels, out, table.target_keep)
    else:
        report = calibrate_predictions(labels, predictions, out, **table.model_dump())
    facts = {key: report.summary[key] for key in CALIBRATION_FACTS if key in report.summary}
    return Result("", facts | {"path": str(report.path)})
