"""A flag, `--set` and a line of the TOML are three spellings of one key; none is ignored."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import pytest

from loader.plan.settings import KEYS
from nmoe_core.base.errors import ConfigError
from nmoe_core.cli import build_parser
from nmoe_core.cli.flags import run_of
from nmoe_core.config.run import Run
from nmoe_core.config.schema import Key, run_keys, setting
from tests.refusals import refused_line

RUBRIC = Path(__file__).parents[3] / "configs" / "rubrics" / "quality_v1.toml"
# A run in which each key can change alone.
WHOLE = {
    "oracle.engine.checkpoint": "model",
    "oracle.http.base_url": "http://b/v1",
    "oracle.http.model": "m",
}
VALUES = {
    "mixture_toml": __file__,
    "flow_profiles_toml": __file__,
    "oracle.rubric": str(RUBRIC),
    "oracle.engine.max_ctx": "64",
    "oracle.http.base_url": "http://a/v1",
    "oracle.http.max_reply_bytes": "4096",
    "oracle.http.api_key_env": "KEY",
    "oracle.http.reasoning_effort": "none",
    "calibration.target_drop": "0.125",
    "curation.include": "keep,band",
    "curation.stability": "insert_only",
    "curation.resume_from_token": "5",
    "checks.levels": "warn",
    "automation.verify_cron": "0 4 * * *",
}


def other_value(key: Key) -> str:
    """A text that stands for another value than the default."""
    if key.name in VALUES:
        return VALUES[key.name]
    if key.choices:
        return str(next(choice for choice in reversed(key.choices) if choice != key.default))
    if isinstance(key.default, bool):
        return str(not key.default).lower()
    return "0.125" if isinstance(key.default, float) else "16"


def value_at(run: Run, name: str) -> Any:
    config: Any = run.loader if name in KEYS else run.config
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    oracle = '[oracle.engine]\ncheckpoint = "model"\n'
    oracle += '[oracle.http]\nbase_url = "http://b/v1"\nmodel = "m"\n'
    path.write_text(f'root = "out"\n{oracle}[heads]\nmax_ctx = 24\n')
    return path


TYPED = [key.name for key in run_keys().values() if key.annotation != Any]


@pytest.mark.parametrize("name", TYPED)
def test_set_takes_every_key_of_the_schema_with_its_type(name: str) -> None:
    key = run_keys()[name]
    before = WHOLE | ({"curation.stability": "resume"} if "resume_from" in name else {})
    name += ".web" * (get_origin(key.annotation) is dict)
    found, value = setting(f"{name}={other_value(key)}")
    run = Run(None, before | {found: value})
    is_path = name in KEYS and Path in KEYS[name].types
    taken = Path(value).resolve() if is_path else value
    assert value_at(run, name) == taken != key.default


def verbs(
    parser: argparse.ArgumentParser, name: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every verb that works on a run, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part, inner in action.choices.items():
                yield from verbs(inner, (*name, part))
        elif action.dest == "settings":
            yield name, parser


REQUIRED = {
    "import-pt": ("head.pt",),
    "prep": ("--source", "jsonl", "--output", "out", "--name", "web"),
}


def run_flags() -> list[Any]:
    """(verb, flag and a value unlike the default) for every flag of a key or a root."""
    found = []
    for name, parser in verbs(build_parser()):
        keys, roots = parser.get_default("keys"), parser.get_default("roots")
        for action in parser._actions:
            if action.dest in keys or action.dest in roots:
                key = run_keys().get(keys.get(action.dest, ""))
                value = other_value(key) if key else "elsewhere"
                given = [action.option_strings[0], *([value] if action.nargs != 0 else [])]
                found.append(pytest.param(name, given, id=" ".join([*name, given[0]])))
    return found


@pytest.mark.parametrize(("verb", "given"), run_flags())
def test_each_flag_overrides_the_run(config: Path, verb: tuple[str, ...], given: list[str]) -> None:
    parse = build_parser().parse_args
    words = [*verb, "--config", str(config), *REQUIRED.get(verb[-1], ())]
    before, after = run_of(parse(words)), run_of(parse([*words, *given]))
    parts = [(run.config, run.loader, run.tree) for run in (before, after)]
    assert parts[0] != parts[1]


def test_a_default_given_by_hand_replaces_the_runs_value(config: Path) -> None:
    config.write_text(config.read_text() + "[calibration]\ntarget_keep = 0.3\n")
    for flag in ("--target-keep", "--target-k"):
        argv = ["hydra", "calibrate", "--config", str(config), flag, "0.5"]
        assert run_of(build_parser().parse_args(argv)).config.calibration.target_keep == 0.5


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ("prep.workers=0", "E-CONFIG", "prep.workers"),
        ("prep.workers=many", "E-CONFIG", "prep.workers"),
        ("prep.worker=4", "E-CONFIG-KEY", "did you mean 'workers'"),
        ("root=s3://bucket/tree", "E-PATH-URL", "root"),
        ("prep.workers", "E-CONFIG", "not key=value"),
    ],
)
def test_a_setting_that_cannot_be_is_one_error(
    config: Path, capsys: pytest.CaptureFixture[str], given: str, code: str, says: str
) -> None:
    command = ("hydra", "merge-labels", "--config", str(config), "--set", given)
    assert says in refused_line(capsys, *command, code=f"{code}]")
    assert not (config.parent / "out").exists()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (["hydra", "grade", "--text-field", "body"], "--text-field is not used with"),
        (["hydra", "grade", "--input-docids", "s", "--source", "web"], "--source is not used with"),
        (["hydra", "oracle-label", "--out", "L"], "--out is not used with the run's own documents"),
    ],
)
def test_a_flag_of_the_other_kind_of_input_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], call: list[str], says: str
) -> None:
    assert says in refused_line(capsys, *call, "--config", str(config))


def test_an_unknown_setting_without_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'workers'"):
        Run(None, dict([setting("prep.worker=4")]))


def test_set_takes_phases_as_the_toml_does() -> None:
    run = Run(None, dict([setting("phases=[{start_step = 5, dataset_weights = {web = 1}}]")]))
    assert [phase.start_step for phase in run.loader.phases] == [5]
