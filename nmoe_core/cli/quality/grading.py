"""`nmoe hydra calibrate|grade`: thresholds for trained heads, and decisions on documents.

Each verb takes a run's `--config`, or the paths themselves. The labelling verbs are registered
here too and live in `hydra_labels`; the heads' training is `nmoe train`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.result import Result
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.cli.beside_config import BACKBONE_KEYS, beside_config, configured_run
from nmoe_core.cli.paths import add_backbone_flags, default_device, default_dtype, required
from nmoe_core.cli.quality import heads as train
from nmoe_core.cli.quality import labels as hydra_labels
from nmoe_core.cli.quality.labels import Outputs, add_jsonl_flags, show
from nmoe_core.prep.mixture import run_sources


def register(verbs: Any) -> None:
    """Add `nmoe hydra` and `nmoe train`."""
    hydra = verbs.add_parser("hydra", help="slices, labels, calibration, grades")
    stages = hydra.add_subparsers(dest="stage", required=True, metavar="STAGE")
    hydra_labels.register(stages)
    _add_calibrate(stages)
    _add_grade(stages)
    train.register(verbs)


def _add_calibrate(stages: Any) -> None:
    verb = stages.add_parser("calibrate", help="fit thresholds on the heads' own scores of val")
    verb.add_argument("--config", metavar="TOML", help="run configuration, instead of paths")
    verb.add_argument("--labels", type=Path, metavar="FILE", help="merged labels of val")
    verb.add_argument("--labels-test", type=Path, metavar="FILE", help="only reported on")
    verb.add_argument("--out", type=Path, metavar="DIR", help="for calibration_summary.json")
    verb.add_argument("--predictions", type=Path, metavar="FILE", help="rows as grade writes them")
    verb.add_argument("--heads-dir", type=Path, metavar="DIR", help="score val with these heads")
    add_backbone_flags(verb)
    verb.add_argument("--max-ctx", type=int, default=4096, help="tokens of a document")
    verb.add_argument("--max-batch", type=int, default=64, help="documents at once")
    verb.add_argument("--target-keep", type=float, default=0.5, help="share of documents to keep")
    verb.add_argument("--target-drop", type=float, help="share to drop; default: what is safe")
    verb.add_argument("--max-false-drop", type=float, default=0.02, help="bound among the dropped")
    verb.add_argument("--compat", action="store_true", help="the published rule, from labels alone")
    verb.add_argument("--json", action="store_true")
    verb.set_defaults(run=lambda arguments: show(calibrate(arguments), arguments.json))
    names = ("target_keep", "target_drop", "max_false_drop")
    keys = {name: f"calibration.{name}" for name in names}
    beside_config(verb, {**keys, **BACKBONE_KEYS, "max_ctx": "heads.max_ctx"})


def _add_grade(stages: Any) -> None:
    verb = stages.add_parser("grade", help="score and decide documents")
    verb.add_argument("--config", metavar="TOML", help="run configuration, instead of paths")
    verb.add_argument("--source", help="with --config: one source only")
    given = verb.add_mutually_exclusive_group()
    given.add_argument("--input-docids", type=Path, metavar="SLICE", help="rows of document ids")
    given.add_argument("--input-jsonl", type=Path, metavar="FILE", help="rows with a text")
    add_backbone_flags(verb)
    verb.add_argument("--heads-dir", type=Path, metavar="DIR")
    verb.add_argument("--calibration", type=Path, metavar="DIR")
    verb.add_argument("--out", type=Path, metavar="DIR")
    verb.add_argument("--max-ctx", type=int, default=4096, help="tokens of a document")
    verb.add_argument("--max-batch", type=int, default=64, help="documents at once")
    verb.add_argument("--no-early-exit", action="store_true", help="judge every document")
    verb.add_argument("--compat", action="store_true", help="accept thresholds of no known heads")
    verb.add_argument("--sample", type=int, metavar="N", help="only N documents of --input-docids")
    add_jsonl_flags(verb)
    verb.add_argument("--tokenizer", default="o200k_harmony", help="of --input-jsonl")
    verb.add_argument("--quiet", action="store_true", help="no progress on standard error")
    verb.add_argument("--json", action="store_true")
    verb.set_defaults(run=lambda arguments: show(grade(arguments), arguments.json))
    keys = {
        **BACKBONE_KEYS,
        "max_ctx": "heads.max_ctx",
        "max_batch": "grading.max_batch",
        "no_early_exit": "not grading.early_exit",
        "compat": "grading.compat",
    }
    beside_config(verb, keys, ("source", "quiet"))


def calibrate(arguments: argparse.Namespace) -> Outputs:
    """Weights and thresholds, from predictions, from heads, or by the published rule."""
    from nmoe_core.tasks import hydra

    if arguments.config is not None:
        return {"calibration": hydra.calibrate_heads(configured_run(arguments))}
    from nmoe_core.calibration import calibrate as core

    labels, out = required(arguments, "labels"), required(arguments, "out")
    names = ("target_keep", "max_false_drop", "target_drop")
    targets: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    if arguments.compat:
        report = core.calibrate_compat(labels, out, arguments.target_keep)
    elif arguments.predictions is not None:
        report = core.calibrate_predictions(labels, arguments.predictions, out, **targets)
    elif arguments.heads_dir is not None:
        data_root = required(arguments, "data_root")
        report = core.calibrate(
            labels,
            arguments.heads_dir,
            hydra.load_checkpoint(required(arguments, "checkpoint"), *_place(arguments)),
            data_root,
            out,
            eos_token_id=hydra.eos_of(data_root),
            max_ctx=arguments.max_ctx,
            max_batch=arguments.max_batch,
            labels_test=arguments.labels_test,
            **targets,
        )
    else:
        raise ConfigError(
            "there are no scores to calibrate on",
            expected="--predictions, or --heads-dir with --checkpoint and --data-root",
            do="add one of them; --compat fits the published rule to labels alone",
        )
    keys = [key for key in hydra.CALIBRATION_FACTS if key in report.summary]
    facts = {key: report.summary[key] for key in keys} | {"path": str(report.path)}
    return {"calibration": Result("", facts)}


def grade(arguments: argparse.Namespace) -> Outputs:
    """Grades of a run's sources, of a slice, or of a file of texts."""
    if arguments.config is not None:
        return _grade_run(arguments)
    from nmoe_core.grading.grade import Grader, grade_documents
    from nmoe_core.tasks import hydra

    documents = _documents(arguments)
    calibration = required(arguments, "calibration")
    grader = Grader.load(
        hydra.load_checkpoint(required(arguments, "checkpoint"), *_place(arguments)),
        required(arguments, "heads_dir"),
        calibration.parent if calibration.is_file() else calibration,
        arguments.max_ctx,
        arguments.max_batch,
        not arguments.no_early_exit,
        compat=arguments.compat,
    )
    progress = None if arguments.quiet else _show_progress
    report = grade_documents(grader, documents, required(arguments, "out"), progress)
    return {str(arguments.out): Result("", asdict(report))}


