"""`nmoe versions`: the kept versions of a split."""

import argparse
from pathlib import Path
from typing import Any

from nmoe_core.cli.output import add_verb, print_rows
from nmoe_core.prep.versions import (
    compare_versions,
    find_version,
    list_versions,
    restore_version,
    share_of_mixture,
)


def register(verbs: Any) -> None:
    versions = verbs.add_parser("versions", help="earlier versions of a split")
    parts = versions.add_subparsers(dest="part", required=True, metavar="COMMAND")
    listed = add_verb(parts, "list", find_versions, "current and kept versions", print_rows)
    compared = add_verb(parts, "compare", compare, "documents and tokens of two versions", _compare)
    restored = add_verb(parts, "restore", restore, "make a kept version current", print_rows)
    for verb in (listed, compared, restored):
        verb.add_argument("split", type=Path, help="directory of manifest.json")
    compared.add_argument("old", metavar="VERSION", help="id, or the start of one")
    compared.add_argument("new", metavar="WITH", nargs="?", help="by default the current one")
    restored.add_argument("version", metavar="VERSION", help="id, or the start of one")


def find_versions(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [version.facts for version in list_versions(arguments.split.resolve())]


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Counts of documents; tokens, and the share of all sources' tokens, of both versions."""
    split = arguments.split.resolve()
    old = find_version(split, arguments.old)
    new = find_version(split, arguments.new) if arguments.new else list_versions(split)[0]
    both = [
        one.facts | {"mixture_share": share_of_mixture(split, one.manifest.total_tokens)}
        for one in (old, new)
    ]
    return {"versions": both, "documents": compare_versions(old.manifest, new.manifest)}


def restore(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Restore a version; then the versions as `list` gives them."""
    restore_version(arguments.split, arguments.version)
    return find_versions(arguments)


def _compare(facts: dict[str, Any]) -> None:
    print_rows(facts["versions"])
    print("documents: " + ", ".join(f"{n:,} {name}" for name, n in facts["documents"].items()))
