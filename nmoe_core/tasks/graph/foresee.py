"""Computes in memory the changes that a run would make: flipped decisions, and token counts.

Uses the existing scores. If a model has to run first (new heads, new text, documents that only the
judge can decide), the figures are marked as open (not known yet).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from loader.files.format import load_manifest
from loader.files.regular import open_file
from nmoe_core.base.errors import NmoeError
from nmoe_core.config.tree import ShardPaths
from nmoe_core.tasks.graph.graded import GradeLooks
from nmoe_core.tasks.graph.states import Graph, State

if TYPE_CHECKING:
    from nmoe_core.quality.calibration.summary_file import Calibration

_SHOWN = 20  # number of flips to list


@dataclass(frozen=True, slots=True)
class ShardFlips:
    """Effects of grading a shard again: number of documents, flipped decisions, and decisions that
    are open until the models have run."""

    documents: int
    flips: int = 0
    unsure: int = 0


@dataclass
class Foreseen:
    """Changes from making every output that is not current.

    Attributes:
        shards: Flips in each shard that will be graded, by (source, partition).
        flips: Some flipped decisions: document id, decision now, decision after the run.
        tokens: Curated tokens per source, now and after the run; None if not known yet.
        kept: Tokens of the kept documents per source after the run, each document once.
        problem: Why decisions cannot be computed; empty if they can be computed.
    """

    shards: dict[tuple[str, str], ShardFlips] = field(default_factory=dict)
    flips: list[tuple[str, str, str]] = field(default_factory=list)
    tokens: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    kept: dict[str, int | None] = field(default_factory=dict)
    problem: str = ""


def foresee(graph: Graph, sources: list[str]) -> Foreseen:
    """Compute the changes; reads only scores of shards that are not current."""
    found = Foreseen()
    grades: GradeLooks | None = None
    if not graph.run.config.grading.is_off:
        try:
            grades = _grades_then(graph)
        except (NmoeError, OSError) as error:
            found.problem = " ".join(str(error).split())
    for source in sources:
        _foresee_source(graph, source, grades, found)
    return found


def _grades_then(graph: Graph) -> GradeLooks | None:
    """The inputs that scores will have; None if labels or heads will still change."""
    (state,) = graph.of("hydra/calibration")
    if state.is_current:
        return graph.grades
    is_known = state.status == "stale" and not state.waits_for
    if not is_known or any(change.kind != "setting" for change in state.changes):
        return None
    calibration: Calibration | None = graph.models.refitted()
    return None if calibration is None else GradeLooks(graph.run, calibration)


def _foresee_source(graph: Graph, source: str, grades: GradeLooks | None, found: Foreseen) -> None:
    run = graph.run
    before = after = kept = 0
    is_open = False
    manifest = run.tree.curated_manifest(source)
    if manifest.is_file():
        before = load_manifest(manifest).total_tokens
    for shard in run.tree.shards(source, run.config.prep.num_shards):
        number = f"{shard.bucket:04d}"
        (scored,) = graph.of(f"{source}/quality_scores", number)
        decisions = None
        if scored.is_current or run.config.grading.is_off:
            decisions = _decisions(shard) if shard.scores.is_file() else None
        else:
            decisions = _graded_then(shard, scored, grades, found)
        tokens = None if decisions is None else _kept_tokens(graph, shard, decisions)
        if tokens is None:
            is_open = True
        else:
            kept += tokens[0]
            after += tokens[1]
    found.tokens[source] = before, None if is_open else after
    found.kept[source] = None if is_open else kept


def _graded_then(
    shard: ShardPaths, state: State, grades: GradeLooks | None, found: Foreseen
) -> list[str] | None:
    """The decisions of a shard after grading again; None if they are open."""
    if not shard.manifest.is_file():
        return None
    documents = load_manifest(shard.manifest).total_documents
    place = shard.source, f"{shard.bucket:04d}"
    if state.status == "missing" or not shard.scores.is_file():
        found.shards[place] = ShardFlips(documents)
        return None
    changed = None
    if grades is not None:
        try:
            changed = {change.name for change in grades.shard(shard).changes()}
        except (NmoeError, OSError):
            changed = None
    if grades is None or changed is None or not changed <= {"hydra/calibration"}:
        found.shards[place] = ShardFlips(documents, 0, documents)
        return None
    flips = unsure = 0
    decisions: list[str] = []
    for row in rows_of(shard.scores):
        decision = grades.calibration.decide_again(row, grades.settings[1])
        unsure += decision is None
        decisions.append(decision or row["decision"])
        if decision is not None and decision != row["decision"]:
            flips += 1
            if len(found.flips) < _SHOWN:
                found.flips.append((row["doc_id"], row["decision"], decision))
    found.shards[place] = ShardFlips(documents, flips, unsure)
    return None if unsure else decisions


def _decisions(shard: ShardPaths) -> list[str]:
    return [row["decision"] for row in rows_of(shard.scores)]


def rows_of(scores: Path) -> Iterator[dict[str, Any]]:
    """The rows of `quality_scores.jsonl`."""
    with open_file(scores) as file:
        yield from map(orjson.loads, file)


def _kept_tokens(graph: Graph, shard: ShardPaths, decisions: list[str]) -> tuple[int, int] | None:
    """Tokens of a shard that curation would keep with these decisions, each document once and as
    often as it is read; None if open."""
    from nmoe_core.curate.shards.inputs import document_lengths
    from nmoe_core.curate.takedown.record import load_takedown
    from nmoe_core.shards.documents import shard_files

    run = graph.run
    number = f"{shard.bucket:04d}"
    if run.config.curation.resume_from_token:
        return None
    read = graph.of(f"{shard.source}/shards", number)
    if run.config.curation.rules(shard.source):
        read = [*read, *_attributes_of(graph, shard.source, number)]
    if not all(state.is_current for state in read):
        return None
    try:
        manifest = load_manifest(shard.manifest)
        lengths = document_lengths(shard_files(run.tree.data, manifest))
        times = _selected(graph, shard, decisions)
        takedown = load_takedown(shard, manifest)
    except (NmoeError, OSError):
        return None
    if len(lengths) != len(times):
        return None
    if takedown is not None:
        times = times * ~takedown.gone
    return int((lengths * (times > 0)).sum()), int((lengths * times).sum())


def _attributes_of(graph: Graph, source: str, number: str) -> list[State]:
    """The attributes and topics that `where` can read."""
    kinds = [key for key in graph.keys if key.startswith(f"{source}/attributes/")]
    read = [*kinds, f"{source}/topics", "curation/duplicates"]
    return [state for key in read for state in graph.of(key, number)]


def _selected(graph: Graph, shard: ShardPaths, decisions: list[str]) -> np.ndarray:
    """How often each document is read, integer or bool `[N]`."""
    run = graph.run
    if not run.config.curation.rules(shard.source):
        return np.isin(np.asarray(decisions, np.str_), run.config.curation.include)
    import pyarrow as pa

    from nmoe_core.tasks.selection.expression import opened
    from nmoe_core.tasks.selection.view import read_columns

    where = opened(run, shard.source)
    table = read_columns(run, shard, where.schema, where.columns)
    given: Mapping[str, list[str]] = {"quality.decision": decisions}
    for name, values in given.items():
        if name in table.column_names:
            place = table.column_names.index(name)
            column = pa.array(values, table.schema.field(name).type)
            table = table.set_column(place, name, column)
    return where.times_read(where.evaluate(table), str)
