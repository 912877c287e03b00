"""`verify` finds every kind of damage: each bit that flips, each file that is gone."""

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import FormatError as LoaderError
from loader.files.checksummed_json import sealed
from loader.files.format import Manifest, load_manifest
from loader.files.shard import IndexReader, open_shard
from loader.plan.check import read_data
from loader.plan.settings import Vocabulary
from nmoe_core.base.atomic import write_json
from nmoe_core.base.errors import FormatError
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.cli import main
from nmoe_core.shards.documents import document_ids, ingest_ids, ingest_ids_at
from nmoe_core.shards.inspect import (
    files_of_directory,
    files_of_manifest,
    inspect_file,
    sample_tokens,
    token_statistics,
)
from nmoe_core.shards.manifest import ShardFormat, combine_shards, left_out
from nmoe_core.shards.shard_file import regenerate_index
from nmoe_core.shards.verify import find_leak, verify_manifest
from nmoe_core.shards.writer import ShardWriter
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.small_gradings import write_source
from tests.project import contents, json_lines
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


def test_ids_of_some_documents_are_found_in_every_file_of_a_shard(tmp_path: Path) -> None:
    write_source(tmp_path, "web", [[i % 400, 1] for i in range(5000)], num_shards=2)
    manifest = load_manifest(tmp_path / "web" / "train" / "manifest.json")
    assert len(manifest.shards) > 2
    every = [name for name, _ in ingest_ids(manifest)]
    last = len(every) - 1
    for rows in ([], [0, 1, 1334, 2700, last], [last], [*range(0, last, 7)]):
        found = ingest_ids_at(manifest, np.array(rows, np.int64))
        assert found == [every[row] for row in rows]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda payload: payload.partition(b"\n")[2], "found 3 rows, expected 4 documents"),
        (lambda payload: payload + b'{"id":"e","text_sha256":""}\n', "found 5 rows"),
        (lambda payload: payload.replace(b'"id"', b'"no"'), "KeyError"),
        (lambda payload: payload.replace(b"{", b""), "JSONDecodeError"),
    ],
)
def test_ids_of_other_documents_or_of_no_shape_are_refused(
    tree: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    manifest = load_manifest(tree / "manifest.json")
    path = _npy(tree).with_suffix(".ids.jsonl")
    payload = path.read_bytes()
    assert ingest_ids_at(manifest, np.arange(4)) == ["d0", "d1", "d2", "d3"]
    path.write_bytes(damage(payload))
    for read in (lambda: list(ingest_ids(manifest)), lambda: ingest_ids_at(manifest, np.arange(2))):
        with refused("E-SHARD-IDS", naming=[says, str(path)]):
            read()
    path.unlink()
    with refused("E-SHARD-IDS", naming=["FileNotFoundError"]):
        ingest_ids_at(manifest, np.arange(2))


def _codes(tree: Path, **tiers: bool) -> set[str]:
    problems = verify_manifest(load_manifest(tree / "manifest.json"), **tiers)
    return {problem.error.code for problem in problems}


def _npy(tree: Path) -> Path:
    return tree / "shard_0000" / "web-v1-shard-000000.npy"


def test_a_fresh_tree_has_no_problem_and_an_eos_is_never_doubled(tree: Path) -> None:
    (tree / ".begun").mkdir()
    (tree / ".begun" / "web.npy").touch()  # hidden, so no part of the tree
    assert _codes(tree, checksums=True, deep=True) == set()
    tokens = np.load(_npy(tree)).tolist()
    assert tokens == [1, 2, 3, EOS, 4, EOS, 5, 6, EOS, 7, 8, EOS]
    # Neither its shard says what prep left out, nor a directory without shards.
    assert [left_out(directory, 4) for directory in (tree, tree / ".begun")] == [{}, {}]


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda tree: os.truncate(_npy(tree), _npy(tree).stat().st_size - 4), "E-SHARD-TRUNCATED"),
        (lambda tree: _npy(tree).unlink(), "E-SHARD-MISSING"),
        (lambda tree: _npy(tree).with_suffix(".idx").unlink(), "E-INDEX-MISSING"),
        (lambda tree: regenerate_index(_npy(tree), 5, allow_tail=True), "E-SHARD-INDEX"),
        (lambda tree: (tree / "shard_0000" / "stray.npy").touch(), "E-MANIFEST-UNKNOWN-FILE"),
        (lambda tree: (tree / "shard_0000" / "stray.idx").touch(), "E-MANIFEST-UNKNOWN-FILE"),
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
    problems = verify_manifest(load_manifest(tree / "manifest.json"), deep=True)
    says = f"EOS differs at token {position}" if code == "E-SHARD-EOS" else "found token 100"
    assert says in str(problems[-1])


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


