"""Grams of texts are found wherever they stand in a long file, and nothing else is."""

from collections import defaultdict

import numpy as np

from nmoe_core.curate.takedown.grams import GRAM_TOKENS, GramIndex, distinct, grams_of

CHUNK = 2**19  # tokens that are looked at together


def _found(index: GramIndex, tokens: np.ndarray) -> dict[int, list[int]]:
    found = defaultdict(list)
    for gram, positions in index.hits(tokens):
        found[gram] += positions.tolist()
    return {gram: sorted(positions) for gram, positions in found.items()}


def test_grams_are_found_at_the_joints_of_chunks_and_at_both_ends() -> None:
    rng = np.random.default_rng(0)
    size = 2 * CHUNK + 200
    texts = [rng.integers(1000, 2000, n).astype(np.uint32) for n in (1, 2, 3, 7, 31, 33, 49, 50)]
    index = GramIndex(distinct(np.concatenate([grams_of(text, i) for i, text in enumerate(texts)])))
    for number, text in enumerate(texts):
        tokens = rng.integers(0, 1000, size).astype(np.uint32)
        half, length = len(text) // 2, len(text)
        places = [0, CHUNK - half, 2 * CHUNK - 1, size - length]
        for place in places:
            tokens[place : place + length] = text
        assert _found(index, tokens) == {number: places}


def test_a_text_longer_than_a_chunk_gives_each_of_its_grams_once() -> None:
    tokens = np.random.default_rng(1).integers(0, 2**17, CHUNK + 60).astype(np.uint32)
    grams = grams_of(tokens, 3)
    assert len(grams) == len(tokens) - GRAM_TOKENS + 1
    last = _found(GramIndex(grams), tokens[-GRAM_TOKENS:])
    assert last == {len(grams) - 1: [0]}
    assert len(grams_of(np.ones(500, np.uint16), 0)) == 1


def test_a_text_without_tokens_has_no_grams_and_no_grams_are_found_nowhere() -> None:
    grams = grams_of(np.empty(0, np.uint32), 0)
    assert len(grams) == 0
    assert _found(GramIndex(grams), np.arange(200, dtype=np.uint32)) == {}


def test_equal_first_windows_of_other_grams_are_told_apart() -> None:
    head = np.arange(32, dtype=np.uint32)
    texts = [np.append(head, np.full(4, last, np.uint32)) for last in (7, 8)]
    index = GramIndex(distinct(np.concatenate([grams_of(text, i) for i, text in enumerate(texts)])))
    between = np.append(head, np.array([7, 7, 7, 8], np.uint32))
    assert _found(index, np.concatenate([between, texts[1], between])) == {1: [36]}


def test_a_hit_is_that_of_its_digest() -> None:
    text = np.arange(80, dtype=np.uint32)
    grams = grams_of(text, 0)
    grams["sha256"] = grams_of(text[::-1].copy(), 0)["sha256"]
    assert _found(GramIndex(grams), text) == {}


def test_a_text_behind_another_one_of_the_same_hash_is_found() -> None:
    base, size = 0x9E3779B97F4A7C15, 2**64  # of the hash: sum of token i times base^i
    rest, factor, last, before = base, 1, size, 0
    while rest >= 2**32:  # Euclid's algorithm: rest = factor * base modulo 2^64, both small
        many = last // rest
        last, rest, before, factor = rest, last - many * rest, factor, before - many * factor
    text = np.array([rest, max(0, -factor)], np.int64)
    other = text + np.array([-rest, factor])
    text, other = text.astype(np.uint32), other.astype(np.uint32)
    firsts = [grams_of(one, 0)["first"][0] for one in (text, other)]
    assert firsts[0] == firsts[1]
    between = np.array([7], np.uint32)
    tokens = np.concatenate([other, between, other, between, text, between, text])
    assert _found(GramIndex(grams_of(text, 0)), tokens) == {0: [6, 9]}


def test_a_gram_that_the_end_of_the_tokens_cuts_off_is_no_hit() -> None:
    before, text = np.zeros(50, np.uint32), np.arange(100, 140, dtype=np.uint32)
    index = GramIndex(grams_of(text, 0))
    for num_kept in range(len(text)):
        assert _found(index, np.append(before, text[:num_kept])) == {}
    assert _found(index, np.append(before, text)) == {0: [50]}
