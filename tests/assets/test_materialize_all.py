"""What "Materialize all" of the lineage makes, asked as the UI asks."""

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from nmoe_assets.component import build_definitions
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.labels.slices import former_data_digest
from tests.assets.server import BACKFILL, LOCATION
from tests.assets.small_project import (
    KEYS,
    environment,
    execute_here,
    opened,
    program_of,
    small_project,
)
from tests.project import output_of


def test_materialize_all_makes_every_asset(tmp_path: Path) -> None:
    # With one definition of partitions over all roots the UI names partitions instead of "all".
    run = small_project(tmp_path, prep={"num_valid_shards": 2}).run
    graph = build_definitions(run).resolve_asset_graph()
    everything = graph.materializable_asset_keys
    asked = {
        "assetSelection": [{"path": list(key.path)} for key in everything],
        "partitionNames": list(KEYS),
    }
    backfill_id = launch_backfill(tmp_path, environment(tmp_path), asked)
    with opened(tmp_path) as instance:
        backfill = instance.get_backfill(backfill_id)
        assert backfill is not None
        assert backfill.asset_backfill_data is not None
        targets = backfill.asset_backfill_data.target_subset
    assert targets.asset_keys == everything
    labels = targets.get_partitions_subset(dg.AssetKey(["hydra", "oracle_labels"]))
    assert len(set(labels.get_partition_keys())) == 24


def launch_backfill(project: Path, env: dict[str, str], asked: dict[str, Any]) -> str:
    command = (program_of("dagster-graphql"), "-m", LOCATION, "-t", BACKFILL)
    printed = output_of(*command, "-v", json.dumps({"b": asked}), env=env, cwd=project)
    [answer] = [line for line in printed.splitlines() if line.startswith("{")]
    launched = json.loads(answer)["data"]["launchPartitionBackfill"]
    assert launched["__typename"] == "LaunchBackfillSuccess", launched
    return launched["backfillId"]


@pytest.mark.long
def test_heads_refuse_labels_of_documents_that_changed(
    own_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_project / "in" / "docs.jsonl"
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps({"text": json.loads(lines[-1])["text"] + " One more sentence."})
    path.write_text("\n".join(lines) + "\n")
    assert execute_here(own_project, "prep", "docs").success
    heads = sorted((own_project / "out" / "heads").glob("*.safetensors"))
    before = [head.stat().st_ino for head in heads]
    config = str(own_project / "run.toml")
    done = execute_here(own_project, "train_heads")
    assert not done.success
    capsys.readouterr()
    assert main(["hydra", "calibrate", "--config", config]) == 1
    [told] = capsys.readouterr().err.splitlines()
    assert "labelled documents have changed" in told
    assert [head.stat().st_ino for head in heads] == before
    assert execute_here(own_project, "label").success
    assert execute_here(own_project, "train_heads").success


def test_labels_of_an_earlier_version_are_not_requested_again(own_project: Path) -> None:
    """Labels cost money: those that name whole manifests are of the same documents."""
    run = Run(own_project / "run.toml")
    labels = sorted(run.tree.labels.glob("*/shard_*"))
    for shard in labels:
        sources = sorted(json.loads((shard / "summary.json").read_text())["per_source"])
        value = json.loads((shard / "summary.json").read_text())
        for added in ("format", "content_hash"):
            value.pop(added, None)
        value["fingerprints"]["data"] = former_data_digest(run.tree.data, sources)
        (shard / "summary.json").write_text(json.dumps(value))
        started = {"fingerprints": value["fingerprints"]}
        (shard / "started.json").write_text(json.dumps(started))
    before = [(shard / "scores.jsonl").stat().st_mtime_ns for shard in labels]
    assert main(["hydra", "oracle-label", "--config", str(run.path)]) == 0
    assert [(shard / "scores.jsonl").stat().st_mtime_ns for shard in labels] == before
    assert main(["hydra", "calibrate", "--config", str(run.path)]) == 0
