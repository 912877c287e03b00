"""Lineage in both directions: which documents a training step reads, and which steps read a
document.

Each fact is read from the committed files of the tasks, and checked to belong to the document. A
fact is None if the task that makes it has not run yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from loader.errors import StateError
from loader.files.format import MANIFEST_NAME, load_manifest
from loader.files.regular import open_file
from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from loader.rows.origins import Origin, Place, origins, readings
from loader.rows.stream import Stream
from nmoe_core.base.docid import DocId, bucket_of, parse_doc_id, split_of
from nmoe_core.base.errors import FormatError
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.inputs import BUCKET, load_quality
from nmoe_core.curate.shards.lineage import read_lineage
from nmoe_core.labels import slices
from nmoe_core.labels.label_files import checked_digest
from nmoe_core.labels.oracle import read_records
from nmoe_core.prep.mixture import SPLITS, run_sources
from nmoe_core.quality.calibration.graded import SUMMARY_NAME, read_grading_summary
from nmoe_core.quality.calibration.summary_file import load_calibration
from nmoe_core.shards.documents import ShardFile, beginning, shard_files
from nmoe_core.shards.manifest import changes_file, column_files
from nmoe_core.text.documents import decode_documents
from nmoe_core.text.tokenizer import load_tokenizer
from nmoe_core.text.transforms.edits import original

Facts = dict[str, Any]
TEXT_TOKENS = 64
_PROVENANCE = ("hf_dataset", "hf_revision", "normalizer")
_INPUTS = {"kind", "paths", "hf_dataset", "hf_subset", "hf_split", "hf_data_files", "split"}


def explain_document(run: Run, name: str, max_readings: int = 8) -> Facts:
    """Trace a document by its id, or by an ingest id that no other document has.

    At most `max_readings` sequences of the plan are listed.

    Raises:
        FormatError: No document has this id, or several have this ingest id (E-DOCID).
        CurationError: Scores or lineage belong to another version of the shard (E-CURATION-...).
        PlanError: The data differ from the plan (E-PLAN-DATA).
    """
    shard, file, document = _find(run, name)
    paths = shard.paths
    tree = run.tree
    start, end = file.spans[document].tolist()
    doc_id = DocId(paths.source, file.rel, start, end)
    ingest_id, text_sha256 = file.ids()[document]
    tokenizer = load_tokenizer(run.tokenizer)
    facts: Facts = {
        "doc_id": str(doc_id),
        "source": paths.source,
        "split": paths.split,
        "shard": paths.name,
        "ingest_id": ingest_id,
        "text_sha256": text_sha256,
        "tokens": end - start,
        "text": beginning(file.tokens[start : end - 1], tokenizer, TEXT_TOKENS).text,
        "provenance": _provenance(run, shard),
    }
    for path in column_files(shard.manifest):
        from nmoe_core.shards.columns import values_of

        facts["columns"] = values_of(path, shard.number(file.rel, document))
    facts["changes"] = _changes(run, shard, file, document)
    if paths.split != "train":
        return facts
    grade = thresholds = curated = None
    places: list[_Place] = []
    if (paths.graded / SUMMARY_NAME).is_file():
        facts["graded_by"] = read_grading_summary(paths.graded).get("grader", "hydra")
        with open_file(load_quality(paths, shard.manifest).path) as rows:
            grade = orjson.loads(next(islice(rows, shard.number(file.rel, document), None)))
    if tree.calibration_summary.is_file():
        thresholds = asdict(load_calibration(tree.calibration).of((grade or {}).get("group")))
    if paths.curated_manifest.is_file():
        places = _curated_places(shard, doc_id)
        first, *again = [one._asdict() | {"doc_id": str(one.doc_id)} for one in places] or [{}]
        curated = {"is_included": bool(places), **first}
        if again:
            curated["again"] = again
    return facts | {
        "label_split": split_of(str(doc_id)),
        "label": _labels(run, {str(doc_id)}).get(str(doc_id)),
        "grade": grade,
        "thresholds": thresholds,
        "curated": curated,
        "readings": _readings(run, doc_id, places, max_readings),
    }


def _changes(run: Run, shard: _Shard, file: ShardFile, document: int) -> Facts | None:
    """What transforms changed in a document; None if nothing."""
    if changes_file(shard.manifest) is None:
        return None
    from nmoe_core.shards.changes import changed_of, read_changes

    rows = read_changes(shard.manifest.path.parent)
    changed = changed_of(rows, shard.number(file.rel, document))
    if changed is None:
        return None
    tokenizer = load_tokenizer(run.tokenizer)
    spans = file.spans[document : document + 1]
    after = decode_documents(tokenizer, file.tokens, spans)[0].as_py()
    before = original(after, changed.changes)
    # Part of a record that was split or cut does not give back the text of the record.
    if before is not None and sha256(before.encode()).digest() != changed.original_sha256:
        before = None
    return {
        "original_sha256": changed.original_sha256.hex(),
        "chars_removed": changed.chars_removed,
        "text_before": before,
        "text_after": after,
        "changes": [change._asdict() for change in changed.changes],
    }


def explain_step(
    run: Run,
    step: int,
    row: int | None = None,
    at_hand: Callable[[Path], None] = lambda directory: None,
) -> Facts:
    """The rows of a step of the plan (or only `row`), and the documents in each row. Before the ids
    and lineage of a shard are read, `at_hand` is called with the shard's directory.

    Returns:
        `step`, `plan_hash`, `lr_scale` and `rows`. A row has `sequence`, `source` and `documents`;
        each document has the position of its tokens in the row, its `doc_id` in the data tree, its
        `ingest_id`, and its decision, scores, topic and label if they exist.

    Raises:
        PlanError: There is no plan (E-PLAN-FORMAT), or the data differ from it (E-PLAN-DATA).
        FormatError: An index is missing or belongs to another file (E-INDEX-...).
        StateError: The step or the row is out of range (E-SEEK).
        CurationError: The lineage file belongs to another version of the curated shard
            (E-CURATION-LINEAGE).
    """
    plan = load_plan(run.tree.plan)
    first = step * plan.batch_size
    rows = []
    shards = {}
    with closing(Stream(plan, "train")) as stream:
        _check("step", step, stream.num_sequences // plan.batch_size)
        chosen = range(first, first + plan.batch_size)
        if row is not None:
            _check("row", row, plan.batch_size)
            chosen = chosen[row : row + 1]
        for found in (origins(stream, n) for n in chosen):
            parts = [_part(run, origin, shards, at_hand) for origin in found.documents]
            rows.append({"sequence": found.sequence, "source": found.source, "documents": parts})
        lr_scale = stream.schedule.lr_scale(first)
    every = [document for row in rows for document in row["documents"]]
    labels = _labels(run, {document["doc_id"] for document in every})
    for document in every:
        document["label"] = labels.get(document["doc_id"], {}).get("aggregated")
    return {"step": step, "plan_hash": plan.plan_hash, "lr_scale": lr_scale, "rows": rows}


def _check(what: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        known = f"0 to {count - 1}"
        raise StateError(f"{what} is out of range", found=number, expected=known, code="E-SEEK")


def _part(
    run: Run, origin: Origin, shards: dict[Path, Any], at_hand: Callable[[Path], None]
) -> Facts:
    """A part of a row: its position, its document in the data tree, and the facts of its
    lineage."""
    directory = origin.path.parent
    root = directory.parents[2]  # {root}/{source}/{split}/shard_NNNN, in a run or a copy
    rel = origin.path.relative_to(root).as_posix()
    if directory not in shards:
        at_hand(directory)
        info = load_manifest(directory / MANIFEST_NAME).extra.get("source_info")
        is_curated = "lineage_path" in (info or {})
        tree = replace(run.tree, data=root, curated=root)
        shard = _Shard(tree.shard_of(rel), is_curated=is_curated)
        lineage = list(read_lineage(shard.manifest)) if is_curated else None
        ids = {file.rel: [ingest_id for ingest_id, _ in file.ids()] for file in shard.files}
        shards[directory] = shard, lineage, ids
    shard, lineage, ids = shards[directory]
    facts: Facts = {
        "row_start": origin.row_start,
        "tokens": origin.stop - origin.first,
        "is_whole": (origin.first, origin.stop) == (origin.start, origin.end),
        "ingest_id": ids[rel][origin.document],
    }
    if lineage is None:
        return facts | {"doc_id": str(DocId(shard.paths.source, rel, origin.start, origin.end))}
    row = dict(lineage[shard.number(rel, origin.document)])
    return facts | {"doc_id": row.pop("parent_doc_id"), **row}


def _find(run: Run, name: str) -> tuple[_Shard, ShardFile, int]:
    if "//" in name and "#" in name:
        doc_id = parse_doc_id(name)
        shard = _Shard(run.tree.shard_of(doc_id.rel))
        for file in shard.files:
            spans = file.spans.tolist()
            span = [doc_id.start, doc_id.end]
            if file.rel == doc_id.rel and span in spans:
                return shard, file, spans.index(span)
        raise FormatError("no such document", where=run.tree.data, found=name, code="E-DOCID")
    found = []
    for shard in _shards_with(run, name):
        for file in shard.files:
            numbers = [i for i, (ingest_id, _) in enumerate(file.ids()) if ingest_id == name]
            found += [(shard, file, i) for i in numbers]
    if len(found) == 1:
        return found[0]
    places = [f"{shard.paths.source}/{shard.paths.split}" for shard, _, _ in found]
    raise FormatError(
        "several documents have this ingest id" if found else "no document has this id",
        where=run.tree.data,
        found=" and ".join(places) or name,
        expected="a document id, or an ingest id that one document has",
        do="pass its document id" if found else "find the id with `nmoe inspect`",
        code="E-DOCID",
    )


def _shards_with(run: Run, ingest_id: str) -> Iterator[_Shard]:
    """In each split of each source, the only shard that can hold this ingest id."""
    for source in run_sources(run):
        for split in SPLITS:
            path = run.tree.manifest(source.name, split)
            if path.is_file():
                num_shards = load_manifest(path).extra["source_info"]["num_buckets"]
                bucket = bucket_of(ingest_id, num_shards)
                yield _Shard(run.tree.shard(source.name, bucket, split))


def _provenance(run: Run, shard: _Shard) -> Facts:
    """Location of the shard's source from the mixture, and the revision that prep read."""
    (spec,) = (source.spec for source in run_sources(run) if source.name == shard.paths.source)
    table = spec.model_dump(include=_INPUTS, exclude_defaults=True)
    info, made_from = (shard.manifest.extra.get(k, {}) for k in ("source_info", "fingerprints"))
    recorded = {key: info[key] for key in _PROVENANCE if key in info}
    return {"kind": spec.kind, **table, **recorded, "revision": made_from.get("source")}


