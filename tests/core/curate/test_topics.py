import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.result import Result
from nmoe_core.curate.shards.inputs import load_topics
from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.curate.topics.model import load_topic_model, nearest_topics, save_tensors
from nmoe_core.shards.manifest import documents_digest
from tests.core.curate.corpus import shard_manifest
from tests.project import failing
from tests.refusals import refused


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def exact_scores(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    wide = centroids.astype(np.float64)
    return rows.astype(np.float64) @ wide.T - np.square(wide).sum(axis=1) / 2


def test_planted_topics_are_recovered(corpus):
    corpus.fit()
    pairs = set()
    for bucket in range(corpus.num_buckets):
        corpus.assign(bucket)
        manifest = shard_manifest(corpus.data, "web", bucket)
        topics = load_topics(corpus.shard(bucket), manifest).topics
        assert topics.dtype == np.uint16
        pairs |= {(corpus.planted[i], int(t)) for i, t in zip(corpus.ingest_ids(bucket), topics)}
    assert len(pairs) == len({planted for planted, _ in pairs}) == corpus.num_topics
    assert corpus.loads == 1  # one table serves the fit and all shards


def test_unchanged_inputs_mean_no_work(corpus):
    fitted, assigned = corpus.fit(), corpus.assign(0)
    assert (fitted.facts["changed"], assigned.facts["changed"]) == (True, True)
    before = corpus.times(corpus.topics)
    corpus.table = EmbeddingTable("backbone-a", lambda: pytest.fail("the table was read"))
    assert corpus.fit() == Result(fitted.digest, fitted.facts | {"changed": False})
    assert corpus.assign(0) == Result(assigned.digest, assigned.facts | {"changed": False})
    assert corpus.times(corpus.topics) == before


def test_header_and_summary_name_what_they_were_made_from(corpus):
    fitted = corpus.fit()
    corpus.assign(1)
    header = load_topic_model(corpus.tree.topic_model).header
    assert header["format"] == "topic-model/2"
    assert header["embedding"] == "shallow-mean-l2"
    assert header["backbone"] == header["fingerprints"]["backbone"] == "backbone-a"
    assert sum(header["count_per_topic"]) == header["num_sampled"] == 240
    summary = json.loads(corpus.shard(1).topics.with_name("summary.json").read_text())
    shard = shard_manifest(corpus.data, "web", 1)
    assert summary["fingerprints"]["shard"] == documents_digest(shard)
    assert summary["fingerprints"]["topic_model"] == fitted.digest
    assert sum(summary["count_per_topic"]) == summary["num_documents"] == shard.total_documents


def test_a_sample_is_spread_over_all_shards(make_corpus):
    corpus = make_corpus(num_documents=400, num_topics=4)
    facts = corpus.fit(sample_documents=80).facts
    assert facts["documents_sampled"] == 80
    assert facts["smallest_topic"] >= 10  # 20 of each planted topic


def test_documents_without_text_do_not_shape_topics_and_get_the_lowest(make_corpus):
    corpus = make_corpus(num_documents=60, num_topics=3, num_empty=5)
    assert corpus.fit().facts["documents_sampled"] == 60
    corpus.assign(0)
    topics = np.load(corpus.shard(0).topics)
    assert corpus.ingest_ids(0)[-3:] == ["empty-0", "empty-2", "empty-4"]
    assert topics[-3:].tolist() == [0, 0, 0]


def test_damaged_labels_are_made_again(corpus):
    corpus.fit()
    corpus.assign(0)
    path = corpus.shard(0).topics
    whole = path.read_bytes()
    for damage in (lambda: path.write_bytes(whole[:-2] + b"\x07\x00"), path.unlink):
        damage()
        assert corpus.assign(0).facts["changed"]
        assert path.read_bytes() == whole


def test_a_killed_relabelling_leaves_no_summary_of_other_labels(corpus):
    fitted, assigned = corpus.fit(), corpus.assign(0)
    refitted = corpus.fit(num_topics=4)
    assert refitted.facts["changed"]
    assert refitted.digest != fitted.digest
    with failing("rename:2:ENOSPC"), pytest.raises(OSError, match="No space"):
        corpus.assign(0)
    assert not corpus.shard(0).topics.with_name("summary.json").exists()
    relabelled = {"documents": assigned.facts["documents"], "topics_used": 4, "changed": True}
    assert corpus.assign(0).facts == relabelled


@pytest.mark.parametrize(
    "options", [{"num_topics": 241}, {"num_topics": 1}, {"num_topics": 6, "sample_documents": 5}]
)
def test_too_few_documents_for_the_topics_are_refused(corpus, options):
    with refused("E-CURATION-TOPICS"):
        corpus.fit(**{"sample_documents": 1000} | options)
    assert not (corpus.topics / "topic_model.safetensors").exists()
    assert corpus.fit(num_topics=6, sample_documents=6).facts["changed"]


def test_a_table_with_nan_and_one_of_another_backbone_are_refused(corpus):
    rows, whole = np.full((1201, 4), np.nan, np.float32), corpus.table
    corpus.table = EmbeddingTable("backbone-nan", lambda: rows)
    with refused("E-CURATION-EMBEDDING"):
        corpus.fit()
    corpus.table = whole
    corpus.fit()
    corpus.table = EmbeddingTable("backbone-b", lambda: pytest.fail("the table was read"))
    with refused("E-CURATION-BACKBONE"):
        corpus.assign(0)


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign", "nan"])
def test_a_file_that_is_no_topic_model_is_refused(tmp_path: Path, damage: str):
    path = tmp_path / "topic_model.safetensors"
    centroids = np.full((2, 3), np.nan if damage == "nan" else 1.0, np.float32)
    if damage != "missing":
        header = {"format": "other/1" if damage == "foreign" else "topic-model/2"}
        save_tensors(path, {"centroids": centroids}, header)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    with refused("E-CURATION-MODEL"):
        load_topic_model(path)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 60))
def test_labels_are_those_of_the_nearest_centroid_whatever_the_block(seed: int, block: int):
    rng = np.random.default_rng(seed)
    centroids = unit(rng.standard_normal((9, 33))) * rng.uniform(0.2, 1, (9, 1)).astype("f4")
    centroids[5] = centroids[2]
    rows = unit(np.concatenate([rng.standard_normal((50, 33)), centroids]))
    blocks = [nearest_topics(rows[i : i + block], centroids) for i in range(0, len(rows), block)]
    labels = nearest_topics(rows, centroids)
    assert np.array_equal(np.concatenate(blocks), labels)
    exact = exact_scores(rows, centroids)
    assert np.all(exact[np.arange(len(rows)), labels] >= exact.max(axis=1) - 1e-12)
    assert 5 not in labels


def test_near_ties_are_decided_beyond_float32():
    rng = np.random.default_rng(4)
    base = unit(rng.standard_normal((1, 512)))
    steps = rng.integers(-1, 2, (8, 512)).astype(np.float32)
    centroids = base + steps * np.spacing(np.abs(base))
    rows = unit(rng.standard_normal((200, 512)))
    exact = exact_scores(rows, centroids)
    assert np.array_equal(nearest_topics(rows, centroids), exact.argmax(axis=1))
    narrow = rows @ centroids.T - np.square(centroids).sum(axis=1) / 2
    assert not np.array_equal(narrow.argmax(axis=1), exact.argmax(axis=1))
