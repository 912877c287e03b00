"""Labels, noise and slices that were changed after they were written are refused."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.labels.agreement import merge_noise, read_noise
from nmoe_core.labels.label_files import (
    label_status,
    merge_labels,
    read_labels,
    require_current_labels,
)
from tests.core.labels.labelling import Labelling
from tests.core.small_gradings import FakeOracle
from tests.project import said
from tests.refusals import refused, refused_line


@pytest.fixture
def labelled(labelling: Labelling) -> Labelling:
    """All of train and val labelled, some of val twice, val merged."""
    labelling.run_all()
    for i in range(8):
        labelling.run_again(i, 2)
    merge_labels(labelling.tree, "val")
    merge_noise(labelling.tree, "val")
    return labelling


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change every object of a JSON or JSON lines file by hand."""
    text = path.read_text()
    rows = [json.loads(t) for t in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def invert(row: dict[str, Any]) -> None:
    row["scores"] = {name: 4 - grade for name, grade in row["scores"].items()}
    row["aggregated"] = 1 - row["aggregated"]


def test_scores_inverted_by_hand_are_refused_by_every_reader_in_one_line(
    labelled: Labelling, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, oracle = labelled.tree, FakeOracle()
    before = read_labels(labelled.merged).scores
    shard = labelled.shard(0, "val") / "scores.jsonl"
    again = shard.parent / "relabelled" / shard.name
    merge, noise = partial(merge_labels, tree, "val"), partial(merge_noise, tree, "val")
    ask = partial(labelled.run, oracle, split="val")
    readers = {labelled.merged: [merge], shard: [merge, ask, noise], again: [noise]}
    for path in readers:
        kept = path.read_bytes()
        edit(path, invert)
        for read in (partial(read_labels, path), *readers[path]):
            with refused("E-LABEL-CORRUPT", match="changed after"):
                read()
        command = ["hydra", "calibrate", "--compat", "--labels", str(path), "--out"]
        refused_line(capsys, *command, str(tmp_path / "calibration"), code="E-LABEL-CORRUPT")
        path.write_bytes(kept)
    assert oracle.asked == []
    labelled.merged.unlink()
    merge_labels(tree, "val")
    assert (read_labels(labelled.merged).scores == before).all()


def test_what_a_killed_merge_left_goes_with_the_next_one(labelled: Labelling) -> None:
    merged = labelled.merged
    summary = merged.with_name(f"{merged.stem}.summary.json")
    for path in (merged, summary, merged.with_name("noise_val.json")):
        path.with_name(f"{path.name}.tmp.4194399").write_bytes(b"left by a killed merge")
    summary.unlink()
    merge_labels(labelled.tree, "val")
    merge_noise(labelled.tree, "val")
    assert list(merged.parent.glob("*.tmp.*")) == []


def without(*keys: str) -> Callable[[dict[str, Any]], object]:
    return lambda row: [row.pop(key) for key in keys if key in row]


OLD = without("format", "content_hash")  # as an earlier version wrote it
FORGED = {
    "digest removed": without("scores_sha256", "labels_sha256", "kinds"),
    "hash removed": without("content_hash"),
    "count changed": lambda row: row.update(parsed=0, ceiling=0.1),
    "sources removed": lambda row: row.update(per_source={"none": {}}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_changed_summary_is_refused_and_an_old_one_is_read(
    labelled: Labelling, name: str
) -> None:
    noise = labelled.merged.with_name("noise_val.json")
    places = {
        noise: lambda: read_noise(noise),
        labelled.shard(0, "val") / "summary.json": lambda: merge_labels(labelled.tree, "val"),
        labelled.merged.with_name("labels_val.summary.json"): lambda: read_labels(labelled.merged),
    }
    for path, read in places.items():
        kept = path.read_bytes()
        edit(path, FORGED[name])
        with refused("E-LABEL-CORRUPT"):
            read()
        # Nor does it vouch for the documents that the labels are of.
        if path.name == "summary.json":
            with refused("E-LABEL-CORRUPT"):
                require_current_labels(labelled.tree, "val")
        # An earlier version wrote neither a format nor a hash; its digest is checked all the same.
        path.write_bytes(kept)
        edit(path, OLD)
        read()
        require_current_labels(labelled.tree, "val")
        path.write_bytes(kept)


def test_salvaged_labels_are_counted_everywhere_and_used_on_request_alone(
    labelling: Labelling, capsys: pytest.CaptureFixture[str]
) -> None:
    def every_third(results: Any) -> Any:
        return ((i, dataclasses.replace(r, is_salvaged=i % 3 == 0)) for i, r in results)

    labelling.run_all(FakeOracle(change=every_third))
    asked = [len(labelling.documents(i, "val").rows) for i in range(8)]
    parsed, salvaged = sum(asked), sum(-(-count // 3) for count in asked)
    assert salvaged > 0
    facts = merge_labels(labelling.tree, "val").facts
    assert (facts["salvaged"], facts["parsed"]) == (salvaged, parsed)
    summary = json.loads(labelling.merged.with_name("labels_val.summary.json").read_text())
    assert summary["salvaged"] == salvaged
    assert sum(row["salvaged"] for row in summary["per_source"].values()) == salvaged
    shard = json.loads((labelling.shard(0, "val") / "summary.json").read_text())
    assert shard["salvaged"] == -(-asked[0] // 3)
    rows = label_status(labelling.tree)
    assert sum(row.salvaged or 0 for row in rows if row.split == "val") == salvaged
    merged = said(capsys, "hydra", "merge-labels", "--labels", labelling.tree.labels)
    assert merged["val"]["salvaged"] == salvaged

    strict = read_labels(labelling.merged)
    lenient = read_labels(labelling.merged, use_salvaged=True)
    assert (len(strict.doc_ids), strict.num_salvaged) == (parsed - salvaged, salvaged)
    assert (len(lenient.doc_ids), lenient.num_salvaged) == (parsed, 0)
    # Other labels are other inputs: a head trained on the ones is not current for the others.
    assert strict.digest != lenient.digest
