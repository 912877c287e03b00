"""Runs that go on under other shares, against a twin in plain Python.

The twin draws one sequence after another. It knows the definition alone: what is owed, largest
remainders, cursors that never go back. It imports nothing of the loader but what a user calls.
"""

import json
import random
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from loader import (
    DeterministicLoader,
    LoaderPlan,
    NmoeError,
    PlanError,
    load_plan,
    remix,
    resolve_plan,
)
from loader import verify_certificate as verify
from loader.__main__ import main
from loader.edits.certificate import certify
from loader.files.checksummed_json import sealed
from loader.rows.stream import Stream
from tests.loader.shared import check_least_consumed, remainders
from tests.refusals import refused

SEQ_LEN, CAPACITY, UNIT = 4, 1200, 10**6
POLICIES = ("swrr", "block", "least_consumed", "weighted_random", "epoch_weighted")
NAMES = ("ant", "bee", "cat", "dog", "elk")


@pytest.fixture(scope="module")
def tree(lib, tmp_path_factory):
    tree = lib.Tree(tmp_path_factory.mktemp("remix"))
    for name in NAMES:
        tree.add(name, CAPACITY * SEQ_LEN + 1, num_files=1)
    return tree


def run_of(tree, **settings) -> LoaderPlan:
    given = {"batch_size": 8, "seq_len": SEQ_LEN, "steps": 40, "datasets": tree.rows("ant", "bee")}
    return resolve_plan(given | settings)


def stream_of(plan: LoaderPlan) -> list[tuple[str, int]]:
    """Source and window of every sequence, in the order of the policy."""
    stream = Stream(plan, "train")
    sources, windows = stream.schedule.in_order(0, stream.num_sequences)
    names = [stream.source_names[i] for i in sources]
    stream.close()
    return list(zip(names, windows.tolist()))


def directories(tree, names) -> dict[str, Path]:
    return {name: tree.root / name for name in names}


# The twin.


def fixed(part: dict) -> dict[str, int]:
    """Weights as a plan keeps them."""
    unit, total = UNIT if part["policy"] == "swrr" else UNIT**3, sum(part["weights"].values())
    return {x: round(Fraction(w * unit, total)) for x, w in part["weights"].items()}


def owed_after(part: dict) -> dict[str, Fraction]:
    """What the sources of a part are owed at the end of what was read of it."""
    if part["policy"] == "weighted_random":
        return {}
    found, total = {}, sum(fixed(part).values())
    counts = {x: [p[0] for p in part["picks"]].count(x) for x in part["weights"]}
    is_whole = len(part["picks"]) == sum(part["quotas"].values())
    for x, weight in fixed(part).items():
        off = part["owed"].get(x, 0) + Fraction(weight * len(part["picks"]), total) - counts[x]
        left = counts[x] == part["quotas"][x] and not is_whole
        found[x] = Fraction(0) if left else max(Fraction(-1), min(Fraction(1), off))
    return found


def check_part(lib, part: dict) -> None:
    """A part that was read to its end has its quotas, in the order of its policy."""
    weights, quotas, policy = part["weights"], part["quotas"], part["policy"]
    picks, names = [name for name, _ in part["picks"]], list(weights)
    assert {x: picks.count(x) for x in weights} == quotas
    if policy == "swrr":
        owed = [round(part["owed"].get(x, 0) * UNIT) for x in names]
        assert picks == [
            names[i] for i in lib.swrr(list(fixed(part).values()), list(quotas.values()), owed)
        ]
    if policy == "least_consumed":
        check_least_consumed(picks, weights, part["owed"])


def order_of(tree, orders: dict, name: str, run: dict) -> list[int]:
    """The windows of a source in the order in which a run over it alone reads them."""
    shuffled = run["shuffle"] or run["policy"] == "epoch_weighted"
    if not shuffled:
        return list(range(CAPACITY))
    key = name, run["seed"]
    if key not in orders:
        rows = tree.rows(name)
        keys = {"shuffle": True, "seed": run["seed"]}
        alone = run_of(tree, datasets=rows, batch_size=1, steps=CAPACITY, **keys)
        orders[key] = [window for _, window in stream_of(alone)]
    return orders[key]


