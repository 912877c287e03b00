"""`nmoe seen` on curated shards of real text, of two tokenizers, with a plan over them."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import load_manifest, open_loader
from nmoe_core.audit.seen.answer import Index, answer
from nmoe_core.audit.seen.index_files import index_shard
from nmoe_core.audit.seen.places import Spans, occurrences
from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import NmoeError
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.shards import suffixes
from nmoe_core.shards.documents import shard_files
from nmoe_core.tasks.checks import check_seen
from nmoe_core.tasks.curate import curate_shards, make_plan
from nmoe_core.tasks.shards import each_shard, outputs_of
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.curate.corpus import Corpus
from tests.own_tokenizers import byte_level, pieces
from tests.project import contents, failing, jsonl_source, said, write_project
from tests.refusals import refused, refused_line

pytest.importorskip("pydivsufsort", reason="extra seen is not installed")
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "naïve",
    "café",
    "isn't",
    "12",
    "345",
    "(x)",
    "re-use",
    "東京",
    "кошка।",
    "देखें",
    "value",
    "example:",
    "long",
]


def _texts() -> list[str]:
    rng = random.Random(3)
    return [
        ". ".join(" ".join(rng.choices(WORDS, k=rng.randrange(4, 12))) for _ in range(12))
        for _ in range(150)
    ]


TEXTS = _texts()


def _made(directory: Path, train: Callable[[Path, list[str]], None], dtype: str) -> Run:
    """A run whose curated shards hold every text, with a plan over them, not yet indexed."""
    (directory / "own").mkdir(parents=True)
    train(directory / "own", TEXTS)
    settings = {
        "root": ".",
        "tokenizer": "own",
        "prep": {"min_doc_tokens": 1, "tokens_per_shard": 12_000, "dtype": dtype},
        "seq_len": 64,
        "batch_size": 4,
        "on_exhaust": "wrap",
        "seen": {"part_tokens": 5000},
        "curation": {"order": "golden"},
    }
    source = jsonl_source("web", [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)])
    project = write_project(directory, [source], settings)
    assert main(["prep-mixture", "--config", str(project.config)]) == 0
    corpus, run = Corpus(directory), project.run
    corpus.fit()
    for bucket in range(2):
        corpus.assign(bucket)
        corpus.grade(bucket, lambda number: "keep")
    curate_shards(run, "web", range(2))
    corpus.combine(64)
    make_plan(run, ["web"], [])
    return run


class _Runs(dict[str, Run]):
    """Indexed runs by their tokenizer, each made when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, name: str) -> Run:
        train, dtype = {"bytes": (byte_level, "uint16"), "pieces": (pieces, "uint32")}[name]
        directory = self._factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(directory)
            self[name] = _made(directory, train, dtype)
            outputs_of(self[name], "seen", "web")
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return _Runs(tmp_path_factory)


@pytest.fixture
def run(runs: dict[str, Run], tmp_path: Path) -> Run:
    """An indexed run of its own."""
    shutil.copytree(runs["pieces"].base, tmp_path / "run")
    return Run(tmp_path / "run" / "run.toml")


def sentences(seed: int, count: int) -> list[str]:
    """Sentences of the texts, without the period."""
    rng = random.Random(seed)
    return [rng.choice(rng.choice(TEXTS).split(". ")).strip(".") for _ in range(count)]


# A byte-level tokenizer is proved against the library over all of Unicode: half a minute.
@pytest.mark.parametrize("name", ["pieces", pytest.param("bytes", marks=pytest.mark.slow)])
def test_every_sentence_of_the_texts_is_found_where_it_is_and_no_other(
    runs: dict[str, Run], name: str
) -> None:
    run = runs[name]
    index, tokenizer = Index(run), load_tokenizer(run.tokenizer)
    assert len(index.parts) > 4, "several files of several parts"
    for sentence in sentences(1, 100):
        found = occurrences(index.find(sentence))
        assert len(found) == sum(text.count(sentence) for text in TEXTS)
        for one in found:
            tokens = np.load(one.part.token_file)[one.start : one.end]
            assert sentence in tokenizer.decode(tokens)
    for sentence in sentences(2, 100):
        words = sentence.split(" ")
        other = " ".join(words[::-1])
        is_there = any(other in text for text in TEXTS)
        assert bool(occurrences(index.find(other))) is is_there


def test_places_that_overlap_or_touch_are_one_place_of_the_same_tokens(
    runs: dict[str, Run],
) -> None:
    part = Index(runs["pieces"]).parts[0]
    tokens = np.array([[2, 9], [3, 5], [4, 6], [9, 11], [12, 14], [30, 31]])
    places = list(Spans(part, tokens).places("web"))
    assert [(one.start, one.end) for one in places] == [(2, 11), (12, 14), (30, 31)]
    assert {(one.source, one.path) for one in places} == {("web", part.token_file)}
    assert list(Spans(part, tokens[:0]).places("web")) == []


