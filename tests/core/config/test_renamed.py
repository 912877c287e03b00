"""Earlier names of keys and values are read for one release, each with one warning."""

import json
import re
import warnings
from pathlib import Path

import pytest

from loader import resolve_plan
from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.cli import build_parser, main
from nmoe_core.cli.help.parser import commands
from nmoe_core.config.renamed import RENAMED
from nmoe_core.config.run import Run
from nmoe_core.config.schema import run_keys, setting
from nmoe_core.tasks.graph import settings
from tests.loader.conftest import Tree
from tests.project import REPOSITORY

VALUES = {
    "automation.poll_interval_s": "7",
    "automation.source_poll_interval_s": "8",
    "backbone.moe_backend": '"packed"',
    "curation.packing": '"flush"',
    "grading.allow_foreign_calibration": "true",
    "grading.batch_size": "3",
    "oracle.engine.batch_size": "4",
    "oracle.engine.moe_backend": '"hub"',
    "oracle.extract_embedded": "true",
    "oracle.max_retries": "2",
}
FLAGS = [
    ("hydra grade", "--max-batch", "--batch-size", ["3"]),
    ("hydra oracle-label", "--max-batch", "--batch-size", ["3"]),
    ("generate p.jsonl -o o --checkpoint c", "--max-batch", "--batch-size", ["3"]),
    ("generate p.jsonl -o o --checkpoint c", "--experts", "--moe-backend", ["packed"]),
]


@pytest.fixture
def data(tmp_path: Path) -> str:
    directory = Tree(tmp_path).add("web", 500).parent
    return f"seq_len = 8\nbatch_size = 2\nroot = '.'\ndata_path = '{directory}'\n"


def _run_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_earlier_value_of_on_exhaust_makes_the_same_plan_with_one_warning(
    data: str, tmp_path: Path
) -> None:
    unset = resolve_plan(_run_file(tmp_path, data))
    plan = resolve_plan(_run_file(tmp_path, f'{data}on_exhaust = "error"\n'))
    assert '"on_exhaust": "all_exhausted"' in plan.to_json(), "as plans always said"
    old = _run_file(tmp_path, f'{data}on_exhaust = "all_exhausted"\n')
    with pytest.warns(
        FutureWarning, match=re.escape('on_exhaust = "all_exhausted" is now "error"')
    ) as warned:
        again = resolve_plan(old)
    assert len(warned) == 1
    assert unset.plan_hash == plan.plan_hash == again.plan_hash


def test_a_plan_with_the_earlier_value_is_opened_without_a_warning(
    data: str, tmp_path: Path
) -> None:
    plan = resolve_plan(_run_file(tmp_path, data))
    (tmp_path / "plan.json").write_text(plan.placed_in(tmp_path).to_json(), encoding="utf-8")
    assert resolve_plan(tmp_path / "plan.json").plan_hash == plan.plan_hash


def _line(key: str) -> str:
    """A table of a TOML file in which a key has a value that is not its default."""
    table, _, name = key.rpartition(".")
    return f"[{table}]\n{name} = {VALUES[RENAMED.get(key, key)]}\n"


def test_every_renamed_key_is_tried_and_is_in_the_table_of_terms() -> None:
    assert set(RENAMED.values()) == set(VALUES)
    table = (REPOSITORY / "docs" / "terms.md").read_text("utf-8").split("## Renamed")[1]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+) \|$", table, re.MULTILINE)
    in_table = {(old, new): where for old, new, where in rows}
    for old, new in RENAMED.items():
        where, _, name = old.rpartition(".")
        assert f"`[{where}]`" in in_table[name, new.rpartition(".")[2]]


@pytest.mark.parametrize("old", RENAMED)
def test_an_earlier_key_is_read_from_a_file_with_one_warning(
    data: str, tmp_path: Path, old: str
) -> None:
    new = RENAMED[old]
    run = Run(_run_file(tmp_path, data + _line(new)))
    assert run.config != Run(_run_file(tmp_path, data)).config
    old_file = _run_file(tmp_path, data + _line(old))
    with pytest.warns(FutureWarning, match=re.escape(f"{old} is now {new}; ")) as warned:
        assert Run(old_file).config == run.config
    assert len(warned) == 1


