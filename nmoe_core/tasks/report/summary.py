"""The summary table of a run, and sample rows from the outputs of tasks.

Sample rows name documents by id and have no text, because the event log stores the rows.
"""

from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from typing import Any

import orjson

from loader.__main__ import fingerprint
from loader.files.format import load_manifest, read_json_object
from loader.files.regular import open_file, read_file
from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from loader.rows.stream import Stream
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.base.settings import THRESHOLDS, last_grader
from nmoe_core.config.run import Run
from nmoe_core.curate.shards.combine import repeats_of
from nmoe_core.labels.compare import panel_agreement
from nmoe_core.labels.cost import sum_of
from nmoe_core.labels.jobs import labelling_of
from nmoe_core.labels.slices import LABEL_SHARDS
from nmoe_core.prep.mixture import run_sources
from nmoe_core.quality.calibration.graded import read_graded, read_grading_summary, scored_by
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.shards.documents import document_ids
from nmoe_core.tasks.backbone import backbone_kind
from nmoe_core.tasks.report.account import run_account
from nmoe_core.tasks.selection.changes import changed_text
from nmoe_core.tasks.selection.composition import composition, most_moved

DIGEST_STEPS = 8
_RANKED = ("spearman", "spearman_within_source", "auc_better_half", "precision_top_fifth")
_RANKED += ("false_drops_bottom_fifth", "spearman_student", "gain_over_student")
_SCOREBOARD = ("n", "families", *_RANKED, *(f"{name}_ci95" for name in _RANKED), "mae_aggregate")
_SCOREBOARD += ("spearman_source_only", "spearman_length_only", "noise_ceiling")
_SCOREBOARD += ("noise_ceiling_ci95", "noise_ceiling_documents")
_SCOREBOARD += ("chance_top_fifth", "chance_bottom_fifth")
_SCOREBOARD += ("num_alike", "spearman_not_alike", "spearman_not_alike_ci95")
Row = dict[str, str | int | float]


def run_report(run: Run) -> dict[str, Any]:
    """The content of the table as JSON values; FormatError if a task has not run
    (E-MANIFEST-MISSING)."""
    if not run.tree.plan.is_file():
        raise FormatError(
            "this run has no loader plan yet",
            where=run.tree.plan,
            do="run `nmoe run`",
            code="E-MANIFEST-MISSING",
        )
    is_off = run.config.grading.is_off
    calibration = {} if is_off else read_calibration(run.tree.calibration_summary)
    plan = load_plan(run.tree.plan)
    digest, num_steps = fingerprint(plan, DIGEST_STEPS)
    passes = passes_of(plan)
    names = [source.name for source in run_sources(run)]
    moved = composition(run, names).items()
    return {
        "root": shown(run.tree.root),
        "sources": [_source(run, plan, name, passes) for name in names],
        "account": run_account(run, plan),
        "changed_text": changed_text(run, names),
        "composition": {kind: most_moved(found) for kind, found in moved},
        "oracle": None
        if is_off
        else f"{calibration['scorer_model']}/{calibration['scorer_version']}",
        "backbone": backbone_kind(run),
        "grader": "none" if is_off else calibration.get("grader", "hydra"),
        "grader_choice": calibration.get("grader_choice"),
        "heads": {} if is_off else scoreboard(run),
        "few_labels": [] if is_off else few_labels_of(run),
        "cost": [] if is_off else grader_costs(run),
        "labels": [] if is_off else labelling_of(run).without_key().account(),
        "raters": panel_agreement(run.tree, run.config.oracle.panel),
        "dropping": calibration.get("dropping"),
        "thresholds": {key: calibration[key] for key in THRESHOLDS if key in calibration},
        "plan": {
            "path": shown(run.tree.plan),
            "plan_hash": plan.plan_hash,
            "steps": plan.num_sequences // plan.batch_size,
            "batch_size": plan.batch_size,
            "seq_len": plan.seq_len,
            "digest_steps": num_steps,
            "digest": digest,
        },
    }


