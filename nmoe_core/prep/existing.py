"""Refuses to replace what was made from other inputs, unless it was asked to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loader.files.format import MANIFEST_NAME
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints, first_difference, recorded
from nmoe_core.prep.journal import Journal


def refuse_changed(shard_dirs: Iterable[Path], fingerprints: Fingerprints) -> None:
    """Refuse shards of other inputs, and directories that prep did not fill (E-PREP-CHANGED)."""
    for shard_dir in shard_dirs:
        there = recorded(shard_dir / MANIFEST_NAME)
        if there == fingerprints or not shard_dir.is_dir() or not any(shard_dir.iterdir()):
            continue
        what, found, expected = "shard was not made by prep", None, None
        if there is not None and (key := first_difference(there, fingerprints)):
            what = f"shard was made from another {key}"
            found, expected = there.get(key), fingerprints.get(key)
        raise FormatError(
            what,
            where=shard_dir,
            found=found,
            expected=expected,
            do="use --force to replace it, or another output directory",
            code="E-PREP-CHANGED",
        )


def refuse_other_journal(journal: Journal, identity: dict[str, Any]) -> None:
    """Refuse a pass that was begun with other inputs (E-PREP-CHANGED)."""
    there = journal.read()
    if there is None:
        return
    flat = [_flat({key: one.get(key) for key in identity}) for one in (there, identity)]
    if key := first_difference(*flat):
        raise FormatError(
            f"a half-done output was made from another {key}",
            where=journal.directory,
            found=flat[0].get(key),
            expected=flat[1].get(key),
            do="go on with the inputs it was begun with, or use --force to start over",
            code="E-PREP-CHANGED",
        )


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """The settings by their own names, without their digest, which says less."""
    flat: dict[str, Any] = {}
    for key, value in identity.items():
        for name, one in value.items() if isinstance(value, dict) else ((key, value),):
            flat.setdefault(name, one)
    flat.pop("settings", None)
    return flat
