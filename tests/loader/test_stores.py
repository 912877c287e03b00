"""Addresses, and plans and shards behind them in stores of fsspec, HTTP and S3 on this machine."""

import base64
import errno
import json
import os
import re
import shutil
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loader import resolve_plan
from loader.__main__ import main
from loader.config import read_config
from loader.files.addresses import address, is_url, join, parent
from loader.files.stores.aws_profile import profile_options
from loader.files.stores.store import read_bytes
from loader.plan import remote
from loader.plan.remote import fetch_plan
from tests.loader.shared import in_a_fork, open_loader
from tests.project import serving
from tests.refusals import refused

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("obstore")


@pytest.fixture
def bucket(two_stages, tmp_path) -> Path:
    """What a store holds: `plans/plan.json` and `data/`."""
    shutil.copytree(two_stages.tree.root, tmp_path / "bucket" / "data")
    plan = json.loads(resolve_plan(two_stages.cfg).to_json()) | {"root": "../data"}
    (tmp_path / "bucket" / "plans").mkdir()
    (tmp_path / "bucket" / "plans" / "plan.json").write_text(json.dumps(plan))
    return tmp_path / "bucket"


@pytest.fixture(params=["memory", "file"])
def files(request, bucket):
    """A store that a test may write to: file system, root in it, and the plan's URL."""
    fs, root = fsspec.filesystem(request.param), str(bucket)
    if request.param == "memory":
        fs.put(root, "/bucket", recursive=True)
        root = "/bucket"
    yield fs, root, f"{request.param}://{root}/plans/plan.json"
    fs.rm(root, recursive=True)


class Quiet(SimpleHTTPRequestHandler):
    """Files of a directory, without ranges and without a log."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def web(bucket, monkeypatch):
    """A server of HTTP on this machine; its address, and what ends it."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    pytest.importorskip("aiohttp")
    with serving(partial(Quiet, directory=str(bucket))) as (host, stop):
        yield f"http://{host}", stop


@pytest.fixture
def s3_bucket(bucket, s3):
    """The same in a bucket of an S3-compatible server on this machine."""
    store, server = s3
    store.put(str(bucket) + "/", "corpus/", recursive=True)
    return "s3://corpus", server.stop


@pytest.fixture(params=["web", "s3_bucket"])
def store(request):
    return request.getfixturevalue(request.param)


def read(url, tmp_path, **options):
    return open_loader(url, cache_dir=tmp_path / "cache", **options)


