"""The next run goes on with a pass that ended early, unless what it left cannot be trusted."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base import fingerprint as digests
from nmoe_core.prep import journal as module
from nmoe_core.prep.journal import Journal
from nmoe_core.prep.progress import PrepProgress
from tests.conftest import Mutations
from tests.core.prep.conftest import Web
from tests.project import failing
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("frequent_commits")


@pytest.fixture
def whole(web: Web, tmp_path: Path) -> dict[str, str]:
    """The digest of a pass that was never interrupted."""
    web = web.at(tmp_path / "whole")
    web.prep()
    return web.digest()


@pytest.mark.parametrize(("budget", "most"), [(None, 220), (20_000, 150)])
def test_an_interrupted_pass_ends_with_the_same_bytes_and_counts_under_any_budget(
    web: Web, tmp_path: Path, budget: int | None, most: int
) -> None:
    web = web.with_(max_tokens=budget)
    never_ended = web.at(tmp_path / "whole")
    counts = never_ended.prep().outcomes
    web.interrupt()
    assert list(web.out.rglob("*.npy")) == []
    seen: list[PrepProgress] = []
    report = web.prep(progress=seen.append)
    assert 0 < report.documents_tokenized < most
    assert report.num_documents == report.outcomes["kept"]
    assert report.outcomes == counts
    assert seen[0].resumed_bytes > 0
    assert web.digest() == never_ended.digest()


@pytest.mark.parametrize(
    ("begun", "ended", "num_tokenized"),
    [
        ({}, {"buckets": [1, 2]}, range(1, 150)),
        ({"buckets": [1, 2]}, {}, [300]),
        ({}, {"existing": "remake"}, [300]),
    ],
)
def test_journal_of_other_shards_is_used_where_it_holds_them_all(
    web: Web,
    whole: dict[str, str],
    begun: dict[str, Any],
    ended: dict[str, Any],
    num_tokenized: Any,
) -> None:
    web.interrupt(**begun)
    assert web.shards(**ended).documents_tokenized in num_tokenized
    web.prep()
    assert web.digest() == whole


def test_shards_that_are_current_leave_the_journal_of_a_pass_over_others(
    web: Web, whole: dict[str, str]
) -> None:
    web.shards(buckets=[0])
    journal = web.interrupt(buckets=[1, 2])
    before = journal.read_bytes()
    assert web.shards(buckets=[0]).skipped == [0]
    assert journal.read_bytes() == before
    web.prep()
    assert not journal.exists()
    assert web.digest() == whole


def _drop_the_seal(journal: Path) -> None:
    """As a version before seals wrote it."""
    entry = json.loads(journal.read_text())
    del entry["content_hash"]
    entry["position"][1] = entry["position"][2] = entry["position"][3] = 0
    journal.write_text(json.dumps(entry))


@pytest.mark.parametrize(
    "damage",
    [
        lambda journal: os.truncate(journal, 40),
        lambda journal: os.truncate(next(journal.parent.rglob("*.ids.jsonl")), 10),
        _drop_the_seal,
    ],
)
def test_damaged_journal_or_file_costs_work_and_no_bytes(
    web: Web, whole: dict[str, str], damage: Any
) -> None:
    damage(web.interrupt())
    assert web.prep().documents_tokenized == 300
    assert web.digest() == whole


@pytest.mark.parametrize("seed", [5, *(pytest.param(n, marks=pytest.mark.long) for n in (6, 7))])
def test_pass_after_any_change_of_its_journal_ends_with_the_same_bytes(
    web: Web, whole: dict[str, str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutations = Mutations(seed)
    web.interrupt()
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a test of content, not of durability
    monkeypatch.setattr(Journal, "commit_if_due", lambda *_: None)
    for i in range(40):
        copy = web.at(web.out.with_name(f"train_{i}"))
        shutil.copytree(web.out, copy.out)
        path = copy.out / ".prep" / ("digests.json" if i % 8 == 7 else "journal.json")
        before = path.read_bytes()
        path.write_bytes(mutations.any_value(before) if i % 2 else mutations.any_bytes(before))
        note = f"mutation {i}: {path.name} {path.read_bytes()!r}"
        copy.prep(existing="grow")
        assert copy.digest() == whole, note
        shutil.rmtree(copy.out)


def test_other_inputs_are_refused_by_name_or_start_over(web: Web, whole: dict[str, str]) -> None:
    web.with_(max_doc_tokens=50).interrupt()
    with refused("E-PREP-CHANGED", "another max_doc_tokens.*found 50, expected 1000000"):
        web.shards(existing="grow")
    assert web.prep().documents_tokenized == 300
    assert web.digest() == whole


def test_resume_does_not_hash_the_source_again(
    web: Web, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "CLOCK_NS", 0)
    web.interrupt()
    monkeypatch.setattr(digests, "_known", {})
    with monkeypatch.context() as patch:
        patch.setattr(digests, "sha256_file", lambda path: pytest.fail(f"{path} is hashed"))
        web.prep()
    assert web.digest() == whole


def test_source_rewritten_with_its_old_times_is_seen(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "CLOCK_NS", 0)
    web.interrupt()
    path = web.source.local_files()[0]
    times = path.stat()
    web.edit(b"shard", b"chard")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with refused("E-PREP-CHANGED", "unfinished output was made with another source"):
        web.shards(existing="grow")


def test_error_in_syncing_ends_the_pass_and_keeps_the_last_journal(web: Web) -> None:
    journal = web.interrupt()
    before = journal.read_bytes()
    with failing("sync:1:EIO"), pytest.raises(OSError, match="Input/output error"):
        web.shards()
    assert journal.read_bytes() == before


def test_journal_is_removed_before_the_files_it_names(
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
