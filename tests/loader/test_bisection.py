"""`nmoe bisect` finds the documents that cause a symptom, in few replays."""

import json
import math
import random
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.verdicts import Flaky
from loader import load_plan, mask, open_loader, resolve_plan
from loader.errors import PlanError
from nmoe_core.audit.plans.bisection import bisect, find_causes, suspects_of
from tests.project import REPOSITORY, said
from tests.refusals import refused, refused_line

EOS, FIRST, SECOND, ABOVE = 999, 7, 8, 0.01


def plant(manifest, rng: random.Random, num_causes: int) -> set[tuple[str, int]]:
    """Write documents in which SECOND follows FIRST, as it hardly does elsewhere: file, start."""
    row = json.loads(manifest.read_text())["shards"][1]
    path = manifest.parent / row["path"]
    tokens = np.load(path)
    ends = [0, *(np.flatnonzero(tokens == EOS) + 1).tolist()]
    chosen = rng.sample([(a, b) for a, b in pairwise(ends) if b - a > 20], num_causes)
    for start, end in chosen:
        tokens[start : end - 1] = np.resize([FIRST, SECOND], end - 1 - start)
    np.save(path, tokens)
    return {(path.name, start) for start, _ in chosen}


def learned(plan) -> float:
    """P(SECOND | FIRST) of a bigram model, as examples/train.py learns it."""
    pairs = followers = 0
    with open_loader(plan, backend="numpy") as loader:
        for inputs, targets in loader:
            after = targets[(inputs == FIRST) & (targets != -100)]
            pairs, followers = pairs + len(after), followers + int((after == SECOND).sum())
    return (1 + followers) / (512 + pairs)


def causes_of(tree, num_tokens: int, seed: int, num_causes: int = 1) -> tuple[set, set, int, int]:
    """Planted and found documents, the number of suspects, and replays."""
    planted = plant(tree.add(f"web{seed}", num_tokens, seed=seed), random.Random(seed), num_causes)
    plan = resolve_plan(tree.one(f"web{seed}", batch_size=64, seq_len=64))
    suspects, replays = suspects_of(plan, 0, len(open_loader(plan))), []

    def value(masked) -> float:
        replays.append(masked.masked)
        return learned(masked)

    found = {(path.name, start) for _, path, start, _ in bisect(plan, suspects, value, ABOVE)}
    return planted, found, len(suspects), len(set(replays))


@pytest.mark.parametrize("num_causes", [1, 2])
def test_planted_documents_are_found(tree, num_causes):
    planted, found, suspects, replays = causes_of(tree, 16_000, 0, num_causes)
    assert found == planted
    # Each halving, the mask of all of them, and each alone unmasked; no mask.
    assert replays <= num_causes * (math.ceil(math.log2(suspects)) + 2) + 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_document_of_ten_thousand_is_found_within_fourteen_replays_and_confirmed_by_two(tree):
    for seed in range(50):
        planted, found, suspects, replays = causes_of(tree, 213_000, seed)
        assert 9_900 < suspects <= 2**14
        assert found == planted
        assert replays <= 14 + 2


def test_causes_are_a_smallest_set_whatever_their_number_and_places():
    rng = random.Random(0)
    for _ in range(300):
        suspects = rng.randint(1, 300)
        causes = rng.sample(range(suspects), rng.randint(1, min(4, suspects)))
        asked = set()

        def is_gone(masked: list[int], causes=causes, asked=asked) -> bool:
            asked.add(tuple(masked))
            return set(causes) <= set(masked)

        assert find_causes(suspects, is_gone) == sorted(causes)
        assert len(asked) <= len(causes) * (math.ceil(math.log2(suspects)) + 3) + 3


@pytest.mark.parametrize(
    ("shows", "turns", "repeat", "most_wrong", "least_right"),
    [
        (1.0, 0.0, 1, 0.0, 1.0),
        (0.98, 0.0, 1, 0.02, 0.7),
        (0.9, 0.0, 1, 0.02, 0.35),
        (0.8, 0.0, 1, 0.02, 0.1),
        (0.7, 0.0, 1, 0.02, 0.02),
        (1.0, 0.02, 1, 0.02, 0.6),
        (0.9, 0.0, 3, 0.02, 0.7),
    ],
)
def test_a_command_that_is_not_reproducible_is_refused_and_seldom_names_an_innocent_document(
    shows: float, turns: float, repeat: int, most_wrong: float, least_right: float
):
    suspects, trials, wrong, right, replays = 256, 400, 0, 0, 0
    for seed in range(trials):
        causes = {random.Random(seed).randrange(suspects)}
        command = Flaky(causes, shows, turns, repeat, seed)
        try:
            found = find_causes(suspects, command.is_gone, command.again)
        except PlanError:
            continue
        finally:
            replays += command.replays
        right, wrong = right + (set(found) == causes), wrong + (set(found) != causes)
    assert wrong <= most_wrong * trials
    assert right >= least_right * trials
    assert replays / trials <= 2 * repeat * (math.log2(suspects) + 6), "a search ends soon"


