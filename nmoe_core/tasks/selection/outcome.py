"""The outcome of each document of a run, kept or dropped, and the reason in words."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from loader.files.format import load_manifest
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.takedown.record import TAKEN_DOWN, load_takedown
from nmoe_core.quality.calibration.graded import read_graded
from nmoe_core.tasks.selection.reasons import COPIES, describe_clause, meaning, without_preset

_COPY = ("exact_of", "near_of", "near_jaccard")


class Outcome(NamedTuple):
    """Documents of a shard, in its order."""

    codes: np.ndarray
    """Unsigned `[N]`: 0 for a kept document, else the number of its reason."""
    reasons: list[str]
    """Reasons by number, from 1."""


def rule_of(run: Run) -> str:
    """The condition for kept documents of all sources, as SQL."""
    table = run.config.curation
    shared = table.shared_rule
    own = [f"(source <> '{k}' or {_grouped(sql)})" for k, sql in table.where_by_source.items()]
    return " and ".join([_grouped(shared), *own]) if own else shared


def _grouped(sql: str) -> str:
    """An expression in parentheses, which a comment at its end must not hide."""
    return f"({sql}\n)" if "--" in sql else f"({sql})"


def outcome_of(run: Run, shard: ShardPaths) -> Outcome:
    """The decisions of the source's expressions, or of `include`, for the documents of a shard;
    documents of a takedown are always dropped. Raises FormatError if the shard is not selected or
    graded yet."""
    codes, reasons = _ruled(run, shard)
    takedown = load_takedown(shard, load_manifest(shard.manifest))
    if takedown is None:
        return Outcome(codes, reasons)
    number = len(reasons) + 1
    codes = np.where(takedown.gone, number, codes.astype(np.min_scalar_type(number)))
    return Outcome(codes, [*reasons, TAKEN_DOWN])


def _ruled(run: Run, shard: ShardPaths) -> Outcome:
    if run.config.curation.rules(shard.source):
        from nmoe_core.shards.attribute_file import read_attribute

        codes = read_attribute(shard.selection, ["reason"]).column("reason").to_numpy()
        return Outcome(codes, [*map(describe_clause, clauses_of(shard))])
    included = set(run.config.curation.include)
    decisions = ["drop", "band", "keep"]
    numbers = {name: 0 if name in included else i for i, name in enumerate(decisions, 1)}
    codes = [numbers[row["decision"]] for row in read_graded(shard.graded).rows()]
    return Outcome(np.array(codes, np.uint8), [f"judged {name}" for name in decisions])


def clauses_of(shard: ShardPaths) -> list[str]:
    """The clauses of a committed selection, ordered by number."""
    from nmoe_core.shards.attribute_file import read_footer

    metadata = read_footer(shard.selection).schema.field("reason").metadata
    return json.loads(metadata[b"clauses"])


def left_out(run: Run, sources: Iterable[str]) -> dict[str, dict[str, int]]:
    """Number of dropped documents by reason (most first) and source. Raises as `outcome_of`."""
    found: dict[str, Counter[str]] = {}
    for source in sources:
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            codes, reasons = outcome_of(run, shard)
            counts = np.bincount(codes, minlength=len(reasons) + 1)[1:].tolist()
            for reason, count in zip(reasons, counts):
                if count:
                    found.setdefault(reason, Counter())[source] += count
    ordered = sorted(found.items(), key=lambda item: -item[1].total())
    return {reason: dict(counts) for reason, counts in ordered}


def why_left_out(run: Run, shard: ShardPaths, numbers: Sequence[int]) -> dict[int, str]:
    """For each dropped document among `numbers` of a shard, by number: a line with the reason and
    the values that caused it. Raises as `outcome_of`."""
    codes, reasons = outcome_of(run, shard)
    dropped = [i for i in numbers if codes[i]]
    copies = copies_of(run, shard, dropped)
    values = _values(run, shard, dropped, codes)
    found = {}
    for i in dropped:
        reason = reasons[codes[i] - 1]
        copy = copies.get(i, "")
        of_clause = values.get(i, {})
        shown = ", ".join(
            str(value)
            if len(of_clause) == 1 and without_preset(reason).startswith(meaning(name))
            else f"{name} {value}"
            for name, value in of_clause.items()
        )
        line = f"{reason}: {shown}" if shown else reason
        found[i] = copy if copy and reason == COPIES else ", ".join(filter(None, (line, copy)))
    return found


def copies_of(run: Run, shard: ShardPaths, numbers: Sequence[int]) -> dict[int, str]:
    """For each copy among `numbers`, a line that names its original document; empty if the run does
    not record `duplicates`."""
    path = shard.attribute("duplicates")
    if "duplicates" not in run.config.attributes.use or not path.is_file() or not numbers:
        return {}
    from nmoe_core.shards.attribute_file import read_attribute

    rows = zip(numbers, read_attribute(path, list(_COPY)).take(list(numbers)).to_pylist())
    found = {}
    for i, row in rows:
        if row["exact_of"] is not None:
            found[i] = f"exact copy of {row['exact_of']}"
        elif row["near_of"] is not None:
            found[i] = f"near copy, {row['near_jaccard']:.0%} similar to {row['near_of']}"
    return found


def _values(
    run: Run, shard: ShardPaths, numbers: Sequence[int], codes: np.ndarray
) -> dict[int, dict[str, object]]:
    """For each document, the values of the columns in its clause."""
    if not run.config.curation.rules(shard.source) or not numbers:
        return {}
    from nmoe_core.tasks.selection.view import read_columns, run_schema

    clauses = clauses_of(shard)
    schema = run_schema(run, shard.source)
    named = [[label for label in schema if _names(clause, label)] for clause in clauses]
    named.append([])  # a takedown does not read a column
    wanted = sorted({label for i in numbers for label in named[codes[i] - 1]})
    columns = read_columns(run, shard, schema, wanted).take(list(numbers))
    rows = dict(zip(numbers, columns.to_pylist()))
    return {
        i: {label.partition(".")[2]: _shown(rows[i][label]) for label in named[codes[i] - 1]}
        for i in numbers
    }


def _names(clause: str, label: str) -> bool:
    column = re.escape(label.partition(".")[2])
    return re.search(rf"(?<![\w']){column}(?![\w'])", without_preset(clause)) is not None


def _shown(value: object) -> object:
    if value is None:
        return "no value"
    return round(value, 3) if isinstance(value, float) else value
