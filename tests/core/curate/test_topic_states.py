"""Topics of states: mean states after the block whose topics have the highest silhouette."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.progress import LOGGER
from nmoe_core.config.run import Run
from nmoe_core.curate.topics.model import TopicModel, load_topic_model
from nmoe_core.curate.topics.states import STORE, silhouettes, standard_of, standardised
from nmoe_core.tasks import curate
from nmoe_core.tasks.backbone import load_backbone
from nmoe_core.tasks.graph import curated as graph
from nmoe_core.tasks.hydra import head_corpus
from nmoe_core.tasks.report import curate_pictures
from tests.core.curate.corpus import EOS, VOCAB_SIZE, Corpus
from tests.refusals import refused

pytest.importorskip("torch")
CTX = 24


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of the topic model are drawn from few documents, since each k costs a fit."""
    monkeypatch.setattr(curate_pictures, "SAMPLE_DOCUMENTS", 24)


def of_states(corpus: Corpus, max_ctx: int = CTX, **options: Any) -> Run:
    """A run over random weights that read the corpus."""
    from nmoe_core.engine import make_tiny_checkpoint

    run = corpus.configure({"topics_from": "states"} | options)
    shutil.rmtree(run.tree.checkpoint)
    make_tiny_checkpoint(
        run.tree.checkpoint,
        num_layers=4,
        vocab_size=VOCAB_SIZE,
        num_experts=2,
        hidden_size=32,
        head_dim=8,
    )
    return Run(run.path, {"heads.max_ctx": max_ctx})


def assigned(run: Run, corpus: Corpus) -> list[np.ndarray]:
    """The topics of each shard, made again if they are not current."""
    buckets = range(corpus.num_buckets)
    curate.assign_shard_topics(run, "web", buckets)
    return [np.load(corpus.shard(bucket).topics) for bucket in buckets]


def forget(corpus: Corpus, *, are_states_kept: bool) -> None:
    """Delete the topics of all shards, and perhaps all states."""
    for bucket in range(corpus.num_buckets):
        corpus.shard(bucket).topics.unlink()
        if not are_states_kept:
            shutil.rmtree(corpus.shard(bucket).with_topics / STORE)
    if not are_states_kept:
        shutil.rmtree(corpus.tree.heads)


def test_planted_topics_are_found_and_the_model_says_by_which_block(corpus: Corpus) -> None:
    run = of_states(corpus)
    made = curate.fit_topics(run, ["web"])
    header = load_topic_model(corpus.tree.topic_model).header
    figures = header["silhouettes"]
    assert [*figures] == ["1", "2", "3"]  # tenths of four blocks, up to eight tenths
    assert figures[str(header["block"])] == max(figures.values())
    assert made.facts["block"] == header["block"]
    rows = [{"block": int(block), "silhouette": value} for block, value in figures.items()]
    assert made.facts["silhouettes"] == rows
    pairs: set[tuple[int, int]] = set()
    for bucket, topics in enumerate(assigned(run, corpus)):
        planted = [corpus.planted[name] for name in corpus.ingest_ids(bucket)]
        pairs |= set(zip(planted, topics.tolist(), strict=True))
    assert len(pairs) == corpus.num_topics
    terms = Path(corpus.tree.topic_terms).read_text()
    assert '"terms"' in terms, "topics of states are named by their terms too"


def test_the_blocks_are_shown_in_their_order() -> None:
    header = {"block": 12, "silhouettes": {"12": 0.4, "3": 0.2, "9": 0.3}}  # as JSON sorts them
    model = TopicModel(np.zeros((2, 4)), "", header, standard=np.ones((2, 4)))
    assert [row["block"] for row in model.choice["silhouettes"]] == [3, 9, 12]


def test_states_that_are_kept_are_not_computed_again_and_others_give_the_same_bytes(
    corpus: Corpus,
) -> None:
    run = of_states(corpus)
    fitted = curate.fit_topics(run, ["web"])
    model = load_backbone(run)
    before = model.tokens_processed
    topics = assigned(run, corpus)
    assert model.tokens_processed == before, "the sample was all documents"
    forget(corpus, are_states_kept=True)
    again = assigned(run, corpus)
    assert model.tokens_processed == before
    forget(corpus, are_states_kept=False)
    computed = assigned(run, corpus)
    assert model.tokens_processed > before
    for one, other, third in zip(topics, again, computed, strict=True):
        assert one.tobytes() == other.tobytes() == third.tobytes()
    corpus.tree.topic_model.unlink()
    assert curate.fit_topics(run, ["web"]).digest == fitted.digest


def test_the_backbone_runs_only_the_blocks_up_to_the_chosen_one(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmoe_core.engine import Transformer

    run = of_states(corpus)
    block = curate.fit_topics(run, ["web"]).facts["block"]
    assigned(run, corpus)
    forget(corpus, are_states_kept=False)
    asked: set[tuple[int, ...]] = set()
    forward = Transformer.forward

    def spy(self: Transformer, *arguments: Any, **options: Any) -> Any:
        asked.add(tuple(options["return_hidden_states"]))
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Transformer, "forward", spy)
    assigned(run, corpus)
    assert asked == {(block,)}


