"""The file that records each output; an output without this file is made again."""

from pathlib import Path

from nmoe_core.base.atomic import fsync_dir, output_lock
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.walk import walk


def record_of(run: Run, key: str, partition: str = "") -> Path:
    """The file that a task commits last for an output, which has the key that `nmoe plan` shows."""
    tree = run.tree
    group, _, kind = key.partition("/")
    fixed = {
        "hydra/backbone": tree.checkpoint / "config.json",
        "hydra/student": tree.student,
        "hydra/probe_head": tree.probe,
        "hydra/judge_head": tree.judge,
        "hydra/calibration": tree.calibration_summary,
        "curation/duplicates": tree.duplicates,
        "curation/topic_model": tree.topic_model,
        "curation/buckets": tree.buckets,
        "mixture/loader_plan": tree.plan,
    }
    if key in fixed:
        return fixed[key]
    if key == "hydra/oracle_labels":
        split, _, number = partition.partition("-")
        return tree.label_shard(split, int(number)) / "summary.json"
    if kind in ("manifest", "valid_manifest"):
        return tree.manifest(group, "valid" if kind == "valid_manifest" else "train")
    if kind == "docid_slices":
        return tree.source_slices(group) / "summary.json"
    if kind == "curated_manifest":
        return tree.curated_manifest(group)
    shard = tree.shard(group, int(partition), "valid" if kind == "valid_shards" else "train")
    if kind.startswith("attributes/"):
        return shard.attribute(kind.removeprefix("attributes/"))
    records = {
        "shards": shard.manifest,
        "valid_shards": shard.manifest,
        "quality_scores": shard.graded / "summary.json",
        "topics": shard.with_topics / "summary.json",
        "selection": shard.selection,
        "buckets": shard.buckets,
        "curated": shard.curation,
        "seen_index": shard.seen_index,
    }
    return records[kind]


def forget(run: Run, outputs: list[str]) -> list[Path]:
    """Remove the records of outputs, so that their tasks make them again; return the paths.

    Args:
        run: The run.
        outputs: Keys as shown in a plan, optionally with a partition: `web/shards:0003`.

    Raises:
        ConfigError: The run does not have one of these outputs (E-CONFIG-OUTPUT); no file is
            removed in this case.
        LockedError: Another process is writing one of these outputs.
    """
    known = walk(run, run_sources(run)).states
    places: list[tuple[str, str]] = []
    for output in outputs:
        key, _, partition = output.partition(":")
        found = [place for place in known if place[0] == key and partition in ("", place[1])]
        if not found:
            raise ConfigError(
                "the run does not have this output",
                where=run.path,
                found=output,
                expected="a key of nmoe plan, such as web/shards:0003",
                do="list the keys with nmoe plan --json, or find them in the UI",
                code="E-CONFIG-OUTPUT",
            )
        places += found
    removed = [record_of(run, *place) for place in places]
    for path in removed:
        if path.exists():
            with output_lock(path.parent):
                path.unlink()
                fsync_dir(path.parent)
    return removed