def random_edit(rng: random.Random, step: int, steps: int) -> dict:
    weights = {name: rng.randint(1, 12) for name in rng.sample(NAMES, rng.randint(1, 5))}
    starts = range(step + 1, steps)
    phases = [
        {
            "start_step": start,
            "dataset_weights": {x: rng.randint(1, 12) for x in rng.sample(list(weights), 1)},
            "lr_scale": 0.5,
        }
        for start in sorted(rng.sample(starts, min(len(starts), rng.choice([0, 0, 0, 1, 2]))))
    ]
    return {"weights": weights, "phases": phases}


def parts_of(edit: dict, step: int, steps: int, batch_size: int) -> list[tuple[int, int, dict]]:
    """Start, end and weights of each part of the rest of a run, in sequences."""
    edges = [step, *(phase["start_step"] for phase in edit["phases"]), steps]
    listed = [{}, *(phase["dataset_weights"] for phase in edit["phases"])]
    return [
        (a * batch_size, b * batch_size, edit["weights"] | weights)
        for (a, b), weights in zip(pairwise(edges), listed)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_edits_of_a_run_agree_with_the_twin(lib, tree, policy, half):
    """Five hundred edits, and as many slow ones, one to four of a run, each held against the whole
    run so far."""
    orders, done, seed = {}, 0, 1000 * half
    while done < 100:
        seed += 1
        rng = random.Random(f"{policy}{seed}")
        batch_size, steps = rng.choice([3, 4, 8]), rng.randint(10, 60)
        weights = {name: rng.randint(1, 9) for name in rng.sample(NAMES, rng.randint(1, 3))}
        run = {"policy": policy, "shuffle": rng.random() < 0.5, "seed": rng.randint(0, 2)}
        rows, run["batch_size"] = tree.rows(**weights), batch_size
        plan = run_of(tree, datasets=rows, steps=steps, **run)
        parts = parts_of({"weights": weights, "phases": []}, 0, steps, batch_size)
        before, kept, step = stream_of(plan), [], 0
        known = planned_parts(policy, parts, kept)
        for _ in range(rng.randint(1, 4)):
            step = rng.randint(step, steps - 1)
            edit = random_edit(rng, step, steps)
            new = [name for name in edit["weights"] if name not in {s.name for s in plan.sources}]
            n = step * batch_size
            kept = read_until(known, before, n)
            try:
                after, certificate = remix(plan, step, sources=directories(tree, new), **edit)
            except PlanError as error:
                if error.code != "E-PLAN-ZERO":
                    raise
                continue
            done += 1
            drawn = stream_of(after)
            assert len(drawn) == steps * batch_size
            assert drawn[:n] == before[:n]
            known = [*kept, *planned_parts(policy, parts_of(edit, step, steps, batch_size), kept)]
            if after is not plan:
                for part in read_until(known, drawn, len(drawn))[len(kept) :]:
                    check_part(lib, part)
            for name in NAMES:
                own = [window for source, window in drawn if source == name]
                assert own == order_of(tree, orders, name, run)[: len(own)]
            for row in certificate.windows:
                counts = [
                    [p[0] for p in drawn[a:b]].count(row.source) for a, b in ((0, n), (n, None))
                ]
                assert (row.start, row.edit, row.stop) == (0, counts[0], sum(counts))
            plan, before = after, drawn


def planned_parts(policy: str, parts: list, kept: list[dict]) -> list[dict]:
    """Parts with what they owe and take, after those that were read."""
    found = []
    for start, stop, weights in parts:
        before = [*kept, *found][-1:]
        if found:
            before = [before[0] | {"picks": as_planned(before[0])}]
        due = owed_after(before[0]) if before else {}
        owed = {x: Fraction(round(due.get(x, 0) * UNIT), UNIT) for x in weights}
        quotas = remainders(stop - start, weights, owed)
        part = {"policy": policy, "weights": weights, "owed": owed, "quotas": quotas}
        found.append(part | {"start": start, "stop": stop, "picks": []})
    return found


def as_planned(part: dict) -> list[tuple[str, int]]:
    return [(name, 0) for name, count in part["quotas"].items() for _ in range(count)]


def read_until(parts: list[dict], drawn: list, n: int) -> list[dict]:
    """The parts that begin before a sequence, with what was read of them."""
    return [
        part | {"picks": drawn[part["start"] : min(n, part["stop"])], "stop": min(n, part["stop"])}
        for part in parts
        if part["start"] < n
    ]


def ranks_of(plan, world_size: int, state: dict | None) -> list[DeterministicLoader]:
    ranks = [DeterministicLoader(plan, r, world_size, backend="numpy") for r in range(world_size)]
    for rank in ranks if state else ():
        rank.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def read(ranks, num_steps: int) -> list[bytes]:
    """Inputs of the next steps, as the ranks together read them."""
    batches = [[rank.next()[0] for rank in ranks] for _ in range(num_steps)]
    return [row.tobytes() for step in batches for part in step for row in part]


EDIT = {
    "weights": {"ant": 3, "cat": 1},
    "phases": [{"start_step": 30, "dataset_weights": {"cat": 9}, "lr_scale": 0.1}],
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("saved", [3, 20])
def test_a_state_of_the_old_plan_continues_under_the_new_one_at_any_number_of_ranks(
    tree, policy, saved
):
    plan = run_of(tree, policy=policy, phases=[{"start_step": 10, "dataset_weights": {"ant": 5}}])
    after, _ = remix(plan, 20, sources=directories(tree, ["cat"]), **EDIT)
    whole = read(ranks_of(after, 1, None), 40)
    for before_size, after_size in ((1, 3), (2, 1), (3, 2)):
        old = ranks_of(plan, before_size, None)
        assert read(old, saved) == whole[: saved * 8]
        new = ranks_of(after, after_size, old[0].state_dict())
        assert new[0].step == saved
        assert read(new, 25 - saved) == whole[saved * 8 : 25 * 8]
        state = new[0].state_dict()
        assert read(ranks_of(after, before_size, state), 15) == whole[25 * 8 :]
        read(old, 21 - saved)
        with refused("E-STATE-PLAN", match="the state belongs to another plan"):
            ranks_of(after, 1, old[0].state_dict())
        with refused("E-STATE-PLAN"):
            ranks_of(plan, 1, state)


def test_a_state_of_validation_stays_a_place_of_validation(lib, tmp_path):
    tree = lib.Tree(tmp_path / "data")
    tree.add("ant", 4000)
    tree.add("ant", 400, split="valid", num_files=2)
    plan = run_of(tree, datasets=tree.rows("ant"))
    after, _ = remix(plan, 20, weights={"ant": 1}, steps=30)
    state = DeterministicLoader(plan, split="valid", backend="numpy").state_dict()
    DeterministicLoader(after, split="valid", backend="numpy").load_state_dict(state)
    with refused("E-STATE-SPLIT"):
        ranks_of(after, 1, state)


@pytest.mark.parametrize("policy", ["swrr", "least_consumed"])
def test_debts_to_sources_survive_any_number_of_edits(tree, policy):
    """One in a hundred is three sequences in every ten edits, however often the run is edited."""
    plan = run_of(tree, steps=200, policy=policy)
    for edit in range(1, 26):
        weights = {"ant": 480 + edit % 2, "bee": 500 - edit % 2, "cat": 10}
        new = directories(tree, ["cat"]) if edit == 1 else {}
        plan, _ = remix(plan, edit * 4, weights=weights, sources=new)
    picks = [name for name, _ in stream_of(plan)[32 : 104 * 8]]
    assert abs(picks.count("cat") - len(picks) * 10 / 990) < 1


@pytest.mark.parametrize(
    ("policy", "low", "high"), [("swrr", 12, 14), ("least_consumed", 12, 14), ("block", 2, 26)]
)
def test_a_new_source_gets_its_share_at_once_and_does_not_catch_up(tree, policy, low, high):
    plan = run_of(tree, policy=policy, steps=200)
    equal: dict[str, float] = dict.fromkeys(("ant", "bee", "cat"), 1)
    after, _ = remix(plan, 100, weights=equal, sources=directories(tree, ["cat"]))
    picks = [name for name, _ in stream_of(after)]
    parts = [picks[i : i + 40].count("cat") for i in range(800, 1600, 40)]
    assert low <= min(parts) <= max(parts) <= high


def test_of_two_edits_at_one_step_the_last_counts_and_an_edit_without_effect_is_dropped(tree):
    plan = run_of(tree, policy="least_consumed")
    cat, thrice = directories(tree, ["cat"]), {"cat": 3, "ant": 1}
    first, _ = remix(plan, 11, weights={"cat": 1}, sources=cat, phases=EDIT["phases"])
    twice, _ = remix(first, 11, weights=thrice)
    once, certificate = remix(plan, 11, weights=thrice, sources=cat)
    assert twice == once
    assert twice.plan_hash == once.plan_hash
    same, nothing = remix(once, 25, weights=dict(reversed(thrice.items())))
    assert same is once
    assert nothing.before is nothing.after
    assert certificate.before is plan
    longer, _ = remix(once, 25, weights=thrice, steps=50)
    assert [s.num_sequences for s in longer.stages] == [88, 14 * 8, 25 * 8]
    assert remix(plan, 0, weights=thrice, sources=cat)[0].stages[0].name == "remix@0"


def test_the_learning_rate_stays_unless_a_phase_changes_it(tree):
    plan = run_of(tree, phases=[{"start_step": 10, "dataset_weights": {}, "lr_scale": 0.3}])
    both, start = {"ant": 1, "bee": 2}, [{"start_step": 20, "dataset_weights": {}, "lr_scale": 0.1}]
    for step, phases, scales in (
        (20, (), [1, 0.3, 0.3]),
        (10, (), [1, 1]),
        (20, start, [1, 0.3, 0.1]),
    ):
        after, _ = remix(plan, step, weights=both, phases=phases)
        assert [stage.lr_scale for stage in after.stages] == scales


@pytest.mark.parametrize(
    ("step", "edit", "code", "naming"),
    [
        (41, {}, "E-REMIX-STEP", ["found 41", "0 to 39"]),
        (40, {}, "E-REMIX-STEP", ["set a larger number of steps"]),
        (20, {"steps": 20}, "E-REMIX-STEP", ["0 to 19"]),
        (True, {}, "E-REMIX-STEP", []),
        (5, {"steps": 0}, "E-CONFIG", ["steps"]),
        (5, {"weights": {"ant": -1}}, "E-CONFIG", ["weights.ant"]),
        (5, {"weights": {}}, "E-CONFIG", ["all weights are zero"]),
        (5, {"weights": {"ant": 1, "bee": 0}}, "E-CONFIG", ["'bee' is never used"]),
        (5, {"weights": {"ant": 1, "bea": 1}}, "E-CONFIG", ["did you mean 'bee'?"]),
        (5, {"add": ["cat"]}, "E-CONFIG", ["'cat' is never used"]),
        (31, EDIT | {"add": ["cat"]}, "E-CONFIG", ["a phase starts before the remix"]),
        (35, {"weights": {"ant": 1, "cat": 0.001}, "add": ["cat"]}, "E-PLAN-ZERO", ["'cat'"]),
        (
            5,
            {"steps": 303},
            "E-PLAN-SHORT",
            ["'ant' is too short for stage 'remix@5'", "found 4801 tokens", "at least 4849 by"],
        ),
    ],
)
def test_an_edit_that_cannot_be_made_is_refused(tree, step, edit, code, naming):
    given = {"weights": {"ant": 1, "bee": 1}} | edit
    sources = directories(tree, given.pop("add", []))
    with refused(code, naming=naming):
        remix(run_of(tree), step, sources=sources, **given)


def test_other_data_under_a_known_name_are_refused(tree, lib, tmp_path):
    other = lib.Tree(tmp_path / "data")
    other.add("bee", 900, seed=5)
    both = {"ant": 1, "bee": 2}
    with refused(
        "E-PLAN-DATA",
        naming=["'bee' has other data", "give the new data a name that the plan does not use"],
    ):
        remix(run_of(tree), 5, weights=both, sources=directories(other, ["bee"]))
    same, _ = remix(run_of(tree), 5, weights=both, sources=directories(tree, ["bee"]))
    assert same == remix(run_of(tree), 5, weights=both)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"on_exhaust": "wrap"},
        {"max_epochs": 2},
        {"max_epochs": 2, "shuffle": True},
        {"packing": "best_fit", "max_epochs": 2},
        {"window_stride": "seq_len+1", "on_exhaust": "wrap"},
        {"on_exhaust": "first_exhausted", "steps": 300},
    ],
    ids=str,
)
def test_sources_that_repeat_or_end_the_run_do_so_over_its_whole_life(tree, settings):
    seq_len = 16 if "packing" in settings else SEQ_LEN
    plan = run_of(tree, **{"steps": 160, "seq_len": seq_len, "batch_size": 4} | settings)
    after, _ = remix(plan, 100, weights={"ant": 1, "bee": 3})
    old, new = stream_of(plan), stream_of(after)
    assert new[:400] == old[:400]
    own = [window for name, window in new if name == "bee"]
    length = {"seq_len": seq_len, "batch_size": 1, "steps": len(own)}
    alone = run_of(tree, datasets=tree.rows("bee"), **settings | length)
    assert own == [window for _, window in stream_of(alone)]


