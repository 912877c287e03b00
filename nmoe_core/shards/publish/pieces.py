"""The files of a published manifest or plan, in the order in which they are committed.

Names are POSIX paths relative to the published URL. Each file comes after all files that it names:
data, manifests of shards, manifests of splits, the plan.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from loader.files.blocks import blocks_name, read_blocks, write_blocks
from loader.files.format import (
    MANIFEST_NAME,
    Manifest,
    load_manifest,
    read_json_object,
    resolve_inside,
)
from loader.files.regular import read_file
from loader.plan.file import load_plan
from loader.plan.records import PLAN_FORMATS
from nmoe_core.base.atomic import committing
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.shards.manifest import entry_row, files_beside, named_files
from nmoe_core.shards.verify import shard_manifests

DATA, SHARD, SPLIT, PLAN = range(4)


@dataclass(frozen=True, slots=True)
class Piece:
    """A file to publish. `sha256` is taken from the manifest that names the
    file, else from the file itself. `tier` is DATA, or the tier of a manifest or plan. `content` is
    set if it differs from the file's content."""

    name: str
    path: Path
    size_bytes: int
    sha256: str
    tier: int
    content: bytes | None = None


def is_plan(path: Path) -> bool:
    """Whether a JSON file is a loader plan rather than a manifest."""
    return path.is_file() and read_json_object(path).get("format") in PLAN_FORMATS


def pieces_of(path: Path) -> list[Piece]:
    """The files of a plan, of a manifest, or of the manifest in a directory, in the order of
    commits. Raises as `load_plan` and `load_manifest`, and FormatError if a file is missing
    (E-SHARD-MISSING)."""
    path = path / MANIFEST_NAME if path.is_dir() else path
    if not is_plan(path):
        return _in_order(_of_split(path, path.parent))
    plan = load_plan(path)
    found: list[Piece] = []
    for source in (*plan.sources, *plan.valid, *plan.twins):
        if not source.manifest.endswith(".json"):
            raise ConfigError(
                f"source {source.name!r} has no manifest",
                where=path,
                found=source.manifest,
                do="prepare it with nmoe prep: publishing needs the checksums of a manifest",
            )
        found += _of_split(resolve_inside(plan.base, source.manifest), plan.base)
    here = path.resolve()
    if here.is_relative_to(plan.base):
        name = here.relative_to(plan.base).as_posix()
        content = read_file(path)
    else:
        name = path.name
        content = replace(plan, root=".").to_json().encode()
    return _in_order([*found, _piece(name, path, PLAN, content=content)])


def manifest_files(manifest: Manifest) -> dict[str, str | None]:
    """Relative path and checksum of every file that a manifest names."""
    named = [named_files(entry_row(entry)) for entry in manifest.shards]
    return {k: v for files in (*named, files_beside(manifest)) for k, v in files.items()}


def _of_split(path: Path, root: Path) -> list[Piece]:
    """A manifest, the existing manifests of its shards, and all files that they name."""
    manifests = {path: SPLIT}
    for name in shard_manifests(load_manifest(path)):
        if (shard := resolve_inside(path.parent, name)).is_file():
            manifests[shard] = SHARD
    pieces = []
    for at, tier in manifests.items():
        for name, checksum in manifest_files(load_manifest(at)).items():
            file = resolve_inside(at.parent, name)
            pieces.append(_piece(_below(file, root), file, DATA, checksum))
        pieces.append(_piece(_below(at, root), at, tier, content=read_file(at)))
    blocks = _blocks_of(load_manifest(path))
    return [*pieces, _piece(_below(blocks, root), blocks, SHARD)]


def _blocks_of(manifest: Manifest) -> Path:
    """The file `blocks.json` of a manifest. It is written again if it is missing, damaged or
    belongs to another manifest."""
    path = manifest.path.with_name(blocks_name(manifest.path))
    try:
        read_blocks(path, manifest)
        return path
    except FormatError:
        with committing(path):
            return write_blocks(manifest)


def _below(path: Path, root: Path) -> str:
    return path.absolute().relative_to(root.absolute()).as_posix()


def _piece(
    name: str, path: Path, tier: int, checksum: str | None = None, content: bytes | None = None
) -> Piece:
    try:
        size_bytes = path.stat().st_size if content is None else len(content)
    except FileNotFoundError:
        do = "restore the file, or run prep for this shard again"
        raise FormatError("file is missing", where=path, do=do, code="E-SHARD-MISSING") from None
    if content is not None:
        checksum = hashlib.sha256(content).hexdigest()
    return Piece(name, path, size_bytes, checksum or sha256_file(path), tier, content)


def _in_order(pieces: list[Piece]) -> list[Piece]:
    """Each file once, data first. If several manifests name a file, the piece of the last manifest
    is used."""
    return sorted({piece.name: piece for piece in pieces}.values(), key=lambda p: (p.tier, p.name))
