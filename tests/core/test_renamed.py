"""Earlier names of keys and values are read for one release, each with one warning."""

import re
from pathlib import Path

import pytest

from loader import resolve_plan
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.config.schema import setting
from tests.loader.conftest import Tree

RENAMED = 'on_exhaust = "all_exhausted" is now "error"', "curation.loader is now curation.packing"


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
    with pytest.warns(FutureWarning, match=re.escape(RENAMED[0])) as warned:
        again = resolve_plan(old)
    assert len(warned) == 1
    assert unset.plan_hash == plan.plan_hash == again.plan_hash


def test_a_plan_with_the_earlier_value_is_opened_without_a_warning(
    data: str, tmp_path: Path
) -> None:
    plan = resolve_plan(_run_file(tmp_path, data))
    (tmp_path / "plan.json").write_text(plan.placed_in(tmp_path).to_json(), encoding="utf-8")
    assert resolve_plan(tmp_path / "plan.json").plan_hash == plan.plan_hash


def test_the_earlier_key_of_packing_is_read_with_one_warning(data: str, tmp_path: Path) -> None:
    run = Run(_run_file(tmp_path, f'{data}[curation]\npacking = "flush"\n'))
    old = _run_file(tmp_path, f'{data}[curation]\nloader = "flush"\n')
    with pytest.warns(FutureWarning, match=re.escape(RENAMED[1])) as warned:
        assert Run(old).config == run.config
    assert len(warned) == 1
    assert run.config.curation.packing == "flush"


def test_both_names_of_packing_are_refused(data: str, tmp_path: Path) -> None:
    both = _run_file(tmp_path, f'{data}[curation]\nloader = "flush"\npacking = "concat"\n')
    with pytest.raises(ConfigError, match="loader is the earlier name of packing"):
        Run(both)


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
