"""The tutorial is true: in an empty directory each of its blocks runs, in order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from nmoe_core.cli import build_parser
from tests.project import REPOSITORY

PAGE = (REPOSITORY / "docs" / "tutorial.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
WRITTEN = "write_docstrings notes.jsonl\n"
# A quarter of them is enough for every task, and for the two batches that are read.
FEWER = f"{WRITTEN}head -n 600 notes.jsonl > few\nmv few notes.jsonl\n"


def test_every_command_of_the_tutorial_has_the_verb_and_the_flags_that_it_shows() -> None:
    lines = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]
    commands = [words for words in map(shlex.split, lines) if words[0] == "nmoe"]
    assert len(commands) > 8
    for command in commands:
        build_parser().parse_args(command[1:])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_block_of_the_tutorial_runs_and_new_documents_alone_are_tokenized(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    bin_directory = Path(sys.executable).parent
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NMOE", "DAGSTER"))}
    environment = kept | {"PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
    printed, config = "", tmp_path / "nmoe.toml"
    assert WRITTEN in BLOCKS[0][1]
    for language, block in BLOCKS:
        if language == "toml":
            (line,) = re.findall("^where = .*$", config.read_text(), re.MULTILINE)
            config.write_text(config.read_text().replace(line, block.strip()))
        elif language in ("sh", "python"):
            program = ("bash", "-e") if language == "sh" else (sys.executable,)
            done = subprocess.run(
                (*program, "-c", block.replace(WRITTEN, FEWER)),
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (block, done.stdout[-2000:], done.stderr[-2000:])
            printed += done.stdout
    assert "copies of other documents" in printed
    assert (tmp_path / "report" / "index.html").is_file()
    with dg.DagsterInstance.from_config(str(tmp_path / ".dagster")) as instance:
        assert newest(instance, ["notes", "shards"], "documents_tokenized") == [20, 20]


def newest(instance: dg.DagsterInstance, key: list[str], fact: str) -> list[int]:
    """A fact of the newest materialisation of each partition."""
    records = instance.fetch_materializations(dg.AssetKey(key), limit=1000).records
    found: dict[str | None, int] = {}
    for record in records:
        made = record.asset_materialization
        assert made is not None
        value = made.metadata[fact].value
        assert isinstance(value, int)
        found.setdefault(made.partition, value)
    return list(found.values())
