"""`verify` finds every kind of damage; a healthy tree has no problem."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loader.files.format import load_manifest
from loader.plan.check import DEFAULT_VOCABULARY, read_data
from nmoe_core.base.atomic import write_json
from nmoe_core.shards.documents import document_ids
from nmoe_core.shards.inspect import files_of_directory, files_of_manifest, inspect_file
from nmoe_core.shards.manifest import ShardFormat, combine_shards
from nmoe_core.shards.shard_file import regenerate_index
from nmoe_core.shards.verify import find_leak, verify_manifest
from nmoe_core.shards.writer import ShardWriter
from tests.refusals import refused

EOS = 99
FORMAT = ShardFormat("web", "v1", "test", 100, EOS, "f")


def _write(directory: Path, documents: list[list[int]], prefix: str = "d") -> None:
    writer = ShardWriter(directory / "shard_0000", FORMAT)
    for i, tokens in enumerate(documents):
        writer.add_document(np.asarray(tokens, np.uint32), f"{prefix}{i}", f"hash{tokens}")
    writer.finish({"source": "s"}, {})
    write_json(directory / "manifest.json", combine_shards(directory, FORMAT, 1, {}))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    _write(tmp_path / "train", [[1, 2, 3], [4], [5, 6, EOS], [7, 8]])
    return tmp_path / "train"


def _codes(tree: Path, **tiers: bool) -> set[str]:
    problems = verify_manifest(load_manifest(tree / "manifest.json"), **tiers)
    return {problem.error.code for problem in problems}


def _npy(tree: Path) -> Path:
    return tree / "shard_0000" / "web-v1-shard-000000.npy"


def test_a_fresh_tree_has_no_problem_and_an_eos_is_never_doubled(tree: Path) -> None:
    assert _codes(tree, checksums=True, deep=True) == set()
    tokens = np.load(_npy(tree)).tolist()
    assert tokens == [1, 2, 3, EOS, 4, EOS, 5, 6, EOS, 7, 8, EOS]


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda tree: os.truncate(_npy(tree), _npy(tree).stat().st_size - 4), "E-SHARD-TRUNCATED"),
        (lambda tree: _npy(tree).unlink(), "E-SHARD-MISSING"),
        (lambda tree: _npy(tree).with_suffix(".idx").unlink(), "E-INDEX-MISSING"),
        (lambda tree: regenerate_index(_npy(tree), 5, allow_tail=True), "E-SHARD-INDEX"),
        (lambda tree: (tree / "shard_0000" / "stray.npy").touch(), "E-MANIFEST-UNKNOWN-FILE"),
    ],
)
def test_structural_damage_is_found_without_hashing(
    tree: Path, damage: Callable[[Path], None], code: str
) -> None:
    damage(tree)
    assert code in _codes(tree)


def test_an_index_whose_boundary_moved_is_refused_by_its_checksum(tree: Path) -> None:
    manifest = load_manifest(tree / "manifest.json")
    index = manifest.index_path(manifest.shards[0])
    spans = np.fromfile(index, "<u8", offset=32)
    spans[1:3] -= 1  # the end of a document and the start of the next one, so no gap tells
    index.write_bytes(index.read_bytes()[:32] + spans.tobytes())
    with refused("E-INDEX-CHECKSUM", str(index)):
        list(document_ids(tree, manifest))


@pytest.mark.parametrize(
    ("position", "token", "code"),
    [(1, EOS, "E-SHARD-EOS"), (3, 7, "E-SHARD-EOS"), (0, 100, "E-SHARD-TOKEN-RANGE")],
)
def test_a_wrong_token_is_found_by_the_deep_tier(
    tree: Path, position: int, token: int, code: str
) -> None:
    tokens = np.load(_npy(tree))
    tokens[position] = token
    np.save(_npy(tree), tokens)
    assert _codes(tree) == set()
    assert _codes(tree, deep=True) == {code, "E-SHARD-CHECKSUM"}


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_doubled_eos_is_counted_across_chunk_edges(
    tree: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.shards.inspect.CHUNK_TOKENS", chunk)
    tokens = np.load(_npy(tree))
    tokens[4] = EOS
    np.save(_npy(tree), tokens)
    (seen,) = files_of_manifest(load_manifest(tree / "manifest.json"))
    inspect_file(seen, EOS, 100)
    assert seen.double_eos == [4, 5]
    assert (seen.num_eos, seen.num_documents) == (5, 4)
    assert len(seen.issues()) == 2


@pytest.mark.parametrize("tokens", [[1, EOS, 2], [100]])
def test_the_writer_refuses_tokens_that_would_break_the_format(
    tmp_path: Path, tokens: list[int]
) -> None:
    writer = ShardWriter(tmp_path / "shard_0000", FORMAT)
    with refused("E-SHARD-DOCUMENT"):
        writer.add_document(np.asarray(tokens, np.uint32), "d", "h")
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_document_in_both_splits_is_a_leak(tree: Path, tmp_path: Path) -> None:
    _write(tmp_path / "same_text", [[1, 2, 3], [40]], prefix="v")
    _write(tmp_path / "same_id", [[41]], prefix="d")
    train = load_manifest(tree / "manifest.json")
    by_text = find_leak(train, load_manifest(tmp_path / "same_text" / "manifest.json"))
    by_id = find_leak(train, load_manifest(tmp_path / "same_id" / "manifest.json"))
    assert (by_text.num_ids, by_text.num_texts) == (0, 1)
    assert (by_id.num_ids, by_id.num_texts, by_id.example) == (1, 0, "d0")


def test_tokens_after_the_last_eos_are_refused_unless_allowed(tree: Path) -> None:
    np.save(_npy(tree), np.asarray([1, EOS, 2, 3], np.uint32))
    with refused("E-SHARD-TAIL"):
        regenerate_index(_npy(tree), EOS)
    assert regenerate_index(_npy(tree), EOS, allow_tail=True)[1] == 2


def test_an_edited_manifest_is_refused(tree: Path) -> None:
    path = tree / "manifest.json"
    path.write_text(path.read_text().replace('"version": "v1"', '"version": "v2"'))
    with refused("E-MANIFEST-HASH"):
        load_manifest(path)


def test_hidden_files_and_directories_are_no_part_of_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / ".data" / "train"  # only what is hidden below it counts
    for name in ("a.npy", "b/c.npy", ".prep/a.npy", "b/.d.npy"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(directory / name, np.arange(4, dtype=np.uint32))
    seen = [file.path.relative_to(directory).as_posix() for file in files_of_directory(directory)]
    assert seen == ["a.npy", "b/c.npy"]
    assert [shard.path for shard in read_data(directory, DEFAULT_VOCABULARY).shards] == seen