def _source(run: Run, plan: LoaderPlan, name: str, passes: Mapping[str, float]) -> dict[str, Any]:
    data = load_manifest(run.tree.manifest(name))
    curated = load_manifest(run.tree.curated_manifest(name))
    diversity = read_summary(run.tree.curation(name))["diversity"]["concat"]
    grades = [
        read_grading_summary(shard.graded)
        for shard in run.tree.shards(name, run.config.prep.num_shards)
    ]
    # With buckets, the figures of the source are those of its buckets together.
    own = [s for s in plan.sources if s.name.partition("/")[0] == name]
    taken = plan.taken()
    is_counted = bool(own) and all(s.name in passes for s in own)
    read = sum(taken[s.name] * passes[s.name] * s.num_tokens for s in own) if is_counted else 0
    tokens = sum(s.num_tokens for s in own)
    decided = (
        {} if run.config.grading.is_off else {"keep": "kept", "band": "band", "drop": "dropped"}
    )
    return {
        "source": name,
        "documents": data.total_documents,
        "tokens": data.total_tokens,
        **{column: sum(grade[key] for grade in grades) for column, key in decided.items()},
        "curated": curated.total_documents,
        "curated_tokens": curated.total_tokens,
        **({} if run.config.curation.repeat is None else _repeated(run, name)),
        "sequences": sum(taken[s.name] for s in own),
        "epochs": round(read / max(1, tokens), 2) if is_counted else None,
        "topics_before": diversity["before"]["mean"] if diversity["before"] else None,
        "topics_after": diversity["after"]["mean"] if diversity["after"] else None,
        "topics_ceiling": diversity["after"]["ceiling"] if diversity["after"] else None,
    }


def _repeated(run: Run, name: str) -> dict[str, int]:
    """The further readings of repeated documents among the curated ones, and their tokens."""
    return dict(zip(("repeats", "repeat_tokens"), repeats_of(run.tree, name)))


def passes_of(plan: LoaderPlan) -> dict[str, float]:
    """Passes over each source in one of its sequences, as the loader counts them."""
    with closing(Stream(plan, "train")) as stream:
        return dict(zip(stream.source_names, stream.schedule.passes.tolist()))


def head_headers(run: Run) -> dict[str, dict[str, Any]]:
    """Headers of the existing graders; probe, judge and student are optional."""
    from nmoe_core.quality.heads.head_files import read_header

    paths = {kind: getattr(run.tree, kind) for kind in ("student", "probe", "judge")}
    return {kind: read_header(path) for kind, path in paths.items() if path.is_file()}


def scoreboard(run: Run) -> dict[str, dict[str, dict[str, Any]]]:
    """Metrics of each grader by split, `val` and `test`; empty for a split without labels. Metrics
    that older files do not have are None."""

    def shown(figures: dict[str, Any] | None) -> dict[str, Any]:
        return {key: figures.get(key) for key in _SCOREBOARD} if figures else {}

    return {
        kind: {"val": shown(header["metrics"]), "test": shown(header.get("test_metrics"))}
        for kind, header in head_headers(run).items()
    }


def few_labels_of(run: Run) -> list[dict[str, Any]]:
    """What a few labels buy: the rows of `few_labels` of the probe, else of the student."""
    headers = head_headers(run)
    found = (headers[kind].get("few_labels") for kind in ("probe", "student") if kind in headers)
    return next((rows for rows in found if rows), [])


def grader_costs(run: Run) -> list[dict[str, Any]]:
    """`hours_per_million_documents` of each `grader`, measured by the last calibration that ran it;
    empty if no calibration ran yet."""
    path = run.tree.calibration_cost
    graders = read_json_object(path).get("graders") if path.is_file() else None
    return graders if isinstance(graders, list) else []


def sample_documents(run: Run, source: str, split: str, bucket: int, count: int = 4) -> list[Row]:
    """The first documents of a shard: id and number of tokens."""
    path = run.tree.shard(source, bucket, split).manifest
    documents = islice(document_ids(run.tree.data, load_manifest(path)), count)
    return [{"doc_id": str(one), "tokens": one.end - one.start} for one in documents]


