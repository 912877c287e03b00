"""Measures how much of a source's text is in evaluation sets, and refuses a share above the
limit."""

from __future__ import annotations

from typing import NamedTuple

from loader.files.format import load_manifest
from nmoe_core.base.errors import ConfigError, CurationError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.shards.documents import shard_files
from nmoe_core.shards.manifest import digest_of
from nmoe_core.tasks.attributes import attribute_names, evaluations_made_with

_NAME = "contamination"
_COLUMNS = ("contamination", "contaminated_by")


class Contaminated(NamedTuple):
    """The curated documents of a source."""

    share: float
    """Share of tokens in passages of evaluation sets."""
    documents: int
    """Documents with such a passage."""
    most: str | None
    """The evaluation set that has most of these tokens."""


def refuse_contaminated(run: Run, source: str) -> Contaminated:
    """The contaminated text in the curated shards of a source. Raises ConfigError if the run has a
    limit without the attribute, FormatError if the attribute is missing or not current, and
    CurationError if the share is above `[contamination] max_share` (E-CONTAMINATION-SHARE)."""
    found = _contaminated(run, source)
    limit = run.config.contamination.max_share
    if limit is not None and found.share > limit:
        raise CurationError(
            "too much of the training text is in evaluation sets",
            where=f"{source}, contamination.max_share",
            found=f"{found.share:.4%} of tokens, in {found.documents} documents, most of "
            f"{found.most}",
            expected=f"at most {limit:.4%}",
            do="add `contamination < 0.1` to curation.where, select and curate again",
            code="E-CONTAMINATION-SHARE",
        )
    return found


def _contaminated(run: Run, source: str) -> Contaminated:
    from nmoe_core.curate.shards.inputs import document_lengths

    if _NAME not in attribute_names(run):
        raise ConfigError(
            "contamination.max_share needs the attribute contamination",
            where=run.path,
            do="add contamination to [attributes] use",
            code="E-CONFIG-MISSING",
        )
    sets = evaluations_made_with(run)
    tokens = inside = 0.0
    documents = 0
    by_set = dict[str, float]()
    for shard in run.tree.shards(source, run.config.prep.num_shards):
        rows = _rows_by_text(shard, sets)
        manifest = load_manifest(shard.curated_manifest)
        curated = shard_files(shard.tree.curated, manifest)
        lengths = document_lengths(curated)
        digests = (digest for file in curated for _, digest in file.ids())
        for length, digest in zip(lengths.tolist(), digests, strict=True):
            tokens += length
            # A document that training has read stays in the curated shard after the source has lost
            # the document.
            share, name = rows.get(digest, (0.0, None))
            if name is not None:
                inside = inside + share * length
                documents = documents + 1
                by_set[name] = by_set.get(name, 0.0) + share * length
    most = max(by_set, key=by_set.__getitem__, default=None)
    return Contaminated(inside / max(tokens, 1), documents, most)


def _rows_by_text(shard: ShardPaths, sets: Fingerprints) -> dict[str, tuple[float, str | None]]:
    from nmoe_core.shards.attribute_file import read_attribute, read_footer, stale

    path = shard.attribute(_NAME)
    expected = {"documents": digest_of(shard.manifest), **sets}
    found = read_footer(path).fingerprints
    if changed := [key for key, value in expected.items() if found.get(key) != value]:
        raise stale(_NAME, path, f"other {changed[0]}")
    table = read_attribute(path, ["text_sha256", *_COLUMNS])
    hashes, *values = (table.column(name).to_pylist() for name in table.column_names)
    return {digest.hex(): row for digest, row in zip(hashes, zip(*values))}
