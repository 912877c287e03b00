"""Exact and near duplicates: against plain definitions, and over additions and deletions."""

import hashlib
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unicodedata import ucd_3_2_0

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from nmoe_core.attributes.copies import counts, duplicates
from nmoe_core.attributes.copies.duplicates import Shard, resolve
from nmoe_core.attributes.minhash import jaccard, signatures, unpack
from nmoe_core.attributes.shared import Before
from nmoe_core.text.transforms.words.hashes import words
from tests.core.attributes import naive

SOURCES = ("books", "law", "web")
SENTENCES = (
    "the quick brown fox jumps over the lazy dog near the river bank while it rains",
    "Das Gesetz tritt am Tage nach der Verkündung in Kraft, soweit nichts anderes gilt.",
    "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
    "def main() -> None: print('hello world', file=sys.stderr); return None  # done",
)


def shard(source: str, documents: Iterable[tuple[str, str]]) -> Shard:
    """A shard of (ingest id, text)."""
    ids, texts = zip(*documents) if documents else ((), ())
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    found = unpack(signatures(pa.array(texts, pa.large_string())))
    return Shard(
        source,
        np.frombuffer(digests, np.uint8).reshape(-1, 32),
        found.keys,
        lambda rows: [ids[row] for row in rows],
        lambda rows: found.sketch[rows],
        np.array([len(text) for text in texts], np.int64),
    )


def similarity(first: str, second: str) -> tuple[bool, float]:
    """Whether two texts are compared, and their estimated similarity."""
    found = unpack(signatures(pa.array([first, second], pa.large_string())))
    is_shared = (found.keys[0] == found.keys[1]).any() and found.keys[0].any()
    return bool(is_shared), float(jaccard((found.sketch[0] == found.sketch[1]).sum()))


def edited(text: str, share: float, rng: random.Random, unit: str = " ") -> str:
    """A text with this share of its words, or of its characters, replaced."""
    parts = text.split(" ") if unit else list(text)
    for i in rng.sample(range(len(parts)), round(share * len(parts))):
        parts[i] = "changed" if unit else chr(rng.randrange(0x4E00, 0x9FFF))
    return unit.join(parts)


def some_text(rng: random.Random, family: str = "w") -> str:
    """30 words with some of both ends replaced: pairs have similarities of all sizes."""
    parts = [f"{family}{i}" for i in range(30)]
    head, tail = rng.randrange(8), rng.randrange(8)
    text = " ".join(["head"] * head + parts[head : len(parts) - tail] + ["tail"] * tail)
    return rng.choice([text] * 20 + [text + "!", "", "...", "two words", "Two words."])


# The table is of one version of Unicode, this Python of another: they agree on old characters.
_OLD = st.characters(exclude_categories=["Cs"]).filter(
    lambda char: ucd_3_2_0.category(char) != "Cn"
)


@given(st.text(_OLD), st.sampled_from(SENTENCES))
def test_words_are_those_of_the_plain_definition(text: str, sentence: str) -> None:
    texts = [text, "", sentence + text]
    found = words(pa.array(texts, pa.large_string()))
    expected = [[naive.word_hash(word) for word in naive.words(text)] for text in texts]
    assert found.hashes.tolist() == [h for hashes in expected for h in hashes]
    assert np.diff(found.bounds).tolist() == [len(hashes) for hashes in expected]


@pytest.mark.parametrize("text", [*SENTENCES, "one", "", "?"])
def test_a_signature_holds_the_least_hashes_of_shingles(text: str) -> None:
    sketch = unpack(signatures(pa.array([text], pa.large_string()))).sketch[0]
    least = naive.least_hashes(text) or [0] * 112
    assert sketch.tolist() == naive.sketch(least)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_follows_from_the_set_after_any_additions_and_deletions(seed: int) -> None:
    rng = random.Random(seed)
    priority = rng.sample(SOURCES, len(SOURCES))
    documents: dict[tuple[str, str], str] = {}
    for _ in range(200):
        if rng.random() < 0.2 and documents:
            del documents[rng.choice(sorted(documents))]
        else:
            documents[rng.choice(SOURCES), str(rng.randrange(100))] = some_text(rng)
    shards = _shards(documents, rng.randrange(1, 4))
    found = {}
    for part, table in zip(shards, resolve(shards, priority)):
        for name, row in zip(part.ingest_ids(np.arange(len(table))), table.to_pylist()):
            assert not any(row.pop(column) for column in duplicates.PASSAGES)
            found[f"{part.source}//{name}"] = tuple(row.values())
    ranked = [
        (priority.index(source), len(text), name, text)
        for (source, name), text in documents.items()
    ]
    expected = dict.fromkeys(found, (True, *[None] * 5))
    for (rank, name), ((of_rank, of_name), near) in naive.survivors(ranked).items():
        of = f"{priority[of_rank]}//{of_name}"
        expected[f"{priority[rank]}//{name}"] = (
            (False, of, *[None] * 4)
            if near is None
            else (False, None, of, np.float32(near), None, None)
        )
    assert found == expected


