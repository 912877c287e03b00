"""Opens manifests and plans by path or URL, for `nmoe verify` and `nmoe info`.

Files in a store are always read from the store, never from a cache. They are copied to a temporary
directory, one shard file at a time, and every message names the URL. Without checksums, only the
first bytes of large files are requested.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loader.files.addresses import address, is_url, join, parent
from loader.files.format import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    load_manifest,
    resolve_inside,
)
from loader.files.nested import json_value
from loader.files.stores import objects
from loader.plan.file import PlanFile, load_plan
from loader.plan.records import PLAN_FORMATS, LoaderPlan
from loader.plan.remote import uncommitted
from nmoe_core.base.errors import FormatError, NmoeError
from nmoe_core.shards.manifest import left_out
from nmoe_core.shards.publish.pieces import is_plan
from nmoe_core.shards.verify import Problem, on_this_machine, shard_manifests, verify_manifest

_WORKERS = 8
_DEPTHS = range(1, 5)  # depths at which to search manifests below a directory without a manifest
_HEAD_BYTES = 4200  # bytes to copy of a large file; more than the longest header of a shard file


@dataclass(frozen=True, slots=True)
class Opened:
    """A manifest, or a plan with its manifests, on this machine or in a store."""

    where: str
    plan: LoaderPlan | None
    manifests: tuple[Manifest, ...]
    url: str | None = None
    """URL of the directory that was copied; None for local files."""
    root: Path = Path()
    """Local copy of that directory, which the manifests' paths refer to."""

    def verify(self, *, checksums: bool = False, deep: bool = False) -> list[Problem]:
        """Problems of all files, see `verify_manifest`."""
        at_hand = on_this_machine if self.url is None else self._at_hand
        found: list[Problem] = []
        for manifest in self.manifests:
            found += verify_manifest(manifest, checksums=checksums, deep=deep, at_hand=at_hand)
        if self.url is None:
            return found
        return [Problem(p.check, _of_url(p.error, self.root, self.url)) for p in found]

    def left_out(self) -> dict[str, Any]:
        """`shards.manifest.left_out` of the first manifest."""
        manifest = self.manifests[0]
        at_hand = on_this_machine if self.url is None else self._at_hand
        with at_hand(manifest, shard_manifests(manifest), True):
            return left_out(manifest.path.parent, manifest.total_documents)

    @contextmanager
    def _at_hand(self, manifest: Manifest, names: Iterable[str], is_whole: bool) -> Iterator[None]:
        """Make local copies of files that a manifest names; files that the store lacks stay
        missing."""
        paths = [resolve_inside(manifest.path.parent, name) for name in names]

        def fetch(path: Path) -> None:
            url = join(str(self.url), path.relative_to(self.root).as_posix())
            if is_whole or path.suffix == ".idx":
                objects.copy(url, path)
            else:
                objects.copy_start(url, path, _HEAD_BYTES)

        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(fetch, paths))
        yield
        for path in paths:
            path.unlink(missing_ok=True)


@contextmanager
def opened(where: str) -> Iterator[Opened]:
    """Open a manifest, a directory with a manifest, or a plan. Raises as `load_manifest` and
    `load_plan`, and PlanError if the store does not answer (E-STORE)."""
    if not is_url(where):
        path = Path(where)
        yield _opened(_manifest_in(path) if path.is_dir() else path, where)
        return
    url = address(where)
    if not url.partition("?")[0].endswith(".json"):
        url = join(url, MANIFEST_NAME)
    with TemporaryDirectory(prefix="nmoe-") as directory:
        root = Path(directory)
        base = parent(url)
        content = objects.read_bytes(url)
        if content is None:
            raise uncommitted(url)
        try:
            value = json_value(content)
        except ValueError:
            value = {}
        name = join(url, "").rpartition("/")[2]
        if isinstance(value, dict) and value.get("format") in PLAN_FORMATS:
            plan = PlanFile(value, url).plan()
            base = join(base, plan.root)
            content = json.dumps(value | {"root": "."}).encode()
            for source in {one.manifest: one for one in (*plan.sources, *plan.valid)}:
                to = resolve_inside(root, source)
                if not objects.copy(join(base, source), to, MAX_MANIFEST_BYTES):
                    raise uncommitted(join(base, source))
        (root / name).write_bytes(content)
        try:
            yield _opened(root / name, url, base, root)
        except NmoeError as error:
            raise _of_url(error, root, base) from None


def _manifest_in(directory: Path) -> Path:
    """The manifest in a directory. Raises FormatError if the directory has no manifest
    (E-MANIFEST-MISSING)."""
    path = directory / MANIFEST_NAME
    if path.exists():
        return path
    below = chain.from_iterable(sorted(directory.glob("*/" * n + MANIFEST_NAME)) for n in _DEPTHS)
    names = [str(found) for found in islice(below, 3)]
    raise FormatError(
        "the directory has no manifest",
        where=directory,
        do=f"name a manifest below this directory, such as {' or '.join(names)}"
        if names
        else "run prep",
        code="E-MANIFEST-MISSING",
    )


def _opened(path: Path, where: str, url: str | None = None, root: Path = Path()) -> Opened:
    if not is_plan(path):
        return Opened(where, None, (load_manifest(path),), url, root)
    plan = load_plan(path)
    sources = {source.manifest: source for source in (*plan.sources, *plan.valid)}
    manifests = tuple(load_manifest(resolve_inside(plan.base, name)) for name in sources)
    return Opened(where, plan, manifests, url, root)


def _of_url(error: Any, root: Path, url: str) -> Any:
    """Convert an error about a local copy to an error about its URL."""
    return type(error)(str(error).replace(str(root), url), code=error.code)
