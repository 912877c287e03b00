"""Earlier versions of a split are kept, listed, compared and restored."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from loader.files.format import load_manifest
from nmoe_core.base.atomic import exchange_dirs, output_lock
from nmoe_core.cli import main
from nmoe_core.prep import versions
from nmoe_core.prep.incremental import existing
from nmoe_core.prep.versions import list_versions, restore_version
from nmoe_core.shards import links
from nmoe_core.shards.verify import verify_manifest
from tests.core.prep.conftest import Web, tree_digest
from tests.crash.disk import Disk
from tests.project import contents, json_lines, said
from tests.refusals import refused, refused_line

Rows = list[dict[str, str]]


@pytest.fixture
def grow(web: Web, documents: Rows) -> Callable[..., str]:
    """Prepare the first so many documents; the id of the version."""

    def run(count: int, **changes: Any) -> str:
        Path(web.source.files[0].path).write_text(json_lines(documents[:count]))
        web.with_(**changes).prep(existing="remake")
        return list_versions(web.out)[0].id

    return run


def _tree(directory: Path) -> dict[str, bytes]:
    paths = [directory / "manifest.json", *directory.glob("shard_*/*")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(paths)}


def _ids(web: Web) -> list[str]:
    return [version.id for version in list_versions(web.out)]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_so_many_versions_are_kept_whole_and_unchanged_shards_are_on_the_disk_once(
    web: Web, grow: Callable[..., str], most: int
) -> None:
    ids, trees = [], []
    for count in (299, 300, 250, 200):
        ids.append(grow(count, keep_versions=most))
        trees.append(_tree(web.out))
    grow(200, keep_versions=most)  # the same version again
    assert _ids(web) == list(reversed(ids))[: most + 1]
    for version, tree in zip(list_versions(web.out), reversed(trees)):
        assert _tree(version.manifest.path.parent) == tree
        assert verify_manifest(version.manifest, checksums=True, deep=True) == []
    web.prep()
    assert (web.out.parent / ".train.versions").exists() == (most > 0)


def test_the_version_that_is_replaced_is_kept_though_the_clock_went_back(
    web: Web, grow: Callable[..., str]
) -> None:
    grow(299, keep_versions=1)
    second = grow(300, keep_versions=1)
    (first_kept,) = (web.out.parent / ".train.versions").iterdir()
    next_year = time.time() + 365 * 86_400
    os.utime(first_kept, (next_year, next_year))  # kept when the clock was wrong
    third = grow(250, keep_versions=1)
    assert _ids(web) == [third, second]


def test_a_run_that_ends_while_it_prunes_leaves_no_part_of_a_version(
    web: Web, grow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def stopped(path: Path, **options: Any) -> None:
        if ".versions" not in path.parent.name or path.name.endswith("new"):
            return remove(path, **options)
        os.utime(path)  # as the removal of a part of it would
        next(path.rglob("*.npy")).unlink()
        raise OSError("stopped")

    first, second = (grow(count, keep_versions=1) for count in (299, 250))
    with monkeypatch.context() as patch:
        patch.setattr("nmoe_core.prep.versions.shutil.rmtree", stopped)
        with pytest.raises(OSError, match="stopped"):
            grow(200, keep_versions=1)
    assert first not in _ids(web)
    third = grow(200, keep_versions=1)
    assert _ids(web) == [third, second]
    names = [path.name for path in (web.out.parent / ".train.versions").iterdir()]
    assert names == [second]


def test_files_that_two_versions_share_are_one_file(web: Web, grow: Callable[..., str]) -> None:
    grow(299)
    grow(300)
    new, old = (version.manifest.path.parent for version in list_versions(web.out))
    pairs = [(path, old / path.relative_to(new)) for path in new.glob("shard_*/web*")]
    assert sum(os.path.samefile(*pair) for pair in pairs) == 9  # of three shards of four


def test_a_restored_version_is_the_one_that_was_and_leaves_the_other_restorable(
    web: Web, grow: Callable[..., str]
) -> None:
    first, before = grow(250), _tree(web.out)
    second, after = grow(300), _tree(web.out)
    (web.out / "notes").write_text("mine")
    assert [version.is_current for version in list_versions(web.out)] == [True, False]
    for _ in range(2):
        restored = restore_version(web.out, first)
        assert (restored.id, restored.is_current) == (first, True)
        assert (_tree(web.out), _ids(web)) == (before, [first, second])
        assert restore_version(web.out, second[:4]).id == second
        assert (_tree(web.out), _ids(web)) == (after, [second, first])
    assert (web.out / "notes").read_text() == "mine"
    restore_version(web.out, first)
    report = web.prep(existing="grow")  # the source is that of the second version
    assert (report.documents_reused, _ids(web)[0]) == (250, second)


def test_files_of_others_that_a_killed_replacement_holds_outlive_a_restore(
    web: Web, grow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = grow(300)
    (web.out / "notes").write_text("mine")

    def killed(staged: Path, final: Path) -> None:
        assert exchange_dirs(staged, final)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(existing, "exchange_dirs", killed)
        patch.setattr("nmoe_core.prep.run.retire_beside", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            grow(200)
    assert not (web.out / "notes").exists()
    restore_version(web.out, old)
    assert (web.out / "notes").read_text() == "mine"


def test_a_version_whose_keeping_was_stopped_leaves_nothing_where_none_is_kept_any_more(
    web: Web, grow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(250)
    link = versions._link_version

    def stopped(version: Path, target: Path) -> None:
        link(version, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(versions, "_link_version", stopped)
        with pytest.raises(KeyboardInterrupt):
            grow(300, keep_versions=1)
    grow(300, keep_versions=0)
    assert not (web.out.parent / ".train.versions").exists()


def test_a_version_whose_keeping_was_stopped_leaves_nothing_where_the_source_is_as_before(
    web: Web, grow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(250)
    source, old = Path(web.source.files[0].path), contents(web.out)
    before = source.read_bytes()

    def stopped(version: Path, target: Path) -> None:
        target.mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(versions, "_link_version", stopped)
        with pytest.raises(KeyboardInterrupt):
            grow(300)
    source.write_bytes(before)
    web.prep()
    assert contents(web.out) == old
    assert list((web.out.parent / ".train.versions").iterdir()) == []


def test_a_restore_that_a_full_disk_stopped_anywhere_is_ended_by_the_next_one(
    web: Web, grow: Callable[..., str]
) -> None:
    first = grow(250)
    second = grow(300)
    directory = web.out.parent
    (web.out / "notes").write_text("mine")
    with Disk(directory)() as disk:
        restore_version(web.out, first)
    made = contents(directory)
    assert len(disk.changes) > 20
    for k in range(1, len(disk.changes) + 1):
        restore_version(web.out, second)
        with Disk(directory, k, "ENOSPC")(), suppress(OSError):
            restore_version(web.out, first)
        restore_version(web.out, first)
        assert contents(directory) == made, (k, disk.changes[k - 1])


def test_without_links_or_exchange_versions_are_copies(
    web: Web, grow: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(path: Path, to: Path) -> None:
        raise OSError(links.errno.EPERM, "no links here")

    monkeypatch.setattr(links.os, "link", no_links)
    monkeypatch.setattr(existing, "exchange_dirs", lambda staged, final: False)
    first, before = grow(250), _tree(web.out)
    second = grow(300)
    assert _ids(web) == [second, first]
    restore_version(web.out, first)
    assert _tree(web.out) == before


def test_shards_are_copied_if_the_new_version_is_on_another_file_system(
    web: Web, grow: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing_with(code: int) -> None:
        def replace_dir(staged: Path, final: Path) -> None:
            raise OSError(code, os.strerror(code), str(final))

        monkeypatch.setattr(existing, "replace_dir", replace_dir)

    monkeypatch.setattr(existing, "exchange_dirs", lambda staged, final: False)
    grow(250)
    failing_with(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        grow(300)
    failing_with(errno.EXDEV)
    shutil.rmtree(web.out / "shard_0002")
    grow(300)
    assert list(web.out.parent.glob(".train.prep-new")) == []
    assert verify_manifest(load_manifest(web.out / "manifest.json"), checksums=True) == []
    web.at(tmp_path / "fresh" / "train").prep()
    assert tree_digest(web.out) == tree_digest(tmp_path / "fresh" / "train")


def test_a_version_that_is_not_there_or_a_split_in_use_is_refused(
    web: Web, grow: Callable[..., str]
) -> None:
    grow(250)
    second, before = grow(300), _tree(web.out)
    for wrong in ("nothing", ""):
        with refused("E-CONFIG", "no version matches"):
            restore_version(web.out, wrong)
    with output_lock(web.out), refused("E-LOCKED"):
        restore_version(web.out, second)
    with refused("E-MANIFEST-MISSING"):
        list_versions(web.out.parent)
    assert _tree(web.out) == before


@pytest.mark.parametrize("num_shards", [4, 3])
def test_two_versions_are_compared_by_documents_tokens_and_share(
    web: Web, documents: Rows, num_shards: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    web = web.at(tmp_path / "data" / "web" / "train")
    web.prep()
    old = list_versions(web.out)[0]
    rows = [dict(row) for row in documents[5:]]
    for row in rows[:7]:
        row["text"] += " changed"
    new = [{"id": f"new{i}", "text": documents[9]["text"]} for i in range(3)]
    rows.append(dict(rows[20]))  # ids may come twice
    Path(web.source.files[0].path).write_text(json_lines(rows + new))
    web.with_(num_shards=num_shards).prep()
    other = web.out.parents[1] / "books" / "train"
    other.mkdir(parents=True)
    manifest = json.loads((web.out / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest))

    found = said(capsys, "versions", "compare", web.out, old.id)
    counts = {"added": 4, "removed": 5, "changed": 7, "unchanged": 288}
    assert found["documents"] == counts
    tokens = [old.manifest.total_tokens, manifest["total_tokens"]]
    assert [row["tokens"] for row in found["versions"]] == tokens
    shares = [count / (count + manifest["total_tokens"]) for count in tokens]
    assert [row["mixture_share"] for row in found["versions"]] == shares
    assert main(["versions", "list", str(web.out)]) == 0
    assert old.id in capsys.readouterr().out
    assert main(["versions", "restore", str(web.out), old.id]) == 0
    assert main(["versions", "compare", str(web.out), old.id]) == 0
    assert "300 unchanged" in capsys.readouterr().out
    refused_line(capsys, "versions", "restore", str(web.out), "nothing", code="E-CONFIG]")


def test_earlier_versions_are_removed_and_the_current_one_stays(
    web: Web, grow: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for count in (250, 275, 300):
        current = grow(count, keep_versions=3)
    after = _tree(web.out)
    assert len(_ids(web)) == 3
    assert [row["version"] for row in said(capsys, "versions", "remove", web.out)] == [current]
    assert (_ids(web), _tree(web.out)) == ([current], after)
    assert not (web.out.parent / ".train.versions").exists()
