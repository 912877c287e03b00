"""The asset of a published plan: there with `[publish]` alone, and equal to the run's own plan."""

from pathlib import Path

import dagster as dg
import pytest

from nmoe_assets.component import build_definitions
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from tests.project import said

pytest.importorskip("obstore", reason="extra remote is not installed")
KEY = dg.AssetKey(["mixture", "published_plan"])


def test_the_plan_of_a_run_is_published_and_explained_by_its_url(
    own_project: Path,
    in_memory: dg.DagsterInstance,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, url = str(own_project / "run.toml"), f"file://{tmp_path}/store"
    assert not build_definitions(Run(config)).resolve_asset_graph().has(KEY)
    job = build_definitions(Run(config, {"publish.url": url})).resolve_job_def("publish")
    done = job.execute_in_process(instance=in_memory)
    (event,) = done.get_asset_materialization_events()
    made = {k: v.value for k, v in event.materialization.metadata.items()}
    assert made["files_sent"] == made["files"] > 0
    again = job.execute_in_process(instance=in_memory)
    assert again.get_asset_materialization_events() == [], "a current output gets no event"
    by_command = said(capsys, "publish", Run(config).tree.plan, url)
    assert by_command["files_sent"] == 0
    assert all(by_command[key] == made[key] for key in ("files", "url"))
    plan = str(made["url"])
    assert plan == f"{url}/mixture/loader_plan.json"
    explain = ("explain", "--step", "1")
    of_run = said(capsys, *explain, "--config", config)
    of_url = said(capsys, *explain, "--plan", plan, "--cache-dir", tmp_path / "cache")
    for row in of_run["rows"]:
        for document in row["documents"]:
            document["label"] = None  # labels are not published
    assert of_url == of_run
    assert "decision" in of_url["rows"][0]["documents"][0]
    assert main(["verify", "--deep", plan]) == 0
