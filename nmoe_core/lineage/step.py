"""From a step of the loader plan back to source documents, their label, score and decision."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from loader.errors import StateError
from loader.plan.file import load_plan
from loader.rows.origins import Origin, origins
from loader.rows.stream import Stream
from nmoe_core.base.docid import DocId
from nmoe_core.config.run import Run
from nmoe_core.curate.shards.lineage import read_lineage
from nmoe_core.lineage.facts import Facts, Shard, find_labels


def explain_step(run: Run, step: int, row: int | None = None) -> Facts:
    """The rows of a step over all ranks, and the documents that each is made of.

    Args:
        run: The configuration, whose plan is read.
        step: Step of the plan.
        row: Only this row of the step.

    Returns:
        `step`, `plan_hash`, `lr_scale` and `rows`; each row has `sequence`, `source` and
        `documents`; each of these the place of its tokens in the row, its `doc_id` in the data
        tree, its `ingest_id`, and its decision, scores, topic and label where tasks gave them.

    Raises:
        PlanError: There is no plan (E-PLAN-FORMAT), or the data are not its own (E-PLAN-DATA).
        FormatError: An index is missing or not of its file (E-INDEX-...).
        StateError: The plan has no such step, or the step no such row (E-SEEK).
        CurationError: A curated shard's lineage is not its own (E-CURATION-LINEAGE).
    """
    plan = load_plan(run.tree.plan)
    first, parents, rows = step * plan.batch_size, _Parents(run), []
    with closing(Stream(plan, "train")) as stream:
        _check("step", step, stream.num_sequences // plan.batch_size)
        chosen = range(first, first + plan.batch_size)
        if row is not None:
            _check("row", row, plan.batch_size)
            chosen = chosen[row : row + 1]
        for found in (origins(stream, n) for n in chosen):
            parts = [_part(origin) | parents.of(origin) for origin in found.documents]
            rows.append({"sequence": found.sequence, "source": found.source, "documents": parts})
        lr_scale = stream.schedule.lr_scale(first)
    every = [document for row in rows for document in row["documents"]]
    labels = find_labels(run, {document["doc_id"] for document in every})
    for document in every:
        document["label"] = labels.get(document["doc_id"], {}).get("aggregated")
    return {"step": step, "plan_hash": plan.plan_hash, "lr_scale": lr_scale, "rows": rows}


def _check(what: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise StateError(
            f"no such {what}", found=number, expected=f"0 to {count - 1}", code="E-SEEK"
        )


def _part(origin: Origin) -> dict[str, Any]:
    is_whole = (origin.first, origin.stop) == (origin.start, origin.end)
    tokens = origin.stop - origin.first
    return {"row_start": origin.row_start, "tokens": tokens, "is_whole": is_whole}


class _Parents:
    """The documents of the data tree that parts of rows come from; each shard is read once."""

    def __init__(self, run: Run) -> None:
        self._tree = run.tree
        self._shards: dict[str, tuple[Shard, list[Facts], dict[str, list[str]]]] = {}

    def of(self, origin: Origin) -> Facts:
        """`doc_id` and `ingest_id`, and the row of the lineage where the part is curated."""
        tree = self._tree
        is_curated = origin.path.is_relative_to(tree.curated)
        root = tree.curated if is_curated else tree.data
        rel = origin.path.relative_to(root).as_posix()
        key = f"{is_curated}/{rel.rsplit('/', 1)[0]}"
        if key not in self._shards:
            shard = Shard(tree.shard_of(rel), is_curated=is_curated)
            lineage = list(read_lineage(shard.manifest)) if is_curated else []
            ids = {file.rel: [ingest_id for ingest_id, _ in file.ids()] for file in shard.files}
            self._shards[key] = shard, lineage, ids
        shard, lineage, ids = self._shards[key]
        ingest_id = ids[rel][origin.document]
        if not is_curated:
            doc_id = DocId(shard.paths.source, rel, origin.start, origin.end)
            return {"doc_id": str(doc_id), "ingest_id": ingest_id}
        row = dict(lineage[shard.number(rel, origin.document)])
        return {"doc_id": row.pop("parent_doc_id"), "ingest_id": ingest_id, **row}
