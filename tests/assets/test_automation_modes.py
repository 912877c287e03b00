"""What automation requests after a change of settings, and in each mode of `[automation]`."""

import dagster as dg
import pytest
from dagster import AssetKey, DagsterInstance

from nmoe_assets.component import build_definitions
from nmoe_assets.partitions import label_partitions
from nmoe_core.config.run import Run
from tests.assets.daemon import (
    CALIBRATION,
    GRADES,
    HEADS,
    HEADS_AGAIN,
    PLAN,
    REGRADE_PLAN,
    Daemon,
    of_each,
)
from tests.assets.small_project import KEYS

# Dagster's own tester uses a parameter that Dagster marks beta.
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


def code_versions(defs: dg.Definitions) -> dict[str, str | None]:
    graph = defs.resolve_asset_graph()
    return {
        "/".join(key.path): graph.get(key).code_version for key in graph.materializable_asset_keys
    }


def with_settings(run: Run, table: str, **values: object) -> Run:
    """The run with other values in a table of its configuration, or at its top."""
    return run.with_settings({f"{table}.{key}".lstrip("."): v for key, v in values.items()})


PREPARED = {f"{s}/{name}" for s in ("code", "docs", "notes") for name in ("shards", "manifest")}
PREPARED |= {"docs/valid_shards", "docs/valid_manifest"}


@pytest.mark.parametrize(
    ("table", "values", "marked"),
    [
        ("calibration", {"target_keep": 0.3}, {"hydra/calibration": {None}}),
        ("grading", {"early_exit": False}, of_each("quality_scores") | REGRADE_PLAN),
        ("curation", {"include": ("keep", "band")}, of_each("curated")),
        ("", {"batch_size": 2}, PLAN),
        ("", {"policy": "block"}, PLAN),
        ("heads.probe", {"epochs": 9}, {"hydra/probe_head": {None}}),
        # What is made by hand is marked and not requested.
        ("curation", {"num_topics": 6}, {"curation/topic_model"}),
        ("prep", {"min_doc_tokens": 20}, PREPARED),
        ("oracle", {"max_doc_tokens": 64}, {"hydra/oracle_labels"}),
        ("backbone", {"seed": 1}, {"hydra/backbone"}),
        # What reaches no output marks nothing.
        ("checks", {"min_spearman": 0.4}, {}),
        ("automation", {"poll_interval_s": 60, "label_retries": 9}, {}),
        ("compute", {"workers": 4}, {}),
        ("prep", {"workers": 7}, {}),
        ("grading", {"batch_size": 3}, {}),
        ("oracle", {"max_retries": 2}, {}),
        ("retention", {"keep_days": 5}, {}),
    ],
)
def test_a_changed_setting_marks_and_requests_exactly_its_readers(
    daemon: Daemon,
    run: Run,
    table: str,
    values: dict[str, object],
    marked: dict[str, set[str | None]] | set[str],
) -> None:
    before = code_versions(daemon.defs)
    assert None not in before.values()
    daemon.defs = build_definitions(with_settings(run, table, **values))
    after = code_versions(daemon.defs)
    assert {key for key in before if before[key] != after[key]} == set(marked)
    assert daemon.tick() == (marked if isinstance(marked, dict) else {})
    assert daemon.tick() == {}


