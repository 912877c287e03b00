"""`nmoe hydra` and `nmoe train`: the quality stages of a run, one by one, without Dagster."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nmoe_core.cli.output import print_json, print_table
from nmoe_core.config import Run
from nmoe_core.errors import ConfigError
from nmoe_core.mixture import run_sources
from nmoe_core.stages.result import Output

LABEL_SPLITS = ("train", "val")
NUM_LABEL_SLICES = 8
Outputs = dict[str, Output]
Stage = Callable[[argparse.Namespace, Run], Outputs]


def register(verbs: Any) -> None:
    """Add the two groups of verbs."""
    hydra = verbs.add_parser("hydra", help="slices, labels, calibration, grades")
    stages = hydra.add_subparsers(dest="stage", required=True, metavar="STAGE")
    _add(stages, "slices", slices, "list the documents of each source by split")
    label = _add(stages, "oracle-label", oracle_label, "score slices with the oracle")
    label.add_argument("--slices", nargs="+", metavar="train-00", help="some slices only")
    _add(stages, "merge-labels", merge_labels, "join the labels of each split")
    _add(stages, "calibrate", calibrate, "fit thresholds on the heads' own scores")
    grade_verb = _add(stages, "grade", grade, "score and decide every document")
    grade_verb.add_argument("--source", help="one source only")

    train = verbs.add_parser("train", help="train the heads")
    heads = train.add_subparsers(dest="stage", required=True, metavar="HEAD")
    for kind in ("probe", "judge"):
        _add(heads, kind, train_head, f"train the {kind} on the merged labels")
    convert = _add(heads, "import-pt", import_pt, "convert a pickled head of another tool")
    convert.add_argument("head", type=Path, help="the .pt file")


def _add(group: Any, name: str, stage: Stage, text: str) -> argparse.ArgumentParser:
    parser = group.add_parser(name, help=text)
    parser.add_argument("--config", required=True, metavar="TOML", help="run configuration")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=lambda arguments: _run(arguments, stage))
    return parser


def _run(arguments: argparse.Namespace, stage: Stage) -> int:
    outputs = stage(arguments, Run(arguments.config))
    facts = {name: output.facts for name, output in outputs.items()}
    if arguments.json:
        print_json(facts)
        return 0
    header = list(dict.fromkeys(key for row in facts.values() for key in row))
    rows = [[name, *(row.get(key) for key in header)] for name, row in facts.items()]
    print_table(["output", *header], rows)
    return 0


def slices(arguments: argparse.Namespace, run: Run) -> Outputs:
    """Docid slices of every source."""
    from nmoe_core.stages.prep import make_slices

    return {source.name: make_slices(run, source) for source in run_sources(run)}


def oracle_label(arguments: argparse.Namespace, run: Run) -> Outputs:
    """Labels of the asked-for slices, all when none is named."""
    from nmoe_core.stages.hydra import label_slices

    known = [f"{split}-{i:02d}" for split in LABEL_SPLITS for i in range(NUM_LABEL_SLICES)]
    asked = arguments.slices or known
    for key in asked:
        if key not in known:
            raise ConfigError("no such slice", found=key, expected=f"{known[0]} to {known[-1]}")
    return label_slices(run, [source.name for source in run_sources(run)], asked)


def merge_labels(arguments: argparse.Namespace, run: Run) -> Outputs:
    """One label file a split."""
    from nmoe_core.stages.hydra import merge_split

    return {split: merge_split(run, split) for split in LABEL_SPLITS}


def train_head(arguments: argparse.Namespace, run: Run) -> Outputs:
    """The head that the verb names."""
    from nmoe_core.stages import hydra

    hydra.make_backbone(run)
    return {arguments.stage: hydra.train_head(run, arguments.stage)}


def import_pt(arguments: argparse.Namespace, run: Run) -> Outputs:
    """The head file made from a pickle."""
    from nmoe_core.stages import hydra

    hydra.make_backbone(run)
    return {arguments.head.name: hydra.import_head(run, arguments.head)}


def calibrate(arguments: argparse.Namespace, run: Run) -> Outputs:
    """Weights and thresholds."""
    from nmoe_core.stages.hydra import calibrate_heads

    return {"calibration": calibrate_heads(run)}


def grade(arguments: argparse.Namespace, run: Run) -> Outputs:
    """Grades of one source or of all."""
    from nmoe_core.stages.hydra import grade_shards

    names = [source.name for source in run_sources(run)]
    if arguments.source is not None and arguments.source not in names:
        expected = ", ".join(names)
        raise ConfigError("no such source", found=arguments.source, expected=expected)
    outputs: Outputs = {}
    for name in [arguments.source] if arguments.source else names:
        graded = grade_shards(run, name, range(run.config.prep.num_shards))
        outputs |= {f"{name}/{bucket:04d}": output for bucket, output in graded.items()}
    return outputs
