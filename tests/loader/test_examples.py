"""The example trainers, run as a user runs them, also where numpy is all there is."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loader import IGNORE_INDEX, open_loader, resolve_plan
from tests.project import REPOSITORY, output_of

LOADER = REPOSITORY / "loader"
EXAMPLES = REPOSITORY / "examples"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def command(example: str, plan: Path, checkpoint: Path, *arguments: object) -> list[str]:
    parts = [sys.executable, EXAMPLES / example, plan, "--checkpoint", checkpoint, *arguments]
    return [str(part) for part in parts]


def run(*arguments) -> list[str]:
    return output_of(*command(*arguments), env=ENVIRONMENT).splitlines()


def losses(lines: list[str]) -> dict[int, str]:
    """Step -> its line of losses with every digit."""
    found = (re.fullmatch(r"step (\d+)  (loss/.*)", line) for line in lines)
    return {int(m[1]): m[2] for m in found if m}


def test_numpy_example_reads_the_same_stream_in_one_go_or_two(plan_file, tmp_path):
    whole = run("train.py", plan_file, tmp_path / "a", "--steps", 12)[-1]
    run("train.py", plan_file, tmp_path / "b", "--steps", 5)
    assert run("train.py", plan_file, tmp_path / "b", "--steps", 12)[-1] == whole
    assert re.fullmatch(r"step 12, batches [0-9a-f]{16}", whole)


@pytest.mark.long
def test_decoder_killed_and_resumed_has_the_losses_of_an_uninterrupted_run(plan_file, tmp_path):
    pytest.importorskip("torch")
    # Over the stage boundary at step 25, with a thread that reads ahead.
    lines = run("train_decoder.py", plan_file, tmp_path / "a.pt", "--steps", 33)
    assert "data/web/tokens" in lines[-1]
    whole = losses(lines)
    assert sorted(whole) == list(range(33))
    totals = [float(line.split("loss/total ")[1]) for line in whole.values()]
    assert sum(totals[-5:]) < sum(totals[:5])
    names = {name for line in whole.values() for name in re.findall(r"loss/(\w+)", line)}
    assert names == {"web", "code", "math", "total"}
    part = ("--steps", 10**6, "--save-every", 4)
    killed = subprocess.Popen(
        command("train_decoder.py", plan_file, tmp_path / "b.pt", *part),
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert killed.stdout is not None
    lines = []
    for line in killed.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith("step 14 "):
            killed.send_signal(signal.SIGKILL)
            break
    killed.wait()
    killed.stdout.close()
    before = losses(lines)
    after = losses(run("train_decoder.py", plan_file, tmp_path / "b.pt", "--steps", 30))
    assert min(after) in (8, 12, 16)  # the last checkpoint
    assert sorted({*before, *after}) == list(range(30))
    for step, line in [*before.items(), *after.items()]:
        assert line == whole[step]


@pytest.mark.slow
def test_four_ranks_continued_by_three_read_the_stream_of_one(plan_file, tmp_path):
    pytest.importorskip("torch")
    whole = run("train_elastic.py", plan_file, tmp_path / "a.pt", "--ranks", 1, "--steps", 12)[-1]
    run("train_elastic.py", plan_file, tmp_path / "b.pt", "--ranks", 4, "--steps", 7)
    elastic = run("train_elastic.py", plan_file, tmp_path / "b.pt", "--ranks", 3, "--steps", 12)[-1]
    stream = re.compile(r"step 12, (\d) ranks, stream ([0-9a-f]{16}), .*loss/total ([\d.]+)")
    one, three = stream.fullmatch(whole), stream.fullmatch(elastic)
    assert one
    assert three
    assert (one[1], three[1]) == ("1", "3")
    assert one[2] == three[2]


@pytest.mark.long
def test_two_ranks_read_the_stream_of_one_and_sum_their_losses(plan_file, tmp_path):
    pytest.importorskip("torch")
    found = []
    for ranks in (1, 2):
        place = tmp_path / f"{ranks}.pt"
        line = run("train_elastic.py", plan_file, place, "--ranks", ranks, "--steps", 3)[-1]
        named = re.findall(r"(loss/\w+) ([\d.]+)", line)
        found.append((re.findall(r"stream (\w+)", line), {n: float(loss) for n, loss in named}))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)
    assert {"loss/web", "loss/code", "loss/total"} <= set(found[0][1])


@pytest.mark.long
def test_the_elastic_example_leaves_padding_out_of_the_loss(two_stages, tmp_path):
    torch = pytest.importorskip("torch")
    plan = two_stages.tree.root / "packed.json"
    packed = resolve_plan(two_stages.cfg | {"packing": "best_fit"})
    plan.write_text(packed.to_json())
    line = run("train_elastic.py", plan, tmp_path / "a.pt", "--ranks", 2, "--steps", 1)[-1]
    torch.manual_seed(0)
    layers = torch.nn.Embedding(512, 32), torch.nn.Linear(32, 512)
    inputs, targets = open_loader(packed, backend="torch").next()
    counted = targets != IGNORE_INDEX
    assert not counted.all()
    logits = layers[1](layers[0](inputs % 512))[counted]
    loss = torch.nn.functional.cross_entropy(logits, targets[counted] % 512).item()
    assert float(line.split("loss/total ")[1]) == pytest.approx(loss, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # pip may take minutes on a busy machine
def test_an_empty_environment_gets_numpy_only_and_reads_batches(plan_file, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(LOADER)], check=True)
    listing = [python, "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(listing, capture_output=True, check=True)
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert names - {"pip", "setuptools"} == {"nmoe-loader", "numpy"}
    run("train.py", plan_file, tmp_path / "bigram", "--steps", 5)
    lines = run("train.py", plan_file, tmp_path / "bigram", "--steps", 12)
    assert lines[0] == "resumed at step 5"
    assert lines[-1].startswith("step 12, batches ")
    for option in ("peek", "verify", "fingerprint"):
        command = [python, "-m", "loader", option, plan_file]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
