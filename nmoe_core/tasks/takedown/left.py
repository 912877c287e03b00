"""Documents that are recorded as taken down, but that a split or a plan still has."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from loader.files.format import Manifest
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import CurationError
from nmoe_core.config.tree import Tree
from nmoe_core.curate.takedown.record import taken_down
from nmoe_core.shards.documents import ingest_ids
from nmoe_core.shards.publish.read import opened

_DEPTH = 6  # of a shard's manifest below the root of its run, at most


def errors_of_left(manifests: Iterable[Manifest]) -> Iterator[CurationError]:
    """An error for each manifest with documents that the run's record names (E-TAKEDOWN-LEFT). The
    record is looked for in the directories above the manifest. Raises as `taken_down` and
    `ingest_ids`."""
    for manifest in manifests:
        trees = map(Tree.below, manifest.path.absolute().parents[:_DEPTH])
        tree = next((tree for tree in trees if tree.takedown.is_file()), None)
        texts = taken_down(tree) if tree else frozenset[str]()
        if count := sum(text in texts for _, text in ingest_ids(manifest)) if texts else 0:
            yield CurationError(
                "the shards have documents that are recorded as taken down",
                where=manifest.path,
                found=f"{count:,} documents",
                do="run nmoe run curate first; use curated shards, not the data tree",
                code="E-TAKEDOWN-LEFT",
            )


def require_none_left(path: Path) -> None:
    """Raise the first error of `errors_of_left` for a local plan or manifest; raises also as
    `opened`."""
    with opened(shown(path)) as data:
        for error in errors_of_left(data.manifests):
            raise error
