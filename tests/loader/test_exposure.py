"""How often each document was read is what a replay of the loader reads, in any history."""

import json
from collections import defaultdict

import numpy as np
import pytest

from loader import open_loader, remix, resolve_plan
from nmoe_core.audit.readings.exposure import documents_of, readings_of
from tests.loader.numbered import counted, documents, number, owners, rows_read
from tests.loader.test_row_documents import SETTINGS
from tests.project import said
from tests.refusals import refused_line

SIZES = {"web": 900, "code": 600, "math": 500}
PHASES = [{"start_step": 3, "dataset_weights": {"web": 1, "math": 5}}]


@pytest.fixture
def cfg(tree):
    number(tree, **SIZES)
    return {"datasets": tree.rows(*SIZES), "batch_size": 4, "seq_len": 16, "steps": 8}


def check(tree, plan, stop: int, rows, before=()) -> None:
    """The counts up to a step are those of these rows, and of rows that were read before."""
    owner = owners(tree, *SIZES)
    expected = counted(rows, owner)
    earlier = counted(before, owner)
    with documents_of(plan) as table:
        for name, own in zip(table.stream.source_names, readings_of(table, stop * plan.batch_size)):
            every = documents(tree.root / name / "train" / "manifest.json")
            assert own.tokens.tolist() == [len(tokens) for tokens in every]
            for i in range(len(every)):
                read = expected.get((name, i), {})
                passed = earlier.get((name, i), {})
                assert own.tokens_read[i] == sum(read.values()) + sum(passed.values())
                assert own.sequences[i] == len(read) + len(passed)
                assert own.first[i] == min(read, default=-1)
                assert own.last[i] == max(read, default=-1)


@pytest.mark.parametrize("settings", [*SETTINGS, {"phases": PHASES}], ids=str)
def test_counts_are_those_of_a_replay_with_any_ranks_and_resumes(tree, cfg, settings):
    plan = resolve_plan(cfg | settings)
    for stop in (0, 1, 5):
        check(tree, plan, stop, rows_read(plan, [(0, 3)], stop))
    check(tree, plan, 6, rows_read(plan, [(0, 1), (2, 3), (5, 2)], 6))


def test_a_remixed_run_has_read_what_it_read_under_both_plans(tree, cfg):
    plan = resolve_plan(cfg)
    weights = {"web": 1, "math": 4}
    for step in (3, 5):
        after, _ = remix(plan, step, weights=weights)
        rows = [*rows_read(plan, [(0, 2)], step)]
        state = at(plan, step)
        rows += rows_read(after, [(step, 3)], 8, state)
        check(tree, after, 8, rows)
        plan, weights = after, {"code": 1, "math": 1}


def at(plan, step: int) -> dict:
    with open_loader(plan, backend="numpy") as loader:
        loader.seek_step(step)
        return loader.state_dict()


@pytest.mark.parametrize("settings", [{}, {"shuffle": True}], ids=str)
def test_a_continued_run_has_read_what_the_run_before_it_read(
    tree, cfg, settings, tmp_path, capsys
):
    first = resolve_plan(cfg | settings | {"datasets": tree.rows("web", "code"), "steps": 5})
    counts = {"datasets": at(first, 5)["datasets"]}
    second = resolve_plan(cfg | settings)
    with open_loader(second, backend="numpy") as loader:
        loader.load_state_dict(counts)
        continued = loader.plan
        loader.seek_step(1)
        state = loader.state_dict()
    assert continued.consumed
    before = rows_read(first, [(0, 1)], 5)
    check(tree, continued, 3, rows_read(continued, [(0, 2)], 3), before)
    # The plan's file knows nothing of the earlier run; a state of the loader does.
    (tmp_path / "plan.json").write_text(second.placed_in(tmp_path).to_json())
    (tmp_path / "state.json").write_text(json.dumps(state))
    given = ["exposure", "--plan", tmp_path / "plan.json", "--state", tmp_path / "state.json"]
    facts = said(capsys, *given)
    assert facts["step"] == 1
    assert facts["total"]["tokens_read"] == (5 + 1) * 4 * 16
    assert {row["source"] for row in facts["read_before_the_plan"]} == {"web", "code"}


def test_the_command_sums_sources_and_writes_a_row_per_document(tree, cfg, tmp_path, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    plan = resolve_plan(cfg | {"on_exhaust": "wrap", "steps": 60})
    (tmp_path / "plan.json").write_text(plan.placed_in(tmp_path).to_json())
    given = ["exposure", "--plan", tmp_path / "plan.json", "--step", 40]
    facts = said(capsys, *given, "--out", tmp_path / "table.parquet")
    expected = counted(rows_read(plan, [(0, 2)], 40), owners(tree, *SIZES))
    rows = pq.read_table(tmp_path / "table.parquet").to_pylist()
    tokens = defaultdict(list)
    for name in SIZES:
        tokens[name] = documents(tree.root / name / "train" / "manifest.json")
    assert [row["source"] for row in rows] == [n for n in SIZES for _ in tokens[n]]
    for name in SIZES:
        own = [row for row in rows if row["source"] == name]
        for i, row in enumerate(own):
            path = tree.root / name / "train" / row["file"]
            assert np.load(path)[row["start"] : row["end"]].tolist() == tokens[name][i].tolist()
            read = expected[name, i]
            assert row["tokens_read"] == sum(read.values())
            assert row["epochs"] == row["tokens_read"] / row["tokens"]
            assert row["first_step"] == (min(read) // 4 if read else None)
            assert row["last_step"] == (max(read) // 4 if read else None)
        (group,) = [group for group in facts["groups"] if group["source"] == name]
        for key in ("tokens", "tokens_read"):
            assert group[key] == sum(row[key] for row in own)
        assert group["documents_read"] == sum(row["tokens_read"] > 0 for row in own)
        assert group["most_epochs"] == max(row["epochs"] for row in own)
    assert facts["total"]["tokens_read"] == 40 * 4 * 16
    line = refused_line(capsys, *map(str, given[:3]), "--step", "61", code="E-SEEK")
    assert "0 to 60" in line
