import hashlib
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.base.atomic import output_lock, write_json
from nmoe_core.base.errors import LockedError
from nmoe_core.config.tree import Tree
from nmoe_core.labels.slices import combine_slices, data_digest, read_slice, write_source_slices
from nmoe_core.shards.manifest import build_manifest
from nmoe_core.shards.writer import ShardWriter
from tests.core.labels.labelling import Labelling
from tests.core.small_gradings import random_documents, shard_format, slice_all, write_source
from tests.refusals import refused


def reference_slices(root: Path) -> dict[str, list[str]]:
    """The published rule, written again from its description."""
    lines: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for source in sorted(p for p in root.iterdir() if (p / "train").is_dir()):
        for npy in sorted((source / "train").rglob("*.npy")):
            raw = npy.with_suffix(".idx").read_bytes()
            _, _, n, _ = struct.unpack("<8sQQQ", raw[:32])
            for s, e in np.frombuffer(raw[32:], "<u8").reshape(n, 2).tolist():
                doc_id = f"{source.name}//{npy.relative_to(root)}#s={s}:e={e}"
                h = int(hashlib.md5(doc_id.encode()).hexdigest()[:8], 16) % 100
                split = "train" if h < 80 else "val" if h < 90 else "test"
                row = {"doc_id": doc_id, "source": source.name}
                lines[split].append(json.dumps(row, ensure_ascii=False) + "\n")
    return lines


def test_slices_equal_an_independent_reading_of_the_rule(tmp_path: Path, shared_data: Path) -> None:
    slices = slice_all(shared_data, tmp_path / "slices")
    for split, lines in reference_slices(shared_data).items():
        assert (slices / f"docids_{split}.jsonl").read_text("utf-8") == "".join(lines)
        assert lines, "every split of the fixture has documents"
        for i in range(8):
            shard = (slices / f"{split}_shard_{i:02d}").read_text("utf-8")
            assert shard == "".join(lines[i::8])


def test_files_are_ordered_by_path_component_and_unnamed_files_are_left_out(tmp_path: Path) -> None:
    # As strings "s-b/x" sorts before "s/x", by component after it.
    split = tmp_path / "data" / "web" / "train"
    fmt = shard_format("web")
    entries = []
    for name in ("s-b", "s", "not-named"):
        writer = ShardWriter(split / name, fmt)
        for tokens in random_documents(len(name), 30):
            writer.add_document(np.array(tokens, np.uint32), "id", "sha")
        for entry in writer.finish({}, {})["shards"]:
            named = {k: f"{name}/{entry[k]}" for k in ("path", "index_path", "ids_path")}
            entries += [entry | named] * (name != "not-named")
    write_json(split / "manifest.json", build_manifest(fmt, entries, {}, {}))
    write_source_slices(Tree.below(tmp_path), "web")
    rows = read_slice(tmp_path / "slices" / "sources" / "web" / "docids_train.jsonl")
    directories = [doc_id.split("/train/")[1].split("/")[0] for doc_id, _ in rows]
    assert set(directories) == {"s", "s-b"}
    assert directories == sorted(directories, key=["s", "s-b"].index)


def test_no_work_is_done_until_data_or_files_change(tmp_path: Path, data_root: Path) -> None:
    tree = Tree.below(tmp_path)
    first = write_source_slices(tree, "web")
    path = tree.source_slices("web") / "docids_train.jsonl"
    before = path.stat().st_mtime_ns
    left = path.with_name("docids_val.jsonl.tmp.4194305")  # by a killed run over other documents
    left.touch()
    assert write_source_slices(tree, "web").facts == first.facts | {"changed": False}
    assert (path.stat().st_mtime_ns, left.exists()) == (before, False)
    path.unlink()
    assert write_source_slices(tree, "web").facts["changed"]
    digest = data_digest(data_root, ["web"])
    write_source(data_root, "web", random_documents(9, 41))
    assert data_digest(data_root, ["web"]) != digest
    assert write_source_slices(tree, "web").facts["changed"]


def test_combined_slices_follow_their_parts_and_are_written_by_one_process_at_a_time(
    labelling: Labelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, slices, names = labelling.tree, labelling.tree.slices, ["slices_manifest.json"]
    names += ["val_shard_07", "docids_train.jsonl"]
    expected = {name: (slices / name).read_bytes() for name in names}
    assert not combine_slices(tree, ["books", "web"]).facts["changed"]
    for name in names:
        (slices / f"{name}.tmp.4194399").write_bytes(b"left by a killed writer")
    (slices / "val_shard_07").unlink()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: combine_slices(tree, ["web", "books"]), range(4)))
    assert sorted(result.facts["changed"] for result in made) == [False, False, False, True]
    assert {name: (slices / name).read_bytes() for name in names} == expected
    assert not list(slices.glob("*.tmp.*"))
    num_rows = len(expected["docids_train.jsonl"].splitlines())
    assert combine_slices(tree, ["books"]).facts["train"] < num_rows
    (slices / "slices_manifest.json").unlink()
    monkeypatch.setattr("nmoe_core.labels.slices.MAX_WAIT_S", 0.0)
    with output_lock(slices / ".locks" / "combined"), pytest.raises(LockedError):
        combine_slices(tree, ["web", "books"])


def test_a_slice_that_was_changed_is_refused_by_its_reader(labelling: Labelling) -> None:
    slices, own = labelling.tree.slices, labelling.tree.slices / "of_my_own"
    for name in ("val_shard_00", "docids_val.jsonl", "sources/web/docids_val.jsonl"):
        path = slices / name
        whole = path.read_bytes()
        first, rest = whole.split(b"\n", 1)
        path.write_bytes(rest)
        with refused("E-SLICE-CHANGED"):
            read_slice(path)
        if "sources" not in name:
            path.write_bytes(whole)
            assert len(read_slice(path)) == len(whole.splitlines())
    own.write_bytes(first)
    assert len(read_slice(own)) == 1
    manifest = json.loads((slices / "slices_manifest.json").read_text())
    del manifest["files"]["val_shard_00"]
    (slices / "slices_manifest.json").write_text(json.dumps(manifest))
    with refused("E-SLICE-CHANGED", match="content_hash"):
        read_slice(slices / "val_shard_00")
    # The source's list that was changed is not dealt out either.
    (slices / "slices_manifest.json").unlink()
    with refused("E-SLICE-CHANGED"):
        combine_slices(labelling.tree, ["web", "books"])
    (path.parent / "slices.json").unlink()
    assert write_source_slices(labelling.tree, "web").facts["changed"]
    combine_slices(labelling.tree, ["web", "books"])


def test_a_source_without_manifest_or_slices_is_refused(tmp_path: Path, data_root: Path) -> None:
    with refused("E-MANIFEST-MISSING"):
        write_source_slices(Tree.below(tmp_path), "nowhere")
    with refused("E-MANIFEST-MISSING", "run nmoe hydra slices"):
        combine_slices(Tree.below(tmp_path), ["web"])


ROW = '{"doc_id": "web//web/train/a.npy#s=0:e=5", "source": "%s"}'


ODD_ROWS = ["{}", "x", "5", "[1]", "[" * 100_000, '{"doc_id": 5, "source": []}', ROW % "books"]


@pytest.mark.parametrize("line", [*ODD_ROWS, '{"doc_id": "x", "source": "web"}'])
def test_a_slice_row_that_is_not_one_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "docids_train.jsonl"
    path.write_text(f"{ROW % 'web'}\n{line}\n")
    with refused("E-DOCID", match=r"docids_train\.jsonl:2"):
        read_slice(path)
