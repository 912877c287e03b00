"""The code location loads light, and shows the assets, checks and jobs it promises."""

import cProfile
import re
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from nmoe_assets.catalogue import to_metadata
from nmoe_assets.component import build_definitions
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.checks import LEVELS
from nmoe_core.tasks.graph.walk import walk
from tests.assets.small_project import program_of
from tests.project import REPOSITORY, jsonl_source, output_of, write_project

DEMO_SOURCES = ("stdlib", "package_docs", "docstrings")
JOBS = {
    "pipeline",
    "prep",
    "label",
    "train_heads",
    "grade",
    "curate",
    "follow",
    "verify",
    "retention",
}


def test_the_demo_has_the_promised_assets_jobs_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NMOE_CONFIG", raising=False)
    defs = build_definitions(Run("demo"))
    graph = defs.resolve_asset_graph()
    keys = {tuple(key.path) for key in graph.get_all_asset_keys()}
    names = ("documents", "shards", "manifest", "docid_slices", "quality_scores")
    names += ("topics", "selection", "curated", "curated_manifest")
    expected = {(source, name) for source in DEMO_SOURCES for name in names}
    recorded = ("signals", "language", "signatures", "duplicates")
    expected |= {(source, "attributes", name) for source in DEMO_SOURCES for name in recorded}
    heads = ("backbone", "oracle_labels", "student", "probe_head", "judge_head", "calibration")
    expected |= {("hydra", name) for name in (*heads, "regrade_plan")}
    expected |= {
        ("curation", "topic_model"),
        ("curation", "duplicates"),
        ("mixture", "loader_plan"),
    }
    assert keys == expected
    assert {job.name for job in defs.jobs or []} == JOBS
    grade = defs.resolve_job_def("grade")
    assert (grade.description or "").startswith("Makes quality_scores. Choose")
    assert grade.metadata["what_it_would_change"].value.path == ["hydra", "regrade_plan"]
    external = {tuple(key.path) for key in graph.external_asset_keys}
    rows_of_one_step = {(source, "attributes", "duplicates") for source in DEMO_SOURCES}
    assert external == {(source, "documents") for source in DEMO_SOURCES} | rows_of_one_step
    checked = {tuple(key.asset_key.path) for key in graph.asset_check_keys}
    assert checked == expected - external


def test_without_a_grader_there_are_no_labels_no_heads_and_no_jobs_that_make_them() -> None:
    defs = build_definitions(Run("demo", {"grading.grader": "none"}))
    graph = defs.resolve_asset_graph()
    names = {key.path[-1] for key in graph.get_all_asset_keys()}
    assert names.isdisjoint({"docid_slices", "oracle_labels", "student", "probe_head"})
    assert names.isdisjoint({"judge_head", "calibration", "regrade_plan"})
    assert {"quality_scores", "backbone", "topic_model", "curated", "loader_plan"} <= names
    assert {job.name for job in defs.jobs or []} == JOBS - {"label", "train_heads"}
    made = {key for job in defs.jobs or [] for key in _selected(defs, job.name)}
    assert made == graph.materializable_asset_keys
    checked = {key.name for key in graph.asset_check_keys}
    assert checked.isdisjoint({"keep_rate", "score_drift", "keep_rate_of_all"})
    assert {"counts", "digests"} <= checked
    assert "label_retries" not in {sensor.name for sensor in defs.sensors or []}


@pytest.mark.parametrize(("topics_from", "is_read"), [("terms", False), ("backbone", True)])
def test_topics_depend_on_the_backbone_only_if_they_are_made_from_it(
    tmp_path: Path, topics_from: str, *, is_read: bool
) -> None:
    run = Run("demo", {"curation.topics_from": topics_from})
    graph = build_definitions(run).resolve_asset_graph()
    backbone = dg.AssetKey(["hydra", "backbone"])
    model = graph.get(dg.AssetKey(["curation", "topic_model"]))
    assert (backbone in model.parent_keys) is is_read
    links = graph.get(backbone).metadata.values()
    shown = [link.asset_key for link in links if hasattr(link, "asset_key")]
    assert (model.key in shown) is is_read
    run = Run("demo", {"root": str(tmp_path), "curation.topics_from": topics_from})
    (foretold,) = walk(run, run_sources(run)).of("curation/topic_model")
    assert ("hydra/backbone" in foretold.waits_for) is is_read