def sample_grades(run: Run, source: str, bucket: int, count: int = 7) -> list[Row]:
    """Documents of a graded shard at evenly spaced ranks of their score, lowest first: decision,
    the score and the grader that decided, and the probe's score."""
    graded = read_graded(run.tree.shard(source, bucket).graded)
    path = graded.path
    judge = last_grader(graded.summary.get("grader"))
    with open_file(path) as file:
        scores = [orjson.loads(line)["aggregated"] for line in file]
    ranked = sorted(range(len(scores)), key=scores.__getitem__)
    num = min(count, len(ranked))
    chosen = [ranked[i * (len(ranked) - 1) // max(num - 1, 1)] for i in range(num)]
    wanted = set(chosen)
    with open_file(path) as file:
        rows = {i: orjson.loads(line) for i, line in enumerate(file) if i in wanted}
    return [
        {
            "decision": row["decision"],
            "score": round(row["aggregated"], 3),
            **({} if row["q_probe"] is None else {"probe": round(row["q_probe"], 3)}),
            "by": scored_by(row, judge),
            "doc_id": row["doc_id"],
        }
        for row in (rows[i] for i in chosen)
    ]


def sample_attribute(run: Run, source: str, name: str, bucket: int, count: int = 3) -> list[Row]:
    """The `count` lowest and highest documents of a shard by the first column of an attribute whose
    numbers differ; empty if there is no such column."""
    from nmoe_core.shards.attribute_file import numbers, read_attribute

    table = read_attribute(run.tree.shard(source, bucket).attribute(name))
    found = numbers(table).items()
    column = next((n for n, values in found if len(values) and values.min() != values.max()), None)
    if column is None:
        return []
    rows = table.select(["doc_id", column]).to_pylist()
    ranked = sorted((row for row in rows if row[column] is not None), key=lambda row: row[column])
    count = min(count, len(ranked) // 2)
    picked = [*ranked[:count], *ranked[len(ranked) - count :]]
    return [{column: round(float(row[column]), 4), "doc_id": row["doc_id"]} for row in picked]


def label_ledger(run: Run) -> list[Row]:
    """All labels of a run so far: a row for the total, one per model and kind of question with what
    its answers cost, and one per finished slice. Raises as `Labelling.account`, and LabelError if a
    summary was changed (E-LABEL-CORRUPT)."""
    from nmoe_core.labels.label_files import SUMMARY_NAME, read_summary

    slices: list[Row] = []
    for split, i in LABEL_SHARDS:
        path = run.tree.label_shard(split, i) / SUMMARY_NAME
        if path.is_file():
            found = read_summary(path)
            counts = {"documents": found["total"], "parsed": found["parsed"]}
            slices.append({"part": f"{split}-{i:02d}", **counts})
    asked = labelling_of(run).without_key().account()
    spent = ("requests", "retries", "tokens_in", "tokens_out")
    of_models: list[Row] = [
        {
            "part": f"{one['rater']}: {one['questions']}",
            "cost": "unknown" if one["cost"] is None else one["cost"],
            **{key: one[key] for key in spent},
        }
        for one in asked
    ]
    cost = sum_of(one["cost"] for one in asked)
    total: Row = {"part": "total", "cost": "unknown" if cost is None else cost}
    total |= {key: sum(int(row[key]) for row in slices) for key in ("documents", "parsed")}
    total |= {key: sum(one[key] for one in asked) for key in spent}
    return [{key: row.get(key, "") for key in total} for row in (total, *of_models, *slices)]


def sample_labels(run: Run, key: str, count: int = 5) -> list[Row]:
    """The first parsed labels of a slice: scores, as one column in the order of the rubric, and
    document id."""
    from nmoe_core.labels.label_files import SCORES_NAME

    split, _, number = key.rpartition("-")
    lines = read_file(run.tree.label_shard(split, int(number)) / SCORES_NAME).splitlines()
    parsed = (record for record in map(orjson.loads, lines) if record["ok"])
    return [
        {
            "aggregated": round(record["aggregated"], 3),
            "scores": ",".join(str(record["scores"][name]) for name in run.rubric.dimensions),
            "doc_id": record["doc_id"],
        }
        for record in islice(parsed, count)
    ]
