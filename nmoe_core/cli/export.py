"""`nmoe export`: shards in the formats of other trainers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

FORMATS = {
    "megatron": "Megatron-LM's indexed dataset: .bin and .idx",
    "olmo": "OLMo-core's token arrays: .npy and .csv.gz",
    "mds": "MosaicML Streaming's shards: .mds and index.json",
}


def register(verbs: Any) -> None:
    """Add the verb."""
    verb = verbs.add_parser("export", help="shards in the format of another trainer")
    forms = verb.add_subparsers(dest="form", required=True, metavar="FORMAT")
    for name, text in FORMATS.items():
        form = forms.add_parser(name, help=text)
        form.add_argument("manifest", type=Path, help="of a split, or of one shard")
        form.add_argument("--output", type=Path, required=True, metavar="DIR")
        if name == "mds":
            form.add_argument(
                "--seq-len",
                type=int,
                metavar="N",
                help="samples are windows of N tokens; without it a sample is a document",
            )
        form.set_defaults(run=run_export, seq_len=None)


def run_export(arguments: argparse.Namespace) -> int:
    """Write the export unless it is current."""
    from nmoe_core.export.run import export

    made = export(arguments.manifest, arguments.output, arguments.form, arguments.seq_len).facts
    state = "written" if made["changed"] else "already there"
    print(
        f"{arguments.output}: {len(made['files'])} files, {made['documents']:,} documents, "
        f"{made['tokens']:,} tokens, {state}"
    )
    return 0
