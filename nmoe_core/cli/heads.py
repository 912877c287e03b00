"""`nmoe train student|probe|judge|import-pt`, `nmoe hydra plan-labels|calibrate|grade`."""

import argparse
import textwrap
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import GRADER_NAMES, THRESHOLDS
from nmoe_core.cli import labels
from nmoe_core.cli.flags import add_run_flags, model_defaults, number, required, run_of, set_value
from nmoe_core.cli.labels import Outputs, add_file_flags, add_task, named_file
from nmoe_core.cli.output import duration, print_table
from nmoe_core.config.run import Run

_MODEL = ("backbone.checkpoint", "heads.max_ctx")
_GRADING = (*_MODEL, "tokenizer", "grading.batch_size")


def register(verbs: Any) -> None:
    """Add `nmoe hydra` and `nmoe train`."""
    hydra = verbs.add_parser(
        "hydra", help="slices, labels, thresholds and grades of the quality model"
    )
    parts = hydra.add_subparsers(dest="part", required=True, metavar="TASK")
    labels.register(parts)
    text = "choose the documents of train to label next; nmoe run label then labels them, too"
    planned = add_task(parts, "plan-labels", plan_labels, text)
    planned.add_argument(
        "--budget", type=number(1), required=True, metavar="N", help="number of documents"
    )
    planned.description = (
        "Choose the documents of train to label next; nmoe run label then labels them, too.\n"
        "In replays of labelled corpora from 60 labels on, the student needed 0.49 to 0.88 of the\n"
        "labels of random choice for the same rank correlation, a probe with --by probe 0.63 to\n"
        "0.65, and a probe without it 1.01 to 1.10. How much they buy here is not predicted."
    )
    text = "choose by n-grams, or by the states of the backbone (run once for 3,000 documents)"
    planned.add_argument("--by", choices=("student", "probe"), default="student", help=text)
    add_run_flags(planned, roots={"labels": "labels", "data_root": "data"}, is_required=True)

    text = "fit thresholds on the grader's scores of the val labels"
    fit = add_task(parts, "calibrate", calibrate, text, _show_calibration)
    fit.add_argument(
        "--labels", type=Path, metavar="FILE", help="file with the merged labels of val"
    )
    fit.add_argument(
        "--labels-test",
        type=Path,
        metavar="FILE",
        help="file with the merged labels of test: for reports only",
    )
    fit.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="file of scores that nmoe hydra grade wrote",
    )
    fit.add_argument(
        "--compat", action="store_true", help="use the published rule, which needs only labels"
    )
    roots = {"data_root": "data", "heads_dir": "heads", "out": "calibration"}
    add_run_flags(fit, (*_GRADING, "calibration.target_keep"), roots)

    score = add_task(parts, "grade", grade, "score and decide documents")
    score.add_argument("--source", help="grade only this source of the run")
    add_file_flags(score)
    score.add_argument(
        "--sample", type=int, metavar="N", help="grade only N documents of --input-docids"
    )
    roots = {"data_root": "data", "heads_dir": "heads", "calibration": "calibration"}
    add_run_flags(score, _GRADING, roots | {"out": "quality"})

    train = verbs.add_parser("train", help="train the heads and the student")
    heads = train.add_subparsers(dest="head_kind", required=True, metavar="HEAD")
    text = "train the student on labels, without a backbone"
    student = add_task(heads, "student", train_student, text)
    _add_label_flags(student)
    add_run_flags(student, ["tokenizer"], {"data_root": "data", "out": "heads"})
    for kind in ("probe", "judge"):
        head = add_task(heads, kind, train_head, f"train the {kind} on labels")
        _add_label_flags(head)
        keys = [f"heads.{kind}.{name}" for name in ("batch_size", "epochs", "lr")]
        add_run_flags(head, (*_MODEL, *keys), {"data_root": "data", "out": "heads"})
    convert = add_task(heads, "import-pt", import_pt, "convert a pickled head of another tool")
    convert.add_argument("head", type=Path, help="the .pt file")
    add_run_flags(convert, _MODEL, {"out": "heads"})


def _add_label_flags(parser: argparse.ArgumentParser) -> None:
    for flag, text in (("labels", "fit"), ("labels-val", "report on"), ("labels-test", "test")):
        parser.add_argument(f"--{flag}", type=Path, metavar="FILE", help=f"merged labels: {text}")


def _label_files(arguments: argparse.Namespace, run: Run) -> dict[str, Path | None]:
    files = {"train": arguments.labels, "val": arguments.labels_val, "test": arguments.labels_test}
    return _given(run, files)


