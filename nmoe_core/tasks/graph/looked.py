"""Remembers which outputs a walk found unchanged, so that the next walk need not open their files.

What is found for the outputs of one key, such as `web/quality_scores`, depends only on the files
below a few directories and on fingerprints that all its partitions share. A digest of both is kept
per key, in `.walk.json`, if no partition has changed; the files count with their names, inodes,
sizes and times. A later walk that computes the same digest opens none of these files. The names
below each directory are kept too, and used until a directory changes. Directories with a file that
changed in the last two seconds are not remembered, as a further change could leave its times equal.
If `.walk.json` is missing or damaged, the walk is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from loader.files.checksummed_json import sealed
from nmoe_core.base.atomic import write_json
from nmoe_core.base.errors import NmoeError
from nmoe_core.base.fingerprint import read_sealed, sha256_json
from nmoe_core.config.run import Run
from nmoe_core.tasks.graph.listings import Listing, tree_identity


class Reads(NamedTuple):
    """What the state of all outputs of a key depends on.

    made_with: Returns everything other than files, as JSON values: the part of the current
        fingerprints that all partitions share. May raise NmoeError or OSError.
    places: Files, and directories with all files below them.
    """

    made_with: Callable[[], Any]
    places: tuple[Path, ...]


class Looked:
    """The digests of an earlier walk, and of this one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = {"keys": {}, "listings": {}} | _read(path)
        self._known = self._kept["keys"]
        self._version = version("nmoe-data")
        self._now: dict[str, str] = {}
        self._listings: dict[str, Listing] = {}
        # A file that changes after this reading changes the digest of the next walk.
        self._identity = cache(self._read_identity)

    def is_same(self, key: str, reads: Reads) -> bool:
        """Whether an earlier walk found all outputs of a key unchanged, and nothing that they
        depend on has changed since. Call it before the outputs are looked at."""
        try:
            made_with = reads.made_with()
        except (NmoeError, OSError):
            return False
        places = [(str(path), self._identity(path)) for path in reads.places]
        if any(identity is None for _, identity in places):
            return False
        self._now[key] = sha256_json([self._version, made_with, places])
        return self._known.get(key) == self._now[key]

    def keep(self, changed: Collection[str]) -> None:
        """Write the digests of this walk, except those of `changed` keys, unless they are written
        already. A directory that is read-only stays as it is."""
        keys = {key: digest for key, digest in self._now.items() if key not in changed}
        listings = {path: listing._asdict() for path, listing in self._listings.items()}
        found = {"keys": keys, "listings": listings}
        if found == self._kept:
            return
        try:
            write_json(self._path, sealed(found))
        except OSError:
            return

    def _read_identity(self, path: Path) -> str | None:
        known = self._kept["listings"].get(str(path))
        identity, listing = tree_identity(path, None if known is None else Listing(**known))
        if listing is not None:
            self._listings[str(path)] = listing
        return identity


def whole(run: Run) -> list[Any]:
    """All settings of a run, for an output with many of them."""
    return [run.config.model_dump(mode="json"), str(run.loader), str(run.tree)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_sealed(path) or {}
    except OSError:
        return {}
