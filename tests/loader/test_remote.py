from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loader import FormatError, PlanError, build_loader, resolve_plan
from loader.__main__ import main
from loader.plan.remote import fetch_plan, local_data
from tests.refusals import refused

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["memory", "file"])
def store(request, two_stages, tmp_path):
    """The two-stage tree behind a URL, with its plan: (file system, URL of the root)."""
    fs = fsspec.filesystem(request.param)
    root = "/bucket" if request.param == "memory" else str(tmp_path / "bucket")
    for path in two_stages.tree.root.rglob("*"):
        if path.is_file() and path.name != "plan.json":
            target = f"{root}/data/{path.relative_to(two_stages.tree.root).as_posix()}"
            fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            fs.pipe_file(target, path.read_bytes())
    plan = json.loads(resolve_plan(two_stages.cfg).to_json()) | {"root": "../data"}
    fs.makedirs(f"{root}/plans", exist_ok=True)
    fs.pipe_file(f"{root}/plans/plan.json", json.dumps(plan).encode())
    yield fs, root, f"{request.param}://{root}/plans/plan.json"
    fs.rm(root, recursive=True)


def first_shard(fs, root: str) -> str:
    return sorted(fs.glob(f"{root}/data/web/train/*/*.npy"))[0]


def test_batches_over_a_url_are_those_of_the_files(store, two_stages, tmp_path):
    _, _, url = store
    remote = build_loader(url, backend="numpy", cache_dir=tmp_path / "cache")[0]
    local = build_loader(two_stages.cfg, backend="numpy")[0]
    assert remote.plan.plan_hash == local.plan.plan_hash
    for (a, b), (c, d) in zip(remote, local, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
    valid = build_loader(url, split="valid", backend="numpy", cache_dir=tmp_path / "cache")[0]
    assert valid.next_with_meta().document_spans is not None


def test_a_second_fetch_copies_no_shard_and_mends_a_damaged_copy(store, tmp_path):
    _, _, url = store
    plan = fetch_plan(url, tmp_path)
    shards = sorted(plan.parent.rglob("*.npy"))
    times = [path.stat().st_mtime_ns for path in shards]
    good = shards[2].read_bytes()
    shards[2].write_bytes(good[:-4] + b"\0\0\0\0")
    shards[3].unlink()
    fetch_plan(url, tmp_path)
    again = [path.stat().st_mtime_ns for path in shards]
    assert [a == b for a, b in zip(times, again)].count(False) == 2
    assert shards[2].read_bytes() == good
    assert not list(plan.parent.rglob("*.part"))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("cut", "E-SHARD-TRUNCATED"),
        ("replace", "E-SHARD-CHECKSUM"),
        ("remove", "E-SHARD-MISSING"),
        ("remove index", "E-INDEX-MISSING"),
        ("cut index", "E-INDEX-TRUNCATED"),
        ("uncommit", "E-MANIFEST-MISSING"),
    ],
)
def test_damage_is_refused_by_the_name_of_the_file_before_step_0(store, tmp_path, damage, code):
    fs, root, url = store
    path = first_shard(fs, root)
    if "index" in damage:
        path = path.removesuffix(".npy") + ".idx"
    if damage == "uncommit":
        path = f"{root}/data/web/train/manifest.json"
    content = fs.cat_file(path)
    if damage.startswith("cut"):
        fs.pipe_file(path, content[:-200] if damage == "cut" else content[:-8])
    elif damage == "replace":
        fs.pipe_file(path, content[:-4] + b"\1\0\0\0")
    else:
        fs.rm_file(path)
    for _ in range(2):  # nothing of the damage stays in the cache as good
        with pytest.raises(FormatError) as caught:
            build_loader(url, cache_dir=tmp_path / "cache")
        assert caught.value.code == code
        assert fs.unstrip_protocol(path) in str(caught.value)
        if damage == "replace":  # a copy of other content is not kept
            assert not list((tmp_path / "cache").rglob(path.rsplit("/", 1)[1]))


def test_data_other_than_the_plans_is_refused(store, tmp_path):
    fs, root, url = store
    path = f"{root}/data/web/train/manifest.json"
    manifest = json.loads(fs.cat_file(path))
    manifest["shards"][0]["checksum"] = "0" * 64
    fs.pipe_file(path, json.dumps(manifest).encode())
    with refused("E-PLAN-DATA"):
        fetch_plan(url, tmp_path)


def test_one_directory_is_fetched_for_data_path(store, two_stages, tmp_path):
    _, _, url = store
    data = local_data(url.replace("plans/plan.json", "data/code/train"), tmp_path)
    loader = build_loader({"data_path": data, "seq_len": 16, "batch_size": 2}, backend="numpy")[0]
    tokens = two_stages.tree.tokens["code", "train"]
    np.testing.assert_array_equal(loader.next()[0][0], tokens[:16])


def test_a_url_needs_a_cache_and_a_plan(store, tmp_path):
    _, _, url = store
    with pytest.raises(ValueError, match="set cache_dir"):
        build_loader(url)
    with pytest.raises(PlanError, match="there is no such plan"):
        fetch_plan(url + "x", tmp_path)


def test_command_verifies_a_url(store, tmp_path, capsys):
    _, _, url = store
    assert main(["verify", url, "--cache-dir", str(tmp_path)]) == 0
    assert "ok plan" in capsys.readouterr().out


def test_missing_fsspec_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"nmoe-loader\[remote\]"):
        fetch_plan("memory://x/plan.json", Path("cache"))