def test_a_run_that_a_source_ended_continues_with_another_source(tree):
    plan = run_of(tree, datasets=tree.rows("ant"), on_exhaust="first_exhausted", steps=300)
    assert len(stream_of(plan)) == CAPACITY
    bee = directories(tree, ["bee"])
    after, _ = remix(plan, 150, weights={"bee": 1}, sources=bee, steps=160)
    assert stream_of(after)[CAPACITY:] == [("bee", window) for window in range(80)]
    with refused("E-PLAN-SHORT", naming=["ends before step 151", "first_exhausted"]):
        remix(plan, 150, weights={"ant": 1, "bee": 1}, sources=bee, steps=160)


def test_counts_of_another_run_stay_counted(tree):
    plan = run_of(tree)
    loader = DeterministicLoader(plan, backend="numpy")
    loader.load_state_dict(
        {"datasets": [{"spec": "ant", "row_offset": 100}, {"spec": "cat", "row_offset": 7}]}
    )
    state = {"weights": {"bee": 1, "cat": 1}, "sources": directories(tree, ["cat"])}
    after, certificate = remix(loader.plan, 5, **state)
    assert after.consumed == loader.plan.consumed
    cat = next(row for row in certificate.windows if row.source == "cat")
    assert cat.start == cat.edit == 7
    assert next(w for name, w in stream_of(after) if name == "cat") == 7
    loader.seek_step(5)
    resumed = ranks_of(after, 1, loader.state_dict())[0]
    assert resumed.step == 5
    other = [{"spec": "cat", "row_offset": 7, "content_hash": "0" * 64}]
    strange = DeterministicLoader(plan, backend="numpy")
    strange.load_state_dict({"datasets": other})
    with refused("E-STATE-DATA", naming=["'cat'"]):
        remix(strange.plan, 5, **state)
    with refused("E-PLAN-SHORT", naming=["'ant' is too short", "stage 'remix@5'"]):
        remix(loader.plan, 5, weights={"ant": 1}, steps=143)


