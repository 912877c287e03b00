"""The student's features are made in blocks, so memory per token is small."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loader.files.format import MANIFEST_NAME, load_manifest
from nmoe_core.quality.heads import student
from nmoe_core.quality.heads.ngrams import TokenTable
from nmoe_core.quality.heads.student import fit_student
from nmoe_core.shards.documents import document_ids
from tests.core.small_gradings import corpus_of
from tests.refusals import refused

SPELLINGS = {i: f"t{i}".encode() for i in range(40)}
TABLE = TokenTable.of(SPELLINGS, 40)


def _documents(count: int, length: int) -> list[np.ndarray]:
    drawn = np.random.default_rng(0)
    return [drawn.integers(0, 40, length).astype(np.uint32) for _ in range(count)]


def _scores(count: int) -> np.ndarray:
    return np.random.default_rng(1).random((count, 2))


def _peak(run: Callable[[], object]) -> int:
    run()  # imports and tables stay
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_memory_of_a_fit_is_a_fraction_of_what_its_n_grams_would_need_at_once() -> None:
    few = _documents(100, 4000)
    many = few * 4
    small = _peak(lambda: fit_student(few, _scores(len(few)), TABLE))
    large = _peak(lambda: fit_student(many, _scores(len(many)), TABLE))
    num_more = sum(map(len, many)) - sum(map(len, few))
    assert large - small < 24 * num_more  # sorted at once, n-grams need a hundred bytes a token


def test_blocks_do_not_change_the_student(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = _documents(60, 50)
    found = []
    for size in (1, 200, 1 << 17):
        monkeypatch.setattr(student, "BLOCK_TOKENS", size)
        fitted = fit_student(documents, _scores(60), TABLE)
        found.append([fitted.weights.tobytes(), fitted.bias.tobytes(), fitted.penalty])
    assert found[0] == found[1] == found[2]


def test_more_n_grams_than_the_solver_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student, "MAX_ENTRIES", 1000)
    with refused("E-HEAD-MANY", match="max_documents"):
        fit_student(_documents(60, 50), _scores(60), TABLE)


def test_labelled_documents_keep_no_shard_mapped(shared_data: Path) -> None:
    corpus = corpus_of(shared_data)
    manifest = load_manifest(shared_data / "web" / "train" / MANIFEST_NAME)
    doc_ids = [str(one) for one in document_ids(shared_data, manifest)]
    for tokens in corpus.read(doc_ids).tokens:
        assert not isinstance(tokens, np.memmap)
        assert tokens.base is None
