import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from loader.files.checksummed_json import sealed
from loader.files.format import load_manifest
from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import LockedError, NmoeError
from nmoe_core.base.result import Result
from nmoe_core.curate.diversity.measure import measure
from nmoe_core.curate.shards.lineage import read_lineage
from nmoe_core.shards.manifest import documents_digest
from nmoe_core.shards.verify import verify_manifest
from tests.core.curate.corpus import shard_manifest
from tests.project import contents, failing
from tests.refusals import refused


def documents(corpus, bucket: int, tree) -> list[tuple[bytes, tuple[str, str]]]:
    """Token bytes, ingest id and text hash of every document, in order."""
    files = corpus.files(bucket, tree)
    return [(tokens.tobytes(), ids) for file in files for _, tokens, ids in file.documents()]


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


def test_unchanged_inputs_mean_no_work_and_a_damaged_shard_is_made_again(graded):
    made = graded.curate(0)
    times = graded.times(graded.curated)
    again = graded.curate(0)
    assert made.facts["changed"]
    assert again == Result(made.digest, made.facts | {"changed": False})
    assert graded.times(graded.curated) == times
    before = contents(graded.curated)
    next(graded.curated.rglob("*.npy")).unlink()
    assert graded.curate(0).facts["changed"]
    assert contents(graded.curated) == before


def test_other_settings_scores_or_topics_are_curated_again(graded):
    made = graded.curate(0)
    for options in ({"include": ("band",)}, {"order": "shuffle"}, {"seed": 1}):
        changed = graded.curate(0, **options)
        assert changed.facts["changed"]
        assert changed.digest != made.digest
        assert graded.verify() == changed.facts["documents"]
    assert graded.curate(0, seq_len=64).digest == made.digest  # measured anew, in the same order
    graded.grade(0, lambda i: "keep")
    regraded = graded.curate(0, seq_len=64)
    assert regraded.facts["changed"]
    assert regraded.facts["documents"] == regraded.facts["documents_read"]
    graded.fit(num_topics=3)
    graded.assign(0)
    assert graded.curate(0, seq_len=64).facts["changed"]
    assert not graded.curate(0, seq_len=64).facts["changed"]


def test_a_shard_of_which_nothing_is_kept_succeeds(graded):
    graded.grade(0, lambda i: "drop")
    report = graded.curate(0)
    assert (report.facts["documents"], report.facts["tokens"]) == (0, 0)
    assert set(graded.curation(0)["diversity"]["concat"].values()) == {None}
    manifest = shard_manifest(graded.curated, "web", 0)
    assert (manifest.num_shards, manifest.total_documents, manifest.total_tokens) == (0, 0, 0)
    assert graded.verify() == 0
    assert not graded.curate(0).facts["changed"]
    assert graded.curate(1).facts["documents"] == graded.combine().facts["documents"]


def test_a_shard_without_documents_succeeds(make_corpus):
    corpus = make_corpus(num_documents=4, num_topics=2, num_buckets=5)
    corpus.prepare()
    reports = corpus.curate_all()
    assert any(report.facts["documents_read"] == 0 for report in reports)
    combined = corpus.combine()
    assert combined.facts["documents"] == sum(report.facts["documents"] for report in reports)


def test_a_tree_of_another_tool_is_curated_under_its_document_ids(graded):
    path = graded.shard(0).manifest

    manifest = json.loads(path.read_text())
    for key in ("content_hash", "file_hash", "pipeline_version", "fingerprints"):
        del manifest[key]
    for entry in manifest["shards"]:
        del entry["ids_path"]
    path.write_text(json.dumps(manifest))
    graded.assign(0)
    graded.grade(0)
    graded.curate(0)
    assert graded.verify() == len(graded.ingest_ids(0, graded.curated))
    assert set(graded.ingest_ids(0, graded.curated)) <= set(graded.doc_ids(0))


SCORES = "quality/web/shard_0000/quality_scores.jsonl"
LABELS = "topics/web/shard_0000/topics.npy"
NPY, IDS = "data/web/train/shard_0000/*.npy", "data/web/train/shard_0000/*.ids.jsonl"


