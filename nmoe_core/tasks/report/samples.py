"""Sample documents: some kept and some dropped documents of each source, with reasons."""

from collections.abc import Sequence
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.settings import last_grader
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.quality.calibration.graded import read_graded, scored_by
from nmoe_core.shards.documents import DocumentReader, beginning
from nmoe_core.tasks.selection.outcome import outcome_of, why_left_out
from nmoe_core.text.tokenizer import load_tokenizer

_TOKENS = 400
_CHARS = 1200


class Sample(NamedTuple):
    """One document: `reason` is empty if it is kept."""

    doc_id: str
    reason: str
    judged: str
    text: str


def samples(run: Run, source: str, count: int) -> tuple[list[Sample], list[Sample]]:
    """Up to `count` kept and `count` dropped documents of a source, spread over the first shard
    that has kept and dropped documents; if no shard has both, over the first shard. The reasons for
    dropping take turns."""
    shards = run.tree.shards(source, run.config.prep.num_shards)
    for shard in shards:
        codes, reasons = outcome_of(run, shard)
        if codes.any() and not codes.all():
            break
    else:
        shard = shards[0]
        codes, reasons = outcome_of(run, shard)
    kept = _spread(np.flatnonzero(codes == 0), count)
    groups = [_spread(np.flatnonzero(codes == i), count) for i in range(1, len(reasons) + 1)]
    turns = [group[k] for k in range(count) for group in groups if k < len(group)]
    found = _read(run, shard, [*kept, *turns[:count]])
    return found[: len(kept)], found[len(kept) :]


def samples_of_all(run: Run, sources: Sequence[str], count: int) -> list[Sample]:
    """Up to `count` kept and then up to `count` dropped documents, from each source in turn."""
    found = [samples(run, source, count) for source in sources]
    chosen: list[Sample] = []
    for of_kind in zip(*found):
        turns = chain.from_iterable(zip_longest(*of_kind))
        chosen += islice((one for one in turns if one is not None), count)
    return chosen


def _spread(numbers: np.ndarray, count: int) -> list[int]:
    places = np.linspace(0, len(numbers) - 1, min(count, len(numbers))).round().astype(int)
    return numbers[places].tolist()


def _read(run: Run, shard: ShardPaths, chosen: Sequence[int]) -> list[Sample]:
    wanted = set(chosen)
    graded = read_graded(shard.graded)
    judge = last_grader(graded.summary.get("grader"))
    rows = {i: row for i, row in enumerate(graded.rows()) if i in wanted}
    reasons = why_left_out(run, shard, chosen)
    tokenizer = load_tokenizer(run.tokenizer)
    reader = DocumentReader(run.tree.data)
    found = []
    for i in chosen:
        doc_id = rows[i]["doc_id"]
        tokens = reader.tokens(doc_id, tokenizer.eos_token_id)
        text, is_cut = beginning(tokens, tokenizer, _TOKENS)
        is_cut |= len(text) > _CHARS
        shown = text[:_CHARS].rstrip() + "\u2026" * is_cut
        found.append(Sample(doc_id, reasons.get(i, ""), _judged(rows[i], judge), shown))
    return found


def _judged(row: dict[str, Any], judge: str) -> str:
    if row["aggregated"] is None:
        return "not scored"
    return f"{row['decision']}: {row['aggregated']:.2f} by the {scored_by(row, judge)}"
