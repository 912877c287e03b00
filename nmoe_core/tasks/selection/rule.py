"""Tasks of selection: the documents that the expressions of `[curation]` keep, and a preview."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from nmoe_core.attributes import CODES
from nmoe_core.attributes.attribute import ShardDocuments, made, open_shard_documents, replace_rows
from nmoe_core.attributes.where import Where, first_failures
from nmoe_core.base.atomic import writing_if
from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.inputs import REPEAT
from nmoe_core.shards.attribute_file import is_attribute_current, read_attribute, read_footer
from nmoe_core.shards.documents import beginning
from nmoe_core.shards.manifest import changes_by_rule, digest_of
from nmoe_core.tasks.selection.changes import SampleChange, changed_samples
from nmoe_core.tasks.selection.expression import opened
from nmoe_core.tasks.selection.outcome import clauses_of, why_left_out
from nmoe_core.tasks.selection.view import read_columns, shard_parts
from nmoe_core.text.tokenizer import load_tokenizer

_EDGE_TOKENS = 24
_TOLD_ELSEWHERE = ("documents", "columns", "changes", "quality", "topics")


@dataclass(frozen=True, slots=True)
class ClauseFigures:
    """Effect of one clause on the documents of a source."""

    clause: str
    first: int
    """Number of documents for which this is the first clause that drops them."""
    alone: int
    """Number of documents that this clause drops, alone or with others."""
    last: int
    """Number of documents that only this clause drops."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Documents that an expression keeps of a source."""

    source: str
    documents: int
    kept: int
    tokens: int
    kept_tokens: int
    read_tokens: int | None
    """Tokens of one pass, which reads a document as often as `repeat` says; None without it."""
    by_language: dict[str, tuple[int, int]]
    """Numbers of documents and of kept documents by language, if the run records languages."""
    clauses: list[ClauseFigures]
    edge: list[dict[str, Any]]
    """Documents that only one clause drops."""
    changed_text: list[dict[str, Any]]
    """What transforms changed in the source, by `transform` and `rule`."""
    changes: list[SampleChange]
    """Samples of these changes."""


class _Edge(NamedTuple):
    """A document that only one clause drops."""

    digest: str
    row: dict[str, Any]
    tokens: np.ndarray