def the_line(url, tmp_path, capsys) -> str:
    """What the command says of a plan that it refuses: one line."""
    assert main(["peek", url, "--cache-dir", str(tmp_path / "cache")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_plan_in_a_store_is_read_as_that_of_files(store, two_stages, tmp_path):
    local = open_loader(two_stages.cfg)
    remote = read(f"{store[0]}/plans/plan.json", tmp_path)
    assert remote.plan.plan_hash == local.plan.plan_hash
    for (a, b), (c, d) in zip(remote, local, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)


@pytest.mark.parametrize(
    "settings",
    [
        lambda url: {"data_path": url},
        lambda url: {"datasets": [{"path": url, "name": "web"}]},
        lambda url: {"configs": {"web": {"path": url}}, "weights": {"web": 1}},
    ],
    ids=["data_path", "datasets", "configs"],
)
def test_sources_are_read_from_a_url_as_from_a_directory(files, two_stages, tmp_path, settings):
    common = {"batch_size": 2, "seq_len": 16}
    local = open_loader(settings(two_stages.tree.root / "web") | common)
    url = files[2].replace("plans/plan.json", "data/web")
    for given in (url, Path(url), f"{url}/train"):
        loader = open_loader(settings(given) | common, cache_dir=str(tmp_path / "cache"))
        assert loader.plan.plan_hash == local.plan.plan_hash or str(given).endswith("train")
        for found, expected in zip(loader, iter(local), strict=True):
            np.testing.assert_array_equal(found, expected)
        local.seek(0)


def test_a_run_file_may_name_a_url_and_its_copies_are_a_path(files, tmp_path, monkeypatch):
    url = files[2].replace("plans/plan.json", "data/web")
    (tmp_path / "workspace.yaml").write_text("")
    (tmp_path / "run.toml").write_text(
        f'data_path = "{url}"\ncache_dir = "cache"\nbatch_size = 2\nseq_len = 16\n'
    )
    assert read_config(tmp_path / "run.toml")["data_path"] == url
    monkeypatch.chdir("/")
    assert open_loader(tmp_path / "run.toml", split="valid").num_steps == 16
    assert list((tmp_path / "cache").rglob("*.npy"))


def test_a_split_that_the_store_has_no_more_is_not_read_from_the_cache(files, tmp_path):
    fs, root, url = files
    web = url.replace("plans/plan.json", "data/web")
    cfg = {"data_path": web, "batch_size": 2, "seq_len": 16}
    cached = cfg | {"cache_dir": str(tmp_path / "cache")}
    assert resolve_plan(cached).valid
    fs.rm(f"{root}/data/web/valid", recursive=True)
    assert not resolve_plan(cached).valid
    # Nor are splits, where the directory itself holds the data now.
    fs.mv(f"{root}/data/web/train", f"{root}/data/whole", recursive=True)
    fs.rm(f"{root}/data/web", recursive=True)
    fs.mv(f"{root}/data/whole", f"{root}/data/web", recursive=True)
    plan = resolve_plan(cached)
    assert plan == resolve_plan(cfg | {"cache_dir": str(tmp_path / "other")})
    assert [source.manifest for source in plan.sources] == ["manifest.json"]


def test_valid_and_torchs_data_classes_read_a_url_too(files, two_stages, tmp_path):
    valid = read(files[2], tmp_path, split="valid")
    assert valid.next_with_meta().document_spans is not None
    pytest.importorskip("torch")
    from loader.torch_data import StepDataset

    inputs = open_loader(two_stages.cfg).next()[0]
    dataset = StepDataset(Path(files[2]), cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(dataset[0][0].numpy(), inputs)
    options = {"backend": "torch", "num_workers": 1, "cache_dir": tmp_path / "cache"}
    with open_loader(files[2], **options) as loader:
        np.testing.assert_array_equal(loader.next()[0].numpy(), inputs)


def test_a_second_fetch_copies_only_damaged_or_missing_files(files, tmp_path, monkeypatch):
    asked, copy = [], remote.copy
    monkeypatch.setattr(remote, "copy", lambda url, *to: asked.append(url) or copy(url, *to))
    plan = fetch_plan(files[2], tmp_path / "cache")
    shards = sorted(plan.parent.rglob("*.npy"))
    asked.clear()
    fetch_plan(files[2], tmp_path / "cache")
    assert asked == []
    good = [path.read_bytes() for path in shards]
    shards[1].write_bytes(good[1][:8])
    shards[2].write_bytes(good[2][:-4] + b"\0\0\0\0")
    shards[3].unlink()
    fetch_plan(files[2], tmp_path / "cache")
    assert sorted(Path(url).name for url in asked) == sorted(path.name for path in shards[1:4])
    assert [path.read_bytes() for path in shards] == good
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
        ("commit other data", "E-PLAN-DATA"),
    ],
)
def test_damage_is_refused_by_the_name_of_the_file_before_step_0(files, tmp_path, damage, code):
    fs, root, url = files
    path = sorted(fs.glob(f"{root}/data/web/train/*/*.npy"))[0]
    if "index" in damage:
        path = path.removesuffix(".npy") + ".idx"
    if "commit" in damage:
        path = f"{root}/data/web/train/manifest.json"
    content = fs.cat_file(path)
    if damage.startswith("cut"):
        fs.pipe_file(path, content[:-200] if damage == "cut" else content[:-8])
    elif damage == "commit other data":
        fs.pipe_file(path, re.sub(b'"checksum": "[0-9a-f]+"', b'"checksum": "%064d"' % 0, content))
    elif damage == "replace":
        fs.pipe_file(path, content[:-4] + b"\1\0\0\0")
    else:
        fs.rm_file(path)
    for _ in range(2):  # nothing of the damage stays in the cache as good
        with refused(code, naming=[fs.unstrip_protocol(path)]):
            read(url, tmp_path)
        if damage == "replace":  # a copy of other content is not kept
            assert not list((tmp_path / "cache").rglob(path.rpartition("/data/")[2]))


def test_a_url_needs_a_cache_and_fsspec_and_the_command_takes_one(
    files, tmp_path, capsys, monkeypatch
):
    url = files[2]
    with refused("E-CONFIG", match="set cache_dir"):
        open_loader(url)
    assert main(["verify", url, "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "ok plan" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with refused("E-CONFIG", match=r"nmoe-loader\[remote\]"):
        fetch_plan("memory://x/plan.json", Path("cache"))


def test_a_store_that_is_down_is_not_needed_where_the_cache_holds_everything(store, tmp_path):
    root, stop = store
    url = f"{root}/plans/plan.json"
    directory = {"data_path": f"{root}/data/code", "batch_size": 2, "seq_len": 16}
    first, of_directory = read(url, tmp_path).next()[0], read(directory, tmp_path).next()[0]
    stop()
    for given, inputs in ((url, first), (directory, of_directory)):
        with pytest.warns(UserWarning, match="using the copy in the cache"):
            np.testing.assert_array_equal(read(given, tmp_path).next()[0], inputs)
    for path in (tmp_path / "cache").rglob("*.npy"):
        path.unlink()
    with (
        pytest.warns(UserWarning, match="using the copy in the cache"),
        refused("E-STORE", naming=[".npy"]),
    ):
        read(url, tmp_path)


def test_a_missing_plan_or_bucket_and_a_store_that_is_down_give_one_true_line(
    store, tmp_path, capsys
):
    root, stop = store
    urls = [f"{root}/plans/other.json", f"{root}/nowhere/plan.json"]
    for url in urls:
        assert the_line(url, tmp_path, capsys).startswith(f"ERROR [E-PLAN-MISSING]: {url}")
    if root.startswith("s3:"):
        line = the_line("s3://elsewhere/plan.json", tmp_path, capsys)
        assert line.startswith("ERROR [E-STORE]: s3://elsewhere/plan.json")
        assert "NoSuchBucket" in line
    stop()
    line = the_line(f"{root}/plans/plan.json", tmp_path, capsys)
    assert line.startswith("ERROR [E-STORE]: ")
    assert f"{root}/plans/plan.json" in line


@pytest.mark.parametrize(
    ("change", "word"),
    [
        *(({"root": value}, "root") for value in (None, "/etc", "http://other/x")),
        ({"stages": None}, "NoneType"),
        ({"stages": [{}]}, "stages[0].sources"),
        ({"stages": [{"sources": [{"name": "web"}]}]}, "sources[0].manifest"),
        ({"valid": 5}, "int"),
        ({"valid": [{"name": 1, "manifest": 2, "content_hash": 3}]}, "1"),
        ({"format": "x"}, "'x'"),
        *(({key: ...}, key) for key in ("root", "stages")),  # it lacks the key
    ],
)
def test_a_plan_without_its_parts_is_one_true_line(bucket, tmp_path, capsys, change, word):
    path = bucket / "plans" / "plan.json"
    value = json.loads(path.read_text()) | change
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))
    line = the_line(f"file://{path}", tmp_path, capsys)
    assert line.startswith(f"ERROR [E-PLAN-FORMAT]: file://{path}: not a loader plan")
    assert word in line


def test_a_plan_whose_hash_is_no_text_is_refused(bucket, tmp_path, capsys):
    path = bucket / "plans" / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"plan_hash": "\ud800"}))
    assert "E-PLAN-HASH" in the_line(f"file://{path}", tmp_path, capsys)