def _selected(defs: dg.Definitions, job: str) -> set[dg.AssetKey]:
    return set(defs.resolve_job_def(job).asset_layer.selected_asset_keys)


def test_the_documentation_gives_every_check_its_level() -> None:
    text = (REPOSITORY / "docs" / "operations" / "checks.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|[^|]*\| (block|error|warn) \|", text, re.MULTILINE)
    documented = {name: level for names, level in rows for name in re.findall(r"`(\w+)`", names)}
    assert documented == LEVELS


@pytest.mark.parametrize("where", [None, "n_words > 20 and is_survivor"])
def test_every_asset_shows_its_owner_stage_kind_and_dependents(where: str | None) -> None:
    use = ["signals", "duplicates"] if where else []
    run = Run("demo", {"attributes.use": use, "curation.where": where})
    graph = build_definitions(run).resolve_asset_graph()
    keys = graph.get_all_asset_keys()
    for key in keys:
        node = graph.get(key)
        assert node.owners, key
        assert node.group_name, key
        assert node.kinds, key
        assert node.description, key
        # The catalogue prints the start of a description as it is, on one line.
        start = " ".join(node.description.split())[:100]
        assert not re.search(r"[`*#]| - ", start), key
        assert node.tags["stage"], key
        links = [v.asset_key for v in node.metadata.values() if hasattr(v, "asset_key")]
        assert set(links) <= set(keys), key
        assert links or key.path == ["mixture", "loader_plan"], key
        # One is only looked at before scores are made.
        assert set(links) <= set(node.child_keys) or key.path == ["hydra", "regrade_plan"], key
    schema = graph.get(dg.AssetKey(["stdlib", "quality_scores"])).metadata["dagster/column_schema"]
    names = [column.name for column in schema.columns]
    assert names[:5] == ["doc_id", "source", "scores", "aggregated", "decision"]


def test_every_column_leads_to_columns_of_assets_down_to_the_documents() -> None:
    graph = build_definitions(Run("demo")).resolve_asset_graph()

    def columns(key: dg.AssetKey) -> set[str]:
        return {c.name for c in graph.get(key).metadata["dagster/column_schema"].columns}

    def origins(key: dg.AssetKey, column: str) -> set[str]:
        assert column in columns(key), (key, column)
        lineage = graph.get(key).metadata.get("dagster/column_lineage")
        if lineage is None:
            return {f"{key.to_user_string()}.{column}"}
        parents = lineage.deps_by_column.get(column, [])
        return {name for dep in parents for name in origins(dep.asset_key, dep.column_name)}

    curated = dg.AssetKey(["stdlib", "curated"])
    assert origins(curated, "parent_doc_id") == {"stdlib/documents.id"}
    assert origins(curated, "topic") == origins(curated, "decision") == {"stdlib/documents.text"}
    schema = graph.get(curated).metadata["dagster/column_schema"]
    shown = {column.name: column.description for column in schema.columns}
    assert shown["decision"] == "decision of the grader; from quality_scores.decision"
    assert shown["parent_index"] == "number in the parent shard"
    labels = dg.AssetKey(["hydra", "oracle_labels"])
    assert origins(labels, "doc_id") == {f"{source}/documents.id" for source in DEMO_SOURCES}


def test_the_loader_plan_is_overdue_after_the_days_that_the_run_says() -> None:
    for days, policy in ((None, None), (7, dg.FreshnessPolicy.time_window(timedelta(days=7)))):
        settings = {"automation.plan_max_age_days": days} if days else None
        run = Run("demo", settings)
        graph = build_definitions(run).resolve_asset_graph()
        policies = {key: graph.get(key).freshness_policy for key in graph.get_all_asset_keys()}
        assert {key: found for key, found in policies.items() if found} == (
            {dg.AssetKey(["mixture", "loader_plan"]): policy} if policy else {}
        )


