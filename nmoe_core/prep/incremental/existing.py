"""Existing output: refused if it was made with other settings, or replaced atomically.

The new version of a split is made in a hidden directory beside the old one, manifest included. Then
the two directories are exchanged, so a kill at any moment leaves either the complete old version or
the complete new version at the split's path. The next run removes the other directory.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loader.files.format import MANIFEST_NAME, read_json_object
from loader.files.regular import read_file
from nmoe_core.base.atomic import (
    LOCK_NAME,
    TMP_MARK,
    exchange_dirs,
    failpoint,
    fsync_dir,
    output_lock,
    remove_dir,
    remove_leftovers,
    replace_dir,
    write_bytes,
)
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints, first_difference, recorded
from nmoe_core.prep.incremental.known_keys import KEPT_NAME
from nmoe_core.prep.journal import STAGING_NAME, Journal
from nmoe_core.prep.settings import is_larger_budget
from nmoe_core.shards.manifest import SHARD_DIR

_OURS = {MANIFEST_NAME, STAGING_NAME, LOCK_NAME, KEPT_NAME}


def refuse_changed(
    shard_dirs: Iterable[Path], fingerprints: Fingerprints, settings: dict[str, Any]
) -> None:
    """Refuse shards made with other settings, and directories not made by prep (E-PREP-CHANGED). A
    changed source or a larger budget is allowed: the shards are extended."""
    wanted = _by_name({"fingerprints": fingerprints, "settings": settings})
    for shard_dir in shard_dirs:
        there = recorded(shard_dir / MANIFEST_NAME)
        if there == fingerprints or not shard_dir.is_dir() or not any(shard_dir.iterdir()):
            continue
        what = "shard was not made by prep"
        found = None
        expected = None
        if there is not None:
            then = _made_from(shard_dir, there)
            now = wanted
            # manifests of earlier releases record only a digest of the settings
            if "settings" in then:
                then = there
                now = fingerprints
            if (key := _other_setting(then, now, "source", "reading_digest")) is None:
                continue
            what = f"shard was made with another {key}"
            found = _said(key, then.get(key))
            expected = _said(key, now.get(key))
        raise FormatError(
            what,
            where=shard_dir,
            found=found,
            expected=expected,
            do="use --force to replace it, or choose another output directory",
            code="E-PREP-CHANGED",
        )


def _made_from(shard_dir: Path, fingerprints: Fingerprints) -> dict[str, Any]:
    info = read_json_object(shard_dir / MANIFEST_NAME).get("source_info")
    settings = info.get("settings") if isinstance(info, dict) else None
    if not isinstance(settings, dict):
        return fingerprints
    return _by_name({"fingerprints": fingerprints, "settings": settings})


def _other_setting(then: dict[str, Any], now: dict[str, Any], *may_differ: str) -> str | None:
    """The first key whose value differs but must not. Keys in `may_differ` may differ, and the
    budget may be larger."""
    then = {key: value for key, value in then.items() if key not in may_differ}
    now = {key: value for key, value in now.items() if key not in may_differ}
    key = "max_tokens"
    if key in then and key in now and is_larger_budget(then[key], now[key]):
        now = now | {key: then[key]}
    return first_difference(then, now)


def _said(key: str, value: Any) -> Any:
    return "all" if key == "max_tokens" and value is None else value


def refuse_other_journal(journal: Journal, identity: dict[str, Any]) -> None:
    """Raise FormatError if the pass to resume had other inputs (E-PREP-CHANGED). A larger budget is
    allowed."""
    if (entry := journal.read()) is None:
        return
    there = _by_name(entry)
    wanted = _by_name(identity)
    if key := _other_setting(there, wanted):
        raise FormatError(
            f"unfinished output was made with another {key}",
            where=journal.directory,
            found=_said(key, there.get(key)),
            expected=_said(key, wanted.get(key)),
            do="continue with the original inputs, or use --force to start over",
            code="E-PREP-CHANGED",
        )


def _by_name(identity: dict[str, Any]) -> dict[str, Any]:
    """Digests and settings by name, without the digest of all settings."""
    settings = identity.get("settings", {})
    digests = identity.get("fingerprints", {})
    named = {**digests, **settings, **digests, "rows": identity.get("rows")}
    return {name: value for name, value in named.items() if name != "settings"}


def directory_beside(split_dir: Path) -> Path:
    """Hidden directory in which the new version of a split is made; readers ignore it."""
    return split_dir.with_name(f".{split_dir.name}.prep-new")


def clear_beside(split_dir: Path) -> None:
    """Clean up after a killed replacement: remove the old version, or finish the replacement. Keeps
    files of a pass that can be resumed. Raises LockedError if another process is making the new
    version."""
    beside = directory_beside(split_dir)
    if beside.exists() and not (beside / STAGING_NAME).is_dir():
        with output_lock(split_dir):
            retire_beside(split_dir)


def swap_in(split_dir: Path) -> None:
    """Replace the old version with the complete new one; the caller holds the lock.

    If directories cannot be exchanged, shards are replaced one by one. The manifest is removed
    during that time, so readers never see a mixture. After a kill the split cannot be read until
    the next run continues the replacement.
    """
    beside = directory_beside(split_dir)
    # after the exchange, the lock file of this directory is at the split's path
    with output_lock(beside):
        if not exchange_dirs(beside, split_dir):
            (split_dir / MANIFEST_NAME).unlink(missing_ok=True)
            fsync_dir(split_dir)
        retire_beside(split_dir)
        # this process holds the lock in either case
        (split_dir / LOCK_NAME).unlink(missing_ok=True)


def retire_beside(split_dir: Path) -> None:
    """Remove the version that was replaced; files in it that prep did not make are moved to the
    split.

    If the split has no manifest but the directory beside it has one, a replacement was interrupted.
    Its shards may be the only copy, so the replacement is finished first.
    """
    beside = directory_beside(split_dir)
    if not beside.exists():
        return
    remove_leftovers(beside)
    if (beside / MANIFEST_NAME).exists() and not (split_dir / MANIFEST_NAME).exists():
        for shard_dir in sorted(beside.glob("shard_*")):
            _replace_shard(shard_dir, split_dir / shard_dir.name)
        write_bytes(split_dir / MANIFEST_NAME, read_file(beside / MANIFEST_NAME))
    # from this line on, the directory is not complete any more
    (beside / MANIFEST_NAME).unlink(missing_ok=True)
    for entry in sorted(beside.iterdir()):
        is_shard = SHARD_DIR.fullmatch(entry.name) and recorded(entry / MANIFEST_NAME) is not None
        is_there = os.path.lexists(split_dir / entry.name)
        if not (entry.name in _OURS or is_shard or is_there):
            failpoint("rename")
            os.replace(entry, split_dir / entry.name)
    shutil.rmtree(beside)


def _replace_shard(staged: Path, final: Path) -> None:
    """Move a shard to its final path, or copy it if the path is on another file system."""
    try:
        replace_dir(staged, final)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        remove_leftovers(final.parent)
        new = final.with_name(f".{final.name}{TMP_MARK}new")
        shutil.copytree(staged, new, copy_function=_copy_durably)
        fsync_dir(new)
        remove_dir(final)
        os.replace(new, final)
        fsync_dir(final.parent)


def _copy_durably(source: str, target: str) -> None:
    write_bytes(Path(target), read_file(Path(source)))
