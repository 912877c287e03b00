"""A flag, `--set` and a line of the TOML are three spellings of one key; none is ignored."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import pytest

from loader.plan.settings import KEYS
from nmoe_core.base.errors import ConfigError
from nmoe_core.cli import build_parser, main
from nmoe_core.cli.flags import run_of
from nmoe_core.cli.help.parser import commands
from nmoe_core.config.run import Run
from nmoe_core.config.schema import OTHER, Key, run_keys, setting
from tests.project import CONFIGS
from tests.refusals import refused_line

RUBRIC = CONFIGS / "rubrics" / "quality_v1.toml"
# A run in which each key can change alone.
WHOLE = {
    "oracle.engine.checkpoint": "model",
    "oracle.http.base_url": "https://b/v1",
    "oracle.http.model": "m",
    "oracle.http.input_price": 1.0,
    "oracle.http.output_price": 1.0,
}
VALUES = {
    "mixture_toml": __file__,
    "flow_profiles_toml": __file__,
    "oracle.rubric": str(RUBRIC),
    "pack_sequences": "true",
    "oracle.engine.max_ctx": "64",
    "oracle.http.base_url": "http://127.0.0.1/v1",
    "oracle.http.max_reply_bytes": "4096",
    "oracle.http.api_key_env": "ORACLE_KEY",
    "oracle.http.proxy": "http://127.0.0.1:8080",
    "oracle.kind": "http",
    "oracle.http.reasoning_effort": "none",
    "calibration.target_drop": "0.125",
    "calibration.target_unit": "tokens",
    "calibration.target_by": "source",
    "contamination.max_share": "0.125",
    "attributes.use": "signals,pii",
    "curation.include": "keep,band",
    "curation.stability": "insert_only",
    "curation.resume_from_token": "5",
    "checks.levels": "warn",
    "checks.ranges": "0,1",
    "automation.verify_cron": "0 4 * * *",
    "publish.url": "s3://bucket/corpus",
    "duplicates.jaccard": "0.5",
    "duplicates.contained": "0.75",
    "contamination.evaluations": "quiz.jsonl",
    "contamination.min_words": "4",
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
    oracle += '[oracle.http]\nbase_url = "https://b/v1"\nmodel = "m"\n'
    oracle += "input_price = 1\noutput_price = 1\n"
    path.write_text(f'root = "out"\n{oracle}[heads]\nmax_ctx = 24\n')
    return path


# Both hold tables: of `oracle.panel`, the keys are those of `oracle.http`.
NOT_TYPED = ("oracle.panel", "transforms")
# Keys of a function of the user's own need its table; tests of functions set them.
OWN = f"attributes.{OTHER}."
TYPED = [k.name for k in run_keys().values() if k.annotation != Any and k.name not in NOT_TYPED]
TYPED = [name for name in TYPED if not name.startswith(OWN)]


@pytest.mark.parametrize("name", TYPED)
def test_set_takes_every_key_of_the_schema_with_its_type(name: str) -> None:
    key = run_keys()[name]
    before = WHOLE | ({"curation.stability": "resume"} if "resume_from" in name else {})
    before |= {"oracle.http.grades": "expected"} if name.endswith("min_grade_mass") else {}
    name += ".web" * (get_origin(key.annotation) is dict)
    found, value = setting(f"{name}={other_value(key)}")
    run = Run(None, before | {found: value})
    is_path = name in KEYS and Path in KEYS[name].types
    taken = Path(value).resolve() if is_path else value
    assert value_at(run, name) == taken != key.default


def needed(
    parser: argparse.ArgumentParser, given: argparse.Action | None = None, value: str = ""
) -> list[str]:
    """What a verb cannot do without, in its order, and one argument with this value."""
    groups = [group._group_actions for group in parser._mutually_exclusive_groups if group.required]
    chosen = {group[-1] for group in groups if given not in group}
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        if action is given:
            words += [*action.option_strings[:1], value]
        elif action.required or action in chosen:
            found = "a=1" if "=" in str(action.metavar) else "1"
            found = str(next(iter(action.choices))) if action.choices else found
            words += [*action.option_strings[:1], *([found] if action.nargs != 0 else [])]
    return words


def run_flags() -> Iterator[Any]:
    """(command, flag and a value unlike the default) for every flag of a key or a root."""
    for name, parser in commands(build_parser()):
        keys, roots = parser.get_default("keys") or {}, parser.get_default("roots") or {}
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        for action in shown:
            if action.dest in keys or action.dest in roots:
                key = run_keys().get(keys.get(action.dest, ""))
                value = other_value(key) if key else "elsewhere"
                given = [action.option_strings[0], *([value] if action.nargs != 0 else [])]
                words = [*name, *needed(parser)]
                yield pytest.param(words, given, id=" ".join([*name, given[0]]))


@pytest.mark.parametrize(("words", "given"), list(run_flags()))
def test_each_flag_overrides_the_run(config: Path, words: list[str], given: list[str]) -> None:
    parse = build_parser().parse_args
    words = [*words, "--config", str(config)]
    before, after = run_of(parse(words)), run_of(parse([*words, *given]))
    parts = [(run.config, run.loader, run.tree) for run in (before, after)]
    assert parts[0] != parts[1]


def test_a_default_given_by_hand_replaces_the_runs_value(config: Path) -> None:
    config.write_text(config.read_text() + "[calibration]\ntarget_keep = 0.3\n")
    for flag in ("--target-keep", "--target-k"):
        argv = ["hydra", "calibrate", "--config", str(config), flag, "0.5"]
        assert run_of(build_parser().parse_args(argv)).config.calibration.target_keep == 0.5


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("hydra merge-labels --set prep.workers=0", "[E-CONFIG].*prep.workers"),
        ("hydra merge-labels --set prep.workers=many", "[E-CONFIG].*prep.workers"),
        ("hydra merge-labels --set prep.worker=4", "[E-CONFIG-KEY].*did you mean 'workers'"),
        (f"hydra merge-labels --set weights={'9' * 5000}", "[E-"),
        (f"hydra merge-labels --set {'a.' * 5000}a=1", "[E-CONFIG-KEY].*more than 200 parts"),
        (f"hydra merge-labels --set prep.{'a.' * 150}a=1", "[E-CONFIG-KEY].*unknown key"),
        (f"hydra merge-labels --set attributes.use={'[' * 5000}", "[E-CONFIG].*attributes.use"),
        ("hydra merge-labels --set root=hdfs://host/tree", "[E-CONFIG-ROOT].*root"),
        ("hydra merge-labels --set prep.workers", "[E-CONFIG].*not key=value"),
        ("hydra grade --text-field body", "--text-field has no effect with"),
        ("hydra grade --input-docids s --source web", "--source has no effect with"),
        ("hydra oracle-label --out L", "--out has no effect with the run's own documents"),
        ("explain some-id --row 1", "--row without --step"),
        (
            "hydra oracle-label --set oracle.rubric=quality_v2",
            "[E-CONFIG-MISSING].*one of education_v1, properties_v1, quality_v1",
        ),
        # Tasks whose inputs are not there yet.
        ("hydra slices", "mixture_toml"),
        ("hydra merge-labels", "[E-LABEL"),
        ("report", "[E-"),
    ],
)
def test_a_wrong_flag_or_setting_is_one_line_and_nothing_is_written(
    config: Path, capsys: pytest.CaptureFixture[str], call: str, says: str
) -> None:
    line = refused_line(capsys, *call.split(), "--config", str(config))
    assert all(part in line for part in says.split(".*"))
    assert not (config.parent / "out").exists()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("train judge --device cuda", "use --set backbone.device=VALUE"),
        ("hydra oracle-label --device=cpu", "use --set oracle.engine.device=VALUE"),
        ("hydra oracle-label --model m", "use --set oracle.http.model=VALUE"),
        ("hydra oracle-label --salvage", "use --set oracle.extract_embedded=true"),
        ("hydra grade --no-early-exit", "use --set grading.early_exit=false"),
        ("prep-mixture --mixture own.toml", "use --set mixture_toml=VALUE"),
        ("prep-mixture --columns url --no-reuse", "columns=VALUE --set prep.reuse=false"),
        ("hydra grade --batch-sise 3", "did you mean --batch-size?"),
        ("generate p -o o --checkpoint c --early-exit", "unrecognized arguments: --early-exit"),
    ],
)
def test_a_key_that_has_no_flag_is_named_with_set(
    call: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(call.split())
    assert capsys.readouterr().err.strip().endswith(names)


def test_an_unknown_setting_without_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'workers'"):
        Run(None, dict([setting("prep.worker=4")]))


@pytest.mark.parametrize("text", ["url,meta.lang", '["url", "meta.lang"]', "['url','meta.lang']"])
def test_set_takes_a_list_of_toml_or_values_between_commas(text: str) -> None:
    assert setting(f"attributes.columns={text}") == ("attributes.columns", ("url", "meta.lang"))
    assert setting("attributes.columns=[ab]*") == ("attributes.columns", ("[ab]*",))


def test_set_takes_phases_as_the_toml_does() -> None:
    run = Run(None, dict([setting("phases=[{start_step = 5, dataset_weights = {web = 1}}]")]))
    assert [phase.start_step for phase in run.loader.phases] == [5]


def test_set_reads_fields_of_requests_with_the_types_of_toml_at_any_depth() -> None:
    texts = ("top_k=7", "stop=['a']", "kwargs.thinking=false", "kwargs.deep.share=0.5", "mode=fast")
    settings = dict(setting(f"oracle.http.extra_body.{text}") for text in texts)
    table = Run(None, WHOLE | settings).config.oracle.http
    assert table is not None
    kwargs = {"thinking": False, "deep": {"share": 0.5}}
    assert table.extra_body == {"top_k": 7, "stop": ("a",), "kwargs": kwargs, "mode": "fast"}


URL = "s3://bucket/tree"
# Arguments that take text. Any other one without choices and without a number is a path.
TEXTS = {
    *("dataset", "paths", "split", "subset", "data_files", "revision", "text_field", "id_field"),
    *("name", "version", "max_tokens", "tokenizer", "flow", "splits", "config", "settings"),
    *("device", "devices", "sources", "source", "slices", "shard", "order", "document"),
    *("base_url", "model", "accept_model", "api_key_env"),
    *("only", "where", "query", "columns", "family", "old", "new", "url", "remove", "command"),
    *("stop", "date", "tasks", "rebuild", "correct", "scores", "by", "note", "why", "sentence"),
    *("show", "withdraw", "valid", "eos_token", "tokens_field"),
}
TAKES_URLS = {("verify", "manifest"), ("info", "manifest"), ("explain", "plan")}
IS_A_HASH = {("run", "plan")}


def path_arguments() -> Iterator[list[str]]:
    """Each command with a URL in the place of each of its paths."""
    for words, parser in commands(build_parser()):
        for action in parser._actions:
            is_text = action.nargs == 0 or action.choices or action.dest in TEXTS
            is_text = is_text or (*words, action.dest) in TAKES_URLS | IS_A_HASH
            if action.type is Path or (action.type in (None, str) and not is_text):
                yield [*words, *needed(parser, action, URL)]


@pytest.mark.parametrize("command", list(path_arguments()), ids=" ".join)
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


def test_help_lists_every_verb_once_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    (verbs,) = (a.choices for a in parser._actions if a.dest == "verb")
    text = parser.format_help().partition("examples:")[0]
    listed = [line.split()[0] for line in text.splitlines() if line[:2] == "  "]
    assert sorted(name for name in listed if not name.startswith("-")) == sorted(verbs or ())
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("nmoe 0.")


@pytest.mark.parametrize(
    ("words", "near"), [(["prpe"], "prep"), (["hydra", "calibrat"], "calibrate"), (["zzz"], "")]
)
def test_a_misspelt_verb_is_answered_with_the_nearest(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"did you mean {near}?" in message if near else "choose from" in message