@pytest.fixture(scope="module")
def written(tree, tmp_path_factory):
    """A certificate as a file, and the plan after it."""
    plan = run_of(tree, policy="least_consumed", phases=EDIT["phases"][:0])
    after, certificate = remix(plan, 20, sources=directories(tree, ["cat"]), **EDIT)
    path = tmp_path_factory.mktemp("written") / "certificate.json"
    path.write_text(certificate.to_json(path.parent))
    return path, after


def test_a_certificate_is_made_again_from_its_plans_alone(written, capsys):
    path, after = written
    assert verify(path).after == after.placed_in(path.parent)
    assert main(["verify-remix", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok ant: 80 windows before step 20, 80 after"
    assert lines[-1].startswith(f"ok plan {after.plan_hash} continues ")
    plan_file = path.parent / "plan.json"
    plan_file.write_text(after.placed_in(path.parent).to_json())
    assert load_plan(plan_file).plan_hash == after.plan_hash


def leaves(value, at=()):
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, item in pairs for leaf in leaves(item, (*at, key))]
    return [at]


def changed(value, at):
    *path, last = at
    value = json.loads(json.dumps(value))
    inner = value
    for key in path:
        inner = inner[key]
    old = inner[last]
    inner[last] = old + 1 if isinstance(old, int | float) else f"{old}x"
    return value


LABELS = ("plan_id", "mixture", "content_hash")  # of no plan's identity; the seal's own


def test_any_change_of_a_certificate_is_refused_also_where_it_is_sealed_again(written):
    value = json.loads(written[0].read_text())
    copy, num_sealed = written[0].with_name("copy.json"), 0
    for at in leaves(value):
        tampered = [changed(value, at)]
        if at[-1] not in LABELS or len(at) == 3:
            tampered.append(sealed(tampered[0]))
            num_sealed += 1
        for own in tampered:
            copy.write_text(json.dumps(own))
            with pytest.raises(NmoeError) as caught:
                verify(copy)
            assert caught.value.code.startswith(("E-REMIX", "E-PLAN", "E-MANIFEST", "E-PATH")), at
    assert num_sealed > 60
    for own in (
        sealed(value | {"more": 1}),
        sealed({k: v for k, v in value.items() if k != "sources"}),
    ):
        copy.write_text(json.dumps(own))
        with refused("E-REMIX-CERTIFICATE"):
            verify(copy)


def test_plans_that_differ_before_the_step_are_not_certified(tree):
    """In the order of sources, or of one source's windows alone."""
    plan = run_of(tree, shuffle=True)
    for other in (run_of(tree, shuffle=True, seed=7), run_of(tree, shuffle=True, policy="block")):
        with refused("E-REMIX-CERTIFICATE", naming=["prefix_sha256"]):
            certify(plan, other, 20)


def test_a_plan_that_claims_another_end_of_a_stage_is_refused(tree, tmp_path):
    after, _ = remix(run_of(tree), 20, weights={"ant": 1, "bee": 2})
    value = json.loads(after.placed_in(tmp_path).to_json())
    ant, bee = value["stages"][0]["sources"]
    ant["unread_sequences"] += 1
    bee["unread_sequences"] -= 1
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value))
    with refused("E-PLAN-HASH") as caught:
        load_plan(path)
    found = str(caught.value).split("expected ")[1].split(";")[0]
    path.write_text(json.dumps(value | {"plan_hash": found}))
    with refused("E-PLAN-FORMAT", match="unread sequences of stage"):
        DeterministicLoader(load_plan(path))