def test_the_steps_are_those_whose_rows_the_loader_gives(runs: dict[str, Run]) -> None:
    run = runs["pieces"]
    batches = open_loader(run.tree.plan, backend="numpy")
    plan = batches.plan
    rows, num_steps = np.concatenate([inputs.copy() for inputs, _ in batches]), batches.num_steps
    tokenizer, cut = load_tokenizer(run.tokenizer), 0
    decoded = [tokenizer.decode(row) for row in rows]
    by_id = {f"d{i}": text for i, text in enumerate(TEXTS)}
    for sentence in sentences(4, 25):
        found = answer(run, sentence, limit=1000)
        assert found.occurrences == len(found.hits) == sum(t.count(sentence) for t in TEXTS)
        assert found.documents == sum(sentence in text for text in TEXTS)
        assert found.steps == num_steps
        steps, whole = set(), set()
        for hit in found.hits:
            text, own = by_id[hit.ingest_id], parse_doc_id(hit.doc_id)
            assert f"{hit.before}{sentence}{hit.after}" in text
            assert len(hit.after) > 45 or text.endswith(f"{sentence}{hit.after}")
            assert len(hit.before) > 45 or text.startswith(f"{hit.before}{sentence}")
            tokens = np.load(run.tree.data / own.rel)[own.start : own.end]
            assert tokenizer.decode(tokens[:-1]) == text
            spelled = tokens[hit.position : hit.position + hit.tokens]
            assert sentence in tokenizer.decode(spelled)
            assert sentence not in tokenizer.decode(spelled[1:])
            for row in hit.readings or []:
                steps.add(row.step)
                assert row.is_whole is (row.tokens == hit.tokens)
                assert 0 < row.tokens <= hit.tokens
                whole |= {row.step * plan.batch_size + row.row} if row.is_whole else set()
                cut += not row.is_whole
        assert whole == {n for n, text in enumerate(decoded) if sentence in text}
        assert found.is_read is bool(steps)
        assert found.first_step == min(steps, default=None)
        if found.first_step is not None:
            before = answer(run, sentence, before_step=found.first_step)
            assert (before.is_read, before.first_step) == (False, None)
            assert answer(run, sentence, before_step=found.first_step + 1).is_read
    assert answer(run, "long", before_step=num_steps).is_read
    assert answer(run, "long", before_step=0).steps == 0
    with refused("E-SEEK", naming=[f"0 to {num_steps}"]):
        answer(run, "long", before_step=num_steps + 1)
    assert cut > 0, "windows cut some of them"
    *_, sentence, last = min(TEXTS, key=lambda text: len(text.split(". ")[-1])).split(". ")
    assert f". {last}" in [hit.after for hit in answer(run, sentence).hits]