def train_student(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.tasks import hydra

    run = run_of(arguments, "labels", "data_root", "out")
    return {"student": hydra.train_student(run, _label_files(arguments, run))}


def train_head(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.tasks import backbone, hydra

    run = _model_run(arguments, "labels", "data_root", "out")
    if run.config.backbone.kind == "tiny":
        backbone.make_backbone(run)
    kind = arguments.head_kind
    return {kind: hydra.train_head(run, kind, _label_files(arguments, run))}


def plan_labels(arguments: argparse.Namespace) -> Outputs:
    """Choose the documents to label next."""
    from nmoe_core.tasks import hydra

    run = run_of(arguments, "labels", "data_root")
    return {"plan": hydra.plan_labels(run, arguments.budget, arguments.by)}


def import_pt(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.tasks import backbone, hydra

    run = _model_run(arguments, "out")
    if run.config.backbone.kind == "tiny":
        backbone.make_backbone(run)
    return {arguments.head.name: hydra.import_head(run, arguments.head)}


def calibrate(arguments: argparse.Namespace) -> Outputs:
    """Fit weights and thresholds to the scores of heads, to scores in a file, or by the published
    rule."""
    from nmoe_core.tasks import commands, hydra

    if arguments.compat or arguments.predictions is not None:
        run = run_of(arguments, "labels", "out")
        val = arguments.labels
        val = val or run.tree.merged_labels("val")
        rows = None if arguments.compat else arguments.predictions
        return {"calibration": commands.calibrate_file(run, val, rows)}
    if arguments.config is None and arguments.heads_dir is None:
        raise ConfigError(
            "calibration needs scores",
            expected="--predictions, or --heads-dir with --data-root and --checkpoint, or with "
            "--data-root and --set grading.grader=student",
            do="add these flags; or use --compat, the published rule, which needs only labels",
        )
    run = _model_run(arguments, "labels", "out", "data_root")
    named = {"val": arguments.labels, "test": arguments.labels_test}
    return {"calibration": hydra.calibrate_heads(run, _given(run, named))}


def _show_calibration(facts: dict[str, Any]) -> None:
    """Print the thresholds, the share kept per source, the bound and its cost, and the excluded
    documents."""
    found = facts["calibration"]
    if "keep_by_source" not in found:  # the published rule has no measurements to show
        return labels.show_outputs(facts)
    taus = ", ".join(f"{name} {found[name]:.4f}" for name in THRESHOLDS if name in found)
    print(f"{found['grader']}: {taus}; fitted on one half of {found['count']} labels")
    if "families_fit" in found:
        both = f"{found['families_fit']} in this half, {found['families_report']} in the other"
        print(f"families: {both}")
    print()
    rows = [
        [
            *(row["source"], row["documents"], row["tokens"], _share(row)),
            *(_percent(row["keep_tokens"]), row.get("dropped"), row.get("false_drops")),
            _percent(row.get("false_drop_rate_upper95")),
        ]
        for row in found["keep_by_source"]
    ]
    columns = ["kept of", "documents", "tokens", "documents (95 %)", "of tokens", "dropped"]
    print_table([*columns, "of them worth keeping", "at most (95 %)"], rows)
    if by := found.get("target_by"):
        rows = [
            [
                *(row["group"], f"{row['tau_drop']:.4f}", f"{row['tau_keep']:.4f}"),
                *(_percent(row["target_keep"]), _share(row)),
                "own" if row["has_own"] else "shared",
            ]
            for row in found["groups"]
        ]
        print()
        print_table([by, "tau_drop", "tau_keep", "target", "kept (95 %)", "thresholds"], rows)
    _show_triage(found)
    _show_graders(found)
    dropped = found["num_dropped"]
    bound = found["max_false_drop"]
    print(f"\ndropped: {dropped} of the other half", end="")
    if dropped:
        rate, upper = map(_percent, (found["false_drop_rate"], found["false_drop_rate_upper95"]))
        print(f", {rate} of them worth keeping, at most {upper} (95 %)", end="")
    print(f"; allowed: at most {_percent(bound)}\n{found['dropping']}")
    if costs := found["drops_by_labels"]:
        more = ", ".join(f"{n:,}: {_percent(share)}" for n, share in costs["more"])
        print(f"share dropped if fitted on more labels: {more}")
        print(f"share dropped without a margin for chance: {_percent(costs['certain'])}")
    if costs := found.get("cost"):
        hours = [f"{c['grader']} {c['hours_per_million_documents']:g} h" for c in costs]
        print(f"grading a million documents like those of val on this machine: {', '.join(hours)}")
    left_out = {k: n for k, n in found["left_out"].items() if n}
    print(f"excluded from figures: {', '.join(f'{n} {k}' for k, n in left_out.items()) or 'none'}")
    return None


def _show_triage(found: dict[str, Any]) -> None:
    """Print each step that drops documents, with the upper bound of its false drops."""
    rows: list[list[Any]] = []
    for row in found.get("triage", ()):
        proved = found["max_false_drop"] if row["labels_below"] else None
        shares = row["leave"], row["lost_keep_rate"], proved
        seen = row["false_drop_rate"], row["false_drop_rate_upper95"]
        start = row["step"], f"{row['tau']:.4f}", row["labels_below"]
        rows.append([*start, *map(_percent, (*shares, *seen))])
    print()
    columns = ["drops at", "below", "labels below", "dropped here", "judge's keeps lost"]
    print_table([*columns, "false drops proved", "seen", "at most (95 %)"], rows)
    print("false drops: share of documents dropped up to this step that the oracle would keep")


def _show_graders(found: dict[str, Any]) -> None:
    """Print which shares of documents each possible grader would drop and keep, and which share of
    them is wrong."""
    if (choice := found.get("grader_choice")) is None:
        return
    names = ("false_drop_rate", "false_drop_rate_upper95", "precision_keep", "recall_keep")
    rows = []
    for split, said in (("report", "the other half"), ("test", "test")):
        for grader, row in choice.get(split, {"graders": {}})["graders"].items():
            rates = [_percent(row.get(name)) for name in names]
            rows.append([grader, said, row.get("num_dropped"), *rates])
    columns = ["grader", "of", "would drop", "false drops", "at most (95 %)", "kept rightly"]
    print()
    print_table([*columns, "of the oracle's keeps"], rows)
    print(textwrap.fill(choice["sentence"], 112))


def _share(row: dict[str, Any]) -> str:
    if "keep_documents" not in row:
        return "not known"
    low, high = row["keep_documents_ci95"]
    return f"{_percent(row['keep_documents'])} ({_percent(low)} to {_percent(high)})"


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.1f} %"


def grade(arguments: argparse.Namespace) -> Outputs:
    """Grade the sources of a run, a slice, or a file of texts."""
    from nmoe_core.tasks.commands import grade_file
    from nmoe_core.tasks.shards import grade_sources

    file = named_file(arguments, "grade", of_run=("source",))
    if (thresholds := arguments.calibration) is not None and thresholds.is_file():
        arguments.calibration = thresholds.parent
    if file is None:
        return grade_sources(run_of(arguments), arguments.source and [arguments.source])
    needed = () if file.is_text else ("data_root",)
    run = _model_run(arguments, "calibration", "heads_dir", "out", *needed)
    out = required(arguments, "out")
    return {str(out): grade_file(run, file, out)}


def _model_run(arguments: argparse.Namespace, *needed: str) -> Run:
    if arguments.config is not None:
        return run_of(arguments)
    if set_value(arguments, "grading.grader") == "student":
        return run_of(arguments, *needed)
    defaults = model_defaults(arguments, "backbone")
    return run_of(arguments, *needed, "checkpoint", defaults=defaults)


def _given(run: Run, files: dict[str, Path | None]) -> dict[str, Path | None]:
    """The label files that the command line names; if it names none, the run's labels."""
    return {k: path for k, path in files.items() if path is not None or not run.has_file}


def show_scoreboard(heads: dict[str, Any], costs: list[dict[str, Any]]) -> None:
    """Print how well each possible grader and two baselines without the text rank documents, and
    the cost."""
    from nmoe_core.quality.heads.metrics import num_documents

    if not heads:
        return
    split = "test" if any(found["test"] for found in heads.values()) else "val"
    measured = {kind: found[split] for kind, found in heads.items() if found[split]}
    rows = []
    for kind, found in measured.items():
        ranked = (_with_interval(found, f"spearman{of}") for of in ("", "_within_source"))
        shares = [_two(found[name]) for name in ("auc_better_half", "precision_top_fifth")]
        last = _with_interval(found, "false_drops_bottom_fifth")
        rows.append([kind, num_documents(found), *ranked, *shares, last])
        if found.get("num_alike"):
            rest = _with_interval(found, "spearman_not_alike")
            rows.append(["- not alike", found["n"] - found["num_alike"], rest, *[None] * 4])
    for found in [*measured.values()][-1:]:
        for name in ("source", "length"):
            alone = _two(found[f"spearman_{name}_only"])
            rows.append([f"{name} alone", found["n"], alone, *[None] * 4])
        twice = found.get("noise_ceiling_documents")
        ceiling = _with_interval(found, "noise_ceiling")
        rows.append(["noise ceiling, estimated", twice, ceiling, *[None] * 4])
    header = [split, "documents", "Spearman (95 %)", "within source (95 %)", "AUC", "top fifth"]
    print_table([*header, "bottom fifth (95 %)"], rows)
    print("Spearman: with the oracle's scores, on documents outside the training labels", end="")
    print("; test labels are not used to choose a grader" if split == "test" else "")
    print("AUC: how often a document of the oracle's better half ranks above one of the other half")
    chances = next(iter(measured.values()), {})
    top, bottom = (_two(chances.get(f"chance_{end}_fifth")) for end in ("top", "bottom"))
    print("not alike: without documents that resemble one used in training")
    print(f"top fifth: share of the grader's top fifth in the oracle's, with ties; by chance {top}")
    print(
        f"bottom fifth: share of the grader's bottom fifth that is in the oracle's better half; "
        f"by chance {bottom}"
    )
    print(_cost(costs))


def _cost(costs: list[dict[str, Any]]) -> str:
    times = (
        f"{GRADER_NAMES[cost['grader']]} {duration(3600 * cost['hours_per_million_documents'])}"
        for cost in costs
    )
    shown = ", ".join(times) or "not measured"
    return f"time to grade a million such documents, measured at calibration: {shown}\n"


def _with_interval(found: dict[str, Any], name: str) -> str:
    if found.get(f"{name}_ci95") is None:
        return _two(found[name])
    low, high = found[f"{name}_ci95"]
    return f"{_two(found[name])} ({low:.2f} to {high:.2f})"


def _two(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"
