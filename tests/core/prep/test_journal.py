"""A pass that ended early is gone on with, unless what it left cannot be trusted."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.errors import FormatError
from nmoe_core.prep import journal as module
from nmoe_core.prep.journal import Journal
from nmoe_core.prep.progress import PrepProgress
from nmoe_core.prep.run import PrepReport, PrepSettings, prep_shards, write_manifest
from nmoe_core.sources import digests
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import Split

Digest = Callable[[Path], dict[str, str]]
_NUM_MUTATIONS = 120


@pytest.fixture(autouse=True)
def _commit_after_every_small_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)
    monkeypatch.setattr(Journal, "commit_if_due", Journal.commit)
    monkeypatch.setattr("nmoe_core.sources.jsonl._BLOCK_BYTES", 4096)


def _end_after(num_documents: int, error: BaseException) -> Callable[[PrepProgress], None]:
    def progress(state: PrepProgress) -> None:
        if state.documents >= num_documents:
            raise error

    return progress


def _interrupt(source: JsonlSource, settings: PrepSettings, out: Path, **kwargs) -> None:
    stop = _end_after(100, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        prep_shards(Split(source), settings, out, progress=stop, **kwargs)


def _finish(source: JsonlSource, settings: PrepSettings, out: Path, **kwargs) -> PrepReport:
    report = prep_shards(Split(source), settings, out, **kwargs)
    write_manifest(settings, out)
    return report


@pytest.fixture
def whole(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path, tree_digest: Digest
) -> dict[str, str]:
    _finish(source, settings, tmp_path / "whole")
    return tree_digest(tmp_path / "whole")


def test_an_interrupted_pass_is_gone_on_with_and_its_counts_are_whole(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    whole: dict[str, str],
) -> None:
    out = tmp_path / "train"
    _interrupt(source, settings, out)
    assert list(out.rglob("*.npy")) == []
    seen: list[PrepProgress] = []
    report = _finish(source, settings, out, progress=seen.append)
    assert 0 < report.documents_tokenized < 220
    assert report.num_documents == 300
    assert report.outcomes["kept"] == 300
    assert seen[0].resumed_bytes > 0
    assert tree_digest(out) == whole


def test_a_pass_under_a_budget_ends_at_the_same_document_after_a_resume(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path, tree_digest: Digest
) -> None:
    settings = replace(settings, max_tokens=20_000)
    _finish(source, settings, tmp_path / "whole")
    _interrupt(source, settings, tmp_path / "train")
    report = _finish(source, settings, tmp_path / "train")
    assert report.documents_tokenized < 150
    assert tree_digest(tmp_path / "train") == tree_digest(tmp_path / "whole")


def test_a_journal_of_more_shards_serves_those_that_are_asked_for(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    whole: dict[str, str],
) -> None:
    out = tmp_path / "train"
    _interrupt(source, settings, out)
    report = prep_shards(Split(source), settings, out, [1, 2])
    assert report.documents_tokenized < 150
    _finish(source, settings, out)
    assert tree_digest(out) == whole


def test_a_journal_of_fewer_shards_does_not_serve_more(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    whole: dict[str, str],
) -> None:
    out = tmp_path / "train"
    _interrupt(source, settings, out, buckets=[1, 2])
    assert _finish(source, settings, out).documents_tokenized == 300
    assert tree_digest(out) == whole


@pytest.mark.parametrize("damage", ["short", "torn"])
def test_a_journal_or_file_that_was_damaged_costs_work_and_no_bytes(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    whole: dict[str, str],
    damage: str,
) -> None:
    out = tmp_path / "train"
    _interrupt(source, settings, out)
    journal = out / ".prep" / "journal.json"
    if damage == "torn":
        journal.write_bytes(journal.read_bytes()[:40])
    else:
        part = next((out / ".prep").rglob("*.ids.jsonl"))
        part.write_bytes(part.read_bytes()[:10])
    assert _finish(source, settings, out).documents_tokenized == 300
    assert tree_digest(out) == whole


def test_a_pass_after_any_change_of_its_journal_ends_with_the_same_bytes(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    whole: dict[str, str],
    mutations: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _interrupt(source, settings, tmp_path / "train")
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a test of content, not of durability
    for i in range(_NUM_MUTATIONS):
        out = tmp_path / f"train_{i}"
        shutil.copytree(tmp_path / "train", out)
        path = out / ".prep" / ("digests.json" if i % 8 == 7 else "journal.json")
        before = path.read_bytes()
        path.write_bytes(mutations.any_value(before) if i % 2 else mutations.any_bytes(before))
        note = f"mutation {i}: {path.name} {path.read_bytes()!r}"
        _finish(source, settings, out, existing="refuse")
        assert tree_digest(out) == whole, note
        shutil.rmtree(out)


def test_a_journal_of_a_version_without_a_seal_is_begun_again(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    whole: dict[str, str],
) -> None:
    _interrupt(source, settings, tmp_path / "train")
    path = tmp_path / "train" / ".prep" / "journal.json"
    entry = json.loads(path.read_text())
    entry.pop("content_hash", None)
    entry["position"][1] = entry["position"][2] = entry["position"][3] = 0
    path.write_text(json.dumps(entry))
    assert _finish(source, settings, tmp_path / "train").documents_tokenized == 300
    assert tree_digest(tmp_path / "train") == whole


def test_other_inputs_are_refused_by_name_or_start_over(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    whole: dict[str, str],
) -> None:
    out = tmp_path / "train"
    _interrupt(source, replace(settings, max_doc_tokens=50), out)
    with pytest.raises(FormatError) as caught:
        prep_shards(Split(source), settings, out, existing="refuse")
    assert caught.value.code == "E-PREP-CHANGED"
    assert "another max_doc_tokens" in str(caught.value)
    assert "found 50, expected 1000000" in str(caught.value)
    assert _finish(source, settings, out).documents_tokenized == 300
    assert tree_digest(out) == whole


def test_a_pass_is_gone_on_with_without_hashing_the_source_again(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tree_digest: Digest,
    whole: dict[str, str],
) -> None:
    monkeypatch.setattr(digests, "_CLOCK_NS", 0)
    _interrupt(source, settings, tmp_path / "train")
    monkeypatch.setattr(digests, "_known", {})
    with monkeypatch.context() as patch:
        patch.setattr(digests, "sha256_file", lambda path: pytest.fail(f"{path} is hashed"))
        _finish(source, settings, tmp_path / "train")
    assert tree_digest(tmp_path / "train") == whole


def test_a_source_rewritten_under_a_half_done_output_is_seen_though_its_times_are_the_same(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_CLOCK_NS", 0)
    _interrupt(source, settings, tmp_path / "train")
    path = source.local_files()[0]
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"shard", b"chard"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(FormatError, match="half-done output was made from another source") as error:
        prep_shards(Split(source), settings, tmp_path / "train", existing="refuse")
    assert error.value.code == "E-PREP-CHANGED"


def test_an_error_in_syncing_ends_the_pass_and_keeps_the_last_journal(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "train"
    _interrupt(source, settings, out)
    before = json.loads((out / ".prep" / "journal.json").read_text())
    with monkeypatch.context() as patch:
        patch.setenv("NMOE_FAILPOINT", "sync:1:EIO")
        patch.setattr("nmoe_core.base.atomic._steps", Counter())
        with pytest.raises(OSError, match="Input/output error"):
            prep_shards(Split(source), settings, out)
    assert json.loads((out / ".prep" / "journal.json").read_text()) == before


def test_force_starts_over(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    whole: dict[str, str],
) -> None:
    out = tmp_path / "train"
    _interrupt(source, settings, out)
    assert _finish(source, settings, out, existing="remake").documents_tokenized == 300
    assert tree_digest(out) == whole


def test_the_journal_goes_before_the_files_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.commit(lambda: {"fingerprints": {}}, list)
    assert journal.read() is not None
    left = []
    monkeypatch.setattr(
        module.shutil, "rmtree", lambda path, ignore_errors: left.append(list(path.iterdir()))
    )
    journal.remove()
    assert left == [[]]
