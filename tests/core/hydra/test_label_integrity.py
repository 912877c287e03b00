"""Labels, noise and slices that were changed after they were written are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import FormatError, LabelError, LockedError, NmoeError
from nmoe_core.cli import main
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.currency import require_current_labels
from nmoe_core.labels.document_texts import ShardDocuments
from nmoe_core.labels.files import merge_labels, read_labels
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.noise import label_again, merge_noise, read_noise
from nmoe_core.labels.slices import combine_slices, read_slice, write_source_slices
from nmoe_core.labels.status import label_status


class Tree:
    """Slices and labels of both splits."""

    def __init__(self, base: Path, data_root: Path, world: SimpleNamespace, rubric: Rubric) -> None:
        self.world, self.data_root, self.rubric = world, data_root, rubric
        self.labels, self.slices = base / "labels", world.slice_all(data_root, base / "slices")
        self.merged = self.labels / "merged" / "labels_val.jsonl"

    def documents(self, split: str, i: int) -> ShardDocuments:
        tokenizer = self.world.FakeTokenizer()
        path = self.slices / f"{split}_shard_{i:02d}"
        return ShardDocuments(path, self.data_root, tokenizer, 16, self.world.EOS)

    def label(self, oracle: Any = None) -> None:
        for split in ("train", "val"):
            for i in range(8):
                shard = self.labels / split / f"shard_{i}"
                documents = self.documents(split, i)
                label_shard(documents, shard, oracle or self.world.FakeOracle(), self.rubric)


@pytest.fixture
def tree(tmp_path: Path, data_root: Path, world: SimpleNamespace, rubric: Rubric) -> Tree:
    return Tree(tmp_path, data_root, world, rubric)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change every object of a JSON or JSON lines file by hand."""
    is_lines = path.suffix == ".jsonl"
    rows = [
        json.loads(t) for t in (path.read_text().splitlines() if is_lines else [path.read_text()])
    ]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def invert(row: dict[str, Any]) -> None:
    row["scores"] = {name: 4 - grade for name, grade in row["scores"].items()}
    row["aggregated"] = 1 - row["aggregated"]


