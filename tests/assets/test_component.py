"""Several mixtures in one deployment: the component `nmoe_assets.Mixture` and its prefix."""

import shutil
from pathlib import Path

import dagster as dg
import pytest

from loader import open_loader
from nmoe_assets.component import build_definitions
from nmoe_assets.partitions import range_tags
from nmoe_assets.resources import Notifier
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.tasks.curate import make_plan
from nmoe_core.tasks.graph import settings
from tests.assets.small_project import environment, opened, program_of
from tests.project import output_of
from tests.refusals import refused, refused_line

_PROJECT = """
[project]
name = "corpora"
version = "0.1.0"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "corpora"
"""
_DEFINITIONS = """
from pathlib import Path
import dagster as dg

@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
_DEFS_YAML = """
type: nmoe_assets.Mixture
attributes:
  config: ../../../{config}
  prefix: {prefix}
"""


def _names(definitions: dg.Definitions) -> set[str]:
    """Keys, groups, checks, jobs, sensors and schedules."""
    repository = definitions.get_repository_def()
    graph = repository.asset_graph
    return {
        *(key.to_user_string() for key in graph.get_all_asset_keys()),
        *(graph.get(key).group_name for key in graph.get_all_asset_keys()),
        *(job.name for job in repository.get_all_jobs() if not job.name.startswith("__")),
        *(sensor.name for sensor in repository.sensor_defs),
        *(schedule.name for schedule in repository.schedule_defs),
    }


def test_names_of_two_mixtures_never_collide(run: Run) -> None:
    alone = build_definitions(run)
    mixtures = {
        prefix: build_definitions(run.with_settings({"automation.prefix": prefix}))
        for prefix in ("alpha", "beta")
    }
    for prefix, definitions in mixtures.items():
        expected = {f"{prefix}/{n}" if "/" in n else f"{prefix}__{n}" for n in _names(alone)}
        assert _names(definitions) == expected
    both = dg.Definitions.merge(*mixtures.values())
    assert _names(both) == _names(mixtures["alpha"]) | _names(mixtures["beta"])
    dg.Definitions.validate_loadable(both)
    for prefix, definitions in mixtures.items():
        graph = definitions.resolve_asset_graph()
        for key in graph.get_all_asset_keys():
            node = graph.get(key)
            links = [
                value.asset_key for value in node.metadata.values() if hasattr(value, "asset_key")
            ]
            assert {linked.path[0] for linked in (*links, *node.parent_keys)} <= {prefix}


@pytest.mark.parametrize("prefix", ["a/b", "a__b", "_a", "a-b"])
def test_a_prefix_that_names_cannot_begin_with_is_refused(run: Run, prefix: str) -> None:
    with refused("E-CONFIG", "automation.prefix"):
        run.with_settings({"automation.prefix": prefix})


def _with_the_data_of_the_first(text: str) -> str:
    shared = text.replace('root = "out"', 'root = "beta"\ndata_root = "out/data"')
    assert shared != text
    return shared


def _dg_project(directory: Path) -> None:
    """The finished project with a second run that reads the token shards of the first."""
    text = (directory / "run.toml").read_text()
    (directory / "beta.toml").write_text(_with_the_data_of_the_first(text))
    files = {"pyproject.toml": _PROJECT, "corpora/definitions.py": _DEFINITIONS}
    for prefix, config in {"alpha": "run.toml", "beta": "beta.toml"}.items():
        files[f"corpora/defs/{prefix}/defs.yaml"] = _DEFS_YAML.format(config=config, prefix=prefix)
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


def test_a_mixture_with_the_data_of_another_makes_none_of_its_shards_again(
    own_project: Path, instance: dg.DagsterInstance
) -> None:
    before = _written(own_project / "out" / "data")
    text = (own_project / "run.toml").read_text()
    (own_project / "run.toml").write_text(_with_the_data_of_the_first(text))
    run = Run(own_project / "run.toml").with_settings({"automation.prefix": "beta"})
    prep = build_definitions(run).resolve_job_def("beta__prep")
    assert prep.execute_in_process(instance=instance).success
    assert _written(own_project / "out" / "data") == before
    assert (own_project / "beta" / "slices").is_dir()
    page = instance.get_latest_materialization_event(dg.AssetKey(["beta", "docs", "shards"]))
    assert page is not None
    assert page.asset_materialization.metadata["shards_made"].value == 0


@pytest.mark.long
def test_two_mixtures_of_a_dg_project_share_the_shards_of_their_sources(own_project: Path) -> None:
    _dg_project(own_project)

    options = {"cwd": own_project, "env": environment(own_project), "timeout": 120}
    assert "All definitions loaded" in output_of(program_of("dg"), "check", "defs", **options)
    before = _written(own_project / "out" / "data")
    execute = (program_of("dagster"), "job", "execute", "-m", "corpora.definitions")
    output_of(*execute, "-j", "beta__prep", **options)
    assert _written(own_project / "out" / "data") == before
    assert (own_project / "beta" / "slices").is_dir()
    with opened(own_project) as instance:
        made = {key.to_user_string() for key in instance.all_asset_keys()}
        of_beta = {key for key in made if key.startswith("beta/")}
        assert "beta/docs/manifest" in of_beta
        assert not {key for key in made if key.startswith("alpha/")}
        page = instance.get_latest_materialization_event(dg.AssetKey(["beta", "docs", "shards"]))
        assert page is not None
        assert page.asset_materialization.metadata["shards_made"].value == 0


def test_a_mixture_reports_the_failures_of_its_own_runs(
    run: Run, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Notifier, "send", lambda self, text: told.append(text))
    mixtures = [
        build_definitions(run.with_settings({"automation.prefix": prefix}))
        for prefix in ("alpha", "beta")
    ]
    repository = dg.Definitions.merge(*mixtures).get_repository_def()

    def look(prefix: str, cursor: str | None) -> str | None:
        context = dg.build_sensor_context(
            instance=instance,
            cursor=cursor,
            repository_def=repository,
            resources={"notifier": Notifier()},
        )
        sensor = repository.get_sensor_def(f"{prefix}__failure_notice_of_commands")
        return sensor.evaluate_tick(context).cursor

    cursors = {prefix: look(prefix, None) for prefix in ("alpha", "beta")}
    job = mixtures[1].resolve_job_def("beta__label")
    job.execute_in_process(instance=instance, tags=range_tags(["val-00"]), raise_on_error=False)
    assert look("alpha", cursors["alpha"])
    assert told == []
    assert look("beta", cursors["beta"])
    assert [text.partition(" ")[0] for text in told] == ["beta__label"]


def _written(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*.npy"))
    }


def test_a_remix_is_the_next_version_of_a_runs_plan(
    own_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, sources = Run(own_project / "run.toml"), ("code", "docs", "notes")
    first, version = make_plan(run, sources, ("docs",)), settings.loader_plan(run).version
    edit = ["--weights", "docs=1,notes=1", "--remove", "code"]
    config = ["--config", str(own_project / "run.toml")]
    for step in ("2", "4"):
        assert main(["remix", *config, "--step", step, *edit]) == 0
        edit = ["--weights", "docs=3,notes=1"]
    capsys.readouterr()
    written = run.tree.plan.read_bytes()
    made = make_plan(run, sources, ("docs",))
    assert run.tree.plan.read_bytes() == written
    assert made.digest != first.digest
    assert not made.facts["changed"]
    assert made.facts["remix_0002"] == "from step 4: docs 50 -> 75 %, notes 50 -> 25 %"
    assert made.facts["remix_0001"].startswith("from step 2: ")
    assert settings.loader_plan(run).version != version
    other = Run(own_project / "run.toml", {"batch_size": 2})
    with refused("E-REMIX-CHAIN", naming=["continues another plan", "remix_0001.json"]):
        make_plan(other, sources, ("docs",))
    assert run.tree.plan.read_bytes() == written
    refused_line(capsys, "remix", *config, "x.json", "--step", "5", *edit, code="E-CONFIG")


def test_a_plan_reads_token_shards_outside_the_root_of_the_run(own_project: Path) -> None:
    plan = own_project / "out" / "mixture" / "loader_plan.json"
    elsewhere = own_project / "elsewhere"
    shutil.move(own_project / "out" / "data", elsewhere)
    run = Run(own_project / "run.toml", {"data_root": str(elsewhere)})
    sources = ("code", "docs", "notes")
    plan.unlink()
    make_plan(run, sources, ("docs",))
    for split in ("train", "valid"):
        loader = open_loader(plan, backend="numpy", split=split)
        inputs, _ = next(loader)
        assert len(inputs) == run.loader.batch_size
