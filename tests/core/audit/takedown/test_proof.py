"""The proof of a takedown: what was scanned, of which record, and what it does not cover."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.audit.takedown import proof
from nmoe_core.base.docid import bucket_of
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.curate.takedown.grams import GRAMS
from nmoe_core.tasks import curate
from nmoe_core.tasks.takedown import report
from tests.core.audit.takedown.corpus import (
    BUCKETS,
    GRAM,
    Texts,
    command_of,
    copies_of,
    curated_again,
    listed,
    shared_grams,
)
from tests.core.curate.corpus import Corpus
from tests.project import said
from tests.refusals import refused, refused_line

pytestmark = pytest.mark.usefixtures("fixed_clock")


def test_the_sentence_of_a_proof_is_as_narrow_as_its_scan_and_the_proof_says_what_was_looked_at(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    # One whose passage others share, and one whose text is its own.
    of = {
        bool(shared_grams(texts, copies_of(texts, [n]))): n for n in texts if len(texts[n]) > GRAM
    }
    path = Path()
    for shares, name in sorted(of.items()):
        path = listed(corpus, f"id:{name}")
        said(capsys, *command_of(run, path, "--apply"))
        curated_again(run)
        assert main(command_of(run, path, "--verify", "--allow-shared")) == 0
        out = capsys.readouterr().out
        assert "nothing is left" not in out
        assert ("no 50-gram of these texts is left in curated shards: " in out) == (not shares)
        said_of_shared = "texts is left in curated shards; {} others share passages"
        number = len(shared_grams(texts, {n for m in of.values() for n in copies_of(texts, [m])}))
        assert (said_of_shared.format(f"{number:,}") in out) == shares
    sealed = read_summary(run.tree.takedown_proof)
    assert sealed["roots"] == [str(run.tree.curated)]
    assert f"data shards and their kept versions ({run.tree.data})" in sealed["not_covered"]
    said(capsys, *command_of(run, path, "--verify", "--allow-shared", "--raw"), status=1)
    sealed = read_summary(run.tree.takedown_proof)
    assert sealed["roots"] == [str(run.tree.curated), str(run.tree.data)]
    assert not [place for place in sealed["not_covered"] if "data shards" in place]


def test_a_proof_is_sealed_and_a_file_that_no_manifest_names_fails_it(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    path = listed(corpus, "id:doc-0001")
    assert "apply" in refused_line(capsys, *command_of(run, path, "--verify"))
    said(capsys, *command_of(run, path, "--apply"))
    curated_again(run)
    flags = "--verify", "--allow-shared"
    said(capsys, *command_of(run, path, *flags))
    proof = read_summary(corpus.root / "takedown" / "proof.json")
    digests = {k: v for part in proof["scanned"] for k, v in part["files"].items()}
    files = {f.relative_to(corpus.curated).as_posix(): f for f in corpus.curated.rglob("*.npy")}
    assert digests == {k: hashlib.sha256(f.read_bytes()).hexdigest() for k, f in files.items()}
    assert proof["holds"]
    old = corpus.curated / "web" / "train" / ".shard_0000.tmp.old"
    old.mkdir()
    (old / "a.npy").write_bytes(b"")
    line = refused_line(capsys, *command_of(run, path, *flags), code="E-TAKEDOWN-LEFT")
    assert "1 files that no manifest names" in line
    assert not read_summary(corpus.root / "takedown" / "proof.json")["holds"]
    (old / "a.npy").unlink()
    file = next(iter(files.values()))
    raw = bytearray(file.read_bytes())
    raw[140] ^= 1
    file.write_bytes(raw)
    refused_line(capsys, *command_of(run, path, *flags), code="E-SHARD-CHECKSUM")


def test_a_proof_is_of_the_record_whose_texts_were_searched(
    made: tuple[Corpus, Run, Texts],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus, run, _ = made
    path, record = listed(corpus, "id:doc-0001"), corpus.tree.takedown
    said(capsys, *command_of(run, path, "--apply"))
    curated_again(run)
    before, below = record.read_bytes(), proof.shards_below

    def meanwhile(root: Path, **options: bool) -> Iterator[Any]:
        more = path.with_name("more.txt")
        more.write_text("id:doc-0005\n")
        assert main(command_of(run, more, "--apply")) == 0
        return below(root, **options)

    monkeypatch.setattr(proof, "shards_below", meanwhile)
    assert main(command_of(run, path, "--verify", "--allow-shared")) == 0
    made_of = read_summary(corpus.root / "takedown" / "proof.json")["record"]
    assert record.read_bytes() != before
    assert made_of == hashlib.sha256(before).hexdigest()


def test_a_proof_follows_links_to_the_directories_of_sources(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, texts = made
    path = listed(corpus, "id:doc-0001")
    said(capsys, *command_of(run, path, "--apply"))
    moved = (corpus.curated / "web").rename(tmp_path / "elsewhere")
    (corpus.curated / "web").symlink_to(moved)
    failed = said(capsys, *command_of(run, path, "--verify"), status=1)
    gone = copies_of(texts, ["doc-0001"])
    assert {row["ingest_id"] for row in failed["remaining"]} == gone
    assert failed["unnamed"] == []


def test_the_proof_scans_kept_versions_and_the_report_leaves_them_out(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    path, train = listed(corpus, "id:doc-0001"), corpus.curated / "web" / "train"
    name = f"shard_{bucket_of('doc-0001', BUCKETS):04d}"
    shutil.copytree(train / name, train / ".versions" / "one" / name)
    documents = said(capsys, *command_of(run, path))["documents"]
    assert not [row for row in documents if ".versions" in row["doc_id"]]
    said(capsys, *command_of(run, path, "--apply"))
    curated_again(run)
    failed = said(capsys, *command_of(run, path, "--verify", "--allow-shared"), status=1)
    assert failed["remaining"]
    assert all(".versions" in row["doc_id"] for row in failed["remaining"])


def test_nothing_is_proved_of_no_shards_or_of_a_list_that_is_not_recorded(
    made: tuple[Corpus, Run, Texts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    said(capsys, *command_of(run, listed(corpus, "id:doc-0001"), "--apply"))
    curated_again(run)
    path = listed(corpus, "id:doc-0001", "id:doc-0002")
    said(capsys, *command_of(run, path, "--verify", "--allow-shared"), status=1)
    proof = read_summary(corpus.root / "takedown" / "proof.json")
    assert (proof["holds"], proof["remaining"], len(proof["unrecorded"])) == (False, [], 2)
    corpus.curated.rename(tmp_path / "elsewhere")
    assert "no shard" in refused_line(capsys, *command_of(run, path, "--verify"))


@pytest.mark.parametrize("name", ["documents.jsonl", "grams.npy"])
def test_a_damaged_record_is_refused(
    name: str, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    path = listed(corpus, "id:doc-0001")
    said(capsys, *command_of(run, path, "--apply"))
    file = corpus.root / "takedown" / name
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    refused_line(capsys, *command_of(run, path, "--verify"), code="E-TAKEDOWN-RECORD")
    if name == "grams.npy":
        for others in (np.zeros(3, GRAMS), np.zeros((1, 3), GRAMS), np.zeros(3)):
            np.save(file, others)
            refused_line(capsys, *command_of(run, path, "--verify"), code="E-TAKEDOWN-RECORD")


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[1:],
        lambda rows: [rows[0].replace(b'"text_sha256": "', b'"text_sha256": "0'), *rows[1:]],
        lambda rows: [rows[0].replace(b'"why": "', b'"why": "\\ud800'), *rows[1:]],
        lambda rows: rows[:-1],
    ],
)
def test_a_record_that_lost_or_changed_a_row_lets_no_document_come_back(
    change: Any, made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    said(capsys, *command_of(run, listed(corpus, "id:doc-0001"), "--apply"))
    file = run.tree.takedown
    file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))
    with refused("E-TAKEDOWN-RECORD", "checksum"):
        curated_again(run)


def test_grams_of_another_tokenizer_prove_nothing(
    made: tuple[Corpus, Run, Texts],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus, run, _ = made
    path = listed(corpus, "id:doc-0001")
    found = report.add_rows
    with monkeypatch.context() as patch:
        others = lambda tree, rows, *rest: found(  # noqa: E731
            tree, [dict(row) | {"tokenizer": "another"} for row in rows], *rest
        )
        patch.setattr(report, "add_rows", others)
        said(capsys, *command_of(run, path, "--apply"))
    curated_again(run)
    line = refused_line(capsys, *command_of(run, path, "--verify"), code="E-TAKEDOWN-TOKENIZER")
    assert "another" in line


def test_consumed_documents_stay_where_they_are_and_the_proof_says_so(
    made: tuple[Corpus, Run, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, _ = made
    first = corpus.ingest_ids(0, corpus.curated)[0]
    text = run.path.read_text() + "\n[curation.resume_from_token]\nweb = 40\n"
    run.path.write_text(text.replace('order = "golden"', 'order = "golden"\nstability = "resume"'))
    run = Run(run.path)
    path = listed(corpus, f"id:{first}")
    said(capsys, *command_of(run, path, "--apply"))
    curate.curate_shards(run, "web", range(BUCKETS))
    failed = said(capsys, *command_of(run, path, "--verify", "--allow-shared"), status=1)
    assert first in {row["ingest_id"] for row in failed["remaining"]}