def test_scores_inverted_by_hand_are_refused_in_one_line(
    tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree.label()
    merge_labels(tree.labels, "val")
    before = read_labels(tree.merged).scores
    edit(tree.merged, invert)
    for read in (read_labels, lambda path: merge_labels(tree.labels, "val")):
        with pytest.raises(LabelError, match="changed after") as refused:
            read(tree.merged)
        assert refused.value.code == "E-LABEL-CORRUPT"
    command = ["hydra", "calibrate", "--compat", "--labels", str(tree.merged)]
    assert main([*command, "--out", str(tmp_path / "calibration")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "ERROR [E-LABEL-CORRUPT]" in line
    tree.merged.unlink()
    merge_labels(tree.labels, "val")
    assert (read_labels(tree.merged).scores == before).all()


def test_scores_of_a_shard_changed_by_hand_are_refused_by_all_who_read_them(tree: Tree) -> None:
    tree.label()
    shard = tree.labels / "val" / "shard_0"
    oracle, documents = tree.world.FakeOracle(), tree.documents("val", 0)
    edit(shard / "scores.jsonl", invert)
    for read in (
        lambda: read_labels(shard / "scores.jsonl"),
        lambda: merge_labels(tree.labels, "val"),
        lambda: label_shard(documents, shard, oracle, tree.rubric),
    ):
        with pytest.raises(LabelError, match="changed after"):
            read()
    assert oracle.asked == []


def test_labels_that_are_not_finished_are_not_read(tree: Tree) -> None:
    tree.label()
    shard = tree.labels / "val" / "shard_0"
    (shard / "summary.json").unlink()
    with pytest.raises(LabelError) as refused:
        read_labels(shard / "scores.jsonl")
    assert refused.value.code == "E-LABEL-COVERAGE"


DIGESTS = {"scores_sha256", "labels_sha256"}
FORGED = {
    "digest removed": lambda row: [row.pop(key) for key in DIGESTS & row.keys()],
    "hash removed": lambda row: row.pop("content_hash"),
    "count changed": lambda row: row.update(parsed=0),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_summary_that_was_changed_is_refused_and_one_of_an_earlier_version_is_not(
    tree: Tree, name: str
) -> None:
    tree.label()
    merge_labels(tree.labels, "val")
    shard = tree.labels / "val" / "shard_0"
    places = {
        shard / "summary.json": lambda: merge_labels(tree.labels, "val"),
        tree.merged.with_name("labels_val.summary.json"): lambda: read_labels(tree.merged),
    }
    for path, read in places.items():
        kept = path.read_bytes()
        edit(path, FORGED[name])
        with pytest.raises(NmoeError) as refused:
            read()
        assert refused.value.code == "E-LABEL-CORRUPT"
        # An earlier version wrote neither a format nor a hash; its digest is checked all the same.
        path.write_bytes(kept)
        edit(path, lambda row: [row.pop(key) for key in ("format", "content_hash")])
        read()
        path.write_bytes(kept)


def test_a_changed_summary_does_not_vouch_for_the_documents_of_its_labels(tree: Tree) -> None:
    tree.label()
    require_current_labels(tree.labels, "val", tree.data_root)
    edit(tree.labels / "val" / "shard_0" / "summary.json", lambda row: row.update(per_source={}))
    with pytest.raises(LabelError) as refused:
        require_current_labels(tree.labels, "val", tree.data_root)
    assert refused.value.code == "E-LABEL-CORRUPT"


def test_noise_that_was_changed_is_refused(tree: Tree) -> None:
    tree.label()
    for i in range(8):
        shard = tree.labels / "val" / f"shard_{i}"
        label_again(
            tree.documents("val", i), 2, shard, lambda _: tree.world.FakeOracle(), tree.rubric
        )
    merge_labels(tree.labels, "val")
    merge_noise(tree.labels, "val")
    path = tree.labels / "merged" / "noise_val.json"
    assert read_noise(path)["ceiling"] is not None
    kept = path.read_bytes()
    for change in (lambda row: row.update(ceiling=0.1), lambda row: row.pop("content_hash")):
        edit(path, change)
        with pytest.raises(LabelError) as refused:
            read_noise(path)
        assert refused.value.code == "E-LABEL-CORRUPT"
        path.write_bytes(kept)
    edit(path, lambda row: [row.pop(key) for key in ("format", "content_hash")])
    assert read_noise(path)["ceiling"] is not None
    edit(tree.labels / "val" / "shard_0" / "relabelled" / "scores.jsonl", invert)
    with pytest.raises(LabelError, match="changed after"):
        merge_noise(tree.labels, "val")


def test_a_slice_that_was_changed_is_refused_where_its_documents_are_read(
    tree: Tree, tmp_path: Path
) -> None:
    for path in (
        tree.slices / "val_shard_00",
        tree.slices / "docids_val.jsonl",
        tree.slices / "sources" / "web" / "docids_train.jsonl",
    ):
        kept = path.read_bytes()
        path.write_bytes(b"".join(kept.splitlines(keepends=True)[:-1]))
        with pytest.raises(FormatError) as refused:
            read_slice(path)
        assert refused.value.code == "E-SLICE-CHANGED"
        path.write_bytes(kept)
        (tmp_path / "of_my_own").write_bytes(kept.splitlines(keepends=True)[0])
        assert len(read_slice(tmp_path / "of_my_own")) == 1
        assert read_slice(path)
    manifest = tree.slices / "slices_manifest.json"
    edit(manifest, lambda row: row["files"].pop("val_shard_00"))
    with pytest.raises(FormatError, match="content_hash"):
        read_slice(tree.slices / "val_shard_00")


def test_a_source_list_that_was_changed_is_not_dealt_out(tree: Tree) -> None:
    path = tree.slices / "sources" / "web" / "docids_val.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    (tree.slices / "slices_manifest.json").unlink()
    with pytest.raises(FormatError) as refused:
        combine_slices(tree.slices, ["web", "books"])
    assert refused.value.code == "E-SLICE-CHANGED"
    (path.parent / "slices.json").unlink()
    assert not write_source_slices(tree.data_root, "web", tree.slices).is_current
    combine_slices(tree.slices, ["web", "books"])


class Salvages:
    """An oracle that finds every third answer among other words."""

    def __init__(self, world: SimpleNamespace) -> None:
        self._inner = world.FakeOracle()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def label(self, questions: Any) -> Any:
        for i, result in self._inner.label(questions):
            yield i, dataclasses.replace(result, is_salvaged=i % 3 == 0)


def test_salvaged_labels_are_counted_everywhere_and_used_on_request_alone(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    tree.label(Salvages(tree.world))
    asked = [len(tree.documents("val", i).rows) for i in range(8)]
    expected = sum(-(-count // 3) for count in asked)
    assert expected > 0
    report = merge_labels(tree.labels, "val")
    assert (report.salvaged, report.parsed) == (expected, sum(asked))
    summary = json.loads(tree.merged.with_name("labels_val.summary.json").read_text())
    assert summary["salvaged"] == expected
    assert sum(row["salvaged"] for row in summary["per_source"].values()) == expected
    shard = json.loads((tree.labels / "val" / "shard_0" / "summary.json").read_text())
    assert shard["salvaged"] == -(-asked[0] // 3)
    rows = label_status(tree.labels, tree.slices)
    assert sum(row.salvaged or 0 for row in rows if row.split == "val") == expected
    assert main(["hydra", "merge-labels", "--labels", str(tree.labels), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val"]["salvaged"] == expected

    strict, lenient = read_labels(tree.merged), read_labels(tree.merged, use_salvaged=True)
    assert (len(strict.doc_ids), strict.num_salvaged) == (sum(asked) - expected, expected)
    assert (len(lenient.doc_ids), lenient.num_salvaged) == (sum(asked), 0)
    # Other labels are other inputs: a head trained on the ones is not current for the others.
    assert strict.digest != lenient.digest


def test_slices_are_combined_by_one_process_at_a_time_and_leave_no_temporary_file(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tree.slices / "slices_manifest.json"
    names = ["slices_manifest.json", "val_shard_07", "docids_train.jsonl"]
    expected = {name: (tree.slices / name).read_bytes() for name in names}
    for name in names:
        (tree.slices / f"{name}.tmp.4194399").write_bytes(b"left by a killed writer")
    manifest.unlink()
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: combine_slices(tree.slices, ["web", "books"]), range(4)))
    assert sorted(report.is_current for report in reports) == [False, True, True, True]
    assert {name: (tree.slices / name).read_bytes() for name in names} == expected
    assert not list(tree.slices.glob("*.tmp.*"))
    manifest.unlink()
    monkeypatch.setattr("nmoe_core.labels.slices._MAX_WAIT_S", 0.0)
    with output_lock(tree.slices / ".locks" / "combined"), pytest.raises(LockedError):
        combine_slices(tree.slices, ["web", "books"])
