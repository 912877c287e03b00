"""Data versions and fingerprints are of bytes: what one edited record makes stale."""

import json
from collections.abc import Mapping
from pathlib import Path

import dagster as dg

from nmoe_core.cli import main
from tests.assets.small_project import KEYS, execute_here, opened


def versions(project: Path, name: str) -> dict[str, str]:
    """Partition -> data version of the newest materialisation of an asset of docs."""
    found = {}
    with opened(project) as instance:
        for key in KEYS:
            filter_ = dg.AssetRecordsFilter(dg.AssetKey(["docs", name]), asset_partitions=[key])
            [record] = instance.fetch_materializations(filter_, limit=1).records
            event = record.asset_materialization
            assert event is not None
            found[key] = (event.tags or {})["dagster/data_version"]
    return found


def summaries(project: Path, output: str) -> dict[str, tuple[int, int]]:
    """Shard -> inode and time of its summary: commits replace files, and may get an inode again."""
    found = sorted((project / "out" / output / "docs").glob("shard_*/summary.json"))
    stats = {path.parent.name: path.stat() for path in found}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    assert before.keys() == after.keys()
    return [key for key in before if before[key] != after[key]]


def test_one_edited_record_makes_one_shard_and_its_dependents_stale(own_project: Path) -> None:
    names = ("shards", "quality_scores", "topics")
    before = {name: versions(own_project, name) for name in names}
    path = own_project / "in" / "docs.jsonl"
    *lines, last = path.read_text().splitlines()  # which is of the training split
    edited = json.loads(last)["text"] + " One more sentence."
    path.write_text("\n".join([*lines, json.dumps({"text": edited})]) + "\n")
    assert execute_here(own_project, "prep", "docs").success
    stale = changed(before["shards"], versions(own_project, "shards"))
    assert len(stale) == 1

    config = str(own_project / "run.toml")
    for command, output in (("hydra grade", "quality"), ("curate shards", "topics")):
        files = summaries(own_project, output)
        assert main([*command.split(), "--config", config, "--source", "docs"]) == 0
        assert changed(files, summaries(own_project, output)) == [f"shard_{stale[0]}"]

    for job in ("grade", "curate"):
        assert execute_here(own_project, job, "docs").success
    assert changed(before["quality_scores"], versions(own_project, "quality_scores")) == stale
    assert set(changed(before["topics"], versions(own_project, "topics"))) <= set(stale)