def _shards(documents: Mapping[tuple[str, str], str], num_shards: int) -> list[Shard]:
    rows: dict[tuple[str, int], list] = {
        (name, i): [] for name in SOURCES for i in range(num_shards)
    }
    for (source, name), text in documents.items():
        rows[source, int(name) % num_shards].append((name, text))
    return [shard(source, found) for (source, _), found in rows.items()]


@pytest.mark.parametrize(("contained", "visits"), [(None, 128), (0.8, 3)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))]
)
def test_after_changes_of_shards_the_rows_are_those_of_a_fresh_run(
    seed: int, contained: float | None, visits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "MAX_VISITS", visits)
    rng, sizes = random.Random(seed), list[int]()
    places = [(source, i) for source in SOURCES for i in range(4)]
    shards: dict[tuple[str, int], Shard] = {}
    before: dict[tuple[str, int], pa.Table] = {}

    def counted(part: Sequence[Shard], *settings: Any) -> list[pa.Table]:
        sizes.append(sum(len(one.keys) for one in part))
        return resolve(part, *settings)

    monkeypatch.setattr(duplicates, "resolve", counted)
    for _ in range(12):
        changed = set(rng.sample(places, rng.choice([1, 1, 2])))
        gone = {place for place in changed & shards.keys() if rng.random() < 0.4}
        for place in changed:
            # Copies of copies lie in all sources, and a text of words alone shares no key.
            texts = [some_text(rng, f"f{rng.randrange(60)}-") for _ in range(rng.choice([0, 9]))]
            shards[place] = shard(place[0], [(f"{place[1]}-{i}", t) for i, t in enumerate(texts)])
        shards = {place: shards[place] for place in places if place in shards.keys() - gone}
        known = Before(
            [None if place in changed else before[place] for place in shards],
            {source for source, _ in changed},
        )
        settings = ["web"], 0.7, contained
        found = duplicates.resolve_incremental(list(shards.values()), known, *settings)
        fresh = resolve(list(shards.values()), ["web"], contained=contained)
        assert [table.to_pylist() for table in found] == [table.to_pylist() for table in fresh]
        before = dict(zip(shards, found))
    assert min(sizes[4:]) < sum(len(one.keys) for one in shards.values()) / 3


@pytest.mark.parametrize(("threshold", "visits"), [(0.7, 128), (0.5, 2)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))]
)
def test_after_changes_of_documents_the_rows_are_those_of_a_fresh_run(
    seed: int, visits: int, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "MAX_VISITS", visits)
    rng, priority = random.Random(seed), ["web", "law"]
    documents = {(rng.choice(SOURCES), str(i)): some_text(rng) for i in range(80)}
    before, rows = dict[tuple[str, str], str](), dict[tuple[str, str], pa.Table]()
    for _ in range(40):
        for _ in range(rng.choice([1, 1, 2, 5])):
            kind, name = rng.random(), rng.choice(sorted(documents))
            if kind < 0.3:
                del documents[name]
            elif kind < 0.5:
                documents[name] = some_text(rng)
            else:
                documents[rng.choice(SOURCES), str(rng.randrange(1000))] = some_text(rng)
        names = sorted(documents)
        shards = [shard(source, [(i, documents[source, i])]) for source, i in names]
        same = {name for name, text in before.items() if documents.get(name) == text}
        known = Before(
            [rows[name] if name in same else None for name in names],
            {source for source, _ in before.keys() - same},
        )
        found = duplicates.resolve_incremental(shards, known, priority, threshold, 0.8)
        fresh = resolve(shards, priority, threshold, contained=0.8)
        assert [table.to_pylist() for table in found] == [table.to_pylist() for table in fresh]
        rows, before = dict(zip(names, found)), dict(documents)


