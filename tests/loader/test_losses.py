"""Losses that ranks logged are joined to the documents that a replay reads with them."""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from loader import LossLog, open_loader, remix, resolve_plan
from loader.rows.loss_log import read_losses
from nmoe_core.audit.readings.curves import LossTables
from nmoe_core.audit.readings.exposure import documents_of
from nmoe_core.audit.readings.losses import by_step, read_ledger
from nmoe_core.audit.readings.names import by_source
from tests.loader.numbered import counted, number, owners, rows_read
from tests.project import said
from tests.refusals import refused, refused_line

SIZES = {"web": 900, "code": 700, "math": 600}
STEPS = 24


@pytest.fixture
def plan(tree):
    number(tree, **SIZES)
    cfg = {"datasets": tree.rows(*SIZES), "batch_size": 4, "seq_len": 16, "steps": STEPS}
    return resolve_plan(cfg)


def loss_of(sequence: int) -> float:
    """Falls from step to step, and differs in a step."""
    return float(np.float32(5 - sequence / 100 + (sequence * 7 % 5) / 10))


def train(plan, place: Path, start: int, stop: int, ranks: int, loss=loss_of) -> None:
    """Steps of a run, as `ranks` processes log them, one after the other."""
    for rank in range(ranks):
        with (
            open_loader(plan, rank=rank, world_size=ranks, backend="numpy", form="batch") as loader,
            LossLog(place, loader.plan, rank=rank) as log,
        ):
            loader.seek_step(start)
            for step in range(start, stop):
                numbers = loader.next().sequence_index
                log.add(step, numbers, np.array([loss(n) for n in numbers.tolist()]))


