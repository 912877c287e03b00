"""Topics of terms: tf-idf of tokens, reduced by a truncated SVD."""

from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.curate.topics.model import load_topic_model
from nmoe_core.curate.topics.terms import fit_terms, term_table
from nmoe_core.tasks import curate
from tests.refusals import refused

TEXTS = [np.array(text) for text in ([1, 1, 2, 5], [2, 2, 3], [1, 5, 5, 5], [7, 8], [], [7, 7, 8])]


def test_a_document_is_the_sum_of_the_rows_of_its_tokens() -> None:
    words = [" ".join(f"t{token}" for token in text) for text in TEXTS]
    vectors = TfidfVectorizer(token_pattern=r"\S+").fit_transform(words)
    expected = TruncatedSVD(3, random_state=0).fit(vectors).transform(vectors)
    fitted = fit_terms(TEXTS, seed=0)
    assert fitted[:, 0].tolist() == [1, 2, 3, 5, 7, 8]
    table = term_table(fitted, vocab_size=9)
    made = np.array([table[text].sum(axis=0)[:3] if len(text) else np.zeros(3) for text in TEXTS])
    for one, other in zip(made, expected, strict=True):
        # Up to the length of a document and the signs of singular vectors.
        norms = np.linalg.norm(one), np.linalg.norm(other)
        scaled = one / max(norms[0], 1e-9), other / max(norms[1], 1e-9)
        np.testing.assert_allclose(np.abs(scaled[0]), np.abs(scaled[1]), atol=1e-4)


@pytest.mark.parametrize("texts", [[], [np.empty(0, np.int64)], [np.array([3])]])
def test_few_documents_have_few_dimensions(texts: list[np.ndarray]) -> None:
    fitted = fit_terms(texts, seed=0)
    assert len(fitted) == sum(map(len, texts))
    assert np.isfinite(fitted).all()


def test_equal_documents_and_seed_give_equal_rows() -> None:
    assert fit_terms(TEXTS, seed=4).tobytes() == fit_terms(TEXTS, seed=4).tobytes()


def _of_terms(corpus: Any, **options: Any) -> Any:
    return corpus.configure(curation={"topics_from": "terms"} | options)


def test_a_run_without_a_backbone_finds_planted_topics_by_terms(corpus: Any) -> None:
    run = _of_terms(corpus)
    for path in (corpus.root / "backbone").iterdir():
        path.unlink()
    made = curate.fit_topics(run, ["web"])
    assert made.facts["changed"]
    buckets = range(corpus.num_buckets)
    curate.assign_shard_topics(run, "web", buckets)
    pairs = set()
    for bucket in buckets:
        topics = np.load(corpus.shard(bucket).topics)
        planted = [corpus.planted[name] for name in corpus.ingest_ids(bucket)]
        pairs |= set(zip(planted, topics.tolist(), strict=True))
    assert len(pairs) == corpus.num_topics
    assert not curate.fit_topics(run, ["web"]).facts["changed"]


def test_topics_of_terms_and_of_a_backbone_are_not_mixed(corpus: Any) -> None:
    run = _of_terms(corpus, topics_from="backbone")
    by_backbone = curate.fit_topics(run, ["web"])
    by_terms = curate.fit_topics(_of_terms(corpus), ["web"])
    assert by_terms.digest != by_backbone.digest
    model = load_topic_model(corpus.tree.topic_model)
    assert model.terms is not None
    with refused("E-CURATION-BACKBONE"):
        curate.assign_shard_topics(run, "web", [0])


def test_a_kept_topic_model_of_a_backbone_is_not_read_as_one_of_terms(corpus: Any) -> None:
    curate.fit_topics(_of_terms(corpus, topics_from="backbone"), ["web"])
    run = _of_terms(corpus, stability="insert_only")
    with refused("E-CURATION-BACKBONE", "topics_from"):
        curate.assign_shard_topics(run, "web", [0])
    with refused("E-CURATION-BACKBONE", "topics_from"):
        assert curate.embedding_table(run).rows is None


def test_a_table_of_terms_says_how_documents_are_embedded() -> None:
    table = EmbeddingTable.of_terms(lambda: np.zeros((2, 3)))
    assert (table.method, table.backbone) == ("tfidf-svd-100/1", "none")