def test_an_addition_reaches_along_a_chain_of_copies() -> None:
    """Each text shares keys with its neighbours alone; the others are unlike all."""
    texts = [" ".join(f"w{i}" for i in range(2 * n, 2 * n + 30)) for n in range(24)]
    others = [" ".join(f"o{n}-{i}" for i in range(30)) for n in range(60)]
    for seed in range(8):
        names = random.Random(seed).sample(range(100, 200), len(texts))
        old = [shard("web", [(str(name), text)]) for name, text in zip(names[1:], texts[1:])]
        old.append(shard("web", [(f"x{i}", text) for i, text in enumerate(others)]))
        shards = [*old, shard("books", [("a", texts[0])])]
        known = Before([*resolve(old, ["books"]), None], set())
        found = duplicates.resolve_incremental(shards, known, ["books"])
        fresh = resolve(shards, ["books"])
        assert [table.to_pylist() for table in found] == [table.to_pylist() for table in fresh]


def _random_words(rng: random.Random, count: int) -> list[str]:
    return [f"{rng.getrandbits(32):x}" for _ in range(count)]


@pytest.mark.parametrize("threshold", [0.3, 0.4, 0.5, 0.6, 0.7, 0.9])
def test_pairs_a_tenth_above_any_threshold_are_found(threshold: float) -> None:
    rng, shingles, texts = random.Random(0), 200, list[tuple[str, str]]()
    similarity = threshold + 0.1
    edits = int(shingles * (1 - similarity) / (1 + similarity) / 5)
    for pair in range(1000):
        one = _random_words(rng, shingles + 4)
        other = list(one)
        for i in rng.sample(range(4, shingles, 5), edits):
            other[i] = "edited"
        texts += [(f"{pair}a", " ".join(one)), (f"{pair}b", " ".join(other))]
    [table] = resolve([shard("web", texts)], (), threshold)
    assert len(table) - sum(table["is_survivor"].to_pylist()) >= 950


def _of_one_template(rng: random.Random, count: int) -> list[list[str]]:
    template = _random_words(rng, 120)
    return [template + _random_words(rng, 60) for _ in range(count)]


def test_copies_are_found_among_thousands_of_documents_of_one_template() -> None:
    rng = random.Random(0)
    texts = _of_one_template(rng, 4000)
    copies = []
    for i in rng.sample(range(4000), 300):
        copies.append(list(texts[i]))
        copies[-1][rng.randrange(180)] = "edited"
    rows = [" ".join(text) for text in texts + copies]
    part = shard("web", [(f"{i:04}", text) for i, text in enumerate(rows)])
    kept = resolve([part._replace(lengths=None)])[0]["is_survivor"].to_numpy()
    assert kept[:4000].mean() > 0.99
    assert kept[4000:].mean() < 0.02


def test_time_doubles_with_the_documents_of_one_template() -> None:
    rng, spent = random.Random(0), []
    texts = [" ".join(text) for text in _of_one_template(rng, 32_000)]
    for count in (2000, 2000, 32_000):  # the first one compiles
        part = shard("web", [(f"{i:05}", text) for i, text in enumerate(texts[:count])])
        begin = time.process_time()
        resolve([part], ())
        spent.append(time.process_time() - begin)
    assert spent[2] < 2.8**4 * spent[1], "of 16 times as many documents"


def test_the_longest_of_several_copies_is_kept_after_the_priority_of_sources() -> None:
    words_of_one = _random_words(random.Random(0), 300)
    texts = {"whole": words_of_one, "a cut": words_of_one[:270], "b cut": words_of_one[:260]}
    rows = [(name, " ".join(text)) for name, text in texts.items()]
    [table] = resolve([shard("web", rows)])
    assert table["near_of"].to_pylist() == [None, "web//whole", "web//whole"]
    both = [shard("web", rows), shard("books", rows[1:2])]
    web, books = resolve(both, ["books"])
    assert books["is_survivor"].to_pylist() == [True]
    assert web["near_of"].to_pylist()[0] == "books//a cut"


def test_documents_contained_in_a_longer_one_stay_and_name_it_if_that_is_asked_for() -> None:
    rng, rows = random.Random(0), list[tuple[str, str]]()
    for i in range(100):
        one = _random_words(rng, 400)
        rows += [(f"{i:02}a", " ".join(one[:200])), (f"{i:02}b", " ".join(one))]
        rows.append((f"{i:02}c", " ".join(one[:100] + _random_words(rng, 100))))
    part = shard("web", rows)
    [table] = resolve([part], contained=0.8)
    halves, wholes, others = (table["contained_in"].to_pylist()[i::3] for i in range(3))
    assert sum(name == f"web//{i:02}b" for i, name in enumerate(halves)) >= 95
    assert not any(wholes + others)
    assert all(table["is_survivor"].to_pylist())
    assert 0.8 <= min(filter(None, table["containment"].to_pylist())) <= 1
    assert not any(resolve([part])[0]["contained_in"].to_pylist())