def test_an_empty_first_document_is_no_doubled_eos_and_a_last_one_without_eos_is_named(
    tree: Path,
) -> None:
    tokens = np.array([EOS, 1, 98, 100, 1, 2, EOS, EOS, EOS, EOS, EOS, 1], np.uint32)
    np.save(_npy(tree), tokens)
    (seen,) = files_of_manifest(load_manifest(tree / "manifest.json"))
    counts = np.zeros(100, np.int64)
    inspect_file(seen, EOS, 100, counts)
    assert (seen.double_eos, seen.out_of_vocabulary) == ([7, 8, 9], [3])
    assert [issue.partition(" ")[0] for issue in seen.issues()] == ["4", "6", "1", "last"]
    found = token_statistics(counts)
    assert found["most_frequent"] == [[EOS, 6], [1, 3], [2, 1], [98, 1]]
    assert (found["tokens"], found["unique_tokens"], found["vocab_coverage"]) == (11, 4, 0.04)


def test_a_sample_of_all_tokens_has_each_once_with_eight_on_either_side(tree: Path) -> None:
    np.save(_npy(tree), np.arange(80, 105, dtype=np.uint32))
    files = files_of_manifest(load_manifest(tree / "manifest.json"))
    tokenizer = load_tokenizer(TokenizerSettings())
    (rows,) = sample_tokens(files, tokenizer, 100, 99, seed=0).values()
    assert [(row["position"], row["token"]) for row in rows] == [(i, 80 + i) for i in range(25)]
    text = tokenizer.decode(np.arange(80, 100, dtype=np.uint32))
    assert "".join(row["text"] for row in rows) == text
    assert [rows[i]["context"] for i in (0, 9, 24)] == [text[:9], text[1:18], text[16:]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 100])
