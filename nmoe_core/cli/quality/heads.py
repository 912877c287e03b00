"""`nmoe train probe|judge|import-pt`: the heads, from labels or from another tool's pickles.

Each verb takes a run's `--config`, or the paths themselves.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nmoe_core.base.result import Result
from nmoe_core.cli.beside_config import BACKBONE_KEYS, beside_config, configured_run
from nmoe_core.cli.paths import add_backbone_flags, default_device, default_dtype, required
from nmoe_core.cli.quality.labels import Outputs, show
from nmoe_core.config.quality import JudgeTable, ProbeTable

GIB = 2**30
_KEYS = {**BACKBONE_KEYS, "max_ctx": "heads.max_ctx"}


def register(verbs: Any) -> None:
    """Add the verbs."""
    train = verbs.add_parser("train", help="train the heads")
    heads = train.add_subparsers(dest="stage", required=True, metavar="HEAD")
    for kind, table in (("probe", ProbeTable()), ("judge", JudgeTable())):
        head = _add(heads, kind, f"train the {kind} on labels", train_head)
        head.add_argument("--labels", type=Path, metavar="FILE", help="merged labels to fit")
        head.add_argument("--labels-val", type=Path, metavar="FILE", help="to report on")
        head.add_argument("--use-salvaged", action="store_true", help="salvaged labels too")
        head.add_argument("--labels-test", type=Path, metavar="FILE", help="reported on apart")
        head.add_argument("--batch-size", type=int, default=table.batch_size)
        head.add_argument("--epochs", type=int, default=table.epochs)
        head.add_argument("--lr", type=float, default=table.lr)
        head.add_argument("--seed", type=int, default=0)
        head.add_argument("--tap", type=int, help="block to read; default 18 (probe) or 24 of 24")
        if isinstance(table, JudgeTable):
            head.add_argument("--mid-dim", type=int, default=table.mid_dim)
            head.add_argument("--num-heads", type=int, default=table.num_heads)
            head.add_argument("--ffn-dim", type=int, default=table.ffn_dim)
            head.add_argument("--cache-gib", type=float, default=0.5, help="memory for states")
        shared = {name: f"heads.{name}" for name in ("seed", "use_salvaged")}
        own = {name: f"heads.{kind}.{name}" for name in type(table).model_fields}
        beside_config(head, {**_KEYS, **shared, **own})
    convert = _add(heads, "import-pt", "convert a pickled head of another tool", import_pt)
    convert.add_argument("head", type=Path, help="the .pt file")
    convert.add_argument("--num-heads", type=int, default=JudgeTable().num_heads)
    beside_config(convert, {**_KEYS, "num_heads": "heads.judge.num_heads"}, ("head",))


def _add(group: Any, name: str, text: str, verb: Any) -> argparse.ArgumentParser:
    parser = group.add_parser(name, help=text)
    parser.add_argument("--config", metavar="TOML", help="run configuration, instead of paths")
    add_backbone_flags(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory of the heads")
    parser.add_argument("--max-ctx", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=lambda arguments: show(verb(arguments), arguments.json))
    return parser


def train_head(arguments: argparse.Namespace) -> Outputs:
    """The head that the verb names."""
    from nmoe_core.tasks import hydra

    kind = arguments.stage
    if arguments.config is not None:
        run = configured_run(arguments)
        hydra.make_backbone(run)
        return {kind: hydra.train_head(run, kind)}
    from nmoe_core.heads.train import train_judge, train_probe

    data_root = required(arguments, "data_root")
    common = ("max_ctx", "tap", "batch_size", "epochs", "lr", "seed", "use_salvaged")
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in common}
    if kind == "judge":
        settings |= {name: getattr(arguments, name) for name in ("mid_dim", "num_heads", "ffn_dim")}
        settings["cache_bytes"] = int(arguments.cache_gib * GIB)
    report = (train_probe if kind == "probe" else train_judge)(
        required(arguments, "labels"),
        arguments.labels_val,
        _backbone(arguments),
        data_root,
        required(arguments, "out"),
        eos_token_id=hydra.eos_of(data_root),
        labels_test=arguments.labels_test,
        **settings,
    )
    return {kind: Result(report.digest, hydra.head_facts(report))}


def import_pt(arguments: argparse.Namespace) -> Outputs:
    """The head file made from a pickle."""
    from nmoe_core.tasks import hydra

    if arguments.config is not None:
        run = configured_run(arguments)
        hydra.make_backbone(run)
        return {arguments.head.name: hydra.import_head(run, arguments.head)}
    from nmoe_core.heads.convert import import_pickle

    made = import_pickle(
        arguments.head,
        required(arguments, "out"),
        _backbone(arguments),
        arguments.max_ctx,
        arguments.num_heads,
    )
    return {arguments.head.name: Result("", {"path": str(made)})}


def _backbone(arguments: argparse.Namespace) -> Any:
    from nmoe_core.tasks.hydra import load_checkpoint

    device = arguments.device or default_device()
    dtype = arguments.dtype or default_dtype(device)
    return load_checkpoint(required(arguments, "checkpoint"), device, dtype, arguments.experts)
