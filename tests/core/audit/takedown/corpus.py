"""A corpus to take documents from, and what they share, by brute force."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.docid import bucket_of
from nmoe_core.config.run import Run
from nmoe_core.shards.manifest import ShardFormat, combine_shards
from nmoe_core.shards.writer import ShardWriter
from nmoe_core.tasks import curate
from tests.core.curate.corpus import Corpus

BUCKETS = 4
GRAM = 50
FORMAT = ShardFormat("web", "v1", "o200k_harmony", 201088, 199999, "fingerprint")
Texts = dict[str, np.ndarray]


def digest_of(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()


def written(root: Path, texts: Texts) -> Corpus:
    """A corpus of these texts, by ingest id, with topics and grades; all are kept."""
    corpus = Corpus(root, num_buckets=BUCKETS)
    shards = corpus.tree.shards("web", BUCKETS)
    writers = [ShardWriter(shard.directory, FORMAT, 4000) for shard in shards]
    for name, tokens in texts.items():
        digest = digest_of(tokens)
        writers[bucket_of(name, BUCKETS)].add_document(tokens.astype(np.uint32), name, digest)
    info = {"source": "web", "assignment": "md5"}
    for writer in writers:
        writer.finish({"source": "texts"}, info)
    manifest = combine_shards(corpus.tree.split("web"), FORMAT, BUCKETS, info)
    corpus.tree.manifest("web").write_text(json.dumps(manifest))
    return corpus


def random_texts(seed: int, count: int = 220) -> Texts:
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


def run_of(corpus: Corpus, **curation: Any) -> Run:
    run = corpus.configure({"order": "golden", **curation}, seq_len=32)
    text = run.path.read_text()
    if "num_shards = 2" in text:
        run.path.write_text(text.replace("num_shards = 2", f"num_shards = {BUCKETS}"))
    return Run(run.path)


def curated_again(run: Run) -> list[bool]:
    """Curate, combine and plan; whether each shard was made again."""
    made = curate.curate_shards(run, "web", range(BUCKETS))
    curate.combine(run, "web")
    curate.make_plan(run, ["web"], [])
    return [bool(made[bucket].facts["changed"]) for bucket in range(BUCKETS)]


def listed(corpus: Corpus, *lines: str) -> Path:
    path = corpus.root.parent / "gone.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def command_of(run: Run, path: Path, *flags: object) -> list[str]:
    return ["takedown", str(path), "--config", str(run.path), *map(str, flags)]


def copies_of(texts: Texts, names: Sequence[str]) -> set[str]:
    """The ingest ids with the texts of these."""
    gone = {digest_of(texts[name]) for name in names}
    return {name for name, tokens in texts.items() if digest_of(tokens) in gone}


def curated_ids(corpus: Corpus) -> list[str]:
    return sorted(n for b in range(BUCKETS) for n in corpus.ingest_ids(b, corpus.curated))


def grams_of(tokens: np.ndarray) -> Iterator[tuple[int, ...]]:
    length, values = min(GRAM, len(tokens)), tokens.tolist()
    return (tuple(values[i : i + length]) for i in range(len(values) - length + 1) if length)


def shared_grams(texts: Texts, gone: set[str]) -> dict[str, int]:
    """The number of grams of texts that go in each document that stays, by brute force."""
    by_length: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for name in gone:
        for gram in grams_of(texts[name]):
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


def shared_with(values: list[int], gone: Sequence[np.ndarray]) -> dict[str, int]:
    """The number of grams of each of some texts, by digest, that a document holds; none is 0."""
    found = {}
    for text in gone:
        grams, length = set(grams_of(text)), min(GRAM, len(text))
        windows = {tuple(values[i : i + length]) for i in range(len(values) - length + 1)}
        if held := len(grams & windows):
            found[digest_of(text)] = held
    return found
