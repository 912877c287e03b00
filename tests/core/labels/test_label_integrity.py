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
from nmoe_core.base.errors import FormatError, LabelError, LockedError
from nmoe_core.cli import main
from nmoe_core.labels.files import label_status, merge_labels, read_labels, require_current_labels
from nmoe_core.labels.noise import label_again, merge_noise, read_noise
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


def test_scores_inverted_by_hand_are_refused_in_one_line(
    labelled: Labelling, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_labels(labelled.merged).scores
    edit(labelled.merged, invert)
    for read in (read_labels, lambda path: merge_labels(labelled.tree, "val")):
        with refused("E-LABEL-CORRUPT", match="changed after"):
            read(labelled.merged)
    command = ["hydra", "calibrate", "--compat", "--labels", str(labelled.merged)]
    assert main([*command, "--out", str(tmp_path / "calibration")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "ERROR [E-LABEL-CORRUPT]" in line
    labelled.merged.unlink()
    merge_labels(labelled.tree, "val")
    assert (read_labels(labelled.merged).scores == before).all()


def test_scores_of_a_shard_changed_by_hand_are_refused_by_every_reader(labelled: Labelling) -> None:
    scores, oracle = labelled.shard(0, "val") / "scores.jsonl", FakeOracle()
    edit(scores, invert)
    for read in (
        lambda: read_labels(scores),
        lambda: merge_labels(labelled.tree, "val"),
        lambda: labelled.run(oracle, split="val"),
    ):
        with pytest.raises(LabelError, match="changed after"):
            read()
    assert oracle.asked == []


def test_labels_that_are_not_finished_are_not_read(labelling: Labelling) -> None:
    labelling.run()
    labelling.break_off(*labelling.lines())
    with refused("E-LABEL-COVERAGE"):
        read_labels(labelling.shard() / "scores.jsonl")


DIGESTS = {"scores_sha256", "labels_sha256"}
FORGED = {
    "digest removed": lambda row: [row.pop(key) for key in DIGESTS & row.keys()],
    "hash removed": lambda row: row.pop("content_hash"),
    "count changed": lambda row: row.update(parsed=0),
}  # fmt: skip


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
        # An earlier version wrote neither a format nor a hash; its digest is checked all the same.
        path.write_bytes(kept)
        edit(path, lambda row: [row.pop(key) for key in ("format", "content_hash")])
        read()
        path.write_bytes(kept)


def test_a_changed_summary_does_not_vouch_for_the_documents_of_its_labels(
    labelled: Labelling,
) -> None:
    require_current_labels(labelled.tree, "val")
    edit(labelled.shard(0, "val") / "summary.json", lambda row: row.update(per_source={}))
    with refused("E-LABEL-CORRUPT"):
        require_current_labels(labelled.tree, "val")


def test_noise_that_was_changed_is_refused(labelled: Labelling) -> None:
    for i in range(8):
        label_again(labelled.documents(i, "val"), 2, labelled.shard(i, "val"), FakeOracle())
    merge_noise(labelled.tree, "val")
    path = labelled.tree.labels / "merged" / "noise_val.json"
    kept = path.read_bytes()
    for change in (lambda row: row.update(ceiling=0.1), lambda row: row.pop("content_hash")):
        edit(path, change)
        with refused("E-LABEL-CORRUPT"):
            read_noise(path)
        path.write_bytes(kept)
    edit(path, lambda row: [row.pop(key) for key in ("format", "content_hash")])
    assert (read_noise(path) or {})["ceiling"] is not None
    edit(labelled.shard(0, "val") / "relabelled" / "scores.jsonl", invert)
    with pytest.raises(LabelError, match="changed after"):
        merge_noise(labelled.tree, "val")


def test_a_slice_that_was_changed_is_refused_by_its_reader(
    labelling: Labelling, tmp_path: Path
) -> None:
    slices = labelling.tree.slices
    for name in ("val_shard_00", "docids_val.jsonl", "sources/web/docids_train.jsonl"):
        path, own = slices / name, tmp_path / "of_my_own"
        kept = path.read_bytes()
        path.write_bytes(b"".join(kept.splitlines(keepends=True)[:-1]))
        with refused("E-SLICE-CHANGED"):
            read_slice(path)
        path.write_bytes(kept)
        own.write_bytes(kept.splitlines(keepends=True)[0])
        assert len(read_slice(own)) == 1
        assert read_slice(path)
    edit(slices / "slices_manifest.json", lambda row: row["files"].pop("val_shard_00"))
    with pytest.raises(FormatError, match="content_hash"):
        read_slice(slices / "val_shard_00")


def test_a_source_list_that_was_changed_is_not_dealt_out(labelling: Labelling) -> None:
    path = labelling.tree.slices / "sources" / "web" / "docids_val.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    (labelling.tree.slices / "slices_manifest.json").unlink()
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
