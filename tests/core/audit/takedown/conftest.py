"""A curated corpus for takedowns."""

from pathlib import Path

import pytest

from nmoe_core.config.run import Run
from tests.core.audit.takedown.corpus import (
    BUCKETS,
    Texts,
    curated_again,
    random_texts,
    run_of,
    written,
)
from tests.core.curate.corpus import Corpus


@pytest.fixture
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files name one time."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Texts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        texts = random_texts(0)
        corpus = written(tmp_path_factory.mktemp("made") / "run", texts)
        run = run_of(corpus)
        corpus.fit()
        for bucket in range(BUCKETS):
            corpus.assign(bucket)
            corpus.grade(bucket, lambda i: "keep")
        curated_again(run)
    return corpus, texts


@pytest.fixture
def made(made_once: tuple[Corpus, Texts], tmp_path: Path) -> tuple[Corpus, Run, Texts]:
    corpus = made_once[0].copied(tmp_path / "run")
    return corpus, Run(corpus.root / "run.toml"), made_once[1]
