"""Work and events are in proportion to what changed."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from nmoe_assets.assets.recorded import Recorded, needed
from nmoe_assets.component import build_definitions
from nmoe_assets.inputs import REBUILD
from nmoe_assets.ops.pipeline import step_error
from nmoe_assets.partitions import range_tags, shard_partitions
from nmoe_core.base.compute import api
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.walk import walk
from nmoe_core.tasks.shards import each_shard
from tests.assets.dagster_internals import stale_causes
from tests.assets.small_project import ALL, KEYS, copied, environment, execute_here, opened, tick
from tests.project import jsonl_source, write_project

SOURCES = ("books", "docs")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without a grader, whose pipeline has run."""
    directory = tmp_path_factory.mktemp("finished")
    drawn = random.Random(0)
    words = [f"word{i}" for i in range(300)]
    sources = [
        jsonl_source(name, [{"text": " ".join(drawn.choices(words, k=80))} for _ in range(24)])
        for name in SOURCES
    ]
    settings = {
        "seq_len": 128,
        "batch_size": 2,
        "on_exhaust": "wrap",
        "grading": {"grader": "none"},
        "backbone": {"kind": "tiny"},
        "attributes": {"use": ["signals", "duplicates"]},
        "curation": {"num_topics": 4, "where": "is_survivor and n_words > 5"},
    }
    write_project(directory, sources, settings)
    done = execute_here(directory, "pipeline")
    assert done.success, [step_error(one) for one in done.all_events if one.is_step_failure]
    return directory


@pytest.fixture
def project(finished: Path, tmp_path: Path) -> Path:
    return copied(finished, tmp_path / "project")


def log_of(project: Path) -> Counter[tuple[str, str]]:
    """How often each partition of each asset was materialised."""
    found: Counter[tuple[str, str]] = Counter()
    with opened(project) as instance:
        for run in instance.get_runs():
            for entry in instance.all_logs(run.run_id, dg.DagsterEventType.ASSET_MATERIALIZATION):
                event = entry.get_dagster_event()
                found[event.asset_key.to_user_string(), event.partition or ""] += 1
    return found


def newest_versions(project: Path) -> dict[tuple[str, str], str]:
    """The data version of each partition of each asset, or the revision of a source."""
    found = {}
    with opened(project) as instance:
        for run in reversed(instance.get_runs()):
            for entry in instance.all_logs(run.run_id, dg.DagsterEventType.ASSET_MATERIALIZATION):
                event = entry.get_dagster_event()
                made = event.step_materialization_data.materialization
                place = event.asset_key.to_user_string(), event.partition or ""
                version = (made.tags or {}).get("dagster/data_version")
                found[place] = version or made.metadata["revision"].value
    return found


def times(project: Path) -> dict[Path, int]:
    files = (path for path in (project / "out").rglob("*") if path.is_file())
    # a copied project has new inodes, so the first run over it remembers them
    others = (".lock", ".walk.json")
    return {path: path.stat().st_mtime_ns for path in files if path.name not in others}


def stale(project: Path) -> dict[object, object]:
    """What the UI shows as stale."""
    definitions = build_definitions(Run(project / "run.toml"))
    with opened(project) as instance:
        found = stale_causes(instance, definitions).items()
    return {key: one for key, one in found if one[0] != "FRESH"}


def edit(project: Path) -> None:
    """Add a sentence to the last document of docs, which is in the training split."""
    path = project / "in" / "docs.jsonl"
    *lines, last = path.read_text().splitlines()
    edited = json.loads(last)["text"] + " One more sentence."
    path.write_text("\n".join([*lines, json.dumps({"text": edited})]) + "\n")


