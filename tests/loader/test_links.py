"""Symbolic links: a run follows those in its own paths; those inside data must stay inside."""

import os
from pathlib import Path

import numpy as np
import pytest

from loader import load_plan, remix, resolve_plan
from tests.loader.shared import open_loader, rows_of
from tests.refusals import refused


@pytest.fixture
def project(tree, tmp_path) -> Path:
    """A project with a source of its own, and a link to a source elsewhere."""
    tree.add("code", 3000)
    tree.add("web", 3000)
    data = tmp_path / "project" / "data"
    data.mkdir(parents=True)
    os.rename(tree.root / "code", data / "code")
    (data / "web").symlink_to(tree.root / "web")
    return data


def run_of(*paths: Path) -> dict:
    rows = [{"path": str(path)} for path in paths]
    return {"datasets": rows, "batch_size": 4, "seq_len": 16, "steps": 20}


def test_a_run_over_a_linked_source_reads_what_the_link_leads_to(project, tree):
    plan = resolve_plan(run_of(project / "code", project / "web"))
    path = project / "plan.json"
    path.write_text(plan.placed_in(project).to_json())
    straight = rows_of(open_loader(run_of(project / "code", tree.root / "web")))
    np.testing.assert_array_equal(rows_of(open_loader(load_plan(path))), straight)
    alone = resolve_plan(run_of(project / "code"))
    after, _ = remix(alone, 5, weights={"code": 1, "web": 1}, sources={"web": project / "web"})
    assert rows_of(open_loader(after)).shape == (80, 17)


def test_a_link_to_the_whole_project_leaves_its_plan_relative(project, tmp_path):
    (project / "web").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "project")
    plan = resolve_plan(run_of(tmp_path / "link" / "data" / "code"))
    assert plan.placed_in(tmp_path / "link").root == "data/code/train"


def test_linked_files_of_a_hub_snapshot_are_refused_when_the_run_is_planned(project, tmp_path):
    blob = tmp_path / "blob"
    shard = next(project.rglob("code-*.npy"))
    shard.rename(blob)
    shard.symlink_to(blob)
    with refused("E-PATH-ESCAPE", naming=[f"a symbolic link to {blob}", "or copy the files"]):
        resolve_plan(run_of(project / "code"))


def test_a_flow_over_a_link_that_leads_out_of_its_data_root_is_refused_when_planned(
    project, tree, tmp_path
):
    tree.root = project
    cfg = tree.flow(tmp_path, {"pretrain": (1600, {"web": 1, "code": 1})})
    with refused("E-PATH-ESCAPE", naming=["a symbolic link to", "name the directory"]):
        resolve_plan(cfg)
