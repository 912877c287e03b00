"""docs/from_the_documents.md is true: its names import, its commands parse, its flags are there."""

import argparse
import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nmoe.data
from nmoe.data import ShardedWriter, get_shard_id
from nmoe_core.cli import build_parser, main
from nmoe_core.cli.help.parser import commands
from nmoe_core.shards.manifest import ShardFormat
from tests.documents import PAGE, RUN, SNIPPETS, code_in, rows_of
from tests.project import REPOSITORY, output_of


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a command such as `nmoe hydra grade`."""
    parser = build_parser()
    for word in command.split()[1:]:
        (parts,) = (
            action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
        )
        parser = parts.choices[word]
    return parser


def named(dotted: str) -> Any:
    """What a dotted name leads to: a module, or a name of one."""
    parts = dotted.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = vars(found)[part] if isinstance(found, type) else getattr(found, part)
        return found
    raise AssertionError(f"no module of {dotted}")


@pytest.mark.parametrize(("document", "here"), [row[:2] for row in rows_of("Commands")])
def test_every_command_of_the_page_is_a_verb_and_a_module_of_nmoe_data(
    document: str, here: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = parser_of(code_in(here)).format_usage()
    words = code_in(document).split()
    if words[:2] == ["python", "-m"]:
        monkeypatch.setattr(sys, "argv", [words[2], *words[3:], "--help"])
        monkeypatch.delitem(sys.modules, words[2], raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(words[2], run_name="__main__")
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize(("command", "flags"), [row for row in rows_of("Flags") if len(row) == 2])
def test_every_flag_of_the_page_is_one_of_its_command(command: str, flags: str) -> None:
    known = parser_of(code_in(command))._option_string_actions
    assert [flag for flag in code_in(flags).split() if flag not in known] == []


@pytest.mark.parametrize("here", [row[1] for row in rows_of("Flags") if len(row) == 3])
def test_a_flag_that_works_otherwise_has_the_flag_that_the_page_names(here: str) -> None:
    command, _, flag = code_in(here).partition(" --")
    assert f"--{flag}" in parser_of(command)._option_string_actions


def test_the_page_has_every_flag_that_a_snippet_of_the_documents_gives_a_command() -> None:
    told = set(re.findall(r"(?<!\S)`?(--?[a-z][\w-]*)", PAGE))
    of_the_shell = {"-exec", "-name", "-p"}
    shown = {
        flag
        for language, text in SNIPPETS.values()
        if language == "bash"
        for flag in re.findall(r"(?<!\S)(--?[a-z][\w-]*)", text)
    }
    assert shown - of_the_shell - told == set()


def test_the_page_has_every_flag_that_only_sets_a_key_of_the_run() -> None:
    flags: set[str] = set()
    for _, parser in commands(build_parser()):
        keys = parser.get_default("keys") or {}
        of_keys = [action for action in parser._actions if action.dest in keys]
        flags.update(name for action in of_keys for name in action.option_strings)
    assert len(flags) > 5
    told = set(re.findall(r"--[a-z][\w-]*", PAGE))
    assert flags - told == set(), "set with --set"


def test_every_script_of_the_page_is_there_or_is_not() -> None:
    for document, here, _ in rows_of("Scripts"):
        name = code_in(document)
        path = name if here == "same" else here.strip("`")
        assert (REPOSITORY / path).is_file() == (here != "none")
        assert not list(REPOSITORY.glob(f"*/{name}")) or here != "none"


def test_every_variable_of_the_scripts_is_read_by_them() -> None:
    text = (REPOSITORY / "scripts" / "hydra_env.sh").read_text()
    (sentence,) = re.findall(r"Their variables are (.+?);", PAGE, re.DOTALL)
    names = re.findall(r"`(\w+)`", sentence)
    assert len(names) == 9
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_every_module_of_the_page_imports() -> None:
    for document, here in rows_of("Modules"):
        if here != "none":
            assert importlib.import_module(code_in(document))
            assert importlib.import_module(code_in(here))
    files = (REPOSITORY / "nmoe" / "data").glob("[a-z]*.py")
    modules = {code_in(row[0]) for row in rows_of("Modules")} - {"triton_kernels"}
    assert modules == {f"nmoe.data.{path.stem}" for path in files}


@pytest.mark.parametrize(("document", "here"), [row[:2] for row in rows_of("Names")])
def test_every_name_of_the_page_leads_to_what_it_says(document: str, here: str) -> None:
    name = code_in(document)
    if name.startswith("nmoe.data."):
        assert named(name) is named(code_in(here))
        return
    assert name not in nmoe.data.__all__
    if here != "none":
        assert named(code_in(here)) is not None


def test_the_page_has_every_name_of_the_package() -> None:
    rows = {code_in(row[0]) for row in rows_of("Names")}
    assert {f"nmoe.data.{name}" for name in nmoe.data.__all__} <= rows
    with pytest.raises(AttributeError, match="has no attribute 'MixtureSampler'"):
        _ = nmoe.data.MixtureSampler


def test_a_package_of_the_users_own_keeps_its_modules(tmp_path: Path) -> None:
    own = tmp_path / "nmoe"
    own.mkdir()
    (own / "__init__.py").write_text("MINE = True\n")
    (own / "trainer.py").write_text("def train() -> None: ...\n")
    code = "import sys; sys.path{}; import nmoe; print(hasattr(nmoe, 'MINE'), nmoe.__path__[0])\n"
    code += "import nmoe.trainer; print(nmoe.trainer.train.__name__)"
    ahead = output_of(sys.executable, "-c", code.format(f".insert(0, '{tmp_path}')"))
    assert ahead == f"True {own}\ntrain\n"
    behind = output_of(sys.executable, "-c", code.format(f".append('{tmp_path}')"))
    assert behind == f"False {REPOSITORY / 'nmoe'}\ntrain\n"


def test_every_snippet_is_in_the_page_and_what_is_said_to_run_is_there() -> None:
    told = {title: does_run for title, does_run, _ in rows_of("Snippets")}
    assert set(SNIPPETS) <= set(told)
    assert set(RUN) <= set(SNIPPETS)


@pytest.mark.parametrize("title", ["smoke test and research run", "oracle labels on eight GPUs"])
def test_a_command_that_cannot_run_here_is_parsed_as_it_is_printed(title: str) -> None:
    text = SNIPPETS[title][1].replace("\\\n", " ")
    for command in filter(None, re.split(r"python -m nmoe\.data\.", text)):
        words = shlex.split(re.sub(r"\$\(.+?\)", "0", command))
        verb = [] if words[0] == "cli" else [words[0]]
        build_parser().parse_args([*verb, *words[1:]])


def test_every_key_of_the_page_is_in_a_snippet_that_is_read() -> None:
    texts = [text for language, text in SNIPPETS.values() if language in ("toml", "yaml", "json")]
    keys = re.findall(r"`(\w+)`", " ".join(row[0].partition(":")[2] for row in rows_of("Keys")))
    assert len(keys) == 31
    absent = [key for key in keys if not any(re.search(rf'\b{key}"? *[=:]', t) for t in texts)]
    assert absent == []


def test_documents_that_are_dealt_to_shards_make_a_split_that_verifies(tmp_path: Path) -> None:
    fmt = ShardFormat("own", "v1", "o200k_harmony", 201088, 199999, "0" * 64)
    writer = ShardedWriter(tmp_path / "train", fmt, num_shards=4)
    for i in range(40):
        writer.add_document(np.arange(i + 1, dtype=np.uint32), str(i), "0" * 64)
    manifest = writer.finalize()
    assert (manifest.total_documents, manifest.total_tokens) == (40, sum(range(2, 42)))
    path = (
        tmp_path / "train" / f"shard_{get_shard_id('7', 4):04d}" / "own-v1-shard-000000.ids.jsonl"
    )
    assert '"7"' in path.read_text()
    assert main(["verify", str(tmp_path / "train"), "--deep"]) == 0