def test_new_grading_code_requests_all_grades(
    daemon: Daemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.tasks.graph.settings.GRADE_CODE", "grade/next")
    daemon.defs = build_definitions(run)
    assert daemon.tick() == GRADES | REGRADE_PLAN


def test_a_setting_that_changes_while_a_run_of_the_former_ends_is_not_forgotten(
    daemon: Daemon, run: Run
) -> None:
    daemon.report("hydra", "calibration", version="2")
    daemon.defs = build_definitions(with_settings(run, "calibration", target_keep=0.3))
    assert daemon.tick() == {"hydra/calibration": {None}}


def test_heads_and_thresholds_wait_for_labels_of_changed_documents(
    daemon: Daemon, run: Run
) -> None:
    """A person starts the labels, since an oracle may cost money."""
    daemon.report("docs", "shards", version="2", partition="0001")
    assert daemon.tick().keys() == {"docs/quality_scores", "docs/topics", "hydra/regrade_plan"}
    edited = with_settings(run, "heads.probe", epochs=9)
    daemon.defs = build_definitions(with_settings(edited, "calibration", target_keep=0.3))
    assert not {key for key in daemon.tick() if key.startswith("hydra/")}
    for key in label_partitions.get_partition_keys():
        daemon.report("hydra", "oracle_labels", version="2", partition=key)
    assert "hydra/student" in daemon.tick()
    daemon.report("hydra", "student", version="2")
    assert daemon.tick().keys() >= HEADS_AGAIN.keys()
    for name in ("probe_head", "judge_head"):
        daemon.report("hydra", name, version="2")
    assert daemon.tick() == CALIBRATION


def test_heads_and_thresholds_wait_for_labels_of_a_new_source(
    defs: dg.Definitions, run: Run, in_memory: DagsterInstance
) -> None:
    daemon = Daemon(defs, in_memory)
    daemon.everything(sources=("code", "docs"))
    assert daemon.tick() == {}
    for key in KEYS:
        daemon.report("notes", "shards", version="1" + key, partition=key)
    daemon.tick()
    edited = with_settings(run, "heads.probe", epochs=9)
    daemon.defs = build_definitions(with_settings(edited, "calibration", target_keep=0.3))
    assert not {key for key in daemon.tick() if key.startswith("hydra/")}


def test_a_person_starts_the_first_run_of_everything(
    defs: dg.Definitions, in_memory: DagsterInstance
) -> None:
    daemon = Daemon(defs, in_memory)
    assert daemon.tick() == {}
    for key in KEYS:
        daemon.report("code", "shards", version="1", partition=key)
    for name in HEADS:
        daemon.report("hydra", name, version="1")
    daemon.pass_checks(daemon.defs.resolve_asset_graph().get_all_asset_keys())
    assert daemon.tick() == {}


BY_HAND = ("hydra/backbone", "hydra/oracle_labels", "curation/topic_model")
MAKE = {"prep": "make", "heads": "make", "grade": "make", "curate": "make"}


@pytest.mark.parametrize(
    "is_switched_on_later", [pytest.param(False, marks=pytest.mark.long), True]
)
def test_everything_is_made_for_the_first_time_once_and_in_order(
    run: Run, in_memory: DagsterInstance, *, is_switched_on_later: bool
) -> None:
    daemon = Daemon(build_definitions(with_settings(run, "automation", **MAKE)), in_memory)
    graph = daemon.defs.resolve_asset_graph()
    if is_switched_on_later:
        switched_on, daemon.defs = daemon.defs, build_definitions(run)
        assert daemon.tick() == {}
        daemon.defs = switched_on
    order: list[str] = []

    def make(requested: dict[str, set[str | None]]) -> None:
        for key, partitions in requested.items():
            for partition in sorted(partitions, key=str):
                daemon.report(*key.split("/"), version="1", partition=partition)
        daemon.pass_checks({AssetKey(key.split("/")) for key in requested})

    def ask() -> None:
        while requested := daemon.tick():
            for key in requested:
                inputs = {
                    "/".join(dep.path) for dep in graph.get(AssetKey(key.split("/"))).parent_keys
                }
                assert {i for i in inputs if not i.endswith("/documents")} <= {*order, *BY_HAND}
            order.extend(requested)
            make(requested)

    ask()
    assert {key.split("/")[1] for key in order} == {
        *("shards", "manifest", "docid_slices", "valid_shards", "valid_manifest")
    }
    make({"hydra/backbone": {None}, "curation/topic_model": {None}})
    make({"hydra/oracle_labels": set(label_partitions.get_partition_keys())})
    ask()
    everything = {"/".join(key.path) for key in graph.materializable_asset_keys}
    assert sorted(order) == sorted(everything - {*BY_HAND})
    assert daemon.tick() == {}


def test_a_kind_that_is_off_is_never_requested(run: Run, in_memory: DagsterInstance) -> None:
    defs = build_definitions(with_settings(run, "automation", heads="off", grade="off"))
    daemon = Daemon(defs, in_memory)
    daemon.everything()
    daemon.tick()
    daemon.report("hydra", "oracle_labels", version="2", partition="val-03")
    daemon.report("hydra", "calibration", version="2")
    assert daemon.tick() == {}
