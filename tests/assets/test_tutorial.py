"""The tutorials are true: in an empty directory each of their blocks runs, in order."""

import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import dagster as dg
import pytest

from loader.plan.file import load_plan
from nmoe_core.cli import build_parser
from tests.project import REPOSITORY, output_of


def _blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block."""
    text = (REPOSITORY / "docs" / page).read_text("utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


BLOCKS = _blocks("tutorial.md")
MIX_BLOCKS = _blocks("tutorial_mix.md")
WRITTEN = "write_docstrings notes.jsonl\n"
# A quarter of them is enough for every task, and for the two batches that are read.
FEWER = f"{WRITTEN}head -n 600 notes.jsonl > few\nmv few notes.jsonl\n"


@pytest.mark.parametrize("blocks", [BLOCKS, MIX_BLOCKS], ids=["tutorial", "tutorial_mix"])
def test_every_command_of_a_tutorial_has_the_verb_and_the_flags_that_it_shows(
    blocks: list[tuple[str, str]],
) -> None:
    lines = [line for language, block in blocks if language == "sh" for line in block.splitlines()]
    commands = [words for words in map(shlex.split, lines) if words[0] == "nmoe"]
    assert len(commands) > 7
    for command in commands:
        build_parser().parse_args(command[1:])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_block_of_the_tutorial_runs_and_new_documents_alone_are_tokenized(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    printed, config = "", tmp_path / "nmoe.toml"
    assert WRITTEN in BLOCKS[0][1]
    for language, block in BLOCKS:
        if language == "toml":
            (line,) = re.findall("^where = .*$", config.read_text(), re.MULTILINE)
            config.write_text(config.read_text().replace(line, block.strip()))
        elif language in ("sh", "python"):
            printed += _done(language, block.replace(WRITTEN, FEWER), tmp_path)
    assert "copies of other documents" in printed
    assert (tmp_path / "report" / "index.html").is_file()
    with dg.DagsterInstance.from_config(str(tmp_path / ".dagster")) as instance:
        assert newest(instance, ["notes", "shards"], "documents_tokenized") == [20, 20]


def _done(language: str, block: str, directory: Path) -> str:
    """What a block prints in a directory."""
    bin_directory = Path(sys.executable).parent
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NMOE", "DAGSTER"))}
    environment = kept | {"PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
    program = ("bash", "-e") if language == "sh" else (sys.executable,)
    return output_of(*program, "-c", block, cwd=directory, env=environment)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_block_of_the_tutorial_of_weights_runs_and_buckets_get_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flags = "--runs 12 --tokens 60000 --seeds 3 --documents 20"
    assert sum(flags in block for _, block in MIX_BLOCKS) == 1
    config = tmp_path / "nmoe.toml"
    printed = ""
    for language, block in MIX_BLOCKS:
        if language == "toml":
            config.write_text(f"{config.read_text()}\n{block}")
        elif language == "sh":
            fewer = block.replace(flags, "--runs 4 --tokens 56000 --seeds 3 --documents 5")
            printed += _done(language, fewer, tmp_path)
    weights = tomllib.loads((tmp_path / "weights.toml").read_text())["weights"]
    assert len(weights) > 3
    plan = load_plan(tmp_path / "build/demo/mixture/loader_plan.json")
    read = plan.taken()
    assert read.keys() == weights.keys()
    for name, weight in weights.items():
        assert abs(read[name] - weight / sum(weights.values()) * plan.num_sequences) <= 1
    assert "that differ; the first is step 0" in printed


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
