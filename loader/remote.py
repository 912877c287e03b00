"""Plans and shards behind a URL: copied once to a local cache, checked, then read as any other.

Everything the plan names is there and right before step 0: each manifest must be committed and be
the one the plan was built from, each shard must have the size and SHA-256 of its manifest. A file
that is missing, cut, replaced or not committed is refused by its URL. Files come in parallel, each
written beside its place and renamed into it, so that a killed copy is taken up again; what has been
checked is not hashed again while its size and time stand. Needs fsspec (the extra `remote`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import posixpath
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from loader.errors import ConfigError, FormatError, PlanError
from loader.format import MANIFEST_NAME, Manifest, ShardEntry, load_manifest, resolve_inside
from loader.integrity import check_digest
from loader.local_path import local_path
from loader.plan import PLAN_FORMAT

WORKERS = 8
_MAX_HEADER_BYTES = 4200


def fetch_plan(url: str, cache_dir: str | Path | None) -> Path:
    """Copy a plan and all data it names; returns the local plan.

    Args:
        url: A plan's JSON file, in any form that fsspec opens.
        cache_dir: Directory that keeps copies; one directory in it for each root of data.

    Raises:
        ConfigError: fsspec is not installed, or there is no cache_dir.
        PlanError: Not a plan, or its data are not those it was built from.
        FormatError: A file is missing, cut or replaced; its URL is named.
    """
    store = _Store(url)
    value = store.read_json(store.path)
    if value.get("format") != PLAN_FORMAT:
        found = repr(value.get("format"))
        raise PlanError("not a loader plan", where=url, found=found, code="E-PLAN-FORMAT")
    root = posixpath.normpath(posixpath.join(posixpath.dirname(store.path), value["root"]))
    mirror = _mirror(cache_dir, store.name(root))
    rows = [s for stage in value["stages"] for s in stage["sources"]] + value.get("valid", [])
    with _locked(mirror):
        for row in {row["manifest"]: row for row in rows}.values():
            manifest = _fetch_manifest(store, root, mirror, row["manifest"])
            if manifest.content_digest() != row["content_hash"]:
                raise PlanError(
                    f"content digest of source {row['name']!r} is not the plan's",
                    where=store.name(posixpath.join(root, row["manifest"])),
                    found=manifest.content_digest(),
                    expected=row["content_hash"],
                    do="build the plan again, or restore the data it was built from",
                    code="E-PLAN-DATA",
                )
            _fetch_shards(store, posixpath.join(root, row["manifest"]), manifest)
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        local = mirror / f"plan-{name}.json"
        _write(local, json.dumps(value | {"root": "."}, ensure_ascii=False).encode())
    return local


def fetch_data(url: str, cache_dir: str | Path | None) -> Path:
    """Copy one directory with a manifest; returns its local path, for `data_path`.

    Raises:
        As `fetch_plan`.
    """
    store = _Store(url)
    mirror = _mirror(cache_dir, store.name(store.path))
    with _locked(mirror):
        manifest = _fetch_manifest(store, store.path, mirror, MANIFEST_NAME)
        _fetch_shards(store, posixpath.join(store.path, MANIFEST_NAME), manifest)
    return mirror


class _Store:
    """A file system of fsspec and a path on it."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise ConfigError(
                "fsspec is not installed", where=url, do="pip install 'nmoe-loader[remote]'"
            ) from None
        self.fs, self.path = fsspec.core.url_to_fs(url)
        self.path = self.path.rstrip("/")

    def name(self, path: str) -> str:
        """URL of a path."""
        return self.fs.unstrip_protocol(path)

    def size(self, path: str) -> int | None:
        """Size in bytes, or None where there is no file."""
        try:
            return int(self.fs.info(path)["size"])
        except FileNotFoundError:
            return None

    def read_json(self, path: str) -> dict[str, Any]:
        try:
            value = json.loads(self.fs.cat_file(path))
        except (FileNotFoundError, ValueError) as error:
            found = str(error) or type(error).__name__
            where = self.name(path)
            raise PlanError(
                "not a loader plan", where=where, found=found, code="E-PLAN-FORMAT"
            ) from None
        return value if isinstance(value, dict) else {}

    def copy(self, path: str, local: Path) -> None:
        """Copy a file to its place in one rename."""
        local.parent.mkdir(parents=True, exist_ok=True)
        part = local.with_name(local.name + ".part")
        with self.fs.open(path, "rb") as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target, 4 << 20)
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, local)


