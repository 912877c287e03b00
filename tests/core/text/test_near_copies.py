"""Near copies of documents that were trained on, against every pair compared."""

import numpy as np
import pytest

from nmoe_core.text.near_copies import MIN_SIMILARITY, SHINGLE_TOKENS, near_copies


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard's, by plain Python."""

    def shingles(tokens: np.ndarray) -> set[tuple[int, ...]]:
        size = min(SHINGLE_TOKENS, len(tokens))
        return {tuple(tokens[i : i + size].tolist()) for i in range(len(tokens) - size + 1)}

    one, other = shingles(a), shingles(b)
    return len(one & other) / len(one | other)


@pytest.mark.parametrize("least", [0.5, MIN_SIMILARITY])
@pytest.mark.parametrize("seed", range(4))
def test_every_near_copy_is_found_and_nothing_else(seed: int, least: float) -> None:
    rng = np.random.default_rng(seed)
    # Few tokens and shared beginnings, so that many pairs are somewhat alike.
    heads = [rng.integers(0, 50, 12) for _ in range(3)]
    among = [
        np.concatenate([heads[rng.integers(3)], rng.integers(0, 50, rng.integers(1, 60))])
        for _ in range(60)
    ]
    documents = []
    for _ in range(80):
        copy = among[rng.integers(len(among))].copy()
        for _ in range(rng.integers(0, 6)):
            copy[rng.integers(len(copy))] = rng.integers(0, 50)
        documents.append(copy[: rng.integers(1, len(copy) + 1)] if rng.random() < 0.3 else copy)
    expected = [
        max(similarity(document, other) for other in among) >= least for document in documents
    ]
    assert near_copies(documents, among, least).tolist() == expected
    assert 5 < sum(expected) < 75


def test_no_documents_and_short_ones_have_no_copies_but_their_like() -> None:
    short, other = np.array([7]), np.array([7, 8])
    assert near_copies([], [short]).tolist() == []
    assert near_copies([short], []).tolist() == [False]
    assert near_copies([short, other], [short]).tolist() == [True, False]


def test_a_copy_that_shares_exactly_the_least_part_is_near() -> None:
    whole = np.arange(9)  # five shingles, of which the first eight tokens have four
    beginnings = [whole[:size] for size in (9, 8, 7)]
    assert near_copies(beginnings, [whole]).tolist() == [True, True, False]
    assert near_copies([whole], beginnings[1:]).tolist() == [True]
    assert near_copies([whole], beginnings[2:]).tolist() == [False]
