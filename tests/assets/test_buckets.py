"""Buckets as assets: their definition once, the buckets of documents per shard."""

from pathlib import Path
from typing import Any

import pytest

from loader.plan.file import load_plan
from nmoe_core.cli import main
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.walk import walk
from nmoe_core.tasks.report.account import NOT_ACCOUNTED, run_account
from nmoe_core.tasks.report.buckets import plan_buckets
from nmoe_core.tasks.report.pictures import picture_of
from nmoe_core.tasks.report.write import write_report
from tests.core.curate.bucketed import SETTINGS, bucket_project, bucket_rows
from tests.project import Project, contents, json_lines

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")


def _run(project: Project) -> None:
    assert main(["run", "--config", str(project.config)]) == 0


def _stale(project: Project) -> dict[str, str]:
    states = walk(project.run, run_sources(project.run)).states.items()
    return {f"{key}:{part}": one.reason for (key, part), one in states if not one.is_current}


def test_a_run_makes_buckets_and_then_only_what_changes_touch(tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS | {"backbone": {"kind": "tiny"}}
    project = bucket_project(tmp_path, settings)
    assert {"curation/buckets:", "web/buckets:0000"} <= _stale(project).keys()
    _run(project)
    assert not _stale(project)
    run = project.run
    names = {source.name for source in load_plan(run.tree.plan).sources}
    assert {"web/en/q1", "books/en/q1"} <= names
    plan = load_plan(run.tree.plan)
    account = run_account(run, plan)
    assert not [line for line in account["total"] if line["name"] == NOT_ACCOUNTED]
    buckets = plan_buckets(run, plan)
    assert {one.name for one in buckets} == names
    assert sum(one.sequences for one in buckets) == plan.num_sequences
    assert all((one.epochs or 0) > 0 for one in buckets)
    assert picture_of(run, "mixture/loader_plan").count("data:image/png") >= 2
    page = write_report(run, tmp_path / "report" / "index.html")[0].read_text()
    assert all(f"<td>{name}</td>" in page for name in names)
    before = contents(tmp_path / "out" / "curated", "*.npy")
    definition = run.tree.buckets.read_bytes()

    rows = bucket_rows("web")
    moved = next(i for i, row in enumerate(rows) if row["lang"] == "en" and len(row["text"]) > 90)
    rows[moved]["lang"] = "de/at"
    (tmp_path / "in/web.jsonl").write_text(json_lines(rows))
    _run(project)
    assert not _stale(project)
    assert run.tree.buckets.read_bytes() == definition
    after = contents(tmp_path / "out" / "curated", "*.npy")
    changed = {name for name in after.keys() | before if after.get(name) != before.get(name)}
    assert 0 < len(changed) <= 2
    assert all(name.startswith("web/") for name in changed)

    manifest = run.tree.bucket_manifests("web")[0]
    manifest.unlink()
    assert "web/curated_manifest:" in _stale(project)
    _run(project)
    assert manifest.is_file()
    assert not _stale(project)
