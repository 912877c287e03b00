"""`nmoe hydra slices|oracle-label|merge-labels|status`: from documents to merged labels.

Each verb takes a run's `--config`, or the paths themselves: labelling needs no run configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.result import Result
from nmoe_core.base.strict import validate
from nmoe_core.cli.beside_config import beside_config, configured_run
from nmoe_core.cli.output import print_json, print_table
from nmoe_core.cli.paths import add_experts_flag, default_device, default_dtype, required
from nmoe_core.config.quality import OracleTable
from nmoe_core.config.run import Run
from nmoe_core.config.shipped import find_rubric
from nmoe_core.labels.slices import LABELLED_SPLITS, NUM_LABEL_SHARDS

if TYPE_CHECKING:
    from nmoe_core.labels.document_texts import Documents

SHOW_EVERY = 50
Outputs = dict[str, Result]
Verb = Callable[[argparse.Namespace], Outputs]


def register(stages: Any) -> None:
    """Add the verbs."""
    listing = _add(stages, "slices", slices, "list the documents of each source by split")
    listing.add_argument("--data-root", type=Path, metavar="DIR")
    listing.add_argument("--out", type=Path, metavar="DIR", help="slices directory")
    listing.add_argument("--sources", nargs="+", metavar="NAME", help="default: all with train/")

    label = _add(stages, "oracle-label", oracle_label, "score documents with the oracle")
    label.add_argument("--slices", nargs="+", metavar="train-00", help="with --config: only these")
    _add_label_flags(label)
    names = ("replace", "retry_failed", "relabel", "max_doc_tokens", "salvage")
    beside_config(label, {name: f"oracle.{name}" for name in names}, ("slices", "quiet"))

    merge = _add(stages, "merge-labels", merge_labels, "join the labels of each split")
    merge.add_argument("--labels", type=Path, metavar="DIR", help="directory of train/ and val/")

    status = _add(stages, "status", None, "PENDING, RUNNING or DONE of each label shard")
    status.add_argument("--labels", type=Path, metavar="DIR", help="directory of train/ and val/")
    status.add_argument("--slices", type=Path, metavar="DIR", help="slices directory")
    status.set_defaults(run=show_status)


def _add(group: Any, name: str, verb: Verb | None, text: str) -> argparse.ArgumentParser:
    parser = group.add_parser(name, help=text)
    parser.add_argument("--config", metavar="TOML", help="run configuration, instead of paths")
    parser.add_argument("--json", action="store_true")
    beside_config(parser)
    if verb is not None:
        parser.set_defaults(run=lambda arguments: show(verb(arguments), arguments.json))
    return parser


def _add_label_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--input-docids", type=Path, metavar="SLICE", help="rows of document ids")
    source.add_argument("--input-jsonl", type=Path, metavar="FILE", help="rows with a text")
    add_jsonl_flags(parser)
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="of --input-docids")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory of these labels")
    parser.add_argument("--oracle", choices=("engine", "http", "heuristic"), default="engine")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="engine: gpt-oss weights")
    parser.add_argument("--max-ctx", type=int, default=4096, help="engine: prompt and answer")
    parser.add_argument("--max-batch", type=int, default=32, help="engine: answers at once")
    parser.add_argument("--device", help="engine: default cuda where there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the device's")
    add_experts_flag(parser)
    parser.add_argument("--reasoning", choices=("low", "none"), default="low")
    parser.add_argument("--base-url", metavar="URL", help="http: such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="http: the server's name of its model")
    parser.add_argument("--accept-model", nargs="+", default=[], help="http: its other names")
    parser.add_argument("--api", choices=("chat", "completions"), default="chat", help="http")
    parser.add_argument("--api-key-env", metavar="NAME", help="http: variable that holds the key")
    parser.add_argument("--concurrency", type=int, default=64, help="http: requests at once")
    parser.add_argument("--max-new", type=int, default=2048, help="tokens of an answer")
    parser.add_argument("--max-doc-tokens", type=int, default=2048, help="of a document, at most")
    parser.add_argument(
        "--rubric", type=Path, default="quality_v1", metavar="TOML", help="or a name (quality_v1)"
    )
    parser.add_argument("--tokenizer", default="o200k_harmony")
    parser.add_argument("--retry-failed", type=int, default=0, metavar="N")
    parser.add_argument("--replace", action="store_true", help="drop labels of another scorer")
    parser.add_argument("--relabel", type=int, default=0, metavar="N", help="label N of them twice")
    parser.add_argument(
        "--salvage", action="store_true", help="take scores among other words too, marked"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def add_jsonl_flags(parser: argparse.ArgumentParser) -> None:
    """Which fields of `--input-jsonl` hold the documents; the same for every verb."""
    parser.add_argument("--text-field", default="text", help="of --input-jsonl")
    parser.add_argument("--id-field", help="of --input-jsonl; default: doc_id, else id, if there")


def show(outputs: Outputs, as_json: bool) -> int:
    """Print the facts of each output, a row each."""
    facts = {name: output.facts for name, output in outputs.items()}
    if as_json:
        print_json(facts)
        return 0
    header = list(dict.fromkeys(key for row in facts.values() for key in row))
    rows = [[name, *(row.get(key) for key in header)] for name, row in facts.items()]
    print_table(["output", *header], rows)
    return 0


def slices(arguments: argparse.Namespace) -> Outputs:
    """Docid slices of every source."""
    from nmoe_core.labels.slices import combine_slices, write_source_slices

    if arguments.config is not None:
        from nmoe_core.prep.mixture import run_sources
        from nmoe_core.tasks.prep import make_slices

        run = Run(arguments.config)
        return {source.name: make_slices(run, source) for source in run_sources(run)}
    data_root, out = required(arguments, "data_root"), required(arguments, "out")
    names = arguments.sources or sorted(p.parent.name for p in data_root.glob("*/train"))
    if not names:
        raise ConfigError("no source here", where=data_root, expected="directories with train/")
    made = {name: write_source_slices(data_root, name, out) for name in names}
    return made | {"all": combine_slices(out, names)}


def oracle_label(arguments: argparse.Namespace) -> Outputs:
    """Labels of the asked-for slices of a run, or of one file of documents."""
    if arguments.config is None:
        return _label_file(arguments)
    from nmoe_core.prep.mixture import run_sources
    from nmoe_core.tasks.hydra import label_slices

    run = configured_run(arguments)
    known = [f"{split}-{i:02d}" for split in LABELLED_SPLITS for i in range(NUM_LABEL_SHARDS)]
    asked = arguments.slices or known
    for key in asked:
        if key not in known:
            raise ConfigError("no such slice", found=key, expected=f"{known[0]} to {known[-1]}")
    return label_slices(run, [source.name for source in run_sources(run)], asked)


def _label_file(arguments: argparse.Namespace) -> Outputs:
    from nmoe_core.config.rubric import Rubric
    from nmoe_core.labels.label import label_shard
    from nmoe_core.labels.noise import label_again
    from nmoe_core.labels.oracles import make_oracle

    out = required(arguments, "out")
    table = _oracle_table(arguments)
    rubric = Rubric.load(find_rubric(table.rubric, Path.cwd()))
    documents = _documents(arguments)
    options = {"replace": table.replace, "retry_failed": table.retry_failed}
    oracle = make_oracle(table, rubric, Path)
    progress = None if arguments.quiet else _Progress().show
    made = label_shard(documents, out, oracle, progress=progress, **options)
    facts = dict(made.facts)
    if table.relabel:
        turned = make_oracle(table, rubric.turned(), Path)
        again = label_again(documents, table.relabel, out, turned, **options)
        facts["relabelled"] = again.facts["total"]
    facts["scorer"] = oracle.scorer.name
    return {str(out): Result(made.digest, facts)}


def _documents(arguments: argparse.Namespace) -> Documents:
    from nmoe_core.labels.document_texts import jsonl_documents, shard_documents
    from nmoe_core.labels.jsonl_texts import JsonlTexts
    from nmoe_core.text.tokenizer import load_tokenizer

    tokenizer, most = load_tokenizer(arguments.tokenizer), arguments.max_doc_tokens
    if arguments.input_jsonl is not None:
        fields = arguments.text_field, arguments.id_field
        return jsonl_documents(JsonlTexts(arguments.input_jsonl, *fields), tokenizer, most)
    if arguments.input_docids is None:
        raise ConfigError("nothing to label", expected="--input-docids, --input-jsonl or --config")
    data_root = required(arguments, "data_root")
    return shard_documents(arguments.input_docids, data_root, tokenizer, most)


def _oracle_table(arguments: argparse.Namespace) -> OracleTable:
    keys = ("max_doc_tokens", "replace", "retry_failed", "relabel", "salvage")
    table: dict[str, Any] = {key: getattr(arguments, key) for key in keys}
    table |= {"kind": arguments.oracle, "rubric": str(arguments.rubric)}
    if arguments.oracle == "engine":
        keys = ("max_ctx", "max_new", "max_batch", "experts", "reasoning")
        checkpoint = str(required(arguments, "checkpoint"))
        device = arguments.device or default_device()
        dtype = arguments.dtype or default_dtype(device)
        table["engine"] = {key: getattr(arguments, key) for key in keys} | {
            "checkpoint": checkpoint,
            "device": device,
            "dtype": dtype,
        }
    elif arguments.oracle == "http":
        keys = ("accept_model", "api", "api_key_env", "concurrency", "max_new")
        table["http"] = {key: getattr(arguments, key) for key in keys} | {
            "base_url": required(arguments, "base_url"),
            "model": required(arguments, "model"),
            "reasoning_effort": arguments.reasoning,
        }
    return validate(OracleTable, table, "command line")


class _Progress:
    """Documents done and documents a second, on standard error."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def show(self, num_done: int, num_all: int) -> None:
        if num_done % SHOW_EVERY == 0 or num_done == num_all:
            rate = num_done / max(time.monotonic() - self._started, 1e-9)
            print(f"{num_done:,}/{num_all:,} labelled, {rate:,.1f} a second", file=sys.stderr)


def merge_labels(arguments: argparse.Namespace) -> Outputs:
    """One label file a split."""
    from nmoe_core.tasks.hydra import labelled_splits, merge_directory

    if arguments.config is not None:
        labels = Run(arguments.config).paths.labels
    else:
        labels = required(arguments, "labels")
    return {split: merge_directory(labels, split) for split in labelled_splits(labels)}


def show_status(arguments: argparse.Namespace) -> int:
    """Where each label shard stands."""
    from nmoe_core.labels.status import label_status

    if arguments.config is not None:
        paths = Run(arguments.config).paths
        labels, slices_dir = paths.labels, paths.slices
    else:
        labels, slices_dir = required(arguments, "labels"), required(arguments, "slices")
    rows = [dataclasses.asdict(row) for row in label_status(labels, slices_dir)]
    if arguments.json:
        print_json(rows)
        return 0
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("DONE", "RUNNING", "PENDING"))
    print(f"{len(rows)} shards: {counts}")
    return 0
