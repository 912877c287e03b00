"""The code location loads light, and shows the assets, checks and jobs it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nmoe_core.config import Run

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_SOURCES = ("stdlib", "package_docs", "docstrings")
NAMED_JOBS = {"pipeline", "prep", "label", "train_heads", "grade", "curate"}


def test_definitions_load_without_torch_or_any_other_heavy_package() -> None:
    code = """
import sys
import nmoe_assets.definitions
heavy = {"torch", "sklearn", "datasets", "matplotlib", "safetensors", "transformers"}
sys.exit(f"imported {heavy & set(sys.modules)}" if heavy & set(sys.modules) else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_demo_has_the_promised_assets_jobs_and_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NMOE_CONFIG", raising=False)
    from nmoe_assets.definitions import build_definitions

    defs = build_definitions(Run(REPOSITORY / "configs" / "demo.toml"))
    graph = defs.resolve_asset_graph()
    keys = {tuple(key.path) for key in graph.get_all_asset_keys()}
    names = ("documents", "shards", "manifest", "docid_slices", "quality_scores")
    names += ("topics", "curated", "curated_manifest")
    expected = {(source, name) for source in DEMO_SOURCES for name in names}
    heads = ("backbone", "oracle_labels", "probe_head", "judge_head", "calibration")
    expected |= {("hydra", name) for name in heads}
    expected |= {("curation", "topic_model"), ("mixture", "loader_plan")}
    assert keys == expected
    assert {job.name for job in defs.jobs or []} >= NAMED_JOBS
    checks = {(tuple(k.asset_key.path), k.name) for k in graph.asset_check_keys}
    assert len(checks) == 4 * len(DEMO_SOURCES)
    external = {tuple(key.path) for key in graph.external_asset_keys}
    assert external == {(source, "documents") for source in DEMO_SOURCES}


def test_the_workspace_file_names_a_location_that_loads() -> None:
    command = [str(Path(sys.executable).with_name("dagster")), "definitions", "validate"]
    done = subprocess.run(
        [*command, "-w", "workspace.yaml"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