def test_the_deep_tier_finds_the_same_at_any_edge_of_its_chunks(
    tree: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("nmoe_core.shards.verify.CHUNK_TOKENS", chunk)
    assert _codes(tree, deep=True) == set()
    tokens = np.lib.format.open_memmap(_npy(tree), mode="r+")
    tokens[3], tokens[4] = 4, EOS  # the first document ends one token later
    tokens.flush()
    assert "E-SHARD-EOS" in _codes(tree, deep=True)


def test_a_document_in_both_splits_is_a_leak(tree: Path, tmp_path: Path) -> None:
    _write(tmp_path / "same_text", [[1, 2, 3], [40]], prefix="v")
    _write(tmp_path / "same_id", [[41]], prefix="d")
    train = load_manifest(tree / "manifest.json")
    by_text = find_leak(train, load_manifest(tmp_path / "same_text" / "manifest.json"))
    by_id = find_leak(train, load_manifest(tmp_path / "same_id" / "manifest.json"))
    assert (by_text.num_ids, by_text.num_texts) == (0, 1)
    assert (by_id.num_ids, by_id.num_texts, by_id.example) == (1, 0, "d0")


@pytest.mark.parametrize("checksums", [False, True])
def test_manifests_are_brought_here_whole_and_other_files_only_where_they_are_hashed(
    tree: Path, checksums: bool
) -> None:
    brought: list[tuple[str, list[str], bool]] = []

    def at_hand(
        manifest: Manifest, names: Iterable[str], is_whole: bool
    ) -> AbstractContextManager[None]:
        brought.append((manifest.path.parent.name, sorted(names), is_whole))
        return nullcontext()

    manifest = load_manifest(tree / "manifest.json")
    assert verify_manifest(manifest, checksums=checksums, at_hand=at_hand) == []
    files = [f"shard_0000/web-v1-shard-000000.{end}" for end in ("ids.jsonl", "idx", "npy")]
    assert brought[:2] == [
        ("train", ["shard_0000/manifest.json"], True),
        ("train", files, checksums),
    ]
    beside = [("train", [], True), ("shard_0000", [], True)]
    assert brought[2:] == (beside if checksums else [])


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
    assert [shard.path for shard in read_data(directory, Vocabulary()).shards] == seen


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split of five shards, one of which has no document."""
    directory = tmp_path_factory.mktemp("verify")
    rng = random.Random(3)
    texts = [" ".join(rng.choices(["a", "few", "words", "to", "read"], k=30)) for _ in range(8)]
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    (directory / "in.jsonl").write_text(json_lines(rows))
    out = directory / "web" / "train"
    command = ["prep", "--source", "jsonl", "--paths", str(directory / "in.jsonl")]
    assert main([*command, "--name", "web", "--output", str(out), "--num-shards", "5"]) == 0
    assert {_names_shards(path) for path in out.glob("shard_*/manifest.json")} == {True, False}
    return out


def _files(split: Path) -> list[Path]:
    return sorted(p for p in split.rglob("*") if p.is_file() and not p.name.startswith("."))


def _verify(split: Path, *flags: str) -> int:
    return main(["verify", str(split / "manifest.json"), *flags])


def _is_seen(split: Path, path: Path, changed: bytes | None, *flags: str) -> bool:
    before = path.read_bytes()
    path.unlink()
    try:
        if changed is not None:
            path.write_bytes(changed)
        return _verify(split, *flags) == 1
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("flag", ["--checksums", "--deep"])
def test_one_bit_that_flips_in_any_file_of_a_split_is_seen(
    split: Path, mutations: Any, flag: str
) -> None:
    assert _verify(split, flag) == 0
    files = _files(split)
    assert {path.suffix for path in files} == {".npy", ".idx", ".jsonl", ".json"}
    for i in range(400):
        path = files[i % len(files)]
        changed = mutations.flip_bit(path.read_bytes())
        assert _is_seen(split, path, changed, flag), f"{path}: {changed!r}"


@pytest.mark.parametrize("name", ["manifest.json", "shard_0000/manifest.json"])
def test_a_flip_in_the_name_of_a_digest_does_not_switch_its_check_off(
    split: Path, name: str
) -> None:
    path = split / name
    payload = path.read_bytes()
    for key in (b"content_hash", b"created_at", b"fingerprints", b"pipeline_version"):
        at = payload.index(b'"' + key)
        for bit in range(8 * (len(key) + 2)):
            changed = bytearray(payload)
            changed[at + bit // 8] ^= 1 << bit % 8
            assert _is_seen(split, path, bytes(changed), "--checksums"), changed


@pytest.mark.parametrize("flags", [(), ("--checksums",), ("--deep",)])
def test_every_file_of_a_split_that_is_missing_is_named(
    split: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for path in _files(split):
        assert _is_seen(split, path, None, *flags), path
        assert str(path) in capsys.readouterr().err


def test_a_shard_manifest_that_is_not_the_one_named_above_it_is_refused(
    split: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(p for p in _files(split) if p.parent != split and _names_shards(p))
    for key, value in (("version", "v2"), ("fingerprints", {"source": "other"}), ("shards", [])):
        manifest = json.loads(path.read_text()) | {key: value}
        if key == "shards":
            manifest |= {"total_tokens": 0, "total_documents": 0, "num_shards": 0}
        assert _is_seen(split, path, json.dumps(sealed(manifest)).encode())
        assert "E-MANIFEST-MIXED" in capsys.readouterr().err


def _names_shards(path: Path) -> bool:
    return path.name == "manifest.json" and bool(load_manifest(path).shards)


def test_a_tree_of_another_tool_needs_no_shard_manifests_and_no_ids(
    split: Path, tmp_path: Path
) -> None:
    manifest = json.loads((split / "manifest.json").read_text())
    published = ("path", "index_path", "num_tokens", "num_documents", "checksum")
    ours = ("pipeline_version", "fingerprints", "content_hash", "file_hash", "created_at")
    other = {key: value for key, value in manifest.items() if key not in ours}
    other["shards"] = [{key: row[key] for key in published} for row in manifest["shards"]]
    for path in _files(split):
        if path.suffix in (".npy", ".idx"):
            copy = tmp_path / path.relative_to(split)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(other))
    assert _verify(tmp_path, "--checksums", "--deep") == 0


_EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6)


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of one healthy split."""
    root = tmp_path_factory.mktemp("split")
    _write(root, [list(range(i + 1)) for i in range(20)])
    return contents(root)


def _damaged(payload: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    damaged = bytearray(payload)
    for place, value in edits:
        damaged[place % len(damaged)] = value
    return bytes(damaged[: len(damaged) - cut % len(damaged)])


@settings(max_examples=200)
@given(name=st.integers(0, 2), edits=_EDITS, cut=st.integers(0, 3) | st.integers(0, 10**6))
def test_a_damaged_file_of_a_split_is_read_right_or_refused(
    payloads: dict[str, bytes], name: int, edits: list[tuple[int, int]], cut: int
) -> None:
    suffix = (".npy", ".idx", "manifest.json")[name]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for path, payload in payloads.items():
            (root / path).parent.mkdir(exist_ok=True)
            is_it = path.endswith(suffix) and (name < 2 or "/" not in path)
            (root / path).write_bytes(_damaged(payload, edits, cut) if is_it else payload)
        with suppress(FormatError, LoaderError):
            manifest = load_manifest(root / "manifest.json")
            is_sound = not verify_manifest(manifest, checksums=True, deep=True)
            entry = manifest.shards[0]
            spans = IndexReader(manifest.index_path(entry)).to_array()
            tokens = open_shard(manifest.shard_path(entry))
            if is_sound:
                assert len(spans) == entry.num_documents == 20
                assert [tokens[end - 1] for end in spans[:, 1].astype(int)] == [99] * 20


@settings(max_examples=150)
@given(payload=st.binary(max_size=200), kind=st.sampled_from(["a.npy", "a.idx", "manifest.json"]))
def test_any_bytes_are_read_or_refused(payload: bytes, kind: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / kind
        path.write_bytes(payload)
        readers = {"a.npy": open_shard, "a.idx": IndexReader, "manifest.json": load_manifest}
        with suppress(FormatError, LoaderError):
            readers[kind](path)