def _grade_run(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.tasks.shards import outputs_of

    run = configured_run(arguments)
    names = [source.name for source in run_sources(run)]
    if arguments.source is not None and arguments.source not in names:
        expected = ", ".join(names)
        raise ConfigError("no such source", found=arguments.source, expected=expected)
    outputs: Outputs = {}
    for name in [arguments.source] if arguments.source else names:
        graded = outputs_of(run, "grade", name)
        outputs |= {f"{name}/{bucket:04d}": output for bucket, output in graded.items()}
    return outputs


def _documents(arguments: argparse.Namespace) -> Any:
    from nmoe_core.grading.inputs import DocIdInput, TextInput
    from nmoe_core.labels.slices import read_slice

    if arguments.input_jsonl is not None:
        from nmoe_core.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(arguments.tokenizer)
        fields = arguments.text_field, arguments.id_field
        return TextInput(arguments.input_jsonl, tokenizer, *fields)
    if arguments.input_docids is None:
        raise ConfigError("nothing to grade", expected="--input-docids, --input-jsonl or --config")
    data_root = required(arguments, "data_root")
    return DocIdInput(read_slice(arguments.input_docids), data_root, arguments.sample)


def _place(arguments: argparse.Namespace) -> tuple[str, str, ExpertChoice]:
    device = arguments.device or default_device()
    return device, arguments.dtype or default_dtype(device), arguments.experts


def _show_progress(num_done: int, num_all: int | None) -> None:
    of_all = f" of {num_all:,}" if num_all is not None else ""
    print(f"{num_done:,}{of_all} documents graded", file=sys.stderr)
