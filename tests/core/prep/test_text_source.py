"""Text that a trainer's run names is tokenised by prep, once, into a cache."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loader import load_manifest, load_plan, open_loader, open_shard, resolve_plan
from loader.errors import NmoeError
from nmoe_core.prep.run import PrepSettings, prep_shards
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Split
from tests.core.sources.read import builder_of

tokenizers = pytest.importorskip("tokenizers")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
EOS = 10
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<unk>", "<eos>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<eos>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def cfg(tokenizer: Path, tmp_path: Path) -> dict[str, Any]:
    """A run over `t.jsonl`."""
    write_lines(tmp_path / "t.jsonl", texts(0, 200))
    return {
        "configs": {"t": {"train_urls": [str(tmp_path / "t.jsonl")]}},
        "weights": {"t": 1},
        "tokenizer_path": str(tokenizer),
        "eos_token_id": EOS,
        "cache_dir": str(tmp_path / "cache"),
        "batch_size": 1,
        "seq_len": 16,
    }


def texts(seed: int, num_documents: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(num_documents)]


def write_lines(path: Path, documents: list[str]) -> None:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps({"text": text, "id": 1}) + "\n" for text in documents)


def stream_of(cfg: dict[str, Any], split: Any = "train") -> list[int]:
    loader = open_loader(cfg, backend="numpy", split=split)
    return np.concatenate([inputs.ravel() for inputs, _ in loader]).tolist()


def ids_of(documents: list[str]) -> list[int]:
    return [i for text in documents for i in [*(WORDS.index(w) for w in text.split()), EOS]]


def check_stream(found: list[int], documents: list[str]) -> None:
    expected = ids_of(documents)
    assert found == expected[: len(found)]
    assert len(expected) - len(found) <= 16


def made_in(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("*") if not path.name.startswith("."))


def files(*urls: str) -> dict[str, Any]:
    return {"configs": {"t": {"train_urls": list(urls)}}}


def refused_line(cfg: dict[str, Any]) -> str:
    with pytest.raises(NmoeError) as caught:
        resolve_plan(cfg)
    assert "\n" not in caught.value.line()
    return caught.value.line()


def test_a_data_set_is_tokenised_once_and_a_saved_plan_needs_no_text(
    cfg: dict[str, Any], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    hub = tmp_path / "bigcode" / "the-stack-v2"
    datasets.Dataset.from_dict({"text": texts(0, 200)}).save_to_disk(str(hub))
    del cfg["configs"], cfg["weights"]
    cfg["datasets"] = [{"hf_name": str(hub)}]
    check_stream(stream_of(cfg), texts(0, 200))
    plan = resolve_plan(cfg)
    assert (plan.sources[0].name, plan.sources[0].spec) == ("the-stack-v2", f"hf:{hub}")
    assert plan.tokenizer.startswith("tokenizer-")
    (made,) = made_in(tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*.*")}
    saved = plan.base / "plan.json"
    saved.write_text(plan.to_json())
    hub.rename(tmp_path / "gone")
    assert load_plan(saved) == plan
    assert before.items() <= {p: p.stat().st_mtime_ns for p in made.rglob("*.*")}.items()


def test_files_with_braces_gzip_and_a_valid_split_are_read_in_order(
    cfg: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    documents = texts(1, 90)
    for i in range(3):
        path = tmp_path / f"train.{i + 1}-of-3.jsonl.gz"
        write_lines(path, documents[30 * i : 30 * (i + 1)])
    write_lines(tmp_path / "held.jsonl", texts(2, 9))
    urls = [f"{tmp_path}/train.{{1..3}}-of-3.jsonl.gz"]
    held = [f"file://{tmp_path}/held.jsonl"]
    cfg["configs"] = {"owt": {"train_urls": urls, "validation_urls": held}}
    cfg |= {"weights": {"owt": 1}, "tokenizer_path": str(tokenizer.parent)}
    check_stream(stream_of(cfg), documents)
    check_stream(stream_of(cfg, "valid"), texts(2, 9))


def test_a_text_file_is_one_document(cfg: dict[str, Any], tmp_path: Path) -> None:
    text = " ".join(WORDS * 4)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "b.txt.gz"):
        check_stream(stream_of(cfg | files(str(tmp_path / name))), [text])


def test_text_has_the_tokens_that_prep_gives_it(cfg: dict[str, Any], tmp_path: Path) -> None:
    # Normalisation: composed letters, line ends and controls.
    write_lines(tmp_path / "t.jsonl", ["cafe\u0301\r\nline\x00 two", "\ufeffa\x85b " * 40, "a"])
    del cfg["tokenizer_path"], cfg["eos_token_id"]
    resolve_plan(cfg | {"tokenizer": "o200k_harmony", "seq_len": 4})
    source = JsonlSource(Reading("t"), find_files(["t.jsonl"], tmp_path))
    settings = PrepSettings(name="t", num_shards=1, min_doc_tokens=1)
    prep_shards(Split(source), settings, tmp_path / "prep")
    (made,) = made_in(tmp_path / "cache")
    ours, theirs = (next(path.rglob("*.npy")) for path in (made, tmp_path / "prep"))
    assert open_shard(ours).tolist() == open_shard(theirs).tolist()


def test_changed_text_is_tokenised_anew_and_never_served_from_the_cache(
    cfg: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    check_stream(stream_of(cfg), texts(0, 200))
    size = path.stat().st_size
    write_lines(path, list(reversed(texts(0, 200))))
    assert path.stat().st_size == size
    check_stream(stream_of(cfg), list(reversed(texts(0, 200))))
    assert len(made_in(tmp_path / "cache")) == 2


def test_tokens_of_text_that_changed_before_they_were_whole_are_removed(
    cfg: dict[str, Any], tmp_path: Path
) -> None:
    left, of_another = (tmp_path / "cache" / f".{name}-{'0f' * 8}" for name in ("t", "t-b"))
    for directory in (left, of_another):
        (directory / "train").mkdir(parents=True)
    stream_of(cfg)
    assert (left.exists(), of_another.exists()) == (False, True)


def test_processes_that_start_together_make_one_copy(cfg: dict[str, Any], tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as ranks:
        found = [ranks.submit(resolve_plan, cfg) for _ in range(3)]
    assert len({rank.result().plan_hash for rank in found}) == 1
    assert len(made_in(tmp_path / "cache")) == 1


def test_manifests_have_the_names_and_sizes_that_the_run_gives(
    cfg: dict[str, Any], tmp_path: Path
) -> None:
    plan = resolve_plan(cfg | {"tokenizer": "words", "vocab_size": 64})
    assert (plan.tokenizer, plan.vocab_size, plan.eos_token_id) == ("words", 64, EOS)
    (made,) = made_in(tmp_path / "cache")
    assert load_manifest(made / "train" / "manifest.json").vocab_size == 64
    assert "[E-TOKENIZER-DRIFT]" in refused_line(cfg | {"vocab_size": 5})


@pytest.mark.parametrize(("named", "subset"), [({"name": "small"}, "small"), ({}, None)])
def test_the_configuration_of_a_data_set_is_read_that_is_named(
    cfg: dict[str, Any], monkeypatch: pytest.MonkeyPatch, named: dict[str, str], subset: str | None
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": texts(0, 50)}).to_iterable_dataset()
    asked: list[object] = []

    def builder(_: str, *, name: str | None, **__: object) -> Any:
        asked.append(name)
        return builder_of(rows)

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    hub = {"id": "org/name", "revision": COMMIT}
    assert stream_of(cfg | {"configs": {"t": hub | named}})
    assert set(asked) == {subset}


def test_a_commit_of_the_hub_needs_no_look_up(
    cfg: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": texts(0, 50)}).to_iterable_dataset()
    asked: list[object] = []

    def dataset_info(_: object, repo: str, revision: str | None) -> SimpleNamespace:
        asked.append((repo, revision))
        return SimpleNamespace(sha=COMMIT)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder_of(rows))
    streams = []
    for named in ({"revision": COMMIT}, {"revision": "v1"}, {}):
        streams.append(stream_of(cfg | {"configs": {"t": {"id": "org/name"} | named}}))
    assert streams[0] == streams[1] == streams[2]
    assert asked[0] == ("org/name", "v1")
    assert ("org/name", COMMIT) not in asked


@pytest.mark.parametrize(
    ("content", "change", "words"),
    [
        ("[1]\n", files("a.jsonl"), ["a.jsonl:1"]),
        ('{"text": "fox"}\n{"text"', files("a.jsonl"), ["a.jsonl:2"]),
        ('{"text": 5}\n', files("a.jsonl"), ["a.jsonl:1", "text"]),
        ('{"body": "fox"}\n', files("a.jsonl"), ["a.jsonl:1", "text"]),
        ("\n", files("a.jsonl"), ["no document"]),
        ("", files("missing.jsonl"), ["missing.jsonl"]),
        ("", files("*.parquet"), ["no such file", "*.parquet"]),
        ("", files("{a,b}.{jsonl,txt}"), ["no such file"]),
        ("", files("a.jsonl", "b.txt"), ["[E-CONFIG]", "files and jsonl"]),
        ("", {"eos_token_id": None}, ["[E-TOKENIZER-SPECIAL]", "the EOS token is unknown"]),
        ("", {"tokenizer_path": "gpt9"}, ["[E-TOKENIZER-NAME]", "unknown tokenizer"]),
        ("{", {"tokenizer_path": "a.jsonl"}, ["[E-TOKENIZER-FILE]: a.jsonl"]),
    ],
)
def test_text_and_tokenizers_that_cannot_be_used_are_refused_and_leave_nothing(
    cfg: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    change: dict[str, Any],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(content)
    line = refused_line(cfg | change)
    for word in words:
        assert word in line
    assert made_in(tmp_path / "cache") == []


def test_what_cannot_be_fetched_is_refused_in_one_line(
    cfg: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("Max retries exceeded\nwith url: /encodings")

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset_builder", no_network)
    hub = {"configs": {"t": {"id": "org/name", "revision": COMMIT}}}
    assert "[E-SOURCE-NETWORK]" in refused_line(cfg | hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    line = refused_line(cfg | {"tokenizer_path": "org/other"})
    for words in ("[E-TOKENIZER-FILE]", "org/other", "Max retries exceeded with url"):
        assert words in line


def test_a_directory_with_a_revision_or_without_the_column_is_refused(
    cfg: dict[str, Any], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"body": ["fox"]}).save_to_disk(str(tmp_path / "d"))
    data = {"id": str(tmp_path / "d")}
    assert "text" in refused_line(cfg | {"configs": {"t": data}})
    line = refused_line(cfg | {"configs": {"t": data | {"revision": "v2"}}})
    assert "revision is set for a local directory; found 'v2'" in line
