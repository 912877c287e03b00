"""Labels, noise and slices that were changed after they were written are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import LockedError
from nmoe_core.cli import main
from nmoe_core.labels.agreement import merge_noise, read_noise
from nmoe_core.labels.files import label_status, merge_labels, read_labels, require_current_labels
from nmoe_core.labels.slices import combine_slices, read_slice, write_source_slices
from tests.core.labels.labelling import Labelling
from tests.core.quality import FakeOracle
from tests.refusals import refused


@pytest.fixture
def labelled(labelling: Labelling) -> Labelling:
    """All of train and val labelled, val merged."""
    labelling.run_all()
    merge_labels(labelling.tree, "val")
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
    merge, ask = lambda: merge_labels(tree, "val"), lambda: labelled.run(oracle, split="val")
    for path, readers in ((labelled.merged, [merge]), (shard, [merge, ask])):
        kept = path.read_bytes()
        edit(path, invert)
        for read in (lambda path=path: read_labels(path), *readers):
            with refused("E-LABEL-CORRUPT", match="changed after"):
                read()
        command = ["hydra", "calibrate", "--compat", "--labels", str(path)]
        assert main([*command, "--out", str(tmp_path / "calibration")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "ERROR [E-LABEL-CORRUPT]" in line
        path.write_bytes(kept)
    assert oracle.asked == []
    labelled.merged.unlink()
    merge_labels(tree, "val")
    assert (read_labels(labelled.merged).scores == before).all()


def without(*keys: str) -> Callable[[dict[str, Any]], object]:
    return lambda row: [row.pop(key) for key in keys if key in row]


OLD = without("format", "content_hash")  # as an earlier version wrote it
FORGED = {
    "digest removed": without("scores_sha256", "labels_sha256"),
    "hash removed": without("content_hash"),
    "count changed": lambda row: row.update(parsed=0, ceiling=0.1),
    "sources removed": lambda row: row.update(per_source={"none": {}}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_summary_that_was_changed_is_refused_and_one_of_an_earlier_version_is_not(
    labelled: Labelling, name: str
) -> None:
    places = {
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


def test_noise_that_was_changed_is_refused(labelled: Labelling) -> None:
    for i in range(8):
        labelled.run_again(i, 2)
    merge_noise(labelled.tree, "val")
    path = labelled.tree.labels / "merged" / "noise_val.json"
    kept = path.read_bytes()
    for name in ("count changed", "hash removed"):
        edit(path, FORGED[name])
        with refused("E-LABEL-CORRUPT"):
            read_noise(path)
        path.write_bytes(kept)
    edit(path, OLD)
    assert (read_noise(path) or {})["ceiling"] is not None
    edit(labelled.shard(0, "val") / "relabelled" / "scores.jsonl", invert)
    with refused("E-LABEL-CORRUPT", match="changed after"):
        merge_noise(labelled.tree, "val")


def test_a_slice_that_was_changed_is_refused_by_its_reader(
    labelling: Labelling, tmp_path: Path
) -> None:
    slices, own = labelling.tree.slices, tmp_path / "of_my_own"
    for name in ("val_shard_00", "docids_val.jsonl", "sources/web/docids_val.jsonl"):
        path = slices / name
        first, *rest = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(rest))
        with refused("E-SLICE-CHANGED"):
            read_slice(path)
        if "sources" not in name:
            path.write_bytes(b"".join([first, *rest]))
            assert len(read_slice(path)) == len(rest) + 1
    own.write_bytes(first)
    assert len(read_slice(own)) == 1
    edit(slices / "slices_manifest.json", lambda row: row["files"].pop("val_shard_00"))
    with refused("E-SLICE-CHANGED", match="content_hash"):
        read_slice(slices / "val_shard_00")
    # The source's list that was changed is not dealt out either.
    (slices / "slices_manifest.json").unlink()
    with refused("E-SLICE-CHANGED"):
        combine_slices(labelling.tree, ["web", "books"])
    (path.parent / "slices.json").unlink()
    assert write_source_slices(labelling.tree, "web").facts["changed"]
    combine_slices(labelling.tree, ["web", "books"])


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
    assert main(["hydra", "merge-labels", "--labels", str(labelling.tree.labels), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val"]["salvaged"] == salvaged

    strict = read_labels(labelling.merged)
    lenient = read_labels(labelling.merged, use_salvaged=True)
    assert (len(strict.doc_ids), strict.num_salvaged) == (parsed - salvaged, salvaged)
    assert (len(lenient.doc_ids), lenient.num_salvaged) == (parsed, 0)
    # Other labels are other inputs: a head trained on the ones is not current for the others.
    assert strict.digest != lenient.digest


def test_slices_are_combined_by_one_process_at_a_time_and_leave_no_temporary_file(
    labelling: Labelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices, sources = labelling.tree.slices, ["web", "books"]
    manifest = slices / "slices_manifest.json"
    names = ["slices_manifest.json", "val_shard_07", "docids_train.jsonl"]
    expected = {name: (slices / name).read_bytes() for name in names}
    for name in names:
        (slices / f"{name}.tmp.4194399").write_bytes(b"left by a killed writer")
    manifest.unlink()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: combine_slices(labelling.tree, sources), range(4)))
    assert sorted(result.facts["changed"] for result in made) == [False, False, False, True]
    assert {name: (slices / name).read_bytes() for name in names} == expected
    assert not list(slices.glob("*.tmp.*"))
    manifest.unlink()
    monkeypatch.setattr("nmoe_core.labels.slices.MAX_WAIT_S", 0.0)
    with output_lock(slices / ".locks" / "combined"), pytest.raises(LockedError):
        combine_slices(labelling.tree, sources)
