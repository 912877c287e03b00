"""`nmoe takedown`: a list becomes documents, a record, curated shards without them, and a proof."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.docid import bucket_of
from nmoe_core.config.run import Run
from nmoe_core.shards.manifest import ShardFormat, combine_shards
from nmoe_core.shards.writer import ShardWriter
from nmoe_core.tasks import curate
from tests.core.curate.corpus import Corpus
from tests.project import said

BUCKETS = 4
GRAM = 50
FORMAT = ShardFormat("web", "v1", "o200k_harmony", 201088, 199999, "fingerprint")
Texts = dict[str, np.ndarray]


def _digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()


def _write(root: Path, texts: Texts) -> Corpus:
    """A corpus of these texts, by ingest id, with topics and grades; all are kept."""
    corpus = Corpus(root, num_buckets=BUCKETS)
    shards = corpus.tree.shards("web", BUCKETS)
    writers = [ShardWriter(shard.directory, FORMAT, 4000) for shard in shards]
    for name, tokens in texts.items():
        digest = _digest(tokens)
        writers[bucket_of(name, BUCKETS)].add_document(tokens.astype(np.uint32), name, digest)
    info = {"source": "web", "assignment": "md5"}
    for writer in writers:
        writer.finish({"source": "texts"}, info)
    manifest = combine_shards(corpus.tree.split("web"), FORMAT, BUCKETS, info)
    corpus.tree.manifest("web").write_text(json.dumps(manifest))
    return corpus


def _texts(seed: int, count: int = 220) -> Texts:
    """Random documents of 0 to 120 tokens: most of their own, some with passages of a common pool,
    some copies of others."""
    rng = np.random.default_rng(seed)
    pool = [rng.integers(0, 1200, 70) for _ in range(3)]
    texts: Texts = {}
    for i in range(count):
        tokens = rng.integers(0, 1200, rng.integers(3, 120))
        if i % 7 == 0:
            place = int(rng.integers(0, len(tokens)))
            tokens = np.insert(tokens, place, pool[int(rng.integers(3))])
        if i % 11 == 10:
            tokens = texts[f"doc-{rng.integers(i):04d}"]
        if i % 13 == 12:  # a short text inside another one
            tokens = np.insert(tokens, 1, texts[f"doc-{i - 1:04d}"][:9])
            texts[f"doc-{i - 1:04d}"] = texts[f"doc-{i - 1:04d}"][:9]
        texts[f"doc-{i:04d}"] = tokens
    return texts


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Texts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        texts = _texts(0)
        corpus = _write(tmp_path_factory.mktemp("made") / "run", texts)
        run = _run(corpus)
        corpus.fit()
        for bucket in range(BUCKETS):
            corpus.assign(bucket)
            corpus.grade(bucket, lambda i: "keep")
        _curate(run)
    return corpus, texts


def _run(corpus: Corpus, **curation: Any) -> Run:
    run = corpus.configure({"order": "golden", **curation}, seq_len=32)
    text = run.path.read_text()
    if "num_shards = 2" in text:
        run.path.write_text(text.replace("num_shards = 2", f"num_shards = {BUCKETS}"))
    return Run(run.path)


def _curate(run: Run) -> list[bool]:
    """Curate, combine and plan; whether each shard was made again."""
    made = curate.curate_shards(run, "web", range(BUCKETS), picture=False)
    curate.combine(run, "web", picture=False)
    curate.make_plan(run, ["web"], [])
    return [bool(made[bucket].facts["changed"]) for bucket in range(BUCKETS)]


@pytest.fixture
def made(made_once: tuple[Corpus, Texts], tmp_path: Path) -> tuple[Corpus, Run, Texts]:
    corpus = made_once[0].copied(tmp_path / "run")
    return corpus, Run(corpus.root / "run.toml"), made_once[1]


def _list(corpus: Corpus, *lines: str) -> Path:
    path = corpus.root.parent / "gone.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def _command(run: Run, path: Path, *flags: object) -> list[str]:
    return ["takedown", str(path), "--config", str(run.path), *map(str, flags)]


def _copies(texts: Texts, names: Sequence[str]) -> set[str]:
    """The ingest ids with the texts of these."""
    gone = {_digest(texts[name]) for name in names}
    return {name for name, tokens in texts.items() if _digest(tokens) in gone}


def _curated_ids(corpus: Corpus) -> list[str]:
    return sorted(n for b in range(BUCKETS) for n in corpus.ingest_ids(b, corpus.curated))


def _grams(tokens: np.ndarray) -> Iterator[tuple[int, ...]]:
    length, values = min(GRAM, len(tokens)), tokens.tolist()
    return (tuple(values[i : i + length]) for i in range(len(values) - length + 1) if length)


def _sharing(texts: Texts, gone: set[str]) -> dict[str, int]:
    """The number of grams of texts that go in each document that stays, by brute force."""
    by_length: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for name in gone:
        for gram in _grams(texts[name]):
            by_length[len(gram)].add(gram)
    found = {}
    for name, tokens in texts.items():
        values = tokens.tolist()
        held = {
            gram
            for length, grams in by_length.items()
            for i in range(len(values) - length + 1)
            if (gram := tuple(values[i : i + length])) in grams
        }
        if name not in gone and held:
            found[name] = len(held)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_down_leaves_curated_shards_and_the_proof_is_that_of_brute_force(
    seed: int, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    rng = np.random.default_rng(seed)
    named = [f"doc-{i:04d}" for i in rng.choice(len(texts), 12, replace=False)]
    named += [] if seed else ["doc-0007", "doc-0011"]
    gone, path = _copies(texts, named), _list(corpus, *(f"id:{name}" for name in named))
    assert len(gone) > len(named) or seed > 0
    found = said(capsys, *_command(run, path, "--apply"))
    assert found["recorded"] == len(gone)
    failed = said(capsys, *_command(run, path, "--verify"), status=1)
    assert {row["ingest_id"] for row in failed["remaining"]} == gone
    sharing = _sharing(texts, gone)
    assert {row["ingest_id"]: row["grams"] for row in failed["shared"]} == sharing
    touched = {bucket_of(name, BUCKETS) for name in gone}
    assert _curate(run) == [bucket in touched for bucket in range(BUCKETS)]
    assert _curated_ids(corpus) == sorted(texts.keys() - gone)
    status = 1 if sharing else 0
    proof = said(capsys, *_command(run, path, "--verify"), status=status)
    assert proof["remaining"] == []
    assert {row["ingest_id"]: row["grams"] for row in proof["shared"]} == sharing
    allowed = said(capsys, *_command(run, path, "--verify", "--allow-shared"))
    assert allowed["holds"]
    assert allowed["tokens"] == sum(len(texts[name]) + 1 for name in texts.keys() - gone)
    raw = said(capsys, *_command(run, path, "--verify", "--allow-shared", "--raw"), status=1)
    assert {row["ingest_id"] for row in raw["remaining"]} == gone
    assert {row["tree"] for row in raw["remaining"]} == {"data"}