class Boasting(Quiet):
    """Gives a beginning of each file, and says that it is of `length` bytes."""

    length = 10**13

    def do_GET(self) -> None:
        """The beginning, in two pieces."""
        self.send_response(200)
        self.send_header("Content-Length", str(self.length))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        for _ in range(2):
            self.wfile.write(b"[" * 2000)
            self.wfile.flush()
            time.sleep(0.05)


@pytest.mark.parametrize("length", [10**13, 2**63 - 1, 10**30, 4001, 4000])
def test_a_reply_that_is_not_as_long_as_it_says_is_an_error_of_the_store(
    tmp_path, capsys, monkeypatch, length
):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with serving(type("Handler", (Boasting,), {"length": length})) as (host, _):
        line = the_line(f"http://{host}/plan.json", tmp_path, capsys)
    assert ("E-PLAN-FORMAT" if length == 4000 else "E-STORE") in line


@pytest.mark.parametrize("kind", ["manifest", "shard", "index"])
def test_no_copy_from_a_store_is_longer_than_its_manifest_says(
    bucket, tmp_path, capsys, monkeypatch, kind
):
    """The server states no true length, or sends more than it may."""
    monkeypatch.setattr("loader.plan.remote.MAX_MANIFEST_BYTES", 2**16)
    ending = {"manifest": "train/manifest.json", "shard": ".npy", "index": ".idx"}[kind]
    served = endless(bucket, ending)
    with serving(served) as (host, _):
        line = the_line(f"http://{host}/plans/plan.json", tmp_path, capsys)
    assert "E-STORE" in line
    assert "file is too long" in line
    copies = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [path for path in copies if path.name.endswith((ending, f"{ending}.part"))]