def _lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[bytes], bytes]:
    return lambda raw: b"".join(change(raw.splitlines(keepends=True)))


def _of_another_version(raw: bytes) -> bytes:
    value = json.loads(raw)
    value["fingerprints"]["shard"] = "0" * 64
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("code", "pattern", "damage", "named"),
    [
        ("MISMATCH", SCORES, _lines(lambda rows: [*rows[:3], rows[4], rows[3], *rows[5:]]), 3),
        ("MISMATCH", SCORES, _lines(lambda rows: rows[:-1]), -1),
        ("MISMATCH", SCORES, _lines(lambda rows: [*rows, rows[0]]), 0),
        ("QUALITY", SCORES, _lines(lambda rows: [b"{\n", *rows[1:]]), None),
        ("MISMATCH", SCORES, _lines(lambda rows: [b"[]\n", *rows[1:]]), None),
        ("QUALITY", SCORES, _lines(lambda rows: [b'{"doc_id": NaN}\n', *rows[1:]]), None),
        ("QUALITY", SCORES, lambda raw: raw.replace(b"keep", b"maybe"), None),
        ("MISSING", SCORES, None, None),
        ("MISSING", LABELS, None, None),
        ("MISSING", "quality/web/shard_0000/summary.json", None, None),
        ("MISSING", "topics/web/shard_0000/summary.json", None, None),
        ("MISMATCH", "quality/web/shard_0000/summary.json", _of_another_version, None),
        ("MISMATCH", "topics/web/shard_0000/summary.json", _of_another_version, None),
        ("E-SHARD-EOS", NPY, lambda raw: raw[:-4] + (5).to_bytes(4, "little"), None),
        ("E-SHARD-IDS", IDS, lambda raw: raw.split(b"\n", 1)[1], None),
    ],
)
def test_missing_damaged_and_other_inputs_are_refused(graded, code, pattern, damage, named):
    path = next(graded.root.glob(pattern))
    raw = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(raw))
    names = [] if named is None else [json.loads(raw.splitlines()[named])["doc_id"]]
    with refused(code if code.startswith("E-") else f"E-CURATION-{code}", naming=names):
        graded.curate(0)
    assert not contents(graded.curated)


def test_a_failed_run_leaves_the_old_shard_and_the_next_one_cleans_up(graded):
    graded.curate(0)
    before = contents(graded.curated)
    with failing("write:20:ENOSPC"), pytest.raises(OSError, match="No space"):
        graded.curate(0, order="shuffle")
    assert contents(graded.curated) == before
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
    reports = graded.curate_all()
    combined = graded.combine(512)
    times = graded.times(graded.curated)
    again = graded.combine(512)
    assert (combined.facts["changed"], again.facts["changed"]) == (True, False)
    assert graded.times(graded.curated) == times
    manifest = load_manifest(graded.tree.curated_manifest("web"))
    parent = load_manifest(graded.tree.manifest("web"))
    info = manifest.extra["source_info"]
    assert info["parent"] == documents_digest(parent)
    assert info.items() >= {"assignment": "sequential", "order": "golden"}.items()
    assert info["include"] == ["keep"]
    assert manifest.total_documents == sum(report.facts["documents"] for report in reports)
    assert manifest.extra["content_hash"] == combined.digest
    assert manifest.extra["tokenizer_fingerprint"] == "toy-fingerprint"
    assert verify_manifest(manifest, checksums=True, deep=True) == []


