"""A mark of a source that changes when its input may have, cheap enough to ask every few minutes.

Local files are known by name, size and time of change, so a mark may move although no byte did; the
prep that follows compares content and then does no work. Remote files and hub datasets are known by
what their store says. Nothing is read but listings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.sources.hub import DatasetsSource
from nmoe_core.sources.open import open_reader


def source_mark(run: Run, source: SourcePlan) -> str:
    """Digest of the listing of a source, its validation split included.

    Raises:
        SourceError: Files, a store or the hub cannot be listed.
    """
    splits = ("train", "valid") if source.has_valid else ("train",)
    return sha256_json([_listing(run, source, split) for split in splits])


def _listing(run: Run, source: SourcePlan, split: str) -> list[list[str]]:
    reader: Any = open_reader(source.spec, run.base, split)
    if isinstance(reader, DatasetsSource):
        if reader.directory is None:
            return [[reader.revision()]]
        files = sorted(path for path in reader.directory.rglob("*") if path.is_file())
        return [_local(path) for path in files]
    listing = []
    for file in reader.files:
        is_local = isinstance(file.path, Path)
        listing.append(_local(file.path) if is_local else [file.where, file.revision()])
    return listing


def _local(path: Path) -> list[str]:
    status = os.stat(path)
    return [os.fsdecode(path), str(status.st_size), str(status.st_mtime_ns)]
