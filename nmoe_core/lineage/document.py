"""From a document forward: its source, label, grade and decision, its topic, who reads it when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import orjson

from loader.files.format import load_manifest
from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from loader.rows.origins import origins, readings
from loader.rows.stream import Stream
from nmoe_core.base.docid import DocId, bucket_of, parse_doc_id, split_of
from nmoe_core.base.errors import FormatError
from nmoe_core.calibration.files import load_calibration
from nmoe_core.calibration.graded import SUMMARY_NAME
from nmoe_core.config.run import Run
from nmoe_core.curate.shards.inputs import load_quality
from nmoe_core.lineage.facts import Facts, Place, Shard, curated_place, find_labels
from nmoe_core.prep.mixture import SPLITS, run_sources
from nmoe_core.shards.documents import ShardFile, beginning
from nmoe_core.text.tokenizer import load_tokenizer

TEXT_TOKENS = 64
_PROVENANCE = ("hf_dataset", "hf_revision", "normalizer")
_INPUTS = ("kind", "paths", "hf_dataset", "hf_subset", "hf_split", "hf_data_files", "split")


def explain_document(run: Run, name: str, max_readings: int = 8) -> Facts:
    """All that the tasks know of one document.

    Args:
        run: The configuration.
        name: A document id, or the ingest id of a document of one of the run's sources.
        max_readings: Sequences of the plan that are listed.

    Raises:
        FormatError: No document has this id, or several have this ingest id (E-DOCID).
        CurationError: Scores or lineage are of another version of the shard (E-CURATION-...).
        PlanError: The data are not those of the plan (E-PLAN-DATA).
    """
    shard, file, document = _find(run, name)
    doc_id = DocId(shard.paths.source, file.rel, *file.spans[document].tolist())
    ingest_id, text_sha256 = file.ids()[document]
    facts: Facts = {
        "doc_id": str(doc_id),
        "source": shard.paths.source,
        "split": shard.paths.split,
        "shard": shard.paths.name,
        "ingest_id": ingest_id,
        "text_sha256": text_sha256,
        "tokens": doc_id.end - doc_id.start,
        "text": _text(run, file, document),
        "provenance": _provenance(run, shard),
    }
    if shard.paths.split != "train":
        return facts
    is_curated = shard.paths.curated_manifest.is_file()
    place = curated_place(run, shard, doc_id) if is_curated else None
    return facts | {
        "label_split": split_of(str(doc_id)),
        "label": find_labels(run, {str(doc_id)}).get(str(doc_id)),
        "grade": _grade(shard, shard.number(file.rel, document)),
        "thresholds": _thresholds(run),
        "curated": _curated(place) if is_curated else None,
        "readings": _readings(run, doc_id, place, max_readings),
    }


def _find(run: Run, name: str) -> tuple[Shard, ShardFile, int]:
    if "//" in name and "#" in name:
        doc_id = parse_doc_id(name)
        shard = Shard(run.tree.shard_of(doc_id.rel))
        for file in shard.files:
            starts = file.spans.tolist()
            if file.rel == doc_id.rel and [doc_id.start, doc_id.end] in starts:
                return shard, file, starts.index([doc_id.start, doc_id.end])
        raise FormatError("no such document", where=run.tree.data, found=name, code="E-DOCID")
    found = []
    for shard in _shards_with(run, name):
        for file in shard.files:
            ids = enumerate(file.ids())
            found += [(shard, file, i) for i, (ingest_id, _) in ids if ingest_id == name]
    if len(found) == 1:
        return found[0]
    places = [f"{shard.paths.source}/{shard.paths.split}" for shard, _, _ in found]
    raise FormatError(
        "several documents have this ingest id" if found else "no document has this id",
        where=run.tree.data,
        found=" and ".join(places) or name,
        expected="a document id, or an ingest id that one document has",
        do="name it by its document id" if found else "nmoe inspect shows ids",
        code="E-DOCID",
    )


def _shards_with(run: Run, ingest_id: str) -> Iterator[Shard]:
    """The shard of each split of each source where this ingest id would be."""
    for source in run_sources(run):
        for split in SPLITS:
            path = run.tree.manifest(source.name, split)
            if path.is_file():
                num_shards = load_manifest(path).extra["source_info"]["num_buckets"]
                bucket = bucket_of(ingest_id, num_shards)
                yield Shard(run.tree.shard(source.name, bucket, split))


def _text(run: Run, file: ShardFile, document: int) -> str:
    start, end = file.spans[document].tolist()
    tokenizer = load_tokenizer(run.tokenizer, run.config.prep.engine)
    return beginning(file.tokens[start : end - 1], tokenizer, TEXT_TOKENS).text


def _provenance(run: Run, shard: Shard) -> Facts:
    """What the mixture says is read, and the revision that was."""
    (spec,) = (source.spec for source in run_sources(run) if source.name == shard.paths.source)
    table = spec.model_dump(include=set(_INPUTS), exclude_defaults=True)
    info, extra = shard.manifest.extra.get("source_info", {}), shard.manifest.extra
    recorded = {key: info[key] for key in _PROVENANCE if key in info}
    revision = extra.get("fingerprints", {}).get("source")
    return {"kind": spec.kind, **table, **recorded, "revision": revision}


def _grade(shard: Shard, number: int) -> Facts | None:
    if not (shard.paths.graded / SUMMARY_NAME).is_file():
        return None
    quality = load_quality(shard.paths, shard.manifest)
    with open(quality.path, "rb") as file:
        return orjson.loads(next(islice(file, number, None)))


def _thresholds(run: Run) -> Facts | None:
    if not run.tree.calibration_summary.is_file():
        return None
    return asdict(load_calibration(run.tree.calibration).thresholds)


def _curated(place: Place | None) -> Facts:
    if place is None:
        return {"is_included": False}
    return {
        "is_included": True,
        "doc_id": str(place.doc_id),
        "number": place.number,
        "topic": place.topic,
    }


def _readings(run: Run, doc_id: DocId, place: Place | None, most: int) -> list[Facts] | None:
    """Where the plan reads the document, from its first step on."""
    if not run.tree.plan.is_file():
        return None
    plan = load_plan(run.tree.plan)
    candidates = [(run.tree.data / doc_id.rel, doc_id)]
    if place is not None:
        candidates.append((place.path, place.doc_id))
    with closing(Stream(plan, "train")) as stream:
        for path, where in candidates:
            if doc_id.source in stream.source_names and path in stream.files.paths():
                found = readings(stream, doc_id.source, path, where.start, where.end)
                return [_reading(plan, stream, n, path, where) for n in islice(found, most)]
    return []


def _reading(plan: LoaderPlan, stream: Stream, n: int, path: Path, doc_id: DocId) -> Facts:
    step, row = divmod(n, plan.batch_size)
    parts = [
        (part.row_start, part.stop - part.first)
        for part in origins(stream, n).documents
        if (part.path, part.start, part.end) == (path, doc_id.start, doc_id.end)
    ]
    return {
        "step": step,
        "row": row,
        "sequence": n,
        "row_start": parts[0][0],
        "tokens": sum(length for _, length in parts),
    }
