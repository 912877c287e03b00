"""Curated shards whose documents come and go: old ones keep their order, consumed ones a place."""

import hashlib

import numpy as np
import pytest

from nmoe_core.audit.takedown.find import find
from nmoe_core.audit.takedown.items import Item
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.curate.shards.lineage import read_lineage
from nmoe_core.shards.verify import verify_manifest
from tests.core.curate.corpus import Corpus, shard_manifest
from tests.project import contents
from tests.refusals import refused


def prepare(corpus: Corpus, num_documents: int, dropped: tuple[str, ...] = ()) -> None:
    """Write 240 documents by topic, the rest appended; label with the model there is, and grade."""
    corpus.write(num_documents, num_sorted=240)
    for bucket in range(2):
        corpus.assign(bucket)
        ids = corpus.ingest_ids(bucket)
        # By the id, so that decisions do not move when numbers do.
        is_kept = [hashlib.md5(name.encode()).digest()[0] % 3 and name not in dropped
                   for name in ids]  # fmt: skip
        corpus.grade(bucket, lambda i, kept=is_kept: "keep" if kept[i] else "drop")


def stream(corpus) -> list[tuple[str, bytes]]:
    """Ingest id and tokens of every curated document of the source, in training order."""
    files = [file for k in range(2) for file in corpus.files(k, corpus.curated)]
    return [(ids[0], t.tobytes()) for file in files for _, t, ids in file.documents()]


def check(corpus) -> None:
    """Every curated shard is what it says it is."""
    for bucket in range(2):
        corpus.verify(bucket)
        manifest = shard_manifest(corpus.curated, "web", bucket)
        assert verify_manifest(manifest, checksums=True, deep=True) == []
        assert len(list(read_lineage(manifest))) == manifest.total_documents


@pytest.mark.parametrize("order", ["golden", "auto"])
@pytest.mark.parametrize("consumed", [600, 7000])
def test_a_resumed_run_keeps_the_consumed_tokens_and_orders_all_others(corpus, order, consumed):
    corpus.fit()
    prepare(corpus, 240)
    corpus.curate_all(order=order)
    before = stream(corpus)
    tokens = np.cumsum([len(row[1]) // 4 for row in before])
    front = before[: int((tokens < consumed).sum()) + 1]
    # A consumed document is dropped by a new grader; it stays where training read it.
    prepare(corpus, 330, dropped=(front[3][0],))
    first_shard = shard_manifest(corpus.curated, "web", 0).total_tokens
    made = corpus.curate_all(order=order, resume_from_token=consumed)
    after = stream(corpus)
    assert after[: len(front)] == front
    assert len(after) > len(before)
    assert len({name for name, _ in after}) == len(after)
    assert sum(report.facts["documents_frozen"] for report in made) == len(front)
    check(corpus)
    assert (made[0].facts["documents_deferred"] > 0) == (consumed > first_shard)
    again = corpus.curate_all(order=order, resume_from_token=consumed)
    assert not any(report.facts["changed"] for report in again)
    combined = corpus.combine()
    assert combined.facts["documents"] == len(after)
    deferred = sum(report.facts["documents_deferred"] for report in made)
    assert corpus.curation()["num_deferred"] == deferred
    assert combined.facts["misaligned_shards"] == 0


def test_a_resume_without_what_was_consumed_is_refused(graded):
    with refused("E-CURATION-RESUME"):
        graded.curate(0, resume_from_token=10)
    assert not contents(graded.curated)


def test_windows_of_every_shard_are_filled_from_where_the_one_before_ends(graded):
    options = {"order": "window_fill", "seq_len": 512}
    reports = graded.curate_all(**options)
    assert graded.curation(0)["offset"] == 0
    assert graded.curation(1)["offset"] == reports[0].facts["tokens"] % 512
    combined = graded.combine(512).facts
    assert (combined["misaligned_shards"], combined["orders_taken"]) == (0, "window_fill (2)")
    # The place is known from decisions and lengths, so shards may be made in any order.
    made = contents(graded.curated)
    (graded.curated / "web").rename(graded.root / "first")
    for bucket in (1, 0):
        graded.curate(bucket, **options)
    graded.combine(512)
    assert contents(graded.curated) == made


@pytest.mark.parametrize(("by", "descending"), [("quality", False), ("length", True)])
def test_a_curriculum_runs_through_every_topic_of_a_shard(graded, by, descending):
    graded.curate(0, order="count_stride", by=by, descending=descending)
    rows = list(read_lineage(shard_manifest(graded.curated, "web", 0)))
    lengths = np.concatenate([file.lengths() for file in graded.files(0, graded.curated)])
    values = lengths if by == "length" else np.array([row["aggregated"] for row in rows])
    topics = np.array([row["topic"] for row in rows])
    for topic in np.unique(topics):
        steps = np.diff(values[topics == topic])
        assert np.all(steps <= 0 if descending else steps >= 0)


def test_a_takedown_finds_what_training_read_and_the_data_no_longer_hold(corpus):
    corpus.fit()
    prepare(corpus, 240)
    corpus.curate_all(order="golden")
    prepare(corpus, 230)
    gone = {f"doc-{i:05d}" for i in range(230, 240)}
    made = corpus.curate_all(order="golden", resume_from_token=2000)
    consumed = sum(report.facts["documents_frozen"] for report in made)
    frozen = {name for name, _ in stream(corpus)[:consumed]} & gone
    assert frozen
    for name in frozen:
        (found,) = find(corpus.tree, [Item("id", name, 1)], TokenizerSettings(needs_eos=False))
        assert (found.tree, found.ingest_id) == ("curated", name)
