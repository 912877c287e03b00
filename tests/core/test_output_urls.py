"""A URL where a path of this machine is needed is refused by name, before anything is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from loader import build_loader
from loader.__main__ import main as loader_main
from loader.errors import ConfigError
from loader.plan.records import PLAN_FORMAT
from nmoe_core import JSONLSource, PrepConfig, PrepPipeline
from nmoe_core.cli import build_parser, main
from nmoe_core.config.run import Run
from nmoe_core.text.vocabulary import cache_dir
from tests.refusals import refused

URL = "s3://bucket/tree"
# Options that take text. Any other option without choices and without a number is a path.
TEXTS = {
    "dataset",
    "paths",
    "split",
    "subset",
    "data_files",
    "revision",
    "text_field",
    "id_field",
    "name",
    "version",
    "max_tokens",
    "tokenizer",
    "flow",
    "splits",
    "config",
    "settings",
    "device",
    "devices",
    "sources",
    "source",
    "slices",
    "shard",
    "order",
    "base_url",
    "model",
    "accept_model",
    "api_key_env",
    "document",
}


def _commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    yield words, parser
    for name, child in groups[0].choices.items() if groups else ():
        yield from _commands(child, (*words, name))


def _value(action: argparse.Action) -> str:
    return str(next(iter(action.choices))) if action.choices else "1"


def _is_path(action: argparse.Action) -> bool:
    if action.type in (None, str):
        return action.nargs != 0 and not action.choices and action.dest not in TEXTS
    return action.type is Path


def _path_arguments() -> Iterator[list[str]]:
    for words, parser in _commands(build_parser()):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) or not _is_path(action):
                continue
            command = list(words)
            for other in parser._actions:
                is_group = isinstance(other, argparse._SubParsersAction)
                if other.required and other is not action and not is_group:
                    command += [*other.option_strings[:1], _value(other)]
            yield [*command, *action.option_strings[:1], URL]


@pytest.mark.parametrize("command", list(_path_arguments()), ids=" ".join)
def test_a_url_is_refused_by_every_command_line_argument_that_is_a_path(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(command)
    except SystemExit as stopped:
        status = stopped.code
    assert status in (1, 2)
    assert "E-PATH-URL" in (errors := capsys.readouterr().err)
    assert URL in errors
    assert not list(tmp_path.iterdir())


def test_prep_to_a_url_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "some words to read, more than ten of them"}\n')
    for output in (URL, Path(URL)):
        config = PrepConfig(output_dir=output, dataset_name="web", num_shards=1, min_doc_tokens=1)
        with refused("E-PATH-URL", "object stores"):
            PrepPipeline(JSONLSource("in.jsonl"), config).run()
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("key", ["root", "data_root", "mixture_toml", "backbone.checkpoint"])
@pytest.mark.parametrize("url", [URL, "gs://b", "file:///tmp/x", "simplecache::s3://b/c"])
def test_a_url_in_a_configuration_is_refused_with_its_key(
    tmp_path: Path, key: str, url: str
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('root = "out"\n' * (key != "root") + f"{key} = {json.dumps(url)}\n")
    with refused("E-PATH-URL") as caught:
        Run(config)
    assert key in str(caught.value)
    assert url in str(caught.value)


def test_a_url_is_refused_as_the_directory_of_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert loader_main(["peek", "plan.json", "--cache-dir", URL]) == 1
    assert "E-PATH-URL" in capsys.readouterr().err
    plan = {"format": PLAN_FORMAT, "root": "."}
    fsspec.filesystem("memory").pipe_file("/plan.json", json.dumps(plan).encode())
    with pytest.raises(ConfigError, match="object stores"):
        build_loader("memory://plan.json", cache_dir=URL)
    monkeypatch.setenv("NMOE_CACHE_DIR", URL)
    with pytest.raises(ConfigError, match="object stores"):
        cache_dir()
    assert not list(tmp_path.iterdir())