def _readings(run: Run, doc_id: DocId, places: Sequence[_Place], most: int) -> list[Facts] | None:
    """Reads of the document by the plan, in the order of steps."""
    if not run.tree.plan.is_file():
        return None
    plan = load_plan(run.tree.plan)
    curated = [(run.tree.curated / one.doc_id.rel, one.doc_id) for one in places]
    with closing(Stream(plan, "train")) as stream:
        names = stream.sources_of_files()
        for candidates in ([(run.tree.data / doc_id.rel, doc_id)], curated):
            known = [
                Place(names[path], path, one.start, one.end)
                for path, one in candidates
                if path in names
            ]
            if known:
                found = readings(stream, known)
                return [_reading(plan, stream, n, known) for n in islice(found, most)]
    return []


def _reading(plan: LoaderPlan, stream: Stream, n: int, places: Sequence[Place]) -> Facts:
    step, row = divmod(n, plan.batch_size)
    every = origins(stream, n).documents
    own = {(place.path, place.start, place.end) for place in places}
    parts = [part for part in every if (part.path, part.start, part.end) in own]
    tokens = sum(part.stop - part.first for part in parts)
    place = {"step": step, "row": row}
    return {**place, "sequence": n, "row_start": parts[0].row_start, "tokens": tokens}


def _curated_places(shard: _Shard, doc_id: DocId) -> list[_Place]:
    """The positions in the curated tree of a document of the data tree, one for each time that a
    pass reads it; empty if curation dropped the document."""
    curated = _Shard(shard.paths, is_curated=True)
    source = shard.paths.source
    buckets = {
        curated.manifest.shard_path(entry): f"{source}/{entry.extra[BUCKET]}"
        for entry in curated.manifest.shards
        if BUCKET in entry.extra
    }
    found = []
    with closing(read_lineage(curated.manifest)) as lineage:
        for number, row in enumerate(lineage):
            if row["parent_doc_id"] == str(doc_id):
                file, document = curated.file_of(number)
                curated_id = DocId(source, file.rel, *file.spans[document].tolist())
                bucket = buckets.get(shard.paths.tree.curated / file.rel)
                found.append(_Place(curated_id, number, row["topic"], bucket))
    return found