def select_shards(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Record for each document of shards whether the source's expressions keep it, the first clause
    that drops it and, if any is read more than once, how often it is read; current files are kept.

    Raises:
        ConfigError: The source has no expression, or it is not allowed (E-SELECT-...).
        FormatError: An attribute of `where` is not made, or was made from other documents.
    """
    where = opened(run, source)
    shards = {bucket: run.tree.shard(source, bucket) for bucket in buckets}
    return {bucket: _select(run, shard, where) for bucket, shard in shards.items()}


def _select(run: Run, shard: ShardPaths, where: Where) -> Result:
    path = shard.selection
    made_from = selection_fingerprints(run, shard, where.columns)
    with writing_if(lambda: not is_attribute_current(path, made_from), path) as changed:
        if changed:
            found = where.evaluate(_columns(run, shard, where))
            documents = open_shard_documents(shard).documents
            times = where.times_read(found, lambda number: str(documents.doc_ids[number]))
            reasons = first_failures(found.clauses)
            clauses = {"clauses": json.dumps(where.clauses)}
            fields = [("keep", pa.bool_()), pa.field("reason", pa.uint8(), metadata=clauses)]
            columns = [pa.array(reasons == 0), pa.array(reasons)]
            # Without the column, a shard of which no document is repeated does not depend on
            # whether `repeat` is set.
            if (times > 1).any():
                fields.append((REPEAT, pa.uint8()))
                columns.append(pa.array(times.astype(np.uint8)))
            schema = pa.schema(fields)
            rows = pa.record_batch(columns, schema=schema)
            replace_rows(path, "selection", made_from, documents, schema, [rows])
    keep, *times = read_attribute(path, ["keep", REPEAT]).columns
    result = made(path, changed=changed)
    facts = {**result.facts, "kept": int(keep.to_numpy().sum())}
    if times:
        facts["readings"] = int(times[0].to_numpy().sum(dtype=np.int64))
    return replace(result, facts=facts)


def selection_fingerprints(run: Run, shard: ShardPaths, columns: Sequence[str]) -> Fingerprints:
    """Fingerprints of the decisions of a source's expressions, which read `columns`, for the
    documents of a shard."""
    used = sorted({label.partition(".")[0] for label in columns})
    parts = shard_parts(run, shard, used)
    repeat = run.config.curation.repeat
    return {
        "documents": digest_of(shard.manifest),
        "where": str(run.config.curation.where_of(shard.source)),
        "columns": sha256_json(columns),
        "attributes": sha256_json({name: part.digest() for name, part in sorted(parts.items())}),
        "code": CODES["select"],
        **({} if repeat is None else {"repeat": repeat}),
    }


def _columns(run: Run, shard: ShardPaths, where: Where) -> pa.Table:
    return read_columns(run, shard, where.schema, where.columns)


def preview_selection(run: Run, source: str, tried: str | None = None, sample: int = 0) -> Kept:
    """The documents of a source that its expressions would keep, with `tried` instead of
    `curation.where`, and the effect of each clause; writes no file. Also gives `sample` documents
    that only one clause drops, chosen by the digest of their ids, and `sample` changes by each rule
    of the transforms.
    """
    where = opened(run, source, tried)
    language = next((name for name in where.schema if name == "language.lang"), None)
    found = []
    times = [np.empty(0, np.int64)]
    lengths = []
    languages = []
    edge: list[_Edge] = []
    for shard in run.tree.shards(source, run.config.prep.num_shards):
        labels = where.columns if language is None else [*{*where.columns, language}]
        table = read_columns(run, shard, where.schema, labels)
        values = where.evaluate(table)
        clauses = values.clauses
        documents = open_shard_documents(shard)
        doc_ids = documents.documents.doc_ids
        times.append(where.times_read(values, lambda number, own=doc_ids: str(own[number])))
        found.append(clauses)
        lengths += [file.lengths() for file in documents.files]
        if language is not None:
            languages += table.column(language).to_pylist()
        edge += _edge(where, table, clauses, documents, sample)
    tokenizer = load_tokenizer(run.tokenizer)
    shown = [
        {**one.row, "text": beginning(one.tokens, tokenizer, _EDGE_TOKENS).text}
        for one in nsmallest(sample, edge, key=attrgetter("digest"))
    ]
    clauses = np.concatenate(found, axis=1)
    lengths = np.concatenate([np.empty(0, np.int64), *lengths])
    fails = ~clauses
    keep = np.logical_and.reduce(clauses, axis=0)
    first = first_failures(clauses)
    num_fails = fails.sum(axis=0)
    of_language = Counter(languages), Counter(compress(languages, keep.tolist()))
    return Kept(
        source=source,
        documents=len(keep),
        kept=int(keep.sum()),
        tokens=int(lengths.sum()),
        kept_tokens=int(lengths[keep].sum()),
        read_tokens=None if where.repeat is None else int((lengths * np.concatenate(times)).sum()),
        by_language={
            str(name): (count, of_language[1][name]) for name, count in of_language[0].most_common()
        },
        clauses=[
            ClauseFigures(
                text,
                first=int((first == i + 1).sum()),
                alone=int(fails[i].sum()),
                last=int((fails[i] & (num_fails == 1)).sum()),
            )
            for i, text in enumerate(where.clauses)
        ],
        edge=shown,
        changed_text=changes_by_rule(run.tree.split(source, "train")),
        changes=changed_samples(run, source, sample) if sample else [],
    )


def explain_selection(run: Run, doc_id: str) -> dict[str, Any]:
    """The attributes of a training document, and the decision of the source's expressions: `keep`,
    `dropped_by` (a clause) and `why` (a line), and with `repeat` also `times_read`; None if the
    shard was not selected with them."""
    shard = run.tree.shard_of(parse_doc_id(doc_id).rel)
    number = list(open_shard_documents(shard).documents.doc_ids).index(doc_id)
    attributes = {}
    for name, part in shard_parts(run, shard).items():
        if name in _TOLD_ELSEWHERE:
            continue
        table = part.read(list(part.schema()))
        for column in part.schema():
            attributes[f"{name}.{column}"] = table.column(column)[number].as_py()
    verdict = None
    path = shard.selection
    table = run.config.curation
    rule = table.where_of(shard.source)
    made_from = read_footer(path).fingerprints if rule is not None and path.is_file() else {}
    if made_from.get("where") == rule and made_from.get("repeat") == table.repeat and made_from:
        row = read_attribute(path).slice(number, 1).to_pylist()[0]
        dropped = None if row["keep"] else clauses_of(shard)[row["reason"] - 1]
        why = why_left_out(run, shard, [number]).get(number)
        verdict = {"keep": row["keep"], "dropped_by": dropped, "why": why}
        if table.repeat is not None:
            verdict |= {"times_read": row.get(REPEAT, int(row["keep"])), "repeat": table.repeat}
    return {"attributes": attributes, "selection": verdict}


def _edge(
    where: Where, table: pa.Table, clauses: np.ndarray, opened: ShardDocuments, sample: int
) -> Iterator[_Edge]:
    """The first documents of a shard, by the digests of their ids, that only one clause drops."""
    numbers = np.flatnonzero((~clauses).sum(axis=0) == 1).tolist()
    doc_ids = opened.documents.doc_ids
    chosen = nsmallest(sample, ((sha256_json(doc_ids[i]), i) for i in numbers))
    lasts = np.cumsum([len(file.spans) for file in opened.files])
    for digest, i in chosen:
        k = int(np.searchsorted(lasts, i, side="right"))
        file = opened.files[k]
        # The index is negative, counted back from lasts[k], the number of the first document after
        # this file.
        start, end = file.spans[i - int(lasts[k])].tolist()
        values = {label: table.column(label)[i].as_py() for label in where.columns}
        clause = where.clauses[int(clauses[:, i].argmin())]
        row = {"doc_id": doc_ids[i], "clause": clause, **values}
        yield _Edge(digest, row, file.tokens[start : end - 1])
