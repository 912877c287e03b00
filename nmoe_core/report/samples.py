"""Documents to read: some that are kept and some that are left out of each source, and why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.calibration.graded import read_graded, scored_by
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.shards.documents import DocumentReader, beginning
from nmoe_core.tasks.selection.outcome import COPIES, outcome_of
from nmoe_core.text.tokenizer import load_tokenizer

_TOKENS, _CHARS = 400, 1200
_COPY = ("exact_of", "near_of", "near_jaccard")


class Sample(NamedTuple):
    """One document: `reason` is empty where it is kept."""

    doc_id: str
    reason: str
    judged: str
    text: str


def samples(run: Run, source: str, count: int) -> tuple[list[Sample], list[Sample]]:
    """Up to `count` kept documents of a source, and of those that are left out, of each reason in
    turn; they are spread over its first shard that has both, else over its first one."""
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
    names = ["", *reasons]
    found = _read(run, shard, [(i, names[codes[i]]) for i in [*kept, *turns[:count]]])
    return found[: len(kept)], found[len(kept) :]


def _spread(numbers: np.ndarray, count: int) -> list[int]:
    places = np.linspace(0, len(numbers) - 1, min(count, len(numbers))).round().astype(int)
    return numbers[places].tolist()


def _read(run: Run, shard: ShardPaths, chosen: Sequence[tuple[int, str]]) -> list[Sample]:
    wanted = dict(chosen)
    graded = read_graded(shard.graded)
    judge = "student" if graded.summary.get("grader") == "student" else "judge"
    rows = {i: row for i, row in enumerate(graded.rows()) if i in wanted}
    copies = _copies(run, shard, list(wanted))
    tokenizer, reader = load_tokenizer(run.tokenizer), DocumentReader(run.tree.data)
    found = []
    for i, reason in chosen:
        doc_id = rows[i]["doc_id"]
        tokens = reader.tokens(doc_id, tokenizer.eos_token_id)
        text, is_cut = beginning(tokens, tokenizer, _TOKENS)
        is_cut |= len(text) > _CHARS
        shown = text[:_CHARS].rstrip() + "\u2026" * is_cut
        copy = copies.get(i, "")
        why = copy if copy and reason == COPIES else ", ".join(filter(None, (reason, copy)))
        found.append(Sample(doc_id, why, _judged(rows[i], judge), shown))
    return found


def _judged(row: dict[str, Any], judge: str) -> str:
    return f"{row['decision']}: {row['aggregated']:.2f} by the {scored_by(row, judge)}"


def _copies(run: Run, shard: ShardPaths, numbers: list[int]) -> dict[int, str]:
    """Of which document those of these numbers are copies, where the run looks for copies."""
    path = shard.attribute("duplicates")
    if "duplicates" not in run.config.attributes.use or not path.is_file():
        return {}
    from nmoe_core.attributes.files import read_attribute

    rows = zip(numbers, read_attribute(path, list(_COPY)).take(numbers).to_pylist())
    found = {}
    for i, row in rows:
        if row["exact_of"] is not None:
            found[i] = f"a copy: the same text as {row['exact_of']}"
        elif row["near_of"] is not None:
            found[i] = f"a copy: {row['near_jaccard']:.0%} the same as {row['near_of']}"
    return found
