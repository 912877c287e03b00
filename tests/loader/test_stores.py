"""Plans in real stores on this machine: over HTTP, in S3, and in stores that are down."""

from __future__ import annotations

import json
import os
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from loader import NmoeError, PlanError, build_loader, resolve_plan
from loader.__main__ import main
from loader.plan.remote import fetch_plan

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def bucket(two_stages, tmp_path) -> Path:
    """What a store holds: `plans/plan.json` and `data/`."""
    shutil.copytree(two_stages.tree.root, tmp_path / "bucket" / "data")
    plan = json.loads(resolve_plan(two_stages.cfg).to_json()) | {"root": "../data"}
    (tmp_path / "bucket" / "plans").mkdir()
    (tmp_path / "bucket" / "plans" / "plan.json").write_text(json.dumps(plan))
    return tmp_path / "bucket"


class Quiet(SimpleHTTPRequestHandler):
    """Files of a directory, without ranges and without a log."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def web(bucket):
    """A server of HTTP on this machine; its address, and what ends it."""
    pytest.importorskip("aiohttp")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(bucket)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    yield f"http://127.0.0.1:{server.server_port}", stop
    if thread.is_alive():
        stop()


@pytest.fixture
def s3(bucket, monkeypatch):
    """The same in a bucket of an S3-compatible server on this machine."""
    moto = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for key, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    store.makedirs("corpus", exist_ok=True)
    store.put(str(bucket) + "/", "corpus/", recursive=True)
    yield "s3://corpus", server.stop
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture(params=["web", "s3"])
def store(request):
    return request.getfixturevalue(request.param)


def read(url, tmp_path, **options):
    return build_loader(url, backend="numpy", cache_dir=tmp_path / "cache", **options)[0]


def the_line(url, tmp_path, capsys) -> str:
    """What the command says of a plan that it refuses: one line."""
    assert main(["peek", url, "--cache-dir", str(tmp_path / "cache")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_plan_in_a_store_is_read_as_that_of_files(store, two_stages, tmp_path):
    root, _ = store
    local = build_loader(two_stages.cfg, backend="numpy")[0]
    remote = read(f"{root}/plans/plan.json", tmp_path)
    for (a, b), (c, d) in zip(remote, local, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
    pytest.importorskip("torch")
    from loader.torch_data import TokenDataset, WorkerLoader

    inputs = build_loader(two_stages.cfg, backend="numpy")[0].next()[0]
    url = Path(f"{root}/plans/plan.json")
    dataset = TokenDataset(url, cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(next(iter(dataset))[0].numpy(), inputs)
    with WorkerLoader(url, num_workers=0, cache_dir=tmp_path / "cache") as loader:
        np.testing.assert_array_equal(loader.next()[0].numpy(), inputs)


def test_a_store_that_is_down_is_not_needed_where_the_cache_holds_everything(
    store, two_stages, tmp_path
):
    root, stop = store
    url = f"{root}/plans/plan.json"
    first = read(url, tmp_path).next()[0]
    stop()
    with pytest.warns(UserWarning, match="the copy in the cache is read"):
        again = read(url, tmp_path).next()[0]
    np.testing.assert_array_equal(again, first)
    next((tmp_path / "cache").rglob("*.npy")).unlink()
    with (
        pytest.warns(UserWarning, match="the copy in the cache is read"),
        pytest.raises(PlanError) as caught,
    ):
        read(url, tmp_path)
    assert caught.value.code == "E-STORE"
    assert ".npy" in str(caught.value)


def test_a_store_that_is_down_is_one_line(store, tmp_path, capsys):
    root, stop = store
    stop()
    line = the_line(f"{root}/plans/plan.json", tmp_path, capsys)
    assert line.startswith("ERROR [E-STORE]: ")
    assert f"{root}/plans/plan.json" in line


def test_a_directory_of_shards_in_a_store_that_is_down_is_read_from_the_cache(
    store, two_stages, tmp_path
):
    root, stop = store
    cfg = {"data_path": f"{root}/data/code", "batch_size": 2, "seq_len": 16}
    first = read(cfg, tmp_path).next()[0]
    stop()
    with pytest.warns(UserWarning, match="the copy in the cache is read"):
        np.testing.assert_array_equal(read(cfg, tmp_path).next()[0], first)


@pytest.mark.parametrize("name", ["plans/other.json", "nowhere/plan.json"])
def test_a_missing_plan_is_one_true_line(store, tmp_path, capsys, name):
    root, _ = store
    line = the_line(f"{root}/{name}", tmp_path, capsys)
    assert line.startswith("ERROR [E-PLAN-MISSING]: ")
    assert f"{root}/{name}" in line


def test_a_missing_bucket_is_one_true_line(s3, tmp_path, capsys):
    line = the_line("s3://elsewhere/plan.json", tmp_path, capsys)
    assert line.startswith("ERROR [E-PLAN-MISSING]: s3://elsewhere/plan.json")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"root": None}, "root"),
        ({"root": "/etc"}, "root"),
        ({"root": "http://other/x"}, "root"),
        ({"stages": None}, "NoneType"),
        ({"stages": [{}]}, "stages[0].sources"),
        ({"stages": [{"sources": [{"name": "web"}]}]}, "sources[0].manifest"),
        ({"valid": 5}, "int"),
        ({"valid": [{"name": 1, "manifest": 2, "content_hash": 3}]}, "1"),
        ({"format": "x"}, "'x'"),
    ],
)
def test_a_plan_without_its_parts_is_one_true_line(bucket, tmp_path, capsys, change, word):
    path = bucket / "plans" / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    line = the_line(f"file://{path}", tmp_path, capsys)
    assert line.startswith(f"ERROR [E-PLAN-FORMAT]: file://{path}: not a loader plan")
    assert word in line


@pytest.mark.parametrize("key", ["root", "stages"])
def test_a_plan_that_lacks_a_key_is_one_true_line(bucket, tmp_path, capsys, key):
    path = bucket / "plans" / "plan.json"
    value = json.loads(path.read_text())
    del value[key]
    path.write_text(json.dumps(value))
    assert key in the_line(f"file://{path}", tmp_path, capsys)


def test_an_unknown_kind_of_url_is_one_line(tmp_path, capsys):
    assert "no client" in the_line("nosuch://b/plan.json", tmp_path, capsys)


def test_a_full_disk_is_not_blamed_on_the_store(bucket, tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.get_file", full)
    line = the_line(f"file://{bucket}/plans/plan.json", tmp_path, capsys)
    assert "E-STORE" not in line
    assert os.strerror(28) in line


def test_what_is_in_the_cache_is_not_asked_for_again(store, tmp_path, monkeypatch):
    root, _ = store
    url = f"{root}/plans/plan.json"
    fetch_plan(url, tmp_path)
    asked = []
    monkeypatch.setattr("loader.plan.remote.copy", lambda url, _: asked.append(url))
    fetch_plan(url, tmp_path)
    assert asked == []
    next(tmp_path.glob("*/*/*/*/*.npy")).unlink()
    with pytest.raises(NmoeError, match="missing"):
        fetch_plan(url, tmp_path)
    assert len(asked) == 1