def test_recorded_diversity_is_that_of_the_parents_order_and_of_the_order_as_written(graded):
    recorded = []
    for order in ("original", "golden"):
        graded.curate_all(order=order)
        graded.combine(512)
        recorded.append(graded.curation()["diversity"])
    rows = [row for k in range(2) for row in documents(graded, k, graded.curated)]
    topics = [graded.planted[name] for _, (name, _) in rows]
    lengths = [len(tokens) // 4 for tokens, _ in rows]
    for metric in ("concat", "flush"):
        found = measure(np.arange(len(topics)), np.array(topics), np.array(lengths), 512, metric)
        unordered, ordered = recorded[0][metric], recorded[1][metric]
        assert ordered["after"] == pytest.approx(asdict(found))
        assert ordered["before"] == unordered["after"] == unordered["before"]
        assert ordered["after"]["mean"] > ordered["before"]["mean"] + 1
        assert ordered["after"]["percent_of_ceiling"] > 90


def test_shards_of_another_parent_or_other_settings_are_not_combined(graded):
    graded.curate(0)
    graded.curate(1, order="shuffle")
    with refused("E-MANIFEST-MIXED"):
        graded.combine(512)
    graded.curate(1)
    path = graded.shard(1).manifest
    manifest = json.loads(path.read_text())
    manifest["shards"][0]["checksum"] = "0" * 64
    path.write_text(json.dumps(sealed(manifest)))
    with refused("E-CURATION-STALE"):
        graded.combine(512)
    assert not (graded.tree.curated_manifest("web")).exists()


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
    with refused("E-CURATION-LINEAGE" if damage == "lineage" else "E-CURATION-VERIFY"):
        graded.verify()


TOPICS = "topics/web/shard_0000/summary.json"
SHARD = "curated/web/train/shard_0000/curation.json"
SOURCE = "curated/web/train/curation.json"


def _run(corpus: Any) -> None:
    for bucket in range(2):
        corpus.assign(bucket)
        corpus.curate(bucket, order="window_fill")
    corpus.combine()


def _outputs(corpus: Any) -> dict[str, bytes]:
    return contents(corpus.topics) | contents(corpus.curated)


def _edits(name: str, value: dict[str, Any]) -> list[dict[str, Any]]:
    keys = [key for key in value if key not in ("source", "content_hash", "fingerprints")]
    edits = [value | {key: 1 if value[key] == 0 else 0} for key in keys]
    edits += [{key: item for key, item in value.items() if key != "content_hash"}]
    if "fingerprints" in value:
        edits += [value | {"fingerprints": value["fingerprints"] | {"topic_model": "x"}}]
    return edits


@pytest.mark.parametrize("name", [TOPICS, SHARD, SOURCE])
def test_an_edited_summary_is_refused_or_made_again_and_an_older_format_is_read(
    graded, name
) -> None:
    _run(graded)
    before = _outputs(graded)
    path = graded.root / name
    whole = json.loads(path.read_text())
    for edited in _edits(name, whole):
        path.write_text(json.dumps(edited))
        _run(graded)
        assert _outputs(graded) == before, edited
    if name == SOURCE:
        return
    path.write_text(json.dumps(whole | {"num_documents": 7}))
    with pytest.raises(NmoeError, match="content_hash"):
        graded.curate(0, order="window_fill") if name == TOPICS else graded.combine()
    for key in ("content_hash", "schema_version"):
        del whole[key]
    path.write_text(json.dumps(whole))
    older = path.read_bytes()
    _run(graded)
    assert path.read_bytes() == older


SCRIPT = """
import sys
from pathlib import Path
from nmoe_core.config.tree import Tree
from nmoe_core.curate.shards.combine import combine_curated
from nmoe_core.curate.shards.curated import CurateSettings, curate_shard
tree, settings = Tree.below(Path(sys.argv[1])), CurateSettings(seq_len=256)
for shard in tree.shards("web", 2):
    curate_shard(shard, settings)
combine_curated(tree, "web", 2, settings)
"""


# Inside a file, between files, at the swap of a shard, at the manifest of the source.
@pytest.mark.parametrize("failpoint", ["write:30", "fsync:3", "rename:2", "rename:6"])
def test_a_killed_curation_ends_in_the_bytes_of_one_elsewhere(graded, tmp_path, failpoint):
    other = replace(graded, root=tmp_path / "other")
    shutil.copytree(graded.root, other.root)
    other.curate_all()
    other.combine()
    command = [sys.executable, "-c", SCRIPT, str(graded.root)]
    killed = subprocess.run(command, env=os.environ | {"NMOE_FAILPOINT": f"{failpoint}:kill"})
    assert killed.returncode == -signal.SIGKILL
    subprocess.run(command, check=True)
    assert contents(graded.curated) == contents(other.curated)