def test_the_command_says_what_the_function_finds(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = next(text for text in sentences(5, 20) if answer(run, text).is_read)
    config = ("--config", run.path)
    run.tree.seen_digests.unlink()
    found = answer(run, sentence)
    assert run.tree.seen_digests.is_file(), "the next answer hashes no file again"
    shown = said(capsys, "seen", f"  {sentence}\r\n", *config)
    assert shown["hits"][0]["doc_id"] == found.hits[0].doc_id
    assert (shown["sentence"], shown["occurrences"]) == (sentence, found.occurrences)
    assert main(["seen", sentence, "--config", str(run.path)]) == 0
    text = capsys.readouterr().out
    times = "1 time in 1 document," if found.occurrences == 1 else f"{found.occurrences} times in "
    assert text.startswith(f"read: {times}")
    assert f"«{sentence}»" in text
    assert f"first at step {found.first_step}," in text
    assert said(capsys, "explain", found.hits[0].doc_id, *config)["readings"]
    assert main(["seen", "no text has this", "--config", str(run.path)]) == 0
    assert capsys.readouterr().out == "not read: no curated document contains it\n"
    run.tree.plan.unlink()
    assert main(["seen", sentence, "--config", str(run.path)]) == 0
    assert "the run has no plan" in capsys.readouterr().out


def test_command_and_asset_make_the_same_files_and_current_ones_are_left_alone(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run.tree.seen, "*/**/*")
    shutil.rmtree(run.tree.seen)
    made = {int(one.key): one.result for one in each_shard(run, "seen", "web", ["0000", "0001"])}
    assert contents(run.tree.seen, "*/**/*") == before
    rows = said(capsys, "seen", "--index", "--config", run.path)
    assert [row["written"] for row in rows] == [0]
    assert (first := made[0]) is not None
    sizes = [path.stat().st_size for path in run.tree.shard("web", 0).seen.glob("*.sa")]
    assert (first.facts["bytes"], first.facts["files_sorted"]) == (sum(sizes), len(sizes))
    again = outputs_of(run, "seen", "web")[0]
    assert (again.digest, again.facts["files_sorted"]) == (first.digest, 0)
    assert check_seen(run, "web", [0, 1])["suffixes"].passed


def test_an_index_of_another_version_of_the_shard_is_refused_until_it_is_made_again(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    config, sentence = ("--config", str(run.path)), sentences(6, 1)[0]
    corpus = Corpus(run.tree.root)
    corpus.grade(1, lambda number: "keep" if number % 2 else "drop")
    curate_shards(run, "web", [1])
    assert "shard_0001" in refused_line(capsys, "seen", sentence, *config, code="E-SEEN-STALE")
    assert not check_seen(run, "web", [1])["suffixes"].passed
    rows = said(capsys, "seen", "--index", *config)
    assert [row["written"] for row in rows] == [1]
    run.tree.plan.unlink()
    kept = [
        load_tokenizer(run.tokenizer).decode(file.tokens[start : end - 1])
        for bucket in range(2)
        for file in shard_files(
            run.tree.curated, load_manifest(corpus.shard(bucket).curated_manifest)
        )
        for start, end in file.spans
    ]
    assert answer(run, sentence).occurrences == sum(text.count(sentence) for text in kept)
    shutil.rmtree(run.tree.shard("web", 0).seen)
    refused_line(capsys, "seen", sentence, *config, code="E-SEEN-MISSING")


@pytest.mark.parametrize("name", ["index.json", "*.sa"])
def test_a_damaged_index_is_refused_and_made_again(run: Run, name: str, mutations: Any) -> None:
    answer(run, "the cat")
    path = sorted(run.tree.shard("web", 0).seen.glob(name))[0]
    path.write_bytes(mutations.flip_bit(path.read_bytes()))
    with refused("E-SEEN-CHANGED"):
        answer(run, "the cat")
    outputs_of(run, "seen", "web")
    assert answer(run, "the cat").occurrences


@pytest.mark.parametrize("k", [1, 2])
def test_a_build_that_fails_leaves_the_earlier_index_readable(run: Run, k: int) -> None:
    shard = run.tree.shard("web", 1)
    curated, earlier = contents(shard.curated), Index(run)
    expected = len(occurrences(earlier.find("the cat")))
    corpus = Corpus(run.tree.root)
    corpus.grade(1, lambda number: "keep" if number % 2 else "drop")
    corpus.curate(1, seq_len=64, tokens_per_shard=12_000)
    with failing(f"rename:{k}:ENOSPC"), pytest.raises(OSError):
        index_shard(shard, 1000)
    for path in shard.curated.iterdir():
        path.unlink()
    for path, payload in curated.items():
        (shard.curated / path).write_bytes(payload)
    assert len(occurrences(Index(run).find("the cat"))) == expected


def test_texts_that_cannot_be_looked_for_are_refused_in_one_line(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--config", str(run.path))
    refused_line(capsys, "seen", "cat", *config, code="E-SEEN-SHORT")
    refused_line(capsys, "seen", " \n ", *config, code="E-SEEN-SHORT")
    refused_line(capsys, "seen", "the cat", "--step", "99999", *config, code="E-SEEK")
    refused_line(capsys, "seen", "the cat", "--source", "web", *config, code="E-CONFIG")


@pytest.mark.slow
def test_shards_of_another_tokenizer_are_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    shutil.copytree(runs["bytes"].base, tmp_path / "run")
    run = Run(tmp_path / "run" / "run.toml")
    path = run.base / "own" / "tokenizer.json"
    value = json.loads(path.read_text())
    value["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(value))
    with refused("E-SEEN-STALE"):
        answer(run, "the cat")


def test_without_the_package_indexing_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    line = refused_line(capsys, "seen", "--index", "--config", str(run.path), code="E-CONFIG-EXTRA")
    assert "nmoe-data[seen]" in line


def test_a_document_too_large_to_be_sorted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffixes, "MAX_TOKENS", 10)
    assert suffixes.suffix_array(np.zeros(10, np.uint16)).tolist() == [*range(9, -1, -1)]
    with pytest.raises(NmoeError, match="too large"):
        suffixes.suffix_array(np.zeros(11, np.uint16))
    with pytest.raises(NmoeError, match="too large"):
        suffixes.suffix_array(np.array([2**24], np.uint32))
