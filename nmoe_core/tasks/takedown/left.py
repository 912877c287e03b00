"""Documents that are recorded as taken down, but that a split or a plan still has."""

from collections.abc import Iterable
from pathlib import Path

from loader.files.format import Manifest
from nmoe_core.base.errors import CurationError
from nmoe_core.config.tree import Tree
from nmoe_core.curate.takedown.record import taken_down
from nmoe_core.shards.documents import ingest_ids
from nmoe_core.shards.publish.read import opened

_DEPTH = 6  # of a shard's manifest below the root of its run, at most


def left_in(manifests: Iterable[Manifest]) -> dict[Path, int]:
    """The number of documents in each manifest that the run's record names, without zeros. The
    record is looked for in the directories above the manifest. Raises as `taken_down` and
    `ingest_ids`."""
    found = {}
    for manifest in manifests:
        trees = map(Tree.below, manifest.path.absolute().parents[:_DEPTH])
        tree = next((tree for tree in trees if tree.takedown.is_file()), None)
        if texts := taken_down(tree) if tree else ():
            found[manifest.path] = sum(text in texts for _, text in ingest_ids(manifest))
    return {path: count for path, count in found.items() if count}


def require_none_left(path: Path) -> None:
    """Raise CurationError if the local plan or manifest has documents that are recorded as taken
    down (E-TAKEDOWN-LEFT); raises also as `opened` and `left_in`."""
    with opened(str(path)) as data:
        for where, count in left_in(data.manifests).items():
            raise left_error(where, count)


def left_error(where: Path, count: int) -> CurationError:
    """The error for a manifest with documents that are recorded as taken down."""
    return CurationError(
        "the shards have documents that are recorded as taken down",
        where=where,
        found=f"{count:,} documents",
        do="run nmoe run curate first; use curated shards, not the data tree",
        code="E-TAKEDOWN-LEFT",
    )