def test_states_that_heads_were_trained_on_are_copied(corpus: Corpus) -> None:
    from nmoe_core.quality.heads.shapes import probe_blocks
    from nmoe_core.quality.heads.train import FEATURES_DIR
    from nmoe_core.quality.kept_states import KeptStates

    run = of_states(corpus)
    model = load_backbone(run)
    names = [name for bucket in range(corpus.num_buckets) for name in corpus.doc_ids(bucket)]
    kept = KeptStates(model, run.tree.heads / FEATURES_DIR, 2**30, probe_blocks(4))
    kept.pooled(replace(head_corpus(run), eos_token_id=EOS).read(names))
    before = model.tokens_processed
    curate.fit_topics(run, ["web"])
    assigned(run, corpus)
    assert model.tokens_processed == before


def test_only_new_documents_are_computed(make_corpus: Any) -> None:
    corpus = make_corpus(num_documents=120)
    run = of_states(corpus, stability="insert_only")
    curate.fit_topics(run, ["web"])
    old = dict(zip(_names(corpus), np.concatenate(assigned(run, corpus)), strict=True))
    before = load_backbone(run).tokens_processed
    shutil.rmtree(corpus.data)
    corpus.write(126, num_sorted=120)
    curate.fit_topics(run, ["web"])
    new = dict(zip(_names(corpus), np.concatenate(assigned(run, corpus)), strict=True))
    assert load_backbone(run).tokens_processed - before <= 6 * CTX
    assert len(new) == 126
    assert {name: new[name] for name in old} == old


def _names(corpus: Corpus) -> list[str]:
    return [name for bucket in range(corpus.num_buckets) for name in corpus.ingest_ids(bucket)]


def test_a_document_without_text_has_the_first_topic_and_is_not_in_the_sample(
    make_corpus: Any,
) -> None:
    corpus = make_corpus(num_documents=60, num_empty=3)
    run = of_states(corpus)
    assert curate.fit_topics(run, ["web"]).facts["documents_sampled"] == 60
    topics = dict(zip(_names(corpus), np.concatenate(assigned(run, corpus)), strict=True))
    assert [topics[f"empty-{i}"] for i in range(3)] == [0, 0, 0]


def test_models_of_terms_and_of_states_are_not_mixed(corpus: Corpus) -> None:
    run = of_states(corpus, stability="insert_only")
    terms = Run(run.path, {"curation.topics_from": "terms"})
    curate.fit_topics(terms, ["web"])
    with refused("E-CURATION-BACKBONE", "topics_from"):
        curate.assign_shard_topics(run, "web", [0])
    corpus.tree.topic_model.unlink()
    curate.fit_topics(run, ["web"])
    with refused("E-CURATION-BACKBONE", "topics_from"):
        curate.assign_shard_topics(terms, "web", [0])


def test_a_kept_model_refuses_documents_that_are_read_in_another_way(corpus: Corpus) -> None:
    run = of_states(corpus, stability="insert_only")
    curate.fit_topics(run, ["web"])
    other = Run(run.path, {"heads.max_ctx": 12})
    with refused("E-CURATION-BACKBONE", "max_ctx 12"):
        curate.assign_shard_topics(other, "web", [0])


@pytest.mark.parametrize(
    ("key", "value"),
    [("heads.max_ctx", 12), ("backbone.dtype", "bfloat16"), ("backbone.moe_backend", "int8")],
)
def test_a_setting_of_the_states_makes_the_model_stale_and_is_named(
    corpus: Corpus, key: str, value: object
) -> None:
    run = of_states(corpus)
    curate.fit_topics(run, ["web"])
    assert graph.topic_model(run, ["web"]).changes() == []
    changed = Run(run.path, {"heads.max_ctx": CTX} | {key: value})
    assert [change.name for change in graph.topic_model(changed, ["web"]).changes()] == [key]


def test_minutes_of_states_are_told(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nmoe_core.base.progress._FIRST_S", 0.0)
    with caplog.at_level(logging.INFO, LOGGER):
        curate.fit_topics(of_states(corpus), ["web"])
    assert any("states of the backbone" in line for line in caplog.messages)
    assert any("states of the sample" in line for line in caplog.messages)


def test_the_block_with_clear_topics_has_the_highest_silhouette() -> None:
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(60, 8))
    clear = noise * 0.05 + np.repeat(rng.normal(size=(3, 8)), 20, axis=0)
    scores = silhouettes(np.stack([noise, clear, noise + clear], axis=1), num_topics=3, seed=0)
    assert max(scores) == scores[1] > 0.8
    assert silhouettes(np.stack([noise[:3]], axis=1), num_topics=3, seed=0) == [0.0]


def test_each_dimension_counts_alike_and_zero_rows_stay_zero() -> None:
    states = np.array([[1, 1000], [2, 3000], [0, 0], [3, 2000]], np.float32)
    rows = standardised(states, standard_of(states))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 1, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(rows[0], [-(0.5**0.5), -(0.5**0.5)], rtol=1e-6)
    constant = np.ones((3, 2), np.float32)
    assert np.isfinite(standardised(constant, standard_of(constant))).all()
