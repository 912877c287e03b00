"""Curation of a run from its configuration: settings, command, pictures, checks, and a regrade."""

import base64
import io
import json
import re

import pytest
from PIL import Image

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.report.plots.png import MAX_PNG_BYTES
from nmoe_core.tasks import checks, curate
from nmoe_core.tasks.report import curate_pictures
from nmoe_core.tasks.report.pictures import picture_of
from tests.core.curate.test_stability import check, prepare, stream
from tests.project import contents, failing
from tests.refusals import refused


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of the topic model are drawn from few documents, since each k costs a fit."""
    monkeypatch.setattr(curate_pictures, "SAMPLE_DOCUMENTS", 40)


@pytest.fixture
def graded_run(corpus) -> Run:
    """A run of one source with prepared and graded shards, nothing of curation made."""
    for bucket in range(2):
        corpus.grade(bucket)
    return corpus.configure()


def command(run: Run, *flags: str) -> int:
    return main(["curate", "shards", "--config", str(run.path), *flags])


def pictures(markdown: str) -> list[bytes]:
    return [base64.b64decode(text) for text in re.findall(r"base64,([^)]+)\)", markdown)]


def test_the_command_curates_the_shards_of_a_run_and_then_does_nothing(graded_run, corpus, capsys):
    assert command(graded_run, "--json") == 0
    made = json.loads(capsys.readouterr().out)["sources"]["web"]
    assert made["documents"] == 81  # one in three of each shard is kept
    assert made["shards_written"] == 2
    assert all(passed for passed, _ in made["checks"].values())
    assert made["window_topics_after"] > made["window_topics_before"]
    before = corpus.times(corpus.curated)
    assert command(graded_run) == 0
    printed = capsys.readouterr().out
    assert "web: 0 shards written" in printed
    assert "ok     permutation" in printed
    assert corpus.times(corpus.curated) == before
    assert command(graded_run, "--source", "books") == 1
    assert "unknown source" in capsys.readouterr().err


def test_outputs_have_small_pictures_and_topics_their_terms(graded_run, corpus):
    curate.fit_topics(graded_run, ["web"])
    curate.assign_shard_topics(graded_run, "web", range(2))
    curate.curate_shards(graded_run, "web", [0, 1])
    curate.combine(graded_run, "web")
    fitted = picture_of(graded_run, "curation/topic_model")
    shard = picture_of(graded_run, "web/curated", "0000")
    combined = picture_of(graded_run, "web/curated_manifest")
    # Topic cloud and k; order strip; order strip, shares by position, head and tail.
    for markdown, count, width in ((fitted, 2, 1600), (shard, 1, 800), (combined, 3, 1600)):
        found = pictures(markdown)
        assert len(found) == count
        for png in found:
            assert len(png) <= MAX_PNG_BYTES
            assert Image.open(io.BytesIO(png)).width == width
    terms = json.loads((graded_run.tree.topics / "topic_terms.json").read_text())["terms"]
    assert len(terms) == 6
    assert any(terms)
    times = corpus.times(corpus.topics)
    curate.fit_topics(graded_run, ["web"])
    assert picture_of(graded_run, "curation/topic_model") == fitted
    assert corpus.times(corpus.topics) == times  # drawn once a model
    for key, partition in (("web/curated", "0002"), ("web/curated", "x"), ("other/manifest", "")):
        with refused("E-CONFIG-OUTPUT"):
            picture_of(graded_run, key, partition)


def test_pictures_of_another_model_that_a_stopped_run_drew_are_drawn_again(graded_run, corpus):
    curate.fit_topics(graded_run, ["web"])
    fitted = picture_of(graded_run, "curation/topic_model")
    other = corpus.configure({"num_topics": 3})
    with failing("rename:3:EIO"), pytest.raises(OSError, match="Input/output"):
        curate.fit_topics(other, ["web"])  # the model and one picture are there, not their names
    curate.fit_topics(graded_run, ["web"])
    assert picture_of(graded_run, "curation/topic_model") == fitted


def test_a_regrade_that_moves_a_later_shard_fails_a_check(graded_run, corpus, capsys):
    run = corpus.configure({"order": "window_fill"})
    assert command(run) == 0
    corpus.grade(0, lambda i: "keep" if i % 4 else "drop")
    curate.curate_shards(run, "web", [0])  # as the partition that Dagster finds stale
    curate.combine(run, "web")
    found = checks.check_curated(run, "web")
    assert not found["alignment"].passed
    assert "1 shards" in found["alignment"].found
    assert checks.level_of(run, "alignment") == "block"
    assert found["permutation"].passed
    assert command(run, "--json") == 0
    printed = capsys.readouterr().out
    made = json.loads(printed[printed.index("{") :])
    assert made["sources"]["web"]["shards_written"] == 1
    assert checks.check_curated(run, "web")["alignment"].passed


def test_insert_only_in_the_configuration_keeps_old_documents_in_their_order(corpus):
    run = corpus.configure({"stability": "insert_only"})
    corpus.table = EmbeddingTable.open(run.tree.checkpoint)
    curate.fit_topics(run, ["web"])
    model = (run.tree.topics / "topic_model.safetensors").read_bytes()
    prepare(corpus, 240)
    assert command(run) == 0
    before = stream(corpus)
    prepare(corpus, 300)
    curate.fit_topics(run, ["web"])  # kept, although documents came
    assert (run.tree.topics / "topic_model.safetensors").read_bytes() == model
    assert command(run) == 0
    after = stream(corpus)
    kept = set(before)
    assert [row for row in after if row in kept] == before
    inserted = [i for i, row in enumerate(after) if row not in kept]
    assert min(inserted) < 0.7 * len(after) / 2  # among the old ones of its shard
    check(corpus)
    assert run.config.curation.order == "auto"


def test_a_run_without_grades_is_refused_before_anything_is_written(corpus):
    run = corpus.configure()
    curate.open_topics(run, ["web"])
    curate.assign_shard_topics(run, "web", range(2))
    with refused("E-CURATION-MISSING"):
        curate.curate_shards(run, "web", range(2))
    assert not contents(corpus.curated)


def test_scores_of_earlier_shards_are_read_once_a_process(graded_run, corpus, monkeypatch):
    from nmoe_core.curate.shards import consumed

    run = corpus.configure({"order": "window_fill"})
    curate.open_topics(run, ["web"])
    curate.assign_shard_topics(run, "web", range(2))
    reads: list[int] = []
    load = consumed.load_quality

    def counted(shard, manifest):
        reads.append(shard.bucket)
        return load(shard, manifest)

    monkeypatch.setattr(consumed, "load_quality", counted)
    digests = [curate.curate_shards(run, "web", [1])[1].digest for _ in range(3)]
    assert reads == [0]
    corpus.grade(0, lambda i: "keep")
    curate.curate_shards(run, "web", [1])
    assert reads == [0, 0]  # other scores are seen
    assert len(set(digests)) == 1


def test_an_order_as_good_as_a_shuffle_seldom_warns(graded):
    strict = {"checks.min_percent_of_ceiling": 100.0, "checks.max_wrap_tv_8": 0.0}
    run = graded.configure().with_settings(strict)
    warnings = {"diversity": 0, "boundary": 0}
    for seed in range(100, 120):
        graded.curate_all(order="shuffle", seed=seed)
        graded.combine()
        found = checks.check_curated(run, "web")
        for name in warnings:
            warnings[name] += not found[name].passed
    assert max(warnings.values()) <= 3, warnings