def ledger_of(plan, place: Path):
    with documents_of(plan) as table:
        return read_ledger(place, plan, table)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_logs_its_part_of_every_step(plan, tmp_path, ranks):
    train(plan, tmp_path / "log", 0, 10, ranks)
    ledger = ledger_of(plan, tmp_path / "log")
    assert ledger.numbers().tolist() == [*range(40)]
    assert ledger.losses[:40].tolist() == [loss_of(n) for n in range(40)]
    assert ledger.steps[:40].tolist() == [n // 4 for n in range(40)]
    assert (ledger.files, ledger.ranks, ledger.repeated, ledger.torn_bytes) == (ranks, ranks, 0, 0)
    means = by_step(ledger).means
    assert means == pytest.approx(
        [np.mean([loss_of(4 * s + i) for i in range(4)]) for s in range(10)]
    )


def test_steps_that_were_repeated_after_a_resume_have_their_later_losses(plan, tmp_path):
    place = tmp_path / "log"
    train(plan, place, 0, 9, 3, lambda n: loss_of(n) if n < 20 else 99.0)
    for path in place.glob("*rank-00001*"):  # killed while it wrote
        path.write_bytes(path.read_bytes()[:-7])
    train(plan, place, 5, 12, 2)
    ledger = ledger_of(plan, place)
    assert ledger.losses[:48].tolist() == [loss_of(n) for n in range(48)]
    assert ledger.repeated == 4 * 4 - 1  # one was torn
    assert ledger.torn_bytes == 32 + 12 - 7
    assert (ledger.files, ledger.ranks) == (5, 3)


@pytest.mark.parametrize("settings", [{}, {"shuffle": True}, {"packing": "best_fit"}], ids=str)
def test_documents_and_groups_have_the_losses_of_their_rows(tree, plan, tmp_path, settings):
    cfg = {"datasets": tree.rows(*SIZES), "batch_size": 4, "seq_len": 16, "steps": STEPS}
    plan = resolve_plan(cfg | settings)
    bad = {13: math.nan, 30: math.inf}
    train(plan, tmp_path / "log", 2, 20, 3, lambda n: bad.get(n, loss_of(n)))
    read = counted(rows_read(plan, [(0, 1)], STEPS), owners(tree, *SIZES))
    numbers = [n for n in range(8, 80) if n not in bad]
    means = {s: np.mean([loss_of(n) for n in numbers if n // 4 == s]) for s in range(2, 20)}
    expected = {}
    groups = defaultdict(lambda: [0, 0.0, 0])
    for (name, i), rows in read.items():
        own = {n: tokens for n, tokens in rows.items() if n in numbers}
        wrong = sum(n in bad for n in rows)
        weight = sum(own.values())
        total = sum(t * loss_of(n) for n, t in own.items())
        excess = sum(t * (loss_of(n) - means[n // 4]) for n, t in own.items())
        if weight or wrong:
            score = math.inf if wrong else excess / weight
            expected[name, i] = score, weight, total / weight if weight else None, wrong
        groups[name][0] += weight
        groups[name][1] += total
        groups[name][2] += wrong
    with documents_of(plan) as table:
        tables = LossTables(table, read_ledger(tmp_path / "log", plan, table), by_source(table))
        facts = tables.facts(1000)
        places = {
            (name, start): i
            for source, name in enumerate(table.stream.source_names)
            for i, start in enumerate(table.edges(source).tolist())
        }
        paths = {
            f"{name}/{path.parent.name}/{path.name}": int(start)
            for path, start in zip(table.stream.files.paths(), table.stream.index.file_starts)
            for name in [path.parents[2].name]
        }
    assert (facts["steps"], facts["sequences"], facts["not_finite"]) == ([2, 19], 72, 2)
    for row in facts["groups"]:
        weight, total, wrong = groups[row["source"]]
        assert (row["tokens"], row["not_finite"]) == (weight, wrong)
        assert row["loss"] == pytest.approx(total / weight)
    scores = []
    for row in facts["worst"]:
        at = paths[f"{row['source']}/{row['file']}"] + row["start"]
        score, weight, loss, wrong = expected.pop((row["source"], places[row["source"], at]))
        scores.append(score)
        assert (row["tokens_measured"], row["not_finite"]) == (weight, wrong)
        assert row["loss"] == (None if loss is None else pytest.approx(loss))
    assert not expected
    assert scores == pytest.approx(sorted(scores, reverse=True))


def test_the_documents_of_a_spike_are_named(tree, plan, tmp_path, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("matplotlib")
    (tmp_path / "plan.json").write_text(plan.placed_in(tmp_path).to_json())
    spiked = {4 * 15 + 1: 30.0, 4 * 16 + 2: 20.0}
    train(plan, tmp_path / "log", 0, STEPS, 2, lambda n: spiked.get(n, loss_of(n)))
    given = ["losses", tmp_path / "log", "--plan", tmp_path / "plan.json", "--worst", "3"]
    found = said(capsys, *given, "--spike", "auto", "--out", tmp_path / "out")
    spike = found["spike"]
    assert spike["steps"] == [15, 16]
    read = counted(rows_read(plan, [(0, 1)], STEPS), owners(tree, *SIZES))
    inside = {d: rows for d, rows in read.items() if any(60 <= n < 68 for n in rows)}
    assert spike["num_documents"] == len(inside)
    in_highest = [rows[61] for rows in inside.values() if 61 in rows]
    first = [row for row in spike["documents"] if row["sequence"] == 61]
    assert [row["tokens"] for row in first] == sorted(in_highest, reverse=True)[:3]
    assert all(row["loss"] == 30 for row in first)
    assert sum(row["percent"] for row in spike["groups"]) == pytest.approx(100)
    rows = pq.read_table(tmp_path / "out" / "documents.parquet")
    assert rows.num_rows == sum(len(own) for own in _documents(plan))
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")
    at_step = said(capsys, *given, "--spike", "3")["spike"]
    assert at_step["steps"] == [3, 3]
    refused_line(capsys, *map(str, given), "--spike", "24", code="E-CONFIG")


def _documents(plan) -> list[np.ndarray]:
    with documents_of(plan) as table:
        return [np.diff(table.edges(source)) for source in range(len(table.stream.source_names))]


def test_a_calm_run_has_no_spike_and_a_step_of_nan_is_one(plan, tmp_path):
    for name, loss, steps in (
        ("calm", loss_of, None),
        ("nan", lambda n: math.nan if n // 4 == 20 else loss_of(n), [20, 20]),
    ):
        train(plan, tmp_path / name, 0, STEPS, 1, loss)
        with documents_of(plan) as table:
            ledger = read_ledger(tmp_path / name, plan, table)
            found = LossTables(table, ledger, by_source(table)).spike(None)
        assert (found and found["steps"]) == steps


def test_losses_of_a_run_remixed_twice_are_joined_to_all_its_plans(plan, tmp_path):
    plans = [plan]
    for step in (6, 9):
        after, _ = remix(plans[-1], step, weights={"web": 1, "math": step}, steps=14)
        plans.append(after)
    place = tmp_path / "log"
    train(plans[0], place, 0, 8, 2, lambda n: loss_of(n) if n < 24 else 99.0)
    with refused("E-LOSS-PLAN"):  # the remixed run has not begun, so this may be another one
        ledger_of(plans[1], place)
    train(plans[1], place, 6, 10, 3, lambda n: loss_of(n) if n < 36 else 99.0)
    found = ledger_of(plans[1], place)
    assert (found.dropped, found.repeated) == (8, 0)
    train(plans[2], place, 9, 12, 4)
    found = ledger_of(plans[2], place)
    assert found.losses[:48].tolist() == [loss_of(n) for n in range(48)]
    assert found.dropped + found.repeated == 8 + 4  # the new weights may read the same rows once
    train(plans[2], tmp_path / "own", 0, 3, 1)
    for path in (tmp_path / "own").iterdir():  # a run from the first step needs no other plan
        path.rename(place / path.name)
    with refused("E-LOSS-PLAN", naming=[plans[0].plan_hash, plans[2].plan_hash]):
        ledger_of(plans[2], place)


def test_a_log_of_another_plan_is_refused(tree, plan, tmp_path):
    others = [
        resolve_plan(tree.one("web", batch_size=4, steps=8)),
        resolve_plan(tree.one("web", batch_size=2, steps=8)),
        resolve_plan(tree.one("web", batch_size=4, steps=8, seq_len=8)),
        resolve_plan(tree.one("web", batch_size=4, steps=8, shuffle=True)),
    ]
    for i, a in enumerate(others):
        train(a, tmp_path / f"{i}", 0, 3, 1)
        for b in others:
            if a is b:
                assert len(ledger_of(b, tmp_path / f"{i}").numbers())
            else:
                with refused("E-LOSS-PLAN"):
                    ledger_of(b, tmp_path / f"{i}")
    longer = resolve_plan(tree.one("web", batch_size=4, steps=12))
    assert len(ledger_of(longer, tmp_path / "0").numbers()) == 12


def test_directories_and_sequences_that_are_no_log_are_refused(plan, tmp_path):
    with refused("E-LOSS-FORMAT", naming=["LossLog"]):
        ledger_of(plan, tmp_path)
    (tmp_path / "a.losses").write_bytes(b"not a log\n")
    with refused("E-LOSS-FORMAT", naming=["a.losses"]):
        ledger_of(plan, tmp_path)
    (tmp_path / "a.losses").unlink()
    with LossLog(tmp_path, plan, rank=0) as log:
        pass
    with documents_of(plan) as table, refused("E-CONFIG", naming=["no losses yet"]):
        LossTables(table, read_ledger(tmp_path, plan, table), by_source(table))
    head = json.loads(log.path.read_bytes())
    longer = resolve_plan(plan_longer(plan))
    with LossLog(tmp_path, longer, rank=1) as other:
        other.add(0, [plan.num_sequences + 1], [1.0])
    with refused("E-LOSS-PLAN"):
        ledger_of(plan, tmp_path)
    body = other.path.read_bytes().partition(b"\n")[2]
    log.path.write_bytes(json.dumps(head).encode() + b"\n" + body)
    other.path.unlink()
    with refused("E-LOSS-SEQUENCE", naming=[str(plan.num_sequences + 1)]):
        ledger_of(plan, tmp_path)
    assert read_losses(log.path).sequences.tolist() == [plan.num_sequences + 1]


def plan_longer(plan):
    rows = [{"path": str(plan.base / s.name), "weight": 1.0} for s in plan.sources]
    return {"datasets": rows, "batch_size": 4, "seq_len": 16, "steps": STEPS + 3}
