"""Plans over buckets, at random: what the loader reads is what plain Python says, row by row.

Each corpus has several plans: any policy, temperature, weights, phases, limits of epochs, packing
and number of ranks and workers, a resume at another number of ranks, and remixes. For other corpora
than the first, set `BUCKET_PLANS_SEED` to the number of the first one.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pytest

from loader import LoaderPlan, NmoeError, remix
from nmoe_core.tasks.selection.buckets import load_definition
from tests.core.curate.bucket_plans.corpora import SCHEMA, Corpus, make_corpus, random_row
from tests.core.curate.bucket_plans.expected import (
    Expected,
    Row,
    Tokens,
    check_stream,
    read_by_workers,
    read_rows,
    state_at,
    unturned,
)
from tests.core.curate.bucket_plans.naive import Grouping, Part, divided, owed_after, parts_of
from tests.core.curate.bucket_plans.random_plans import plan_of, random_settings

pytest.importorskip("duckdb")

PLANS = 4  # of a corpus
CORPORA = 6
ALL_CORPORA = 125
T = TypeVar("T")
FIRST = int(os.environ.get("BUCKET_PLANS_SEED", "0"))


def check_corpus(directory: Path, seed: int) -> Counter[str]:
    """Check a random corpus and some of its plans; returns what became of the plans."""
    corpus = make_corpus(directory, seed)
    grouping = Grouping(corpus.kept, corpus.by, corpus.least)
    curated = corpus.curated()
    naive = {
        name: [d.tokens for d in own for _ in range(d.times)]
        for name, own in grouping.buckets.items()
    }
    assert {n: sorted(own) for n, own in curated.items()} == {
        n: sorted(o) for n, o in naive.items()
    }
    if corpus.order == "original" and all(d.times == 1 for d in corpus.kept):
        assert curated == naive
    rng = random.Random(f"plans {seed}")
    _check_later_documents(rng, corpus, grouping)
    return Counter(_check_plan(rng, corpus, curated) for _ in range(PLANS))


def _check_later_documents(rng: random.Random, corpus: Corpus, grouping: Grouping) -> None:
    """The definition also says the bucket of documents that it was not made of."""
    definition = load_definition(corpus.run())
    rows = [random_row(rng, few=False) for _ in range(20)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    table = table.rename_columns([f"columns.{name}" for name in table.column_names])
    for source in corpus.sources:
        for row, bucket in zip(rows, definition.buckets(source, table)):
            assert f"{source}/{bucket}" in grouping.bucket_of(source, row)


def _check_plan(rng: random.Random, corpus: Corpus, curated: dict[str, list[Tokens]]) -> str:
    """One random plan; returns `read`, or the code of the error."""
    sizes = {name: sum(map(len, docs)) for name, docs in sorted(curated.items())}
    settings = random_settings(rng, corpus, sizes)
    parts, codes = parts_of(settings, sizes)
    expected = Expected(settings, curated)
    if "E-CONFIG" not in codes and expected.is_short(parts):
        codes.add("E-PLAN-SHORT")
    plan, code = _tried(lambda: plan_of(corpus, settings))
    if plan is None:
        assert code in codes
        return code
    # How many rows documents fill is known when the loader opens them.
    assert not codes or (codes == {"E-PLAN-SHORT"} and plan.packing != "concat")
    size = plan.batch_size
    rows, code = _tried(lambda: read_rows(plan))
    if rows is None:
        assert code == "E-PLAN-SHORT"
        assert codes or plan.on_exhaust == "first_exhausted"
        return code
    assert not codes
    check_stream(plan, rows, parts, expected)
    ends = np.cumsum([part.length for part in parts])
    scales = [parts[k].lr_scale for k in np.searchsorted(ends, range(len(rows)), "right").tolist()]
    assert [row.lr_scale for row in rows] == [scales[k // size * size] for k in range(len(rows))]

    assert read_rows(plan, rng.randint(1, size), prefetch=rng.choice([0, 2])) == rows
    assert read_by_workers(plan, rng.randint(1, size), rng.randint(1, 3)) == rows
    step = rng.randrange(len(rows) // size)
    assert read_rows(plan, rng.randint(1, size), state_at(plan, step)) == rows[step * size :]
    if rng.random() < 0.6:
        _check_remixes(rng, plan, rows, parts, expected)
    return "read"


def _check_remixes(
    rng: random.Random, plan: LoaderPlan, rows: list[Row], parts: list[Part], expected: Expected
) -> None:
    """One remix, or one after the other: the past stays, the rest has its quotas with debts."""
    size = plan.batch_size
    first = 0
    for _ in range(rng.choice([1, 1, 2])):
        step = rng.randrange(first, len(rows) // size)
        n = step * size
        names = [source.name for source in plan.sources]
        weights = {name: rng.choice([1, 2, 5, 30]) for name in names if rng.random() < 0.6}
        weights = weights or {names[0]: 1}
        parts = _cut(parts, n)
        owed = {name: Fraction(0) for name in weights}
        if parts:
            picks = [row.bucket for row in unturned(plan, rows)]
            due = owed_after(parts[-1], picks[n - parts[-1].length : n], plan.policy)
            owed |= {name: own for name, own in due.items() if name in weights}
        quotas = divided(plan.num_sequences // size * size - n, weights, owed)
        parts.append(Part({k: float(w) for k, w in weights.items()}, quotas, owed=owed))
        edited, code = _tried(partial(remix, plan, step, weights=weights))
        if edited is None:
            assert code in ("E-PLAN-SHORT", "E-PLAN-ZERO")
            is_early = plan.on_exhaust == "first_exhausted" or plan.packing != "concat"
            assert is_early or expected.is_short(parts) or 0 in quotas.values()
            return
        after = edited[0]
        if after is plan:  # it changes nothing
            return
        read = read_rows(after, rng.randint(1, size))
        assert [row[:4] for row in read[:n]] == [row[:4] for row in rows[:n]]
        check_stream(after, read, parts, expected)
        saved = rng.randint(0, step)
        again = read_rows(after, rng.randint(1, size), state_at(plan, saved))
        assert again == read[saved * size :]
        plan, rows, first = after, read, step


def _tried(make: Callable[[], T]) -> tuple[T | None, str]:
    """What a function returns, or the code of its error."""
    try:
        return make(), ""
    except NmoeError as error:
        return None, error.code


def _cut(parts: list[Part], n: int) -> list[Part]:
    """The parts before sequence `n`."""
    kept = []
    start = 0
    for part in parts:
        length = min(part.length, n - start)
        if length > 0:
            read = length if length < part.length else part.read
            kept.append(Part(part.weights, part.quotas, part.lr_scale, part.owed, read))
        start += part.length
    return kept


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CORPORA))
def test_the_loader_reads_what_plain_python_says(seed: int, tmp_path: Path) -> None:
    check_corpus(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST + CORPORA, FIRST + ALL_CORPORA))
def test_the_loader_reads_what_plain_python_says_of_more_corpora(seed: int, tmp_path: Path) -> None:
    check_corpus(tmp_path, seed)
