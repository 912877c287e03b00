"""The page of an asset in the UI: description, schema, links, and the format of facts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

# Name, type and meaning of each column of an asset's rows, then its parent columns.
Columns = Sequence[tuple[str, ...]]
LINEAGE = "dagster/column_lineage"
_TYPES = {str: "string", int: "integer", float: "number"}
_DOC_ID = ("doc_id", "string", "source//relative path#s=start:e=end")
_SOURCE = ("source", "string", "name of the source")
_TEXT = "shards.tokens"
DOCUMENT_ROWS = (("id", "string", "id in the source"), ("text", "string", "text of the document"))
SHARD_ROWS = (
    (*_DOC_ID, "documents.id"),
    ("tokens", "array", "token ids of the text, then the EOS token", "documents.text"),
)
SLICE_ROWS = ((*_DOC_ID, "shards.doc_id"), _SOURCE)
LABEL_ROWS = (
    (*_DOC_ID, "docid_slices.doc_id"),
    _SOURCE,
    ("ok", "bool", "whether the answer is a set of scores", _TEXT),
    ("scores", "object", "an integer grade for each dimension of the rubric", _TEXT),
    (
        "aggregated",
        "number",
        "weighted mean of the scores, from 0 (all lowest) to 1 (all highest)",
        _TEXT,
    ),
    ("snippet", "string", "start of the text", _TEXT),
    ("scorer_model", "string", "name of the scorer"),
    ("scorer_version", "string", "version of the scorer"),
    ("rubric_hash", "string", "hash of the rubric"),
)
GRADE_ROWS = (
    (*_DOC_ID, "shards.doc_id"),
    _SOURCE,
    (
        "scores",
        "object",
        "scores of the judge or the student, by dimension; null after an early exit",
        _TEXT,
    ),
    ("aggregated", "number", "weighted mean of the scores that decided, 0..1", _TEXT),
    ("decision", "string", "drop, band or keep", _TEXT),
    (
        "q_probe",
        "number",
        "weighted mean of the probe's scores, 0..1; null from the student",
        _TEXT,
    ),
    ("early_exit", "bool", "whether the student or the probe already dropped it", _TEXT),
    ("probe_scores", "object", "scores of the probe; null from the student", _TEXT),
)
TOPIC_ROWS = (("topic", "integer", "nearest centroid, in the order of the documents", _TEXT),)
ATTRIBUTE_ROWS = (
    (*_DOC_ID, "shards.doc_id"),
    ("text_sha256", "string", "SHA-256 of the text, 32 bytes", _TEXT),
)
SELECTION_ROWS = (
    *ATTRIBUTE_ROWS,
    ("keep", "bool", "whether all clauses are true"),
    ("reason", "integer", "number of the first false clause, from 1; 0 if kept"),
)
BUCKET_ROWS = (*ATTRIBUTE_ROWS, ("bucket", "string", "its bucket, such as science/q3"))
REPEAT_ROWS = (("repeat", "integer", "how often a pass reads it; absent if none more than once"),)
LINEAGE_ROWS = (
    ("parent_doc_id", "string", "id in the parent shard", "quality_scores.doc_id"),
    ("parent_index", "integer", "number in the parent shard"),
    ("topic", "integer", "nearest centroid", "topics.topic"),
    ("decision", "string", "decision of the grader", "quality_scores.decision"),
    ("aggregated", "number", "score of the document, 0..1", "quality_scores.aggregated"),
)

# Meanings of facts whose names do not explain them; an asset's description ends with the facts that
# it shows.
_MEANINGS = {
    "documents_reused": "documents whose tokens were reused from earlier shards",
    "documents_tokenized": "tokenized in this run; 0 if all requested shards were current",
    "shards_made": "requested shards that this run wrote",
    "shards_current": "requested shards that were current already",
    "changed": "whether this run wrote the file; false if the file was current",
    "train, val, test": "documents of each split",
    "computed": "documents whose rows this run computed; the other rows were reused",
    "kept": "documents that the rule keeps",
    "readings": "how often a pass reads documents, each as often as [curation] repeat says",
    "num_repeats, num_repeat_tokens": "readings of documents beyond their first, and their tokens",
    "copies": "documents of each source, with the numbers of exact and near copies",
    "shards_written": "shards whose rows changed",
    "parse_rate": "share of answers that are a set of scores",
    "salvaged": "parsed labels that were extracted from an answer with other text; heads do "
    "not use them by default",
    "labels_reused": "documents whose text the oracle had labelled before",
    "oracle_calls": "documents scored in this run; 0 if the slice was current",
    "failures": "labels without scores, by finish reason",
    "requests, retries": "requests to the oracle's server in this run, and how many of them were "
    "about a text that had been sent before",
    "spent": "what the tokens of this run cost, at the prices of [oracle.http]",
    "tokens_in, tokens_out": "tokens of prompts and of answers in this run, as the server counts",
    "ledger": "all labels so far, in the last event of a run: the total, the cost by model and "
    "kind of question, and each finished slice",
    "n": "val documents that measure it; it was not fitted on them",
    "spearman": "rank correlation with the oracle's aggregate, -1..1",
    "spearman_within_source": "the same rank correlation within each source, averaged",
    "mae_aggregate, r2_aggregate": "mean absolute error, and explained share of the variance",
    "auc_better_half": "probability that a document from the half that the oracle scores higher "
    "is ranked above a document from the other half",
    "precision_top_fifth": "share of the top fifth that is also in the oracle's top fifth",
    "false_drops_bottom_fifth": "share of the bottom fifth that is in the oracle's better half",
    "spearman_source_only, spearman_length_only": "rank correlation by source or length alone",
    "spearman_student": "rank correlation of a student without a backbone on the same labels",
    "gain_over_student": "rank correlation of the head minus rank correlation of the student",
    "num_failed": "documents left out because their states are not finite",
    "head_steps": "steps trained in this run; 0 if the head was current",
    "backbone_documents": "documents scored in this run; the other scores were reused",
    "backbone_tokens": "tokens that the backbone read in this run; 0 if the output was current",
    "tau_drop, tau_keep": "a document is dropped if its aggregate is below tau_drop, kept from "
    "tau_keep on, and otherwise in the band",
    "groups": "thresholds and kept shares of each source or language with its own targets",
    "target_keep_of_all": "share of all documents that would be kept if each group met its target",
    "tau_student": "a document whose student score is below it is dropped without the backbone",
    "tau_probe": "a document whose probe score is below it is dropped without the judge",
    "achieved_keep, achieved_band, achieved_drop": "share of val documents with each decision",
    "count": "val documents: one half fits the thresholds, the other measures the shares",
    "cost": "hours per million documents like the val documents, on the machine of the calibration",
    "early_exits": "documents dropped without the judge, by the student or the probe",
    "grader": "what grades: hydra (probe and judge), stacked (student and probe) or student",
    "failed": "documents dropped because their states are not finite",
    "window_topics": "mean of distinct topics in a window, the length of a training sequence",
    "percent_of_ceiling": "window_topics in percent of the highest expected mean of any order",
    "wrap_tv_8": "total variation between the topics of the first and the last 8 windows, 0 to 1",
    "before, after, shuffle": "in the source's order, in the chosen order, in a random order",
    "min_full, last, std": "topics in the poorest full and in the last window; standard deviation",
    "kl_mean": "KL divergence of a window's topics from all topics, in nats; lower is more diverse",
    "discrepancy_max": "largest deviation of a topic from an even distribution, in windows",
    "padding": "share of window tokens that are padding",
    "cut_documents": "documents that would fit in one window but are split over several",
    "changed_text": "what transforms replaced: documents, spans and characters of each rule",
    "left_out": "documents that are not curated, by the first reason that applies",
    "composition": "languages, topics and sources whose shares of the tokens changed most",
    "account": "totals of files, documents and tokens, and the amounts removed or added",
    "not_shown": "the reason why this page does not compare the sources",
    "misaligned_shards": "shards that start at another position in a window than planned",
    "steps, sequences": "length of the run; a step reads batch_size sequences",
    "sequences_SOURCE": "sequences of each source",
    "buckets_SOURCE": "buckets of each source",
    "remix_NNNN": "shares before and after each remix",
    "files_sorted": "token files indexed in this run; 0 if no file changed",
    "files_sent, bytes_sent": "uploaded in this run; 0 if the store had all files",
    "files_replaced": "files in the store that were replaced by other content",
    "may_flip_least, may_flip_most": "bounds of changed decisions, at 95 % if a sample was graded",
    "sampled, sampled_flips": "documents graded for this estimate, and changed decisions",
}
STUDENT_FACTS = (
    *("n", "spearman", "spearman_within_source", "mae_aggregate, r2_aggregate"),
    *("auc_better_half", "precision_top_fifth", "false_drops_bottom_fifth"),
    "spearman_source_only, spearman_length_only",
)
HEAD_FACTS = (
    *(*STUDENT_FACTS, "spearman_student", "gain_over_student"),
    *("num_failed", "head_steps", "backbone_tokens"),
)
ORDER_FACTS = (
    *("window_topics", "percent_of_ceiling", "wrap_tv_8", "before, after, shuffle"),
    *("min_full, last, std", "kl_mean", "discrepancy_max", "padding", "cut_documents", "changed"),
)


def with_facts(text: str, *facts: str) -> str:
    """A description in Markdown: the asset, and the meaning of its metadata."""
    meanings = (f"- `{fact.replace(', ', '`, `')}`: {_MEANINGS[fact]}" for fact in facts)
    return "\n".join((text, "", *meanings))


def curated_group(source: str) -> str:
    """The group of a source's assets that come after its scores. A source's assets that come before
    the labels are in the group of the source, so that the groups form an acyclic graph: sources,
    `hydra`, curated sources, `mixture`.
    """
    return f"{source}_curated"


def asset_metadata(
    *, columns: Columns = (), downstream: Iterable[dg.AssetKey] = ()
) -> dict[str, Any]:
    """Definition metadata of an asset: the schema of its rows, and links to the assets that read
    it.

    The description of a column names its parent column, since only Dagster+ shows column lineage.
    """
    described = [
        dg.TableColumn(name, kind, "; from ".join((description, *made_from)))
        for name, kind, description, *made_from in columns
    ]
    schema = {"dagster/column_schema": dg.TableSchema(columns=described)} if described else {}
    links = {f"leads to {key.to_user_string()}": dg.MetadataValue.asset(key) for key in downstream}
    return {**schema, **links}


def column_lineage(
    rows: Columns, key: dg.AssetKey, deps: Iterable[dg.AssetKey]
) -> dict[str, dg.TableColumnLineage]:
    """Metadata that links each column of an asset to its parent columns.

    `shards.tokens` is the column `tokens` of the inputs named `shards`, or of the asset `shards` of
    the same source.
    """

    def parents(column: str) -> list[dg.TableColumnDep]:
        name, _, of_name = column.partition(".")
        found = [dep for dep in deps if dep.path[-1] == name]
        found = found or [dg.AssetKey([*key.path[:-1], name])]
        return [dg.TableColumnDep(asset_key=asset, column_name=of_name) for asset in found]

    by_column = {column: parents(made_from[0]) for column, _, _, *made_from in rows if made_from}
    lineage = dg.TableColumnLineage(deps_by_column=by_column)
    return {LINEAGE: lineage} if by_column else {}


def to_metadata(key: str, value: Any) -> Any:
    """A fact as the UI shows it: paths are links, numbers are rounded, an interval and the sentence
    of a choice are text, other mappings are tables."""
    if value is None or value in ({}, ""):
        return "unknown" if value is None else "none"
    if isinstance(value, dict):
        rows = [{"name": str(name), "value": _words(one)} for name, one in value.items()]
        return value.get("sentence") or table(rows)["sample"]
    if key == "path":
        return dg.MetadataValue.path(value)
    if key.endswith("_ci95"):
        return "unknown" if None in value else "{:.4f} to {:.4f}".format(*value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        rows = [{name: str(to_metadata(name, cell)) for name, cell in row.items()} for row in value]
        return table(rows)["sample"]
    return _four_figures(value) if isinstance(value, float) else value


def _words(value: Any) -> str:
    """A value as text, such as `a 1, b 2`."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(
            ": ".join(map(_words, one)) if isinstance(one, list) else _words(one) for one in value
        )
    return str(to_metadata("", value))


def _four_figures(value: float) -> float:
    """The value rounded to four figures for display; files keep the exact value."""
    return float(f"{value:.4g}") if abs(value) < 1000 else float(round(value))


def table(
    rows: Sequence[Mapping[str, str | int | float]], name: str = "sample"
) -> dict[str, dg.TableMetadataValue]:
    """Rows as a table under a name; empty if there are no rows."""
    if not rows:
        return {}
    columns = [dg.TableColumn(column, _TYPES[type(value)]) for column, value in rows[0].items()]
    records = [dg.TableRecord(dict(row)) for row in rows]
    schema = dg.TableSchema(columns=columns)
    return {name: dg.MetadataValue.table(records=records, schema=schema)}


def with_row_count(metadata: Mapping[str, Any], *, of_partition: bool = False) -> dict[str, Any]:
    """Metadata with the number of documents also under the key that Dagster plots over time.

    Dagster reads `dagster/row_count` as the rows of the whole asset, even in the event of a
    partition.
    """
    if "documents" not in metadata:
        return dict(metadata)
    name = "dagster/partition_row_count" if of_partition else "dagster/row_count"
    return {name: metadata["documents"], **metadata}
