"""Plans and shards behind a URL: copied once to a local cache, checked, and read from the cache.

All data of the plan are copied before step 0. Each manifest must be the one from which the plan was
built, and each shard must have the size and SHA-256 of its manifest. Files are copied in parallel,
each under a temporary name and then renamed, so a killed copy continues with the missing files; a
checked file is not requested again while its size and time are unchanged. If all files are cached,
a store that does not answer causes only a warning. Needs the extra `remote`.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from loader.errors import ConfigError, FormatError, PlanError
from loader.files.addresses import address, is_url, join, local_path, parent
from loader.files.format import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    ShardEntry,
    check_digest,
    load_manifest,
    resolve_inside,
)
from loader.files.locks import locked
from loader.files.nested import json_value
from loader.files.regular import read_file
from loader.files.stores.clients import STORE_CODE
from loader.files.stores.objects import copy, read_bytes
from loader.plan.check import check_data
from loader.plan.file import PlanFile, malformed
from loader.plan.records import SourceData
from loader.plan.settings import LOCAL_CACHE

T = TypeVar("T")
R = TypeVar("R")
_WORKERS = 8
_MAX_HEADER_BYTES = 4200


def fetch_plan(url: str, cache_dir: str | Path | None) -> Path:
    """Copy a plan and all its data; returns the path of the local plan. `cache_dir` has one
    directory per root of data.

    Raises:
        ConfigError: The store's client is not installed, or there is no cache_dir.
        PlanError: The file is not a plan (E-PLAN-FORMAT), the data changed after it was built
            (E-PLAN-DATA), or the store does not answer and a file is not cached (E-STORE).
        FormatError: A file is missing, truncated or replaced; the message has its URL.
    """
    return fetch_manifests(url, cache_dir, _fetch_shards)[0]


def fetch_manifests(
    url: str, cache_dir: str | Path | None, fetch: Callable[[list[tuple[str, Manifest]]], object]
) -> tuple[Path, str, Path]:
    """Copy a plan and its manifests, then call `fetch` with each manifest and the URL of its
    directory. Returns the local plan, the URL of its root, and the cache. Raises as
    `fetch_plan`."""
    cache = _cache(cache_dir)
    url = address(url)
    last = cache / f"{_digest(url)}.json"
    try:
        content = read_bytes(url)
    except PlanError as error:
        content = _last(last, error)
    if content is None:
        raise PlanError("no plan at this URL", where=url, code="E-PLAN-MISSING")
    try:
        value = json_value(content)
    except ValueError as error:
        raise malformed(url, str(error)) from None
    plan = PlanFile(value, url).plan()
    root = join(parent(url), plan.root)
    mirror = _mirror(cache, root)
    sources = {source.manifest: source for source in (*plan.sources, *plan.valid, *plan.twins)}
    with _locked(mirror):
        manifests = in_parallel(partial(_fetch_planned, root, mirror), sources.values())
        found = [(parent(join(root, path)), m) for path, m in zip(sources, manifests)]
        own = len(found) - len({twin.manifest for twin in plan.twins})
        fetch(found[:own])
        # for a twin plan, the other corpus's tokens are not needed, only its document ends
        for directory, manifest in found[own:]:
            in_parallel(partial(_fetch_index, directory, manifest), manifest.shards)
        local = mirror / f"plan-{_digest(url)}.json"
        _write(local, json.dumps(value | {"root": "."}).encode())
        _write(last, content)
    return local, root, cache


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of a function that reads from a store, in the order of `items`. Raises the error
    of the first item that fails."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        return list(pool.map(function, items))


def _fetch_planned(root: str, mirror: Path, source: SourceData) -> Manifest:
    manifest = _fetch_manifest(root, mirror, source.manifest, source.content_hash)
    check_data(source, manifest, join(root, source.manifest))
    return manifest


def fetch_index(urls: Mapping[Path, str], manifest: Manifest, entry: ShardEntry) -> None:
    """Copy the index of a file of a manifest whose URL is in `urls`. Raises as `fetch_plan`."""
    if not entry.index_path:
        return
    local = manifest.index_path(entry)
    directory = parent(urls[manifest.path])
    with _locked(local.parent):
        _fetch_index(directory, manifest, entry)


def local_data(where: str | Path, cache_dir: str | Path | None) -> Path:
    """A local directory of shards: `where` if it is local, else a checked copy of the URL, with its
    `train` and `valid` splits if they exist. Raises as `fetch_plan`."""
    if not is_url(where):
        return Path(where)
    url = address(where).rstrip("/").removesuffix(f"/{MANIFEST_NAME}")
    mirror = _mirror(_cache(cache_dir), url)
    last = mirror / "directories.json"
    with _locked(mirror):
        try:
            names = _fetch_manifests(url, mirror)
        except PlanError as error:
            names = json.loads(_last(last, error))
        _fetch_shards([(join(url, n), load_manifest(mirror / n / MANIFEST_NAME)) for n in names])
        _write(last, json.dumps(names).encode())
    return mirror


def _fetch_manifests(url: str, mirror: Path) -> list[str]:
    """Copy the manifest of a directory, or the manifests of its splits; returns the directories
    with a manifest. Copies of manifests that the store no longer has are removed."""
    names = ["."] if _has_manifest(url, mirror) else []
    names = names or [n for n in ("train", "valid") if _has_manifest(join(url, n), mirror / n)]
    if names in ([], ["valid"]):
        raise uncommitted(url)
    for gone in {".", "train", "valid"}.difference(names):
        (mirror / gone / MANIFEST_NAME).unlink(missing_ok=True)
    return names


def _has_manifest(url: str, mirror: Path) -> bool:
    try:
        _fetch_manifest(url, mirror, MANIFEST_NAME)
    except FormatError as error:
        if error.code != "E-MANIFEST-MISSING":
            raise
        return False
    return True


def _last(copy_of_last: Path, error: PlanError) -> bytes:
    """The copy that the last fetch made, if the store does not answer. Raises `error` if there is
    no copy."""
    if error.code != STORE_CODE or not copy_of_last.exists():
        raise error
    warnings.warn(f"using the copy in the cache: {error}", stacklevel=3)
    return read_file(copy_of_last)


def _fetch_manifest(root: str, mirror: Path, relative: str, digest: str | None = None) -> Manifest:
    """A manifest from the store, or its local copy if the copy has this digest."""
    url = join(root, relative)
    local = resolve_inside(mirror, relative)
    if digest is not None and local.exists():
        try:
            manifest = load_manifest(local)
            if manifest.content_digest() == digest:
                return manifest
        except FormatError:
            pass  # a damaged copy is replaced
    if not fetch_whole(url, local):
        raise uncommitted(url)
    return load_manifest(local)


def fetch_whole(url: str, local: Path) -> bool:
    """Copy a manifest, or the file of its blocks, to its place atomically; False if the file is
    missing in the store. Raises as `copy`."""
    part = _beside(local, ".part")
    if not copy(url, part, MAX_MANIFEST_BYTES):
        return False
    os.replace(part, local)
    return True


def uncommitted(url: str) -> FormatError:
    """The error for data without a manifest."""
    return FormatError(
        "the data are not committed: the manifest is missing",
        where=url,
        do="let prep finish, or upload the manifest last",
        code="E-MANIFEST-MISSING",
    )


def _fetch_shards(manifests: list[tuple[str, Manifest]]) -> None:
    in_parallel(_fetch_shard, [(url, m, entry) for url, m in manifests for entry in m.shards])


def _fetch_shard(place: tuple[str, Manifest, ShardEntry]) -> None:
    directory, manifest, entry = place
    least = np.dtype(manifest.dtype).itemsize * entry.num_tokens
    sizes = range(least, least + _MAX_HEADER_BYTES)
    path = manifest.shard_path(entry)
    _fetch_file(join(directory, entry.path), path, sizes, entry.checksum, "E-SHARD")
    if entry.index_path:
        _fetch_index(directory, manifest, entry)


def _fetch_index(directory: str, manifest: Manifest, entry: ShardEntry) -> None:
    size = 32 + 16 * entry.num_documents
    recorded = str(entry.extra.get("index_checksum") or "")
    url = join(directory, entry.index_path)
    path = manifest.index_path(entry)
    _fetch_file(url, path, range(size, size + 1), recorded, "E-INDEX")


def _fetch_file(url: str, local: Path, sizes: range, checksum: str, code: str) -> None:
    if _is_checked(local, checksum, sizes):
        return
    part = _beside(local, ".part")
    if not copy(url, part, sizes[-1]):
        raise FormatError("file is missing", where=url, code=f"{code}-MISSING")
    try:
        size = part.stat().st_size
        if size not in sizes:
            raise FormatError(
                "file has another length than its manifest says",
                where=url,
                found=f"{size} bytes",
                expected=f"{sizes[0]} bytes" + (" and a header" if len(sizes) > 1 else ""),
                do="run prep for this shard again, or restore the file",
                code=f"{code}-TRUNCATED",
            )
        if checksum:
            check_digest(part, checksum, f"{code}-CHECKSUM", url)
    except FormatError:
        part.unlink()
        raise
    os.replace(part, local)
    _write(_beside(local, ".checked"), json.dumps(_stamp(local, checksum)).encode())


def _is_checked(local: Path, checksum: str, sizes: range) -> bool:
    """Whether the local copy was checked and has not changed since."""
    try:
        if local.stat().st_size not in sizes:
            return False
        return json.loads(read_file(_beside(local, ".checked"))) == _stamp(local, checksum)
    except (OSError, ValueError):
        return False


def _stamp(local: Path, checksum: str) -> dict[str, Any]:
    at = local.stat()
    return {"checksum": checksum, "size_bytes": at.st_size, "modified_ns": at.st_mtime_ns}


def _beside(local: Path, suffix: str) -> Path:
    return local.with_name(local.name + suffix)


def _cache(cache_dir: str | Path | None) -> Path:
    if cache_dir is None:
        raise ConfigError(
            "reading a URL needs a cache directory", where="cache_dir", do="set cache_dir"
        )
    return Path(os.path.abspath(local_path(cache_dir, "cache_dir", LOCAL_CACHE)))


def _mirror(cache: Path, root: str) -> Path:
    mirror = cache / _digest(root)
    mirror.mkdir(parents=True, exist_ok=True)
    return mirror


def _digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]


@contextmanager
def _locked(mirror: Path) -> Iterator[None]:
    """Hold the lock of a cache: one process copies, and the others wait and use its copies."""
    mirror.mkdir(parents=True, exist_ok=True)
    with locked(mirror / ".lock"):
        yield


def _write(path: Path, content: bytes) -> None:
    part = _beside(path, ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        # Without the sync, a power cut may leave an incomplete file under this name.
        os.fsync(file.fileno())
    os.replace(part, path)