def _labels(run: Run, doc_ids: Collection[str]) -> dict[str, Facts]:
    """The merged label records of these documents; documents without a label are not in the
    result."""
    found: dict[str, Facts] = {}
    for split in slices.SPLITS:
        path = run.tree.merged_labels(split)
        if not path.is_file():
            continue
        checked_digest(path)
        for record in read_records(path):
            if record["doc_id"] in doc_ids:
                found[record["doc_id"]] = record
    return found


class _Shard:
    """A committed shard of the data tree or the curated tree."""

    def __init__(self, paths: ShardPaths, *, is_curated: bool = False) -> None:
        self.paths = paths
        tree = paths.tree
        self.manifest = load_manifest(paths.curated_manifest if is_curated else paths.manifest)
        self.files = shard_files(tree.curated if is_curated else tree.data, self.manifest)

    def number(self, rel: str, document: int) -> int:
        """The number in the shard of a document, given its number in a file."""
        before = takewhile(lambda file: file.rel != rel, self.files)
        return sum(len(file.spans) for file in before) + document

    def file_of(self, number: int) -> tuple[ShardFile, int]:
        """The file of document `number` of the shard, and the document's number in the file."""
        for file in self.files:
            if number < len(file.spans):
                return file, number
            number -= len(file.spans)
        raise IndexError(f"{self.manifest.path} has no document {number}")


class _Place(NamedTuple):
    """The position of a data-tree document in the curated tree, its topic, and its bucket as the
    plan names it; None if the run has no buckets."""

    doc_id: DocId
    number: int
    topic: int
    bucket: str | None
