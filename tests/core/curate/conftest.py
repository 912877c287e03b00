"""Corpora for the tests of curation: written, and with topics and grades."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.curate.corpus import Corpus


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests name one time."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """Build a corpus under the test's directory."""

    def make(name: str = "run", num_documents: int = 240, num_empty: int = 0, **sizes: int):
        return Corpus(tmp_path / name, **sizes).write(num_documents, num_empty=num_empty)

    return make


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    """240 documents, 6 topics, 2 shards of several files."""
    return make_corpus()


@pytest.fixture(scope="session")
def graded_once(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        corpus = Corpus(tmp_path_factory.mktemp("graded")).write(240)
        corpus.prepare()
    return corpus


@pytest.fixture
def graded(graded_once: Corpus, tmp_path: Path) -> Corpus:
    """`corpus` with topics and grades; a copy of one made once, since commits wait for the disk."""
    return graded_once.copied(tmp_path / "run")
