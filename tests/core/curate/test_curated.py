from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from loader.files.format import MANIFEST_NAME, load_manifest
from loader.files.sealed import sealed
from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import CurationError, LockedError
from nmoe_core.base.result import Result
from nmoe_core.curate.diversity.measure import measure
from nmoe_core.curate.shards.lineage import read_lineage
from nmoe_core.shards.manifest import documents_digest
from nmoe_core.shards.verify import verify_manifest
from tests.core.curate.corpus import shard_manifest
from tests.refusals import refused


def documents(corpus, bucket: int, tree) -> list[tuple[bytes, tuple[str, str]]]:
    """Token bytes, ingest id and text hash of every document, in order."""
    files = corpus.files(bucket, tree)
    return [(tokens.tobytes(), ids) for file in files for _, tokens, ids in file.documents()]


def edit(path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(("include", "one_in"), [(("keep",), [0]), (("keep", "band"), [0, 1])])
def test_a_curated_shard_holds_exactly_the_kept_documents_token_for_token(graded, include, one_in):
    report = graded.curate(0, include=include, tokens_per_shard=900)
    parents = documents(graded, 0, graded.data)
    kept = [row for i, row in enumerate(parents) if i % 3 in one_in]
    curated = documents(graded, 0, graded.curated)
    assert Counter(curated) == Counter(kept)
    assert all(np.frombuffer(tokens, "<u4")[-1] == 1200 for tokens, _ in curated)
    facts = graded.curation(0)
    assert report.facts["documents"] == facts["num_kept"] == len(kept)
    assert report.facts["tokens"] == sum(len(tokens) // 4 for tokens, _ in kept)
    assert report.facts["documents_read"] == len(parents) == sum(facts["decisions"].values())
    assert graded.verify() == len(kept)
    manifest = shard_manifest(graded.curated, "web", 0)
    assert manifest.num_shards > 1
    assert verify_manifest(manifest, checksums=True, deep=True) == []


def test_lineage_leads_each_document_back_to_its_parent(graded):
    graded.curate(0)
    parents = dict(zip(graded.doc_ids(0), documents(graded, 0, graded.data)))
    rows = list(read_lineage(shard_manifest(graded.curated, "web", 0)))
    topics = np.load(graded.topics / "web" / "shard_0000" / "topics.npy")
    for row, document in zip(rows, documents(graded, 0, graded.curated), strict=True):
        assert parents[row["parent_doc_id"]] == document
        assert list(parents)[row["parent_index"]] == row["parent_doc_id"]
        assert row["topic"] == topics[row["parent_index"]]
        assert row["aggregated"] == row["parent_index"] / 1000
        assert row["decision"] == "keep"


def test_the_order_spreads_topics_over_windows(graded):
    graded.curate(0, seq_len=512)
    for metric in ("concat", "flush"):
        found = graded.curation(0)["diversity"][metric]
        assert found["after"]["mean"] > found["before"]["mean"] + 1
        assert found["after"]["percent_of_ceiling"] > 90
    graded.curate(1, order="original")
    for metric in ("concat", "flush"):
        unordered = graded.curation(1)["diversity"][metric]
        assert unordered["before"] == unordered["after"]
    rows = read_lineage(shard_manifest(graded.curated, "web", 1))
    indices = [row["parent_index"] for row in rows]
    assert indices == sorted(indices)


def test_reruns_and_other_directories_give_the_same_bytes(make_corpus):
    first, second = make_corpus("first"), make_corpus("second")
    for corpus in (first, second):
        corpus.prepare()
        corpus.curate(0)
        corpus.curate(1)
        corpus.combine()
    assert first.outputs(first.curated) == second.outputs(second.curated)
    assert any(name.endswith("lineage.jsonl") for name in first.outputs(first.curated))


def test_unchanged_inputs_mean_no_work_and_a_damaged_shard_is_made_again(graded):
    made = graded.curate(0)
    times = graded.times(graded.curated)
    again = graded.curate(0)
    assert made.facts["changed"]
    assert again == Result(made.digest, made.facts | {"changed": False})
    assert graded.times(graded.curated) == times
    before = graded.outputs(graded.curated)
    next(graded.curated.rglob("*.npy")).unlink()
    assert graded.curate(0).facts["changed"]
    assert graded.outputs(graded.curated) == before


@pytest.mark.parametrize(
    "options", [{"include": ("band",)}, {"order": "shuffle"}, {"seed": 1}, {"seq_len": 64}]
)
def test_changed_settings_are_curated_again(graded, options):
    made = graded.curate(0)
    changed = graded.curate(0, **options)
    assert changed.facts["changed"]
    assert (changed.digest == made.digest) == ("seq_len" in options)
    assert graded.verify() == changed.facts["documents"]


def test_changed_scores_or_topics_are_curated_again(graded):
    graded.curate(0)
    graded.grade(0, lambda i: "keep")
    regraded = graded.curate(0)
    assert regraded.facts["changed"]
    assert regraded.facts["documents"] == regraded.facts["documents_read"]
    graded.fit(num_topics=3)
    graded.assign(0)
    assert graded.curate(0).facts["changed"]
    assert not graded.curate(0).facts["changed"]


def test_a_shard_of_which_nothing_is_kept_succeeds(graded):
    graded.grade(0, lambda i: "drop")
    report = graded.curate(0)
    assert (report.facts["documents"], report.facts["tokens"]) == (0, 0)
    none = {"before": None, "after": None, "shuffle": None}
    assert graded.curation(0)["diversity"]["concat"] == none
    manifest = shard_manifest(graded.curated, "web", 0)
    assert (manifest.num_shards, manifest.total_documents, manifest.total_tokens) == (0, 0, 0)
    assert graded.verify() == 0
    assert not graded.curate(0).facts["changed"]
    graded.curate(1)
    combined = graded.combine()
    kept = shard_manifest(graded.curated, "web", 1).total_documents
    assert combined.facts["documents"] == kept


def test_a_shard_without_documents_succeeds(make_corpus):
    corpus = make_corpus(num_documents=4, num_topics=2, num_buckets=5)
    corpus.prepare()
    reports = [corpus.curate(bucket) for bucket in range(5)]
    assert any(report.facts["documents_read"] == 0 for report in reports)
    combined = corpus.combine()
    assert combined.facts["documents"] == sum(report.facts["documents"] for report in reports)


def test_a_tree_of_another_tool_is_curated_under_its_document_ids(graded):
    path = graded.data / "web" / "train" / "shard_0000" / MANIFEST_NAME

    def keep_published_fields(manifest: dict) -> None:
        for key in ("content_hash", "file_hash", "pipeline_version", "fingerprints"):
            del manifest[key]
        for entry in manifest["shards"]:
            del entry["ids_path"]

    edit(path, keep_published_fields)
    graded.assign(0)
    graded.grade(0)
    graded.curate(0)
    assert graded.verify() == len(graded.ingest_ids(0, graded.curated))
    assert set(graded.ingest_ids(0, graded.curated)) <= set(graded.doc_ids(0))


def swap_rows(rows: list[str]) -> list[str]:
    return [*rows[:3], rows[4], rows[3], *rows[5:]]


@pytest.mark.parametrize(
    ("code", "damage", "named"),
    [
        ("MISMATCH", swap_rows, 3),
        ("MISMATCH", lambda rows: rows[:-1], -1),
        ("MISMATCH", lambda rows: [*rows, rows[0]], 0),
        ("QUALITY", lambda rows: ["{\n", *rows[1:]], None),
        ("MISMATCH", lambda rows: ["[]\n", *rows[1:]], None),
        ("QUALITY", lambda rows: ['{"doc_id": NaN}\n', *rows[1:]], None),
        ("QUALITY", lambda rows: [row.replace("keep", "maybe") for row in rows], None),
    ],
)
def test_scores_that_are_not_those_of_the_documents_are_refused(graded, code, damage, named):
    path = graded.shard(0).scores
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(damage(rows)))
    names = [] if named is None else [json.loads(rows[named])["doc_id"]]
    with refused(f"E-CURATION-{code}", naming=names):
        graded.curate(0)
    assert not graded.outputs(graded.curated)


@pytest.mark.parametrize("name", ["quality", "topics"])
def test_inputs_of_another_version_of_the_shard_are_refused(graded, name):
    summary = graded.root / name / "web" / "shard_0000" / "summary.json"
    edit(summary, lambda value: value["fingerprints"].update(shard="0" * 64))
    with refused("E-CURATION-MISMATCH"):
        graded.curate(0)


@pytest.mark.parametrize(
    "name",
    ["quality/web/shard_0000/summary.json", "quality/web/shard_0000/quality_scores.jsonl",
     "topics/web/shard_0000/summary.json", "topics/web/shard_0000/topics.npy"],
)  # fmt: skip
def test_missing_inputs_are_refused(graded, name):
    (graded.root / name).unlink()
    with refused("E-CURATION-MISSING"):
        graded.curate(0)


@pytest.mark.parametrize(
    ("code", "pattern", "damage"),
    [
        ("E-SHARD-EOS", "*.npy", lambda raw: raw[:-4] + (5).to_bytes(4, "little")),
        ("E-SHARD-IDS", "*.ids.jsonl", lambda raw: raw.split(b"\n", 1)[1]),
    ],
)
def test_a_damaged_parent_is_refused(graded, code, pattern, damage):
    path = next(graded.shard(0).directory.glob(pattern))
    path.write_bytes(damage(path.read_bytes()))
    with refused(code):
        graded.curate(0)
    assert not graded.outputs(graded.curated)


def test_a_failed_run_leaves_the_old_shard_and_the_next_one_cleans_up(graded, monkeypatch):
    graded.curate(0)
    before = graded.outputs(graded.curated)
    monkeypatch.setattr("nmoe_core.base.atomic._steps", Counter())
    monkeypatch.setenv("NMOE_FAILPOINT", "write:20:ENOSPC")
    with pytest.raises(OSError, match="No space"):
        graded.curate(0, order="shuffle")
    assert graded.outputs(graded.curated) == before
    monkeypatch.delenv("NMOE_FAILPOINT")
    train = graded.curated / "web" / "train"
    (train / ".shard_0000.tmp.old").mkdir()
    assert not graded.curate(0).facts["changed"]
    assert not list(train.glob(".shard*"))


def test_two_writers_of_one_shard_exclude_each_other_but_not_other_shards(graded):
    with output_lock(graded.curated / "web" / "train" / ".locks" / "shard_0000"):
        with pytest.raises(LockedError):
            graded.curate(0)
        graded.curate(1)


def test_combining_is_idempotent_and_names_the_parent(graded):
    reports = [graded.curate(bucket) for bucket in range(2)]
    combined = graded.combine(512)
    times = graded.times(graded.curated)
    again = graded.combine(512)
    assert (combined.facts["changed"], again.facts["changed"]) == (True, False)
    assert graded.times(graded.curated) == times
    manifest = load_manifest(graded.tree.curated_manifest("web"))
    parent = load_manifest(graded.tree.manifest("web"))
    info = manifest.extra["source_info"]
    assert info["parent"] == documents_digest(parent)
    found = info["assignment"], info["order"], info["include"]
    assert found == ("sequential", "golden", ["keep"])
    assert manifest.total_documents == sum(report.facts["documents"] for report in reports)
    assert manifest.extra["content_hash"] == combined.digest
    assert manifest.extra["tokenizer_fingerprint"] == "toy-fingerprint"
    assert verify_manifest(manifest, checksums=True, deep=True) == []


def test_recorded_diversity_is_that_of_the_parents_order_and_of_the_order_as_written(graded):
    recorded = []
    for order in ("original", "golden"):
        for bucket in range(2):
            graded.curate(bucket, order=order)
        graded.combine(512)
        recorded.append(graded.curation()["diversity"])
    topics: list[int] = []
    lengths: list[int] = []
    for bucket in range(2):
        topics += [graded.planted[name] for name in graded.ingest_ids(bucket, graded.curated)]
        lengths += [len(row[0]) // 4 for row in documents(graded, bucket, graded.curated)]
    for metric in ("concat", "flush"):
        found = measure(np.arange(len(topics)), np.array(topics), np.array(lengths), 512, metric)
        unordered, ordered = recorded[0][metric], recorded[1][metric]
        assert ordered["after"] == pytest.approx(asdict(found))
        assert ordered["before"] == unordered["after"]
        assert ordered["after"]["mean"] > ordered["before"]["mean"] + 1


def other_documents(manifest: dict) -> None:
    manifest["shards"][0]["checksum"] = "0" * 64
    manifest.update(sealed(manifest))


def test_shards_of_another_parent_or_other_settings_are_not_combined(graded):
    graded.curate(0)
    graded.curate(1, order="shuffle")
    with refused("E-MANIFEST-MIXED"):
        graded.combine(512)
    graded.curate(1)
    path = graded.data / "web" / "train" / "shard_0001" / MANIFEST_NAME
    edit(path, other_documents)
    with refused("E-CURATION-STALE"):
        graded.combine(512)
    assert not (graded.curated / "web" / "train" / MANIFEST_NAME).exists()


@pytest.mark.parametrize("damage", ["lineage", "tokens", "decision"])
def test_verification_finds_a_shard_that_is_not_its_parents_copy(graded, damage):
    graded.curate(0)
    directory = graded.curated / "web" / "train" / "shard_0000"
    if damage == "lineage":
        path = directory / "lineage.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    if damage == "tokens":
        path = next(directory.glob("*.npy"))
        path.write_bytes(path.read_bytes()[:-8] + (1199).to_bytes(4, "little") + b"\xb0\x04\0\0")
    if damage == "decision":
        graded.grade(0, lambda i: "keep" if i % 2 else "drop")
    with pytest.raises(CurationError) as caught:
        graded.verify()
    code = "E-CURATION-LINEAGE" if damage == "lineage" else "E-CURATION-VERIFY"
    assert caught.value.code == code
