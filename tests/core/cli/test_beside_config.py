"""No flag beside `--config` is ignored: it changes the run, or is refused in one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli import build_parser, main
from nmoe_core.cli.beside_config import configured_run, require_no_ignored_flag
from nmoe_core.config.run import Run


def verbs(
    parser: argparse.ArgumentParser, name: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every verb that takes `--config` and does not require it, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part, inner in action.choices.items():
                yield from verbs(inner, (*name, part))
        elif action.dest == "config" and not action.required:
            yield name, parser


def flags() -> list[Any]:
    """(verb, flag, value) of every flag beside `--config`; values differ from the defaults."""
    found = []
    for name, parser in verbs(build_parser()):
        for action in parser._actions:
            if not action.option_strings or action.dest in ("help", "config", "json"):
                continue
            value = None
            if action.nargs != 0:
                value = action.choices[-1] if action.choices else "x"  # type: ignore[index]
                value = {int: "16", float: "0.25"}.get(action.type, value)  # type: ignore[arg-type]
            given = [action.option_strings[-1], *([value] if value else [])]
            found.append(pytest.param(name, action.dest, given, id=" ".join([*name, given[0]])))
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('root = "out"\n[backbone]\nkind = "tiny"\n[heads]\nmax_ctx = 24\n')
    return path


@pytest.mark.parametrize(("verb", "name", "given"), flags())
def test_each_flag_changes_the_run_or_is_refused(
    config: Path, verb: tuple[str, ...], name: str, given: list[str]
) -> None:
    argv = [*verb, "--config", str(config), *given]
    argv += ["head.pt"] if verb[-1] == "import-pt" else []
    arguments = build_parser().parse_args(argv)
    keys, used = arguments.beside_config
    if name in used:
        return
    if name not in keys:
        with pytest.raises(ConfigError, match=f"{given[0]} is not used with --config"):
            require_no_ignored_flag(arguments, argv)
        return
    require_no_ignored_flag(arguments, argv)
    assert configured_run(arguments).config != Run(config).config


def test_what_verbs_use_themselves_is_known() -> None:
    """Each of these is read by the verb also where there is a run."""
    found = {name: parser.get_default("beside_config")[1] for name, parser in verbs(build_parser())}
    assert {name: sorted(used) for name, used in found.items() if used} == {
        ("hydra", "oracle-label"): ["quiet", "slices"],
        ("hydra", "grade"): ["quiet", "source"],
        ("train", "import-pt"): ["head"],
    }


def test_a_default_given_by_hand_replaces_the_runs_value(config: Path) -> None:
    config.write_text(config.read_text() + "[calibration]\ntarget_keep = 0.3\n")
    for flag in ("--target-keep", "--target-k"):
        argv = ["hydra", "calibrate", "--config", str(config), flag, "0.5"]
        arguments = build_parser().parse_args(argv)
        require_no_ignored_flag(arguments, argv)
        assert configured_run(arguments).config.calibration.target_keep == 0.5


def test_a_path_beside_a_run_is_refused_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["hydra", "calibrate", "--config", str(config), "--target-keep", "0.1", "--out", "E"]
    assert main(call) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out is not used with --config" in line
    assert main([*call[:-2], "--target-keep", "7"]) == 1
    assert "target_keep" in capsys.readouterr().err
    assert not (config.parent / "out").exists()


@pytest.mark.parametrize(
    ("call", "stages"),
    [(["hydra", "grade"], ["grade"]), (["curate", "shards"], ["topics", "curate"])],
)
def test_the_command_works_where_compute_says(
    config: Path, monkeypatch: pytest.MonkeyPatch, call: list[str], stages: list[str]
) -> None:
    from types import SimpleNamespace

    from nmoe_core.tasks import checks, curate
    from nmoe_core.tasks import shards as module

    config.write_text(config.read_text() + "[prep]\nnum_shards = 2\n[compute]\nworkers = 3\n")
    asked: list[tuple[str, str, int]] = []

    def mapped(work: Any, keys: Any, *, backend: str, workers: int, ray: Any) -> Iterator[Any]:
        asked.append((work.args[1], backend, workers))
        output = module.Result("", {"changed": True})
        return (module.Attempt(key, output, None, 0.0, 0.0) for key in keys)

    monkeypatch.setattr(module, "map_shards", mapped)
    source = SimpleNamespace(name="web")
    monkeypatch.setattr("nmoe_core.prep.mixture.run_sources", lambda run: [source])
    monkeypatch.setattr("nmoe_core.cli.quality.grading.run_sources", lambda run: [source])
    monkeypatch.setattr(curate, "open_topics", lambda *a, **k: module.Result("", {}))
    monkeypatch.setattr(curate, "combine", lambda *a: module.Result("", {}))
    monkeypatch.setattr(checks, "check_curated", lambda *a: {})
    assert main([*call, "--config", str(config), "--json"]) == 0
    assert asked == [(stage, "pool", 3) for stage in stages]
