"""Earlier versions of a split: kept when it is replaced, then listed, compared, restored, removed.

Each version is a complete directory beside the split, in `.train.versions/ID`, that any reader can
use. Its manifest and shards are hard links, so files that two versions share are stored once. An id
is the start of the manifest's content hash.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from loader.files.regular import read_file
from nmoe_core.base.atomic import TMP_MARK, fsync_dir, output_lock, remove_dir, write_bytes
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.prep.incremental.existing import directory_beside, retire_beside, swap_in
from nmoe_core.shards.documents import ingest_ids
from nmoe_core.shards.links import link_or_copy, link_tree
from nmoe_core.shards.manifest import shard_dirs

ID_CHARS = 12
_Pairs = Counter[tuple[str, str]]


class Version(NamedTuple):
    """A version of a split; `is_current` if readers of the split see this one."""

    id: str
    manifest: Manifest
    is_current: bool

    @property
    def facts(self) -> dict[str, Any]:
        """Facts to show to the user."""
        return {
            "version": self.id,
            "current": self.is_current,
            "made": self.manifest.extra.get("created_at"),
            "documents": self.manifest.total_documents,
            "tokens": self.manifest.total_tokens,
            "path": shown(self.manifest.path.parent),
        }


def list_versions(split_dir: Path) -> list[Version]:
    """The current version of a split, then the kept earlier versions, newest first. Raises
    FormatError if the split has no manifest (E-MANIFEST-MISSING)."""
    current = _version(split_dir, is_current=True)
    kept = [_version(path, is_current=False) for path in _kept(split_dir)]
    return [current, *(version for version in kept if version.id != current.id)]


def find_version(split_dir: Path, version_id: str) -> Version:
    """The version whose id starts with `version_id`. Raises ConfigError if none or several
    match."""
    versions = list_versions(split_dir)
    found = [version for version in versions if version_id and version.id.startswith(version_id)]
    if len(found) != 1:
        raise ConfigError(
            "several versions match" if found else "no version matches",
            where=split_dir,
            found=version_id,
            expected=", ".join(version.id for version in versions),
        )
    return found[0]


def keep_version(split_dir: Path, new_dir: Path | None = None, most: int | None = None) -> None:
    """Keep the current version of a split and the newest earlier ones, at most `most` in total. If
    the new version has the same content, the new version gets the manifest and so the creation time
    of the current version. The caller holds the lock of the split."""
    try:
        current = _version(split_dir, is_current=True)
    except FormatError:  # readers would refuse this version too
        return
    if new_dir is not None and _version(new_dir, is_current=False).id == current.id:
        write_bytes(new_dir / MANIFEST_NAME, read_file(current.manifest.path))
        return
    kept = _versions_dir(split_dir)
    _remove(split_dir, [])
    if not (kept / current.id).exists() and most != 0:
        staged = kept / f".{current.id}{TMP_MARK}new"
        shutil.rmtree(staged, ignore_errors=True)
        _link_version(split_dir, staged)
        os.replace(staged, kept / current.id)
        fsync_dir(kept)
    # The clock may have gone back: the current version is the newest regardless of its time.
    last_first = sorted(_kept(split_dir), key=lambda path: path.name != current.id)
    _remove(split_dir, last_first[most:] if most is not None else [])


def half_kept(split_dir: Path) -> list[Path]:
    """Incomplete directories of runs that were killed while they kept or removed a version."""
    return list(_versions_dir(split_dir).glob(f".*{TMP_MARK}*"))


def restore_version(split_dir: Path, version_id: str) -> Version:
    """Make a kept version the current one, atomically, and keep the previous one. The files of an
    interrupted pass that would have replaced the split are deleted. Raises the errors of
    `find_version`, and LockedError if another process is writing the split."""
    split_dir = split_dir.resolve()
    with output_lock(split_dir):
        version = find_version(split_dir, version_id)
        if version.is_current:
            # a replacement that was killed after the exchange may have left files
            retire_beside(split_dir)
        else:
            keep_version(split_dir)
            retire_beside(split_dir)  # the directory may contain files that prep did not make
            _link_version(version.manifest.path.parent, directory_beside(split_dir))
            swap_in(split_dir)
    return _version(split_dir, is_current=True)


def remove_versions(split_dir: Path) -> None:
    """Remove all kept versions of a split; raises LockedError if another process is writing it."""
    split_dir = split_dir.resolve()
    with output_lock(split_dir):
        _remove(split_dir, _kept(split_dir))


def _remove(split_dir: Path, versions: Iterable[Path]) -> None:
    """Remove kept versions, and the incomplete directories of runs that were killed."""
    for left in half_kept(split_dir):
        shutil.rmtree(left)
    for path in versions:
        remove_dir(path)
    kept = _versions_dir(split_dir)
    if kept.exists() and not any(kept.iterdir()):
        kept.rmdir()


def compare_versions(old: Manifest, new: Manifest) -> dict[str, int]:
    """Number of documents added, removed, changed (same id, different text) and unchanged.

    Memory: the ids of one shard, or of all shards if the versions have different shards.
    """
    counts: Counter[str] = Counter(added=0, removed=0, changed=0, unchanged=0)
    for before, after in _pairs(old, new):
        both = before & after
        ids_before = Counter(ingest_id for ingest_id, _ in (before - both).elements())
        ids_after = Counter(ingest_id for ingest_id, _ in (after - both).elements())
        num_changed = (ids_before & ids_after).total()
        counts["added"] += ids_after.total() - num_changed
        counts["removed"] += ids_before.total() - num_changed
        counts["changed"] += num_changed
        counts["unchanged"] += both.total()
    return dict(counts)


def share_of_mixture(split_dir: Path, num_tokens: int) -> float:
    """This split's share of the tokens of all sources in its data root, if it has `num_tokens`."""
    others = split_dir.parent.parent.glob(f"[!.]*/{split_dir.name}/{MANIFEST_NAME}")
    mine = split_dir / MANIFEST_NAME
    total = sum(load_manifest(path).total_tokens for path in others if path != mine)
    return num_tokens / max(total + num_tokens, 1)


