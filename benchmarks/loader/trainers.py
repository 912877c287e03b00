"""What each trainer reads of a plan: framework x form x ranks x workers x (fresh, resumed).

    python -m benchmarks.loader.trainers --only lightning,fabric

Each cell runs in processes of its own, with gloo between ranks. A cell is "right" if every step has
the rows of the plan, each on exactly one rank, compared with numbers that are counted here and not
by the loader; "refused" if an error of the loader ends it before a wrong row, "stopped" if an error
of the framework does; anything else is WRONG, and the exit status 1. A resumed run goes on after
step 3 from what the framework saves. Frameworks that are not installed are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.loader.trainer_ways import (
    BATCH_SIZE,
    SEQ_LEN,
    SOURCES,
    STEPS,
    WAYS,
    Cell,
    read_cell,
)

SAVED_AT, PATIENCE_S = 3, 120
NEEDS = {"stateful": "torchdata", "fabric": "lightning", "own": "torch", "dataloader": "torch"}


@dataclass
class Found:
    """What one rank of a cell read: rows of each step, -1 for rows that are not of the plan."""

    rows: list[list[int]]
    error: str | None
    is_ours: bool


def write_data(directory: Path) -> Path:
    """Two sources whose tokens say source and position; returns the plan's file."""
    from loader import resolve_plan

    num_tokens = STEPS * BATCH_SIZE * SEQ_LEN
    for i, name in enumerate(SOURCES):
        (directory / name / "train").mkdir(parents=True)
        tokens = np.arange(num_tokens, dtype=np.uint32) + i * num_tokens + 1
        np.save(directory / name / "train" / "0.npy", tokens)
    rows = [{"path": str(directory / name), "name": name, "weight": 1.0} for name in SOURCES]
    cfg = {"datasets": rows, "batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "steps": STEPS}
    cfg |= {"allow_unmanifested": True, "vocab_size": 2 * num_tokens + 1, "eos_token_id": 0}
    plan = directory / "plan.json"
    plan.write_text(resolve_plan(cfg).placed_in(directory).to_json())
    return plan


def run(cell: Cell, ranks: int, plan: Path, place: Path) -> list[Found]:
    """One cell, in a forked process for each rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = {}
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            try:
                answer(cell, rank, ranks, port, plan, place)
            finally:
                os._exit(0)
        children[child] = rank
    found = {}
    deadline = time.monotonic() + PATIENCE_S
    while children:
        child, _ = os.waitpid(-1, os.WNOHANG)
        if child in children:
            rank = children.pop(child)
            file = place / f"rank{rank}.json"
            found[rank] = Found(**json.loads(file.read_text())) if file.exists() else None
            file.unlink(missing_ok=True)
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.01)
    return [found[rank] or Found([], "the process ended", False) for rank in range(ranks)]


def answer(cell: Cell, rank: int, ranks: int, port: int, plan: Path, place: Path) -> None:
    """The part of one rank, in its process."""
    from loader.errors import NmoeError

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {key: str(value) for key, value in (names | {"MASTER_PORT": port}).items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    rows: list[list[int]] = []
    found = Found(rows, None, False)
    try:
        read_cell(cell, plan, place, rows)
    except Exception as error:  # noqa: BLE001 - whatever a framework raises is an answer
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, NmoeError):
            cause = cause.__cause__ or cause.__context__
        text = str(error).strip()
        _, of_worker, sentence = str(cause or error).rpartition("\nloader.errors.ConfigError: ")
        found.error = sentence if of_worker else str(cause or text.splitlines()[-1])
        found.is_ours = cause is not None or bool(of_worker)
    (place / f"rank{rank}.json").write_text(json.dumps(asdict(found)))


def verdict(found: list[Found], first: int, last: int) -> tuple[str, str]:
    """`right`, `refused`, `stopped` or `WRONG`, and why."""
    ours = [one.error for one in found if one.error and one.is_ours]
    for step, rows in enumerate(itertools.zip_longest(*(one.rows for one in found)), first):
        read = sorted(itertools.chain.from_iterable(part or () for part in rows))
        own = range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        is_part = set(read) < set(own) and len(set(read)) == len(read) and None in rows
        if read != list(own) and not is_part:
            return ("refused", ours[0]) if ours else ("WRONG", f"step {step}: rows {read}")
    if ours:
        return "refused", str(ours[0])
    if errors := [one.error for one in found if one.error]:
        return "stopped", str(errors[0])
    if any(len(one.rows) != last - first for one in found):
        return "WRONG", f"{[len(one.rows) for one in found]} steps"
    return "right", ""


def judge(cell: Cell, ranks: int, plan: Path) -> Iterator[tuple[str, str]]:
    """The verdicts on a fresh and on a resumed run."""
    with tempfile.TemporaryDirectory() as place:
        yield verdict(run(cell, ranks, plan, Path(place)), 0, STEPS)
    with tempfile.TemporaryDirectory() as place:
        cell = replace(cell, stop=SAVED_AT)
        before = verdict(run(cell, ranks, plan, Path(place)), 0, SAVED_AT)
        if before[0] != "right":
            yield before
            return
        cell = replace(cell, stop=STEPS, start=SAVED_AT)
        yield verdict(run(cell, ranks, plan, Path(place)), SAVED_AT, STEPS)


def table(plan: Path, only: Iterable[str], every_rank: Iterable[int]) -> int:
    """Print the table and the reasons; returns how many cells are wrong."""
    reasons: dict[str, int] = {}
    every_rank = list(every_rank)
    heads = [
        f"{n} rank{'s' * (n > 1)}, {kind}" for n in every_rank for kind in ("fresh", "resumed")
    ]
    print("| framework | it is given | workers |", " | ".join(heads), "|")
    print("|" + "---|" * (3 + len(heads)))
    num_wrong = 0
    for cell in WAYS:
        needed = NEEDS.get(cell.framework, cell.framework)
        if (only and cell.framework not in only) or not find_spec(needed):
            continue
        row = [cell.framework, cell.title(), str(cell.workers)]
        for ranks in every_rank:
            for word, why in judge(cell, ranks, plan):
                note = ""
                if word != "right":
                    note = f" {reasons.setdefault(f'{word}: {why}', len(reasons) + 1)}"
                num_wrong += word == "WRONG"
                row.append(word + note)
        print("|", " | ".join(row), "|", flush=True)
    for why, number in reasons.items():
        print(f"{number}. {why}")
    return num_wrong


def main() -> int:
    """Run the cells; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="frameworks, separated by commas")
    parser.add_argument("--ranks", default="1,2,3")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    for module in (
        "torch",
        "torch._dynamo",
        "torchdata",
        "accelerate",
        "lightning",
        "transformers",
    ):
        if find_spec(module.split(".")[0]):
            __import__(module)  # once, before the processes are forked
    directory = Path(tempfile.mkdtemp())
    try:
        plan = write_data(directory)
        return int(table(plan, only, map(int, arguments.ranks.split(","))) > 0)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