@pytest.mark.parametrize("old", RENAMED)
def test_an_earlier_key_is_set_on_the_command_line_over_the_new_one_of_the_file(
    data: str, tmp_path: Path, old: str
) -> None:
    new = RENAMED[old]
    value = VALUES[new].strip('"')
    file = _run_file(tmp_path, data)
    default = dict([setting(f"{new}={run_keys()[new].default}")])
    table, _, name = new.rpartition(".")
    changed = Run(file, dict([setting(f"{new}={value}")]))
    given = json.dumps(default[new])
    both = _run_file(tmp_path, f"{data}[{table}]\n{name} = {given}\n")
    with pytest.warns(FutureWarning, match=re.escape(f"{old} is now {new}; ")) as warned:
        run = Run(both, dict([setting(f"{old}={value}")]))
    assert len(warned) == 1
    assert run.config == changed.config != Run(both).config
    assert run.is_given(new)


def test_a_table_that_a_caller_sets_may_have_earlier_names(data: str, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="backbone.experts is now backbone.moe_backend"):
        run = Run(_run_file(tmp_path, data), {"backbone": {"experts": "packed"}})
    assert run.config.backbone.moe_backend == "packed"


@pytest.mark.parametrize("old", RENAMED)
def test_both_names_of_a_key_are_refused(data: str, tmp_path: Path, old: str) -> None:
    key = old.rpartition(".")[2]
    now = RENAMED[old].rpartition(".")[2]
    more = _line(RENAMED[old]).partition("\n")[2]
    both = _run_file(tmp_path, data + _line(old) + more)
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ConfigError, match=f"{key} is the earlier name of {now}"),
    ):
        Run(both)


@pytest.mark.parametrize(("verb", "old", "new", "value"), FLAGS)
def test_an_earlier_flag_does_the_same_and_warns_unless_it_is_published_and_no_help_shows_it(
    verb: str, old: str, new: str, value: list[str]
) -> None:
    words = verb.split()
    now = vars(build_parser().parse_args([*words, new, *value]))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert vars(build_parser().parse_args([*words, old, *value])) == now
    is_published = old == "--max-batch"
    told = [] if is_published else [f"{old} is now {new}; this release still accepts it"]
    assert [str(warning.message) for warning in warned] == told
    of_verb = [parser for path, parser in commands(build_parser()) if words[: len(path)] == [*path]]
    text = of_verb[-1].format_help()
    assert new in text
    assert not re.search(rf"{old}\b", text)


def test_the_earlier_name_of_a_verb_is_the_verb_with_a_warning(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ["hydra", "review", "--config", str(_run_file(tmp_path, data)), "--by", "mara"]
    assert main(rest) == 1
    refusal = capsys.readouterr().err
    assert "--by without --correct" in refusal
    with pytest.warns(FutureWarning, match="nmoe hydra look is now nmoe hydra review; "):
        assert main(["hydra", "look", *rest[2:]]) == 1
    assert capsys.readouterr().err.endswith(refusal)


@pytest.mark.parametrize("flag", ["--debug", "--traceback", "-v"])
def test_an_error_is_a_traceback_with_debug_or_an_earlier_name_which_warns(
    flag: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(NmoeError, match="no such file"):
            main([flag, "info", str(tmp_path / "none.json")])
    told = f"{flag} is now --debug; this release still accepts it"
    assert [str(warning.message) for warning in warned] == [told] * (flag != "--debug")


def test_renamed_keys_change_no_code_version() -> None:
    """Dagster shows these versions; they are as before the keys were renamed."""
    engine = {"oracle.kind": "engine", "oracle.engine.checkpoint": "/c"}
    chosen = {"oracle.engine.moe_backend": "hub", "backbone.moe_backend": "grouped"}
    run = Run(None, engine | chosen | {"oracle.extract_embedded": True})
    assert settings.labels(run).version == "labels/2+39c01d9fa16a"
    assert settings.calibration(run).version == "calibrate/5+f620b4c5abfb"
    assert settings.grades(run).version == "grade/2+44bd243e9867"


def test_the_command_line_takes_the_earlier_names_as_well() -> None:
    old = ["on_exhaust=all_exhausted", "curation.loader=flush"]
    with pytest.warns(FutureWarning):
        run = Run(None, dict(map(setting, old)))
    assert run.config.curation.packing == "flush"
    new = ["on_exhaust=error", "curation.packing=flush"]
    assert Run(None, dict(map(setting, new))).loader == run.loader


def test_a_value_of_on_exhaust_that_never_was_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="one of error, first_exhausted, wrap"):
        Run(None, {"on_exhaust": "all"})
