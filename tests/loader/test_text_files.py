from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

import loader.files.text_files
import loader.plan.text_sources
from loader import ConfigError, PlanError, build_loader, resolve_plan
from loader.files.text_files import TextSource, content_stamp, expand_braces

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cfg(tmp_path) -> dict[str, object]:
    """One file of lines, tokenised by words of one letter."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = tokenizers.models.WordLevel({**{c: i for i, c in enumerate("abcdefgh")}, "<eos>": 8})
    made = tokenizers.Tokenizer(letters)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "a b c d e f g h"}) + "\n")
    return {
        "configs": {"t": {"train_urls": [f"{tmp_path}/t.jsonl"]}},
        "weights": {"t": 1},
        "tokenizer_path": str(tmp_path / "tokenizer.json"),
        "eos_token_id": 8,
        "cache_dir": str(tmp_path / "cache"),
        "batch_size": 1,
        "seq_len": 4,
    }


def tokens(cfg) -> list[int]:
    return [i for inputs, _ in build_loader(cfg, backend="numpy")[0] for i in inputs[0].tolist()]


def test_changed_text_is_tokenised_anew_and_never_served_from_the_cache(cfg, tmp_path):
    assert tokens(cfg) == [0, 1, 2, 3, 4, 5, 6, 7]
    path, before = tmp_path / "t.jsonl", (tmp_path / "t.jsonl").stat()
    path.write_text(json.dumps({"text": "h g f e d c b a"}) + "\n")
    assert path.stat().st_size == before.st_size
    assert tokens(cfg) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_text_that_changes_under_the_tokeniser_is_refused(cfg, tmp_path, monkeypatch):
    real = loader.plan.text_sources._write_split

    def write_and_touch(*arguments):
        real(*arguments)
        os.utime(tmp_path / "t.jsonl", ns=(1, 1))

    monkeypatch.setattr("loader.plan.text_sources._write_split", write_and_touch)
    with pytest.raises(PlanError, match="changed while it was tokenised"):
        resolve_plan(cfg)
    assert list((tmp_path / "cache").iterdir()) == []


def test_directory_is_stamped_by_every_file_in_it(tmp_path):
    (tmp_path / "sub").mkdir()
    source = TextSource(repo=str(tmp_path))
    empty = content_stamp(source)
    (tmp_path / "sub" / "a.arrow").write_text("x")
    one = content_stamp(source)
    os.utime(tmp_path / "sub" / "a.arrow", ns=(5, 5))
    assert len({json.dumps(stamp) for stamp in (empty, one, content_stamp(source))}) == 3
    with pytest.raises(ConfigError, match="no revision; found 'v2'"):
        content_stamp(TextSource(repo=str(tmp_path), revision="v2"))


def test_object_of_a_store_is_stamped_by_what_the_store_says_of_it():
    files = pytest.importorskip("fsspec").filesystem("memory")
    stamps = []
    for text in ("one", "four"):
        files.pipe("/stamped/a.jsonl", text.encode())
        stamps.append(content_stamp(TextSource(urls=("memory://stamped/a.jsonl",))))
    assert stamps[0] != stamps[1]
    files.rm("/stamped", recursive=True)
    with pytest.raises(PlanError, match="file cannot be read"):
        content_stamp(TextSource(urls=("memory://stamped/a.jsonl",)))


def test_dataset_of_the_hub_is_stamped_by_its_commit(monkeypatch):
    asked = []

    def dataset_info(_, repo, revision):
        asked.append((repo, revision))
        if revision == "gone":
            raise OSError("404: no such\nrevision")
        return SimpleNamespace(sha=COMMIT)

    hub = SimpleNamespace(HfApi=type("HfApi", (), {"dataset_info": dataset_info}))
    monkeypatch.setattr(loader.files.text_files, "import_extra", lambda *_: hub)
    expected = [["org/name", COMMIT]]
    assert content_stamp(TextSource(repo="org/name")) == expected
    assert content_stamp(TextSource(repo="org/name", revision="v1")) == expected
    assert asked == [("org/name", None), ("org/name", "v1")]
    assert content_stamp(TextSource(repo="org/name", revision=COMMIT)) == expected
    assert len(asked) == 2  # a commit needs no look-up
    with pytest.raises(PlanError, match="404: no such revision"):
        content_stamp(TextSource(repo="org/name", revision="gone"))


def test_braces_are_written_out():
    assert expand_braces("a{1..3}b") == ["a1b", "a2b", "a3b"]
    assert expand_braces("{08..10}") == ["08", "09", "10"]
    assert expand_braces("x{a,b}-{1..2}") == ["xa-1", "xa-2", "xb-1", "xb-2"]
    assert expand_braces("plain{}") == ["plain{}"]


def test_a_pattern_of_too_many_files_is_refused_before_they_are_written_out():
    assert len(expand_braces("{0..99999}")) == 100_000
    assert len(expand_braces("{1..1}" * 3000)) == 1
    for pattern in ("{0..999999999}", "{0..999}{0..999}", "{a,b}" * 60, f"{{0..{'9' * 5000}}}"):
        with pytest.raises(ConfigError, match="at most 100000 files") as caught:
            expand_braces(pattern)
        assert len(str(caught.value)) < 400


def test_a_range_that_runs_backwards_is_refused():
    with pytest.raises(ConfigError, match=r"\{3\.\.1\}"):
        expand_braces("a{3..1}b")


@pytest.mark.parametrize(
    ("source", "spec"),
    [
        (TextSource(repo="a/b"), "hf:a/b"),
        (TextSource(repo="a/b", split="dev"), "hf:a/b:dev"),
        (TextSource(repo="a/b", text_key="body"), "hf:a/b:train:body"),
        (TextSource(repo="a/b", config="en"), "hf:a/b:en:train"),
        (TextSource(repo="a/b", config="en", text_key="body"), "hf:a/b:en:train:body"),
        (TextSource(urls=("x.txt",)), "txt:x.txt"),
    ],
)
def test_specs_are_written_as_the_token_balance_document_has_them(source, spec):
    assert source.spec == spec


class Refused(Exception):
    """What a client raises: of no class that the loader knows, with lines."""


def no_network(*_: object, **__: object):
    raise Refused("Max retries exceeded\nwith url: /encodings")


def said_of(cfg) -> str:
    with pytest.raises(PlanError) as caught:
        resolve_plan(cfg)
    assert caught.value.code == "E-PLAN-SOURCE"
    line = caught.value.line()
    assert "Max retries exceeded with url: /encodings" in line
    return line


def test_an_encoding_that_cannot_be_fetched_is_one_line(cfg, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    del cfg["tokenizer_path"]
    line = said_of(cfg | {"tokenizer": "gpt2"})
    assert "'gpt2'" in line
    assert "tokenizer_path" in line


def test_a_tokenizer_of_the_hub_that_cannot_be_fetched_is_one_line(cfg, monkeypatch):
    fetched = SimpleNamespace(from_pretrained=no_network)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", SimpleNamespace(Tokenizer=fetched))
    assert "'org/name'" in said_of(cfg | {"tokenizer_path": "org/name"})


def test_a_damaged_tokenizer_file_is_one_line(cfg, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(PlanError, match=r"tokenizer\.json") as caught:
        resolve_plan(cfg)
    assert caught.value.code == "E-PLAN-SOURCE"


def test_text_and_data_sets_that_cannot_be_fetched_are_one_line(cfg, tmp_path, monkeypatch):
    files = pytest.importorskip("fsspec").filesystem("memory")
    datasets = pytest.importorskip("datasets")
    files.pipe("/away/a.jsonl", b'{"text": "a b c d e f"}')
    remote = {"configs": {"t": {"train_urls": ["memory://away/a.jsonl"]}}}
    assert tokens(cfg | remote) == [0, 1, 2, 3]
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem._open", no_network)
    fresh = {"cache_dir": str(tmp_path / "other")}
    assert "memory://away/a.jsonl" in said_of(cfg | remote | fresh)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ukey", no_network)
    assert "memory://away/a.jsonl" in said_of(cfg | remote | fresh)
    monkeypatch.setattr(datasets, "load_dataset", no_network)
    hub = {"configs": {"t": {"id": "org/name", "revision": COMMIT}}}
    assert "hf:org/name" in said_of(cfg | hub | fresh)
    files.rm("/away", recursive=True)