def test_copies_of_a_deleted_survivor_come_back() -> None:
    copies = [("a", SENTENCES[0] + "!"), ("b", SENTENCES[0])]
    assert resolve([shard("web", copies)])[0]["near_of"].to_pylist() == [None, "web//a"]
    assert resolve([shard("web", copies[1:])])[0]["is_survivor"].to_pylist() == [True]


def test_a_document_is_dropped_only_for_a_kept_one_that_is_near() -> None:
    rng = random.Random(0)
    chain = [" ".join(str(rng.random()) for _ in range(300))]
    while similarity(chain[0], chain[-1])[1] > 0.3:
        chain.append(edited(chain[-1], 0.01, rng))
    [table] = resolve([shard("web", [(f"{i:03}", text) for i, text in enumerate(chain)])])
    assert 2 < sum(table["is_survivor"].to_pylist()) < len(chain)
    for i, name in enumerate(table["near_of"].to_pylist()):
        if name:
            assert similarity(chain[i], chain[int(name.removeprefix("web//"))])[1] >= 0.7


@pytest.mark.parametrize(
    ("edits", "shingles", "recall"), [(6, 250, 0.92), (4, 180, 0.95), (4, 380, 0.99)]
)
def test_pairs_of_similarity_79_80_and_90_hundredths_are_found(
    edits: int, shingles: int, recall: float
) -> None:
    rng = random.Random(0)
    pairs = []
    for _ in range(1000):
        words_of_one = [f"{rng.getrandbits(32):x}" for _ in range(shingles + 4)]
        other = list(words_of_one)
        for i in rng.sample(range(4, shingles, 5), edits):  # each in five shingles of its own
            other[i] = "edited"
        pairs += [" ".join(words_of_one), " ".join(other)]
    found = unpack(signatures(pa.array(pairs, pa.large_string())))
    is_shared = (found.keys[::2] == found.keys[1::2]).any(1)
    near = jaccard((found.sketch[::2] == found.sketch[1::2]).sum(1))
    assert abs(near.mean() - (shingles - 5 * edits) / (shingles + 5 * edits)) < 0.005
    assert (is_shared & (near >= 0.7)).mean() >= recall


@pytest.mark.parametrize(
    "letters",
    [
        *((0x4E00, 0x9FFF), (0x0E01, 0x0E2F), (0x0E94, 0x0EA4), (0x1780, 0x17B4), (0x1000, 0x102B)),
        *((0xA984, 0xA9B3), (0x1B05, 0x1B34), (0xA000, 0xA48D), (0x1A20, 0x1A55)),
    ],
)
@pytest.mark.parametrize(("share", "recall"), [(0.01, 0.98), (0.02, 0.95)])
def test_scripts_without_spaces_with_edited_characters_are_found(
    letters: tuple[int, int], share: float, recall: float
) -> None:
    rng = random.Random(1)
    texts = ["".join(chr(rng.randrange(*letters)) for _ in range(400)) for _ in range(100)]
    pairs = [similarity(text, edited(text, share, rng, unit="")) for text in texts]
    assert sum(is_shared and near >= 0.7 for is_shared, near in pairs) >= 100 * recall


def test_slices_and_batches_give_the_signatures_of_the_whole() -> None:
    texts = pa.array(SENTENCES * 50_000, pa.large_string())
    whole = signatures(texts)
    assert whole.slice(100_001, 20).equals(signatures(texts.slice(100_001, 20)))
    assert whole.slice(199_996).equals(signatures(pa.array(SENTENCES, pa.large_string())))


@pytest.mark.parametrize("seed", range(3))
def test_copies_are_counted_with_the_document_that_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    documents = {(rng.choice(SOURCES), str(i)): some_text(rng) for i in range(120)}
    shards = _shards(documents, 2)
    tables = resolve(shards, SOURCES)
    groups: dict[str, int] = {}
    kept_of: list[list[str]] = []
    for part, table in zip(shards, tables):
        ids = part.ingest_ids(np.arange(len(table)))
        rows = zip(ids, table.to_pylist())
        kept_of.append([r["exact_of"] or r["near_of"] or f"{part.source}//{i}" for i, r in rows])
        for name in kept_of[-1]:
            groups[name] = groups.get(name, 0) + 1
    assert max(groups.values()) > 2
    counted = counts.with_counts(shards, tables)
    for names, table, before in zip(kept_of, counted, tables):
        assert table["num_copies"].to_pylist() == [groups[name] for name in names]
        assert counts.without_counts(table).equals(before)
    assert counts.with_counts([], []) == []