def endless(bucket: Path, ending: str) -> type[Quiet]:
    """A server of the bucket that says that files of one ending are very long, and sends much."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            path = bucket / self.path.lstrip("/")
            is_long = self.path.endswith(ending)
            content = path.read_bytes() if path.is_file() else b""
            self.send_response(200 if path.is_file() else 404)
            self.send_header("Content-Length", str(10**13 if is_long else len(content)))
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(content)

    return Handler


def test_a_whole_file_is_read_into_memory_up_to_a_limit(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("loader.files.stores.store.MAX_BYTES", 3999)
    with serving(type("Handler", (Boasting,), {"length": 4000})) as (host, _):
        line = the_line(f"http://{host}/plan.json", tmp_path, capsys)
    assert "E-STORE" in line
    assert "file is too long" in line
    assert "at most 3999" in line


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"a":' * 10**5, '{"format": "\\ud800"}', "1" * 5000]
)
def test_a_plan_of_a_store_that_cannot_be_parsed_is_one_line(tmp_path, capsys, text):
    (tmp_path / "plan.json").write_text(text)
    assert "E-PLAN-FORMAT" in the_line(f"file://{tmp_path}/plan.json", tmp_path, capsys)


def test_an_unknown_kind_of_url_is_one_line(tmp_path, capsys):
    assert "no client" in the_line("nosuch://b/plan.json", tmp_path, capsys)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_broken_disk_of_this_machine_is_one_line(
    bucket, tmp_path, monkeypatch, capsys, code
):
    def failing(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("loader.files.stores.store.os.fsync", failing)
    line = the_line(f"file://{bucket}/plans/plan.json", tmp_path, capsys)
    assert "E-STORE" not in line  # the store is not to blame
    assert os.strerror(code) in line


# Addresses: URLs stay whole, and are refused where only paths work


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Path("s3://b/x"), "s3://b/x"),
        ("s3:/b/x", "s3://b/x"),
        ("http:/h:80/x", "http://h:80/x"),
        (Path("file:///a/b"), "file:///a/b"),
        (Path("simplecache::s3://b/x"), "simplecache::s3://b/x"),
        ("memory:///b", "memory:///b"),
    ],
)
def test_a_url_is_whole_however_it_came(given, expected):
    assert address(given) == expected
    assert is_url(given)


@pytest.mark.parametrize(
    "given", ["/a/b", "a/b", "C:/a", "C:\\a", "a:b", "a/s3:/b", Path("/x:y/z")]
)
def test_a_path_is_no_url(given):
    assert address(given) == str(given)
    assert not is_url(given)


@pytest.mark.parametrize(
    ("base", "part", "expected"),
    [
        ("http://h/a", "../b/c", "http://h/b/c"),
        ("http://h/a", "../../../b", "http://h/b"),
        ("s3://bucket/a/b", "../data/x", "s3://bucket/a/data/x"),
        ("s3://bucket", "../other/x", "s3://bucket/other/x"),
        ("file:///a/b", "..", "file:///a"),
        ("memory:///a", "b", "memory:///a/b"),
    ],
)
def test_parts_are_joined_inside_their_host_or_bucket(base, part, expected):
    assert join(base, part) == expected


def test_a_query_belongs_to_the_file_alone():
    assert parent("https://h/a/plan.json?sig=x/y#z") == "https://h/a"


@pytest.mark.parametrize(
    "key", ["cache_dir", "root", "data_root", "mixture_toml", "flow_profiles_toml"]
)
@pytest.mark.parametrize("value", ["gs://b/x", Path("s3://b/x")])
def test_a_url_where_only_a_path_works_is_refused_by_name(tree, tmp_path, key, value, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree.add("web", 1000)
    cfg = tree.one(**{key: value})
    (tmp_path / "run.toml").write_text(
        f'data_path = "{tree.root}/web"\nbatch_size = 2\nseq_len = 16\n{key} = "{address(value)}"\n'
    )
    for given in (cfg, SimpleNamespace(**cfg), tmp_path / "run.toml"):
        with refused("E-PATH-URL", naming=[key, address(value)]) as caught:
            open_loader(given)
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run.toml"]


def test_a_url_as_the_argument_cache_dir_is_refused_too(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tree.add("web", 1000)
    cfg = tree.one()
    for given in (cfg, "memory://b/plan.json", open_loader(cfg).plan):
        with refused("E-PATH-URL", naming=["gs://b/x"]):
            open_loader(given, cache_dir="gs://b/x")
    assert main(["peek", "memory://b/plan.json", "--cache-dir", "gs://b/x"]) == 1
    assert "gs://b/x" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_forked_process_that_asks_a_store_again_is_refused(bucket):
    url = f"file://{bucket}/plans/plan.json"
    assert read_bytes(url)

    def ask() -> str:
        with refused("E-CONFIG") as error:
            read_bytes(url)
        return str(error.value)

    assert "spawn" in in_a_fork(ask)
    assert read_bytes(url)


@pytest.mark.parametrize(
    ("environment", "region", "method", "keys"),
    [
        ({}, "eu-1", "shared-credentials-file", {"region", "credential_provider"}),
        ({}, None, "sso", {"credential_provider"}),
        ({}, "eu-1", "env", {"region"}),
        ({}, None, "iam-role", set()),
        ({}, "eu-1", None, {"region"}),
        ({"AWS_ACCESS_KEY_ID": "k"}, "eu-1", "sso", set()),
        ({"AWS_ACCESS_KEY_ID": "k", "AWS_PROFILE": "p"}, None, "sso", {"credential_provider"}),
    ],
)
def test_an_aws_profile_supplies_settings_that_the_environment_lacks(
    monkeypatch, environment, region, method, keys
):
    key = SimpleNamespace(access_key="id", secret_key="secret", token="token")
    found = method and SimpleNamespace(method=method, get_frozen_credentials=lambda: key)
    values = {"get_credentials": lambda: found, "get_config_variable": {"region": region}.get}
    session = SimpleNamespace(Session=lambda: SimpleNamespace(**values))
    monkeypatch.setitem(sys.modules, "botocore.session", session)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = profile_options()
    assert options.keys() == keys
    assert options.get("region", region) == region
    if "credential_provider" in keys:
        given = options["credential_provider"]()
        assert given.pop("expires_at") > datetime.now(UTC) + timedelta(minutes=5)
        assert given == {"access_key_id": "id", "secret_access_key": "secret", "token": "token"}


def test_login_query_and_coded_letters_of_an_address_reach_the_server(bucket, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    asked = []

    class Asked(Quiet):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            super().do_GET()

    (bucket / "a b").mkdir()
    (bucket / "a b" / "ä.txt").write_bytes(b"text")
    path = "/a%20b/%C3%A4.txt"
    with serving(partial(Asked, directory=str(bucket))) as (host, _):
        assert read_bytes(f"http://{host}{path}") == b"text"
        assert read_bytes(f"http://me:p%40ss@{host}{path}") == b"text"
        assert read_bytes(f"http://{host}{path}?sig=1") == b"text"
    token = base64.b64encode(b"me:p@ss").decode()
    assert asked == [(path, None), (path, f"Basic {token}"), (f"{path}?sig=1", None)]