def test_a_pipeline_over_a_current_project_starts_no_task(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(project / "dagster"))
    before = log_of(project)
    files = times(project)
    assert execute_here(project, "pipeline").success
    with opened(project) as instance:
        assert instance.get_runs(limit=2)[1].job_name != "pipeline"
        assert [run.job_name for run in instance.get_runs(limit=1)] == ["pipeline"]
    assert log_of(project) == before
    assert times(project) == files
    assert main(["run", "curate", "--config", str(project / "run.toml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(task["task"], task["run_id"]) for task in told["tasks"]] == [("curate", None)]
    assert log_of(project) == before


def test_events_are_read_once_for_tasks_that_have_nothing_to_do(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(project / "dagster"))
    with opened(project) as instance:
        storage = type(instance.event_log_storage)
    read: Counter[str] = Counter()
    read_ids = storage.get_latest_storage_id_by_partition

    def counted(self: object, key: dg.AssetKey, *arguments: object, **options: object) -> object:
        read[key.to_user_string()] += 1
        return read_ids(self, key, *arguments, **options)

    monkeypatch.setattr(storage, "get_latest_storage_id_by_partition", counted)
    tasks = ("prep", "grade", "curate")
    assert main(["run", *tasks, "--config", str(project / "run.toml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {task["run_id"] for task in told["tasks"]} == {None}
    assert set(read.values()) == {1}


def test_a_job_over_current_outputs_logs_no_materialisation(project: Path) -> None:
    before = log_of(project)
    for job in ("prep", "curate"):
        assert execute_here(project, job).success
    assert log_of(project) == before
    assert stale(project) == {}


def test_one_edited_record_makes_events_of_what_changed_alone(project: Path) -> None:
    before = log_of(project)
    versions = newest_versions(project)
    edit(project)
    assert execute_here(project, "pipeline").success
    made = log_of(project) - before
    assert set(made.values()) == {1}
    now = newest_versions(project)
    changed = {place for place in now if now[place] != versions.get(place)}
    assert stale(project) == {}
    assert len(made) <= len(changed) + 3
    untouched = {place for place in made if place[0].startswith(("books/shards", "books/manifest"))}
    assert untouched == set()
    assert changed <= made.keys()


def test_an_edited_record_reaches_the_plan_by_what_the_sensors_request(project: Path) -> None:
    """Link by link: runs of one partition leave what follows prep to `follow_changes`."""
    environment(project)
    settings = {"automation.max_partitions_per_run": 1, "automation.curate": "make"}
    definitions = build_definitions(Run(project / "run.toml", settings))
    before = newest_versions(project)
    cursors: dict[str, str | None] = {}

    def requests(sensor: str, instance: dg.DagsterInstance) -> list[dg.RunRequest]:
        found = tick(sensor, definitions, instance, cursors.get(sensor))
        cursors[sensor] = found.cursor or cursors.get(sensor)
        return [*(found.run_requests or ())]

    def work(asked: list[dg.RunRequest], instance: dg.DagsterInstance) -> None:
        for request in asked:
            done = definitions.resolve_job_def(request.job_name).execute_in_process(
                instance=instance, asset_selection=request.asset_selection, tags=request.tags
            )
            assert done.success

    with opened(project) as instance:
        assert requests("follow_changes", instance) == []
        requests("source_watch", instance)
        edit(project)
        work(requests("source_watch", instance), instance)
        links = []
        while asked := requests("follow_changes", instance):
            links.append({key.path[-1] for one in asked for key in one.asset_selection})
            work(asked, instance)
    plan = ("mixture/loader_plan", "")
    assert newest_versions(project)[plan] != before[plan]
    assert links[-1] == {"loader_plan"}
    assert len(links) <= 6
    assert {key for key, _ in stale(project)} == {dg.AssetKey(["curation", "topic_model"])}, (
        "which a person makes"
    )


def test_outputs_whose_blocking_check_failed_are_not_left_out(project: Path) -> None:
    environment(project)
    run = Run(project / "run.toml")
    graph = build_definitions(run).resolve_asset_graph()
    keys = graph.materializable_asset_keys
    key = dg.AssetKey(["books", "manifest"])
    [check] = [one for one in graph.get_check_keys_for_assets({key}) if graph.get(one).blocking][:1]
    states = walk(run, run_sources(run))
    with opened(project) as instance:
        assert needed(keys, Recorded(instance, graph, keys), states) == {}
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(key, check.name, passed=False, metadata={})
        )
        found = needed(keys, Recorded(instance, graph, keys), states)
    assert {key, dg.AssetKey(["mixture", "loader_plan"])} <= found.keys()
    assert dg.AssetKey(["docs", "shards"]) not in found


def test_an_output_with_an_input_that_its_newest_event_does_not_name_needs_an_event(
    project: Path,
) -> None:
    environment(project)
    use = {"attributes.use": ["signals", "duplicates", "pii"]}
    graph = build_definitions(Run(project / "run.toml", use)).resolve_asset_graph()
    keys = [dg.AssetKey(["docs", name]) for name in ("selection", "topics")]
    with opened(project) as instance:
        recorded = Recorded(instance, graph, keys)
        assert [recorded.outdated(key) for key in keys] == [{*KEYS}, set()]


@pytest.mark.long
@pytest.mark.parametrize("job", ["prep", "pipeline"])
def test_partitions_that_failed_in_another_job_do_not_stay_failed(project: Path, job: str) -> None:
    """As of the asset's page, or of automation. Automation waits for a failed input."""
    environment(project)
    definitions = build_definitions(Run(project / "run.toml"))
    key = dg.AssetKey(["docs", "shards"])
    partitions = shard_partitions(len(KEYS))
    source = project / "in" / "docs.jsonl"
    text = source.read_text()
    source.write_text("{torn\n")
    with opened(project) as instance:
        done = definitions.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, asset_selection=[key], tags=ALL, raise_on_error=False
        )
        assert not done.success
        failed = instance.get_status_by_partition(key, KEYS, partitions) or {}
    assert [str(failed[one]) for one in KEYS] == ["AssetPartitionStatus.FAILED"] * 2
    source.write_text(text)
    assert execute_here(project, job).success
    with opened(project) as instance:
        now = instance.get_status_by_partition(key, KEYS, partitions) or {}
    assert [str(now[one]) for one in KEYS] == ["AssetPartitionStatus.MATERIALIZED"] * 2
    before = log_of(project)
    assert execute_here(project, job).success
    assert log_of(project) == before


@pytest.mark.long
def test_events_that_a_person_changed_are_logged_again(project: Path) -> None:
    """By the items of an asset's menu (*report* and *wipe*), and by deleting a run."""
    shards, model = dg.AssetKey(["docs", "shards"]), dg.AssetKey(["curation", "topic_model"])
    with opened(project) as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization(shards, partition="0001"))
        instance.wipe_assets([dg.AssetKey(["books", "shards"])])
        [made] = instance.fetch_materializations(model, limit=1).records
        instance.delete_run(made.run_id)
    first = range_tags(KEYS[:1])
    assert execute_here(project, "prep", "docs", **first, **{REBUILD: "true"}).success
    assert (dg.AssetKey(["books", "shards"]), KEYS[0]) in stale(project)
    files = times(project)
    assert execute_here(project, "pipeline").success
    assert stale(project) == {}
    assert times(project) == files


def test_workers_start_only_if_a_shard_has_something_to_do(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    @contextmanager
    def watched(workers: int, initializer: object) -> Iterator[object]:
        started.append(workers)
        yield map

    monkeypatch.setattr(api, "open_process_pool", watched)
    run = Run(project / "run.toml", {"compute.workers": 2})
    tasks = ("grade", "attributes/signals", "topics", "select", "curate")
    for task in tasks:
        assert all(one.result for one in each_shard(run, task, "docs", KEYS)), task
    assert started == []
    run.tree.shard("docs", 1).topics.unlink()
    assert all(one.result for one in each_shard(run, "topics", "docs", KEYS))
    assert started == [2]
