"""What names a plan, data or a cache: URLs stay whole, and are refused where only paths work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from loader import build_loader
from loader.__main__ import main
from loader.config import read_config
from loader.files.addresses import address, is_url, join, parent
from tests.refusals import refused


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


@pytest.fixture
def shards(tree):
    """A source in a store, and the tokens of its splits."""
    fs = pytest.importorskip("fsspec").filesystem("memory")
    for split, num_tokens in (("train", 1000), ("valid", 200)):
        tree.add("web", num_tokens, split=split)
    for path in (tree.root / "web").rglob("*"):
        if path.is_file():
            fs.pipe_file(f"/b/{path.relative_to(tree.root).as_posix()}", path.read_bytes())
    yield tree
    fs.rm("/b", recursive=True)


@pytest.mark.parametrize(
    "settings",
    [
        lambda url: {"data_path": url},
        lambda url: {"datasets": [{"path": url, "name": "web"}]},
        lambda url: {"configs": {"web": {"path": url}}, "weights": {"web": 1}},
    ],
    ids=["data_path", "datasets", "configs"],
)
@pytest.mark.parametrize("url", ["memory://b/web", Path("memory://b/web"), "memory://b/web/train"])
def test_sources_are_read_from_a_url_as_from_a_directory(shards, tmp_path, settings, url):
    common = {"batch_size": 2, "seq_len": 16}
    remote = build_loader(
        settings(url) | common, backend="numpy", cache_dir=str(tmp_path / "cache")
    )[0]
    local = build_loader(settings(shards.root / "web") | common, backend="numpy")[0]
    assert remote.plan.plan_hash == local.plan.plan_hash or str(url).endswith("train")
    for (a, b), (c, d) in zip(remote, local, strict=True):
        assert a.tolist() == c.tolist()
        assert b.tolist() == d.tolist()


def test_a_run_file_may_name_a_url_and_its_copies_are_a_path(shards, tmp_path, monkeypatch):
    (tmp_path / "workspace.yaml").write_text("")
    (tmp_path / "run.toml").write_text(
        'data_path = "memory://b/web"\ncache_dir = "cache"\nbatch_size = 2\nseq_len = 16\n'
    )
    assert read_config(tmp_path / "run.toml")["data_path"] == "memory://b/web"
    monkeypatch.chdir("/")
    assert build_loader(tmp_path / "run.toml", split="valid")[0].num_steps == 6
    assert list((tmp_path / "cache").rglob("*.npy"))


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
            build_loader(given)
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run.toml"]


def test_a_url_as_the_argument_cache_dir_is_refused_too(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tree.add("web", 1000)
    cfg = tree.one()
    for given in (cfg, "memory://b/plan.json", build_loader(cfg)[1]):
        with refused("E-PATH-URL", naming=["gs://b/x"]):
            build_loader(given, cache_dir="gs://b/x")
    assert main(["peek", "memory://b/plan.json", "--cache-dir", "gs://b/x"]) == 1
    assert "gs://b/x" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
