"""The pages of the project behind the webserver: why an output is stale, and what prep changed."""

import os
from pathlib import Path

from dagster import AssetKey
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from nmoe_assets.component import build_definitions
from nmoe_assets.names import PICTURES
from nmoe_assets.ops.pictures import with_pictures
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from tests.assets.small_project import append
from tests.project import jsonl_source, write_project


def test_the_page_of_an_asset_links_to_why_it_is_stale(own_project: Path) -> None:
    os.environ["NMOE_CONFIG"] = str(own_project / "run.toml")
    ui = TestClient(with_pictures(PlainTextResponse("another page")))
    graph = build_definitions(Run(own_project / "run.toml")).resolve_asset_graph()
    link = graph.get(AssetKey(["hydra", "calibration"])).metadata["why it is stale"]
    assert "hydra/calibration is current" in ui.get(link.value).text
    append(own_project, "\n[calibration]\ntarget_keep = 0.3\n")
    shown = ui.get(link.value).text
    assert "calibration.target_keep: 0.5 -&gt; 0.3" in shown
    assert "hydra/calibration is current" not in shown
    assert shown.index("code/quality_scores") > shown.index("0.5 -&gt; 0.3")
    assert "after hydra/calibration" in shown
    (own_project / "run.toml").write_text("prep = 1")
    assert ui.get(link.value).status_code == 404


def test_the_page_of_a_manifest_shows_samples_of_what_transforms_changed(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "text": f"{i} {'words ' * 40}\nclick here\nmore"} for i in range(40)]
    table = {"kind": "lines", "bad_starts": ["click here"], "sources": ["web"]}
    sources = [jsonl_source("web", rows), jsonl_source("books", rows)]
    config = write_project(tmp_path, sources, {"transforms": [table]}).config
    assert main(["run", "prep", "--config", str(config)]) == 0
    os.environ["NMOE_CONFIG"] = str(config)
    ui = TestClient(with_pictures(PlainTextResponse("another page")))
    shown = ui.get(f"{PICTURES}web/manifest").text
    assert "Samples of changed text" in shown
    assert shown.count("<td>click here") == 5
    assert "Samples of changed text" not in ui.get(f"{PICTURES}books/manifest").text
