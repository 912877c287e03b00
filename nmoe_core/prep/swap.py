"""Puts a split that was made anew in the place of the old one, all of it in one step.

`--force` makes the new version in a hidden directory beside the old one, manifest included. Then
the two directories change places, so that a kill at any moment leaves either the whole old version
or the whole new one under the split's name. What is left beside it is cleared by the next run.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from loader.format import MANIFEST_NAME
from nmoe_core.atomic import (
    LOCK_NAME,
    exchange_dirs,
    failpoint,
    fsync_dir,
    output_lock,
    remove_leftovers,
    replace_dir,
)
from nmoe_core.fingerprint import recorded
from nmoe_core.prep.journal import STAGING_NAME

_OURS = {MANIFEST_NAME, STAGING_NAME, LOCK_NAME}
_SHARD_DIR = re.compile(r"shard_\d{4,}")


def directory_beside(split_dir: Path) -> Path:
    """Where the new version of a split is made; no reader looks at hidden directories."""
    return split_dir.with_name(f".{split_dir.name}.prep-new")


def clear_beside(split_dir: Path) -> None:
    """Remove what a killed swap left, whichever version it is.

    Raises:
        LockedError: The swap is not dead: another process is making the new version.
    """
    if directory_beside(split_dir).exists():
        with output_lock(split_dir):
            retire_beside(split_dir)


def swap_in(split_dir: Path) -> None:
    """Put the complete new version in the place of the old one; the caller holds the lock.

    Where directories cannot change places, shards are replaced one after the other; the manifest
    is away meanwhile, so readers never see a mixture, but a kill then leaves nothing to read
    before the next run.
    """
    beside = directory_beside(split_dir)
    with output_lock(beside):  # its lock file is the one that others will find after the step
        if not exchange_dirs(beside, split_dir):
            (split_dir / MANIFEST_NAME).unlink(missing_ok=True)
            fsync_dir(split_dir)
            for shard_dir in sorted(beside.glob("shard_*")):
                replace_dir(shard_dir, split_dir / shard_dir.name)
            os.replace(beside / MANIFEST_NAME, split_dir / MANIFEST_NAME)
            fsync_dir(split_dir)
        retire_beside(split_dir)


def retire_beside(split_dir: Path) -> None:
    """Remove the version that is not the split's; files that prep did not make move over to it."""
    beside = directory_beside(split_dir)
    if not beside.exists():
        return
    remove_leftovers(beside)
    for entry in sorted(beside.iterdir()):
        is_shard = _SHARD_DIR.fullmatch(entry.name) and recorded(entry / MANIFEST_NAME) is not None
        is_there = os.path.lexists(split_dir / entry.name)
        if not (entry.name in _OURS or is_shard or is_there):
            failpoint("rename")
            os.replace(entry, split_dir / entry.name)
    shutil.rmtree(beside)