def _fetch_manifest(store: _Store, root: str, mirror: Path, relative: str) -> Manifest:
    path, local = posixpath.join(root, relative), resolve_inside(mirror, relative)
    if store.size(path) is None:
        raise FormatError(
            "data is not committed: there is no manifest",
            where=store.name(path),
            do="let prep finish, or upload the manifest last",
            code="E-MANIFEST-MISSING",
        )
    store.copy(path, local)
    return load_manifest(local)


def _fetch_shards(store: _Store, manifest_path: str, manifest: Manifest) -> None:
    directory = posixpath.dirname(manifest_path)
    fetch = partial(_fetch_shard, store, directory, manifest)
    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(fetch, manifest.shards):
            pass


def _fetch_shard(store: _Store, directory: str, manifest: Manifest, entry: ShardEntry) -> None:
    least = 4 * entry.num_tokens
    path = posixpath.join(directory, entry.path)
    sizes = range(least, least + _MAX_HEADER_BYTES)
    _fetch_file(store, path, manifest.shard_path(entry), sizes, entry.checksum, "E-SHARD")
    if entry.index_path:
        size = 32 + 16 * entry.num_documents
        recorded = str(entry.extra.get("index_checksum") or "")
        path, local = posixpath.join(directory, entry.index_path), manifest.index_path(entry)
        _fetch_file(store, path, local, range(size, size + 1), recorded, "E-INDEX")


def _fetch_file(
    store: _Store, path: str, local: Path, sizes: range, checksum: str, code: str
) -> None:
    name, size = store.name(path), store.size(path)
    if size is None:
        raise FormatError("file is missing", where=name, code=f"{code}-MISSING")
    if size not in sizes:
        raise FormatError(
            "file is not as long as its manifest says",
            where=name,
            found=f"{size} bytes",
            expected=f"{sizes[0]} bytes" + (" and a header" if len(sizes) > 1 else ""),
            do="run prep for this shard again, or restore the file",
            code=f"{code}-TRUNCATED",
        )
    if _is_checked(local, checksum, size):
        return
    store.copy(path, local)
    if checksum:
        try:
            check_digest(local, checksum, f"{code}-CHECKSUM", name)
        except FormatError:
            local.unlink()
            raise
    _write(_mark(local), json.dumps(_stamp(local, checksum)).encode())


def _is_checked(local: Path, checksum: str, size: int) -> bool:
    """Whether the local copy was checked and is as it was then."""
    try:
        if local.stat().st_size != size:
            return False
        return json.loads(_mark(local).read_bytes()) == _stamp(local, checksum)
    except (OSError, ValueError):
        return False


def _stamp(local: Path, checksum: str) -> dict[str, Any]:
    status = local.stat()
    size, modified_ns = status.st_size, status.st_mtime_ns
    return {"checksum": checksum, "size_bytes": size, "modified_ns": modified_ns}


def _mark(local: Path) -> Path:
    return local.with_name(local.name + ".checked")


def _mirror(cache_dir: str | Path | None, root: str) -> Path:
    if cache_dir is None:
        raise ConfigError(
            "a URL is read through a cache", where="cache_dir", found=None, do="set cache_dir"
        )
    mirror = (
        Path(os.path.abspath(local_path(cache_dir, "cache_dir")))
        / hashlib.sha256(root.encode()).hexdigest()[:16]
    )
    mirror.mkdir(parents=True, exist_ok=True)
    return mirror


@contextmanager
def _locked(mirror: Path) -> Iterator[None]:
    """One process of a machine copies; the others find its copies."""
    with open(mirror / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)
