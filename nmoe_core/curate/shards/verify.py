"""Checks a curated shard against its parent: the kept documents, each once, token for token."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from loader.files.format import load_manifest
from nmoe_core.base.errors import CurationError
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.inputs import load_quality, select_documents
from nmoe_core.curate.shards.lineage import read_lineage
from nmoe_core.shards.documents import shard_files


def verify_curated_shard(shard: ShardPaths) -> int:
    """Check that a curated shard holds exactly the kept documents of its parent.

    Tokens, ingest id and text hash of each document are compared with those of the parent document
    that its lineage names; documents that training had consumed, with the parent document of the
    same id and text, if it is still kept. Both shards are read whole.

    Returns:
        Number of documents compared.

    Raises:
        CurationError: Names the first document that was not kept, is there twice, differs, or is
            missing (E-CURATION-VERIFY); or scores or lineage are missing or foreign.
        FormatError: A shard is missing or broken.
    """
    parent, curated = load_manifest(shard.manifest), load_manifest(shard.curated_manifest)
    quality = load_quality(shard, parent)
    originals = {
        doc_id: (tokens, ids)
        for file in shard_files(shard.tree.data, parent)
        for doc_id, tokens, ids in file.documents()
    }
    info = curated.extra["source_info"]
    include, num_frozen = info["include"], info["frozen_documents"]
    names = list(originals)
    chosen = select_documents(quality.path, names, include).indices
    missing = dict.fromkeys(names[k] for k in chosen)
    places = {originals[name][1]: name for name in missing}
    copies = (row for file in shard_files(shard.tree.curated, curated) for row in file.documents())
    with closing(read_lineage(curated)) as lineage:
        rows = zip(copies, lineage, strict=True)
        for number, ((doc_id, tokens, ids), row) in enumerate(rows):
            parent_doc_id = row["parent_doc_id"]
            if number < num_frozen:
                # Consumed before the parent was what it is now: not kept perhaps, or elsewhere.
                parent_doc_id = places.get(ids)
                if parent_doc_id is None:
                    continue
            if parent_doc_id not in missing:
                raise _refuse(doc_id, f"{parent_doc_id}: not kept, or written twice")
            del missing[parent_doc_id]
            if not np.array_equal(tokens, originals[parent_doc_id][0]):
                raise _refuse(doc_id, f"other tokens than {parent_doc_id}")
            if ids != originals[parent_doc_id][1]:
                raise _refuse(doc_id, f"other id or text hash than {parent_doc_id}: {ids}")
    if len(missing) != info["deferred_documents"]:
        raise _refuse(curated.path, f"{len(missing)} kept documents missing: {next(iter(missing))}")
    return len(chosen)


def _refuse(where: object, found: str) -> CurationError:
    return CurationError(
        "curated shard is not the kept part of its parent",
        where=where,
        found=found,
        do="curate this shard again",
        code="E-CURATION-VERIFY",
    )
