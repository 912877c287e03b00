"""The writers whose texts are changed on the way: prep with each kind of transform, and an
attribute by a function of one's own."""

import base64
import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.prep.journal import Journal
from tests.crash.project import run_task
from tests.crash.writers import Views, Writer, attribute_rows, shards, tree_of
from tests.project import json_lines, toml

_FUNCTIONS = """
import os, signal, time
from contextlib import suppress
from pathlib import Path

def die():
    for victim in ("getpid", "getppid"):
        calls = sorted(Path(__file__).with_name(victim).glob("*"))
        if not calls:
            continue
        with suppress(FileNotFoundError):  # by the function of another worker
            calls[0].rmdir()
            if len(calls) == 1:
                Path(__file__).with_name(f"was-{os.getpid()}").mkdir()
                os.kill(getattr(os, victim)(), signal.SIGKILL)
                time.sleep(600)

def shorten(batch):
    die()
    return [[(0, 5, "", "start")] if len(text) % 3 else None for text in batch.texts]

def measure(batch):
    die()
    return {"num_lines": [1 + text.count(chr(10)) for text in batch.texts]}
"""
_OWN = {"path": "own"}
_LINES = {"kind": "lines"}
_SITE = {"boilerplate_documents": 20, "site_column": "url"}
_SEVERAL: list[dict[str, Any]] = [
    {"kind": "fix_text"},
    {"kind": "licence_header"},
    {"kind": "base64_blobs", "min_chars": 100},
    {"kind": "redact"},
    {"kind": "function", "function": "mine:shorten", **_OWN},
    _LINES | _SITE | {"presets": ["refinedweb"]},
    {"kind": "paragraphs", "min_chars": 100},
    {"kind": "passages", "min_words": 12},
]
KINDS: dict[str, list[dict[str, Any]]] = {
    **{str(table["kind"]): [table] for table in _SEVERAL if table["kind"] != "lines"},
    **{f"lines {one}": [_LINES | {"presets": [one]}] for one in ("c4", "fineweb", "refinedweb")},
    "lines boilerplate": [_LINES | _SITE],
}
"""The transforms of a run, by their kind, and by the rules of `lines`."""
_NUM_OLD = 120
_NUM_NEW = 160
_NOTICE = "# Copyright 2019 The Authors\n# Licensed under the Apache License, Version 2.0\n\n"


def _text(number: int) -> str:
    """A text that each kind of transform changes, or that shares parts which one removes."""
    blob = base64.b64encode(random.Random(number).randbytes(120)).decode()
    shared = " ".join(f"word{number % 15} of a paragraph {i}" for i in range(8))
    lines = [
        f"{_NOTICE if number % 4 == 0 else ''}import os",
        "Home  News  Contact",
        f"Sign in to see {number}",
        f"{number} likes",
        f"Number {number} of the list says that the cafÃ© of AT&amp;T is open again [1].",
        f"Write to reader{number}@mail.org, or call +49 30 {1234567 + number} in the evening.",
        blob if number % 3 == 0 else "No image is here.",
        f"\n{shared}\n",
        f"These words of page {number} are the last ones for those who read it.",
    ]
    return "\n".join(lines)


def _write_rows(project: Path, first: int, last: int, salt: str = "") -> None:
    """The input: documents `first` to `last`, of which some have other texts with another salt."""
    rows = []
    for i in range(first, last):
        text = _text(i) + (salt if i % 10 == 0 else "")
        rows.append({"id": f"t{i}", "text": text, "url": f"https://{'ab'[i % 2]}.org/{i}"})
    (project / "in" / "web.jsonl").write_text(json_lines(rows), "utf-8")


def _configure(project: Path, tables: Mapping[str, Any]) -> None:
    path = project / "run.toml"
    keeps_urls = '[attributes]\ncolumns = ["url"]\n'
    text = path.read_text("utf-8").replace("[attributes]\n", keeps_urls, 1)
    path.write_text(text + toml(tables).replace("[attributes]\n", ""), "utf-8")
    (project / "own").mkdir()
    (project / "own" / "mine.py").write_text(_FUNCTIONS, "utf-8")


def kill_in_call(project: Path, victim: str, number: int) -> None:
    """Let a call of a function kill its own process, `getpid`, or the worker's, `getppid`."""
    for i in range(number):
        (project / "own" / victim / str(i)).mkdir(parents=True)


def killed_in(project: Path) -> int:
    """The process of the function that did it."""
    (mark,) = (project / "own").glob("was-*")
    mark.rmdir()
    return int(mark.name.removeprefix("was-"))


def prep(project: Path, *flags: str) -> int:
    """In small blocks, with a commit of the journal after each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 50_000)
        patch.setattr("nmoe_core.prep.incremental.shared_keys._PART_BYTES", 50_000)
        patch.setattr("nmoe_core.prep.incremental.shared_keys._HELD_BYTES", 20_000)
        patch.setattr(Journal, "commit_if_due", Journal.commit)
        return run_task(project, " ".join(["prep-mixture", *flags]))


def _prepared(tables: list[dict[str, Any]], project: Path) -> None:
    """Shards of some documents; then some go, some change, and others come."""
    _configure(project, {"transforms": tables})
    _write_rows(project, 0, _NUM_OLD)
    assert prep(project, "--force") == 0
    for table in tables:
        assert changed_spans(project, table["kind"]) > 0, table
    _write_rows(project, 15, _NUM_NEW, " And more.")


def changed_spans(project: Path, kind: str) -> int:
    """How many spans the transforms of a kind changed."""
    count = 0
    for path in tree_of(project).split("web", "train").glob("shard_*/manifest.json"):
        changes = json.loads(path.read_text())["source_info"]["changes"]
        count += sum(one["spans"] for rule, one in changes.items() if rule.startswith(kind))
    return count


def _measured(project: Path) -> None:
    table = {"function": "mine:measure", "columns": {"num_lines": "int"}, **_OWN}
    _configure(project, {"attributes": {"score": table}})
    _write_rows(project, 0, _NUM_OLD)
    assert prep(project, "--force") == 0
    assert measure(project) == 0
    _write_rows(project, 15, _NUM_NEW, " And more.")
    assert prep(project) == 0


def measure(project: Path, *flags: str) -> int:
    """Make the attribute."""
    return run_task(project, " ".join(["attributes --only score", *flags]))


def _scores(project: Path) -> Views:
    return attribute_rows(project, "score")


def _transforming(tables: list[dict[str, Any]], **more: Any) -> Writer:
    return Writer(prep, shards, partial(_prepared, tables), **more)


OF_TRANSFORM = "prep-mixture of function"
OF_ATTRIBUTE = "attributes of function"
KIND_WRITERS = {
    **{f"prep-mixture of {kind}": _transforming(tables) for kind, tables in KINDS.items()},
    OF_ATTRIBUTE: Writer(measure, _scores, _measured),
}
SEVERAL_WRITERS = {"prep-mixture of transforms": _transforming(_SEVERAL)}
