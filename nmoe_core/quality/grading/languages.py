"""Maps document ids to languages, from the attribute `language` of the documents' shards."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.config.tree import ShardPaths, Tree
from nmoe_core.quality.calibration.summary_file import Calibration
from nmoe_core.quality.calibration.targets import Languages
from nmoe_core.shards.attribute_file import read_attribute, read_footer, stale
from nmoe_core.shards.manifest import digest_of

LANGUAGE = "language"


def language_digest(shard: ShardPaths) -> str:
    """The digest of a shard's languages. Raises FormatError if they do not exist
    (E-ATTRIBUTE-MISSING), or belong to other documents (E-ATTRIBUTE-STALE)."""
    path = shard.attribute(LANGUAGE)
    if not path.is_file():
        raise FormatError(
            "targets by language need the languages of this shard",
            where=path,
            do="run `nmoe attributes --only language` first",
            code="E-ATTRIBUTE-MISSING",
        )
    footer = read_footer(path)
    expected = digest_of(shard.manifest)
    if footer.fingerprints.get("documents") != expected:
        raise stale(LANGUAGE, path, footer.fingerprints.get("documents"))
    return footer.digest


def grouped_by(calibration: Calibration, shard: ShardPaths) -> Fingerprints:
    """Fingerprints that a shard's grades depend on in addition to its documents: its languages, if
    thresholds differ by language. Raises as `language_digest`."""
    return {"languages": language_digest(shard)} if calibration.target_by == "language" else {}


def shard_languages(tree: Tree) -> Languages:
    """Return a function that looks up the languages of documents of a run; it raises as
    `language_digest`.

    It holds the languages of one shard at a time, so documents in shard order read each shard once.
    """

    @lru_cache(maxsize=2)
    def of_shard(shard: ShardPaths) -> dict[str, str]:
        language_digest(shard)
        table = read_attribute(shard.attribute(LANGUAGE), ["doc_id", "lang"])
        return dict(zip(table.column("doc_id").to_pylist(), table.column("lang").to_pylist()))

    def languages(doc_ids: Sequence[str]) -> list[str]:
        paths = [tree.shard_of(parse_doc_id(doc_id).rel) for doc_id in doc_ids]
        found = np.empty(len(doc_ids), object)
        # Labels are in any order over all shards, so look up the documents' languages shard by
        # shard.
        for i in sorted(range(len(doc_ids)), key=lambda i: paths[i].directory):
            found[i] = of_shard(paths[i])[doc_ids[i]]
        return found.tolist()

    return languages