def test_answers_are_given_again_before_a_cause_counts():
    causes = {3, 40}
    for lie in ([], [3, 40], [3], [40]):
        again = lambda masked, lie=lie: (causes <= set(masked)) != (masked == lie)  # noqa: E731
        with refused("E-BISECT", naming=["contradict each other"]):
            find_causes(64, lambda masked: causes <= set(masked), again)
    assert find_causes(64, lambda masked: causes <= set(masked)) == [3, 40]


def test_a_symptom_that_masks_do_not_explain_is_refused():
    for answers, named in (
        ([False] * 9, "remains although all suspects are masked"),
        ([True] * 9, "missing although no document is masked"),
        ([True] * 3 + [False] * 9, "contradict each other"),
    ):
        with refused("E-BISECT", naming=[named]):
            find_causes(9, lambda _, answers=answers: answers.pop(0))


@pytest.mark.long
def test_the_verb_replays_a_trainer_and_continues_after_an_interrupt(tree, tmp_path, capsys):
    planted = plant(tree.add("web", 1000), random.Random(1), 1)
    plan = resolve_plan(tree.one(batch_size=8))
    path, output = tmp_path / "plan.json", tmp_path / "found"
    path.write_text(plan.placed_in(tmp_path).to_json())
    train = f"{sys.executable} {REPOSITORY / 'examples' / 'train.py'} {{plan}} --steps"
    subprocess.run(
        shlex.split(f"{train} 1 --checkpoint at".replace("{plan}", str(path))),
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    # From the checkpoint, which a replay must not change.
    run = f"cd {tmp_path} && cp at.npy run.npy && cp at.json run.json && echo >> asked"
    command = f"sh -c '{run} && {train} 99 --checkpoint run --probe {FIRST} {SECOND}'"
    words = ["bisect", path, "--from-step", 1, "--to-step", 7, "--source", "web"]
    words += ["--above", ABOVE, "-o", output, "--command"]
    for wrong, named in (
        ("false {plan}", "exit status 1"),
        ("false plan", "does not use the plan"),
    ):
        assert named in refused_line(capsys, *map(str, words), wrong)
    facts = said(capsys, *words, command)
    assert {(Path(row["file"]).name, row["start"]) for row in facts["causes"]} == planted
    asked = (tmp_path / "asked").stat().st_size
    assert asked == facts["replays"] <= 16
    causes = [tuple(row.values()) for row in facts["causes"]]
    assert load_plan(facts["plan"]).masked == mask(plan, causes, replace_text=True).masked
    lines = (output / "replays.jsonl").read_bytes().splitlines(keepends=True)
    (output / "replays.jsonl").write_bytes(b"".join(lines[:-1]) + b'{"torn')
    assert said(capsys, *words, command) == facts
    assert (tmp_path / "asked").stat().st_size == asked + 1
    assert said(capsys, *words, command, "--repeat", 3)["causes"] == facts["causes"]
    assert "no majority" in refused_line(capsys, *map(str, words), command, "--repeat", "2")
    for damaged in (b"\0\0\n", b"[]\n", b'{"command": "a", "plan_hash": "b"}\n'):
        (output / "replays.jsonl").write_bytes(damaged)
        assert "not a record of a replay" in refused_line(capsys, *map(str, words), command)


def test_a_command_that_does_not_repeat_its_answer_is_refused_before_a_commit(
    tree, tmp_path, capsys
):
    tree.add("web", 1000)
    path, output = tmp_path / "plan.json", tmp_path / "found"
    path.write_text(resolve_plan(tree.one(batch_size=8)).placed_in(tmp_path).to_json())
    command = tmp_path / "command.py"
    command.write_text(  # Masks help, but not the second time.
        "import hashlib, json, pathlib, sys\n"
        "plan = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "seen = pathlib.Path(__file__).with_name(hashlib.sha256(plan).hexdigest())\n"
        "print(0 if json.loads(plan).get('masked') and not seen.exists() else 1)\n"
        "seen.touch()\n"
    )
    words = ["bisect", path, "--from-step", 1, "--to-step", 7, "--above", "0.5", "-o", output]
    words += ["--command", f"{sys.executable} {command} {{plan}}"]
    assert "contradict each other" in refused_line(capsys, *map(str, words), code="E-BISECT")
    assert not (output / "causes.json").exists()
    rows = [json.loads(line) for line in (output / "replays.jsonl").read_text().splitlines()]
    assert len({row["plan_hash"] for row in rows}) < len(rows), "some are asked twice"


def test_steps_and_sources_that_the_plan_does_not_have_are_refused(tree):
    tree.add("web", 400)
    plan = resolve_plan(tree.one())
    for steps, sources in (((0, 99), ()), ((3, 3), ()), ((0, 2), ("wab",))):
        with refused("E-CONFIG"):
            suspects_of(plan, *steps, sources)