@pytest.mark.parametrize("by", ["all", "language"])
def test_grades_and_their_thresholds_are_made_from_languages_where_targets_are_by_language(
    by: str,
) -> None:
    defs = build_definitions(Run("demo", {"calibration.target_by": by}))
    graph = defs.resolve_asset_graph()
    source = DEMO_SOURCES[0]
    languages = {dg.AssetKey([name, "attributes", "language"]) for name in DEMO_SOURCES}
    parents = graph.get(dg.AssetKey(["hydra", "calibration"])).parent_keys
    assert parents & languages == (languages if by == "language" else set())
    own = graph.get(dg.AssetKey([source, "quality_scores"])).parent_keys & languages
    for job, is_first in (("prep", by == "language"), ("curate", by != "language")):
        made = defs.resolve_job_def(job).asset_layer.executable_asset_keys
        assert (languages <= made, languages.isdisjoint(made)) == (is_first, not is_first)
    assert own == ({dg.AssetKey([source, "attributes", "language"])} if by == "language" else set())


@pytest.mark.parametrize("most", [None, 4])
def test_a_run_of_a_backfill_makes_at_most_the_partitions_that_the_run_says(
    most: int | None,
) -> None:
    settings = {"automation.max_partitions_per_run": most} if most else None
    run = Run("demo", settings)
    graph = build_definitions(run).resolve_asset_graph()
    partitioned = [key for key in graph.materializable_asset_keys if graph.get(key).partitions_def]
    policies = [graph.get(key).backfill_policy for key in partitioned]
    assert {policy.max_partitions_per_run for policy in policies if policy} == {most}


def test_a_secret_is_shown_as_the_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from nmoe_assets.resources import WEBHOOK_VARIABLE, resources

    monkeypatch.setenv(WEBHOOK_VARIABLE, "http://127.0.0.1/secret")
    notifier = resources()["notifier"]
    assert "secret" not in str(notifier)
    assert WEBHOOK_VARIABLE in str(notifier)


def test_loading_costs_nothing_for_a_shard_and_the_same_for_each_source(tmp_path: Path) -> None:
    """Counted in calls of functions, which do not depend on what else the machine does."""
    _, few, many, more = (
        _calls(tmp_path / f"{sources}_{shards}", sources, shards)
        for sources, shards in ((1, 1), (10, 10), (10, 1000), (30, 1000))  # the first imports
    )
    assert many < 1.1 * few
    assert more < 3.6 * many


def _calls(directory: Path, num_sources: int, num_shards: int) -> int:
    """Calls of Python functions that loading the definitions takes."""
    names = [f"source{i}" for i in range(num_sources)]
    sources = [jsonl_source(name, (), valid_split="train[:1%]") for name in names]
    run = write_project(directory, sources, {"prep": {"num_shards": num_shards}}).run
    profile = cProfile.Profile(builtins=False)
    profile.runcall(lambda: build_definitions(run).get_repository_def())
    return sum(row.callcount for row in profile.getstats())


def test_the_workspace_file_names_a_location_that_loads() -> None:
    command = (program_of("dagster"), "definitions", "validate", "-w", "workspace.yaml")
    output_of(*command, cwd=REPOSITORY, timeout=120)


def test_an_interval_that_is_not_known_is_shown_as_such() -> None:
    for value, expected in ((None, "unknown"), ([None, 1.0], "unknown"), ([0, 1], "0.0000 to")):
        assert to_metadata("keep_ci95", value).startswith(expected)


def test_a_fact_is_shown_as_text_or_a_table_and_never_as_json() -> None:
    assert to_metadata("false_drop_rate", None) == "unknown"
    assert to_metadata("left_out", {}) == "none"
    choice = {"sentence": "The student grades.", "report": {"documents": 27}}
    assert to_metadata("grader_choice", choice) == "The student grades."
    found = to_metadata("drops", {"certain": 0.123456, "more": [[26, 0], [52, None]]})
    assert [record.data for record in found.records] == [
        {"name": "certain", "value": "0.1235"},
        {"name": "more", "value": "26: 0, 52: unknown"},
    ]
    nested = to_metadata("remix_0001", {"web": {"before": 0.5, "after": 0.25}})
    assert nested.records[0].data == {"name": "web", "value": "before 0.5, after 0.25"}
    [row] = to_metadata("triage", [{"step": "student", "tau": None}]).records
    assert row.data == {"step": "student", "tau": "unknown"}


def test_a_job_over_partitions_says_how_to_make_current_ones_again(tmp_path: Path) -> None:
    run = write_project(tmp_path, [jsonl_source("web", ())]).run
    jobs = build_definitions(run).resolve_all_job_defs()
    told = {job.name for job in jobs if "`nmoe/rebuild` = `true`" in (job.description or "")}
    assert {"prep", "label", "grade", "curate"} <= told
    assert "train_heads" not in told