def _pairs(old: Manifest, new: Manifest) -> Iterator[tuple[_Pairs, _Pairs]]:
    """Ingest ids and text digests of both versions; shard by shard if both have the same shards."""
    names = [{path.name for path in shard_dirs(one.path.parent)} for one in (old, new)]
    if names[0] != names[1]:
        yield Counter(ingest_ids(old)), Counter(ingest_ids(new))
        return
    for name in sorted(names[0]):
        paths = (one.path.parent / name / MANIFEST_NAME for one in (old, new))
        before, after = (Counter(ingest_ids(load_manifest(path))) for path in paths)
        yield before, after


def _version(directory: Path, *, is_current: bool) -> Version:
    manifest = load_manifest(directory / MANIFEST_NAME)
    return Version(manifest.content_digest()[:ID_CHARS], manifest, is_current)


def _versions_dir(split_dir: Path) -> Path:
    return split_dir.with_name(f".{split_dir.name}.versions")


def _kept(split_dir: Path) -> list[Path]:
    """Directories of the kept versions, newest first."""
    paths = _versions_dir(split_dir.resolve()).glob(f"[!.]*/{MANIFEST_NAME}")
    return sorted((path.parent for path in paths), key=_made_at, reverse=True)


def _made_at(version: Path) -> tuple[str, int]:
    manifest = load_manifest(version / MANIFEST_NAME)
    return str(manifest.extra.get("created_at")), version.stat().st_mtime_ns


def _link_version(directory: Path, to: Path) -> None:
    """Link the shards and, last, the manifest of a version into another directory."""
    to.mkdir(parents=True)
    for path in shard_dirs(directory):
        link_tree(path, to / path.name)
    link_or_copy(directory / MANIFEST_NAME, to / MANIFEST_NAME)
    fsync_dir(to)
