"""`nmoe verify` sees every bit that flips in a file of a split, and every file that is gone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from loader.files.format import load_manifest
from loader.files.sealed import sealed
from nmoe_core.cli import main
from tests.project import json_lines


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
    return sorted(p for p in split.rglob("*") if p.is_file() and p.name != ".lock")


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
