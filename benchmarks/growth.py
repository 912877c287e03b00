"""How the cost of a project grows with its bytes and its shards: `python -m benchmarks.growth`.

One row per stage and size. Costs are processor seconds of the command and all its children, the
resident memory of its largest process, and the files, megabytes and events of Dagster that it
wrote. Three sources hold documents of lognormal length, made of paragraphs of the text on this
machine; a project of `nmoe init` is made, run, run again with nothing to do, and run after one
document and after 1 % of the documents changed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.prep import measure
from benchmarks.prep.corpus import installed_texts
from nmoe_core.cli.output import print_table

_SHARES = {"web": 0.5, "docs": 0.3, "books": 0.2}
_MEDIAN_BYTES = 1800
_SPREAD = 1.1
_PARAGRAPH_BYTES = 8_000_000
_NMOE = [sys.executable, "-m", "nmoe_core"]
_JOB = [sys.executable, "-m", "dagster", "job", "execute", "-m", "nmoe_assets.definitions", "-j"]
_TASKS = ("prep", "label", "train_heads", "grade", "curate")
_READERS = {
    "plan": ["plan"],
    "report": ["report"],
    "report --html": ["report", "--html", "page.html"],
    "sql": ["sql", "select source, lang, count(*) from documents group by source, lang"],
}
_WRITTEN_EVENTS = ("ASSET_MATERIALIZATION", "ASSET_CHECK_EVALUATION")


class Cost(NamedTuple):
    """The cost of one command."""

    cpu_s: float
    peak_mb: float
    files: int
    written_mb: float
    events: int
    log_mb: float


class Project:
    """A project below a directory, and the costs of commands in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "nmoe.toml"
        self.home = directory / ".dagster"

    def cost(self, command: list[str]) -> Cost:
        """Run a command in the project."""
        os.environ.update(NMOE_CONFIG=str(self.file), DAGSTER_HOME=str(self.home))
        os.chdir(self.directory)
        before = self._files()
        events = self._events()
        log = self._log_bytes()
        done = measure.run([*command])
        after = self._files()
        written = [path for path, state in after.items() if before.get(path) != state]
        written_bytes = sum(after[path][0] for path in written)
        return Cost(
            done.cpu_s,
            done.peak_bytes / 1e6,
            len(written),
            written_bytes / 1e6,
            self._events() - events,
            (self._log_bytes() - log) / 1e6,
        )

    def _files(self) -> dict[Path, tuple[int, int, int]]:
        """Size, number and time of each file of the run; files of Dagster count as events."""
        found = {}
        for path in self.directory.rglob("*"):
            if path.is_file() and self.home not in path.parents:
                status = path.stat()
                found[path] = status.st_size, status.st_ino, status.st_mtime_ns
        return found

    def _events(self) -> int:
        """Materialisations and verdicts of checks in the event log."""
        path = self.home / "history" / "runs" / "index.db"
        if not path.is_file():
            return 0
        with sqlite3.connect(path) as log:
            query = "select count(*) from event_logs where dagster_event_type in (?, ?)"
            return log.execute(query, _WRITTEN_EVENTS).fetchone()[0]

    def _log_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.home.rglob("*") if path.is_file())


def paragraphs() -> list[str]:
    """Paragraphs of the text files on this machine."""
    found = []
    total = 0
    for text in installed_texts():
        for paragraph in re.split(r"\n\s*\n", text):
            if 100 <= len(paragraph) <= 4000:
                found.append(paragraph)
                total += len(paragraph)
        if total > _PARAGRAPH_BYTES:
            break
    return found


def documents(pieces: list[str], size: int, drawn: random.Random) -> Iterator[str]:
    """Documents of about `size` bytes in all; 2 % are copies, 2 % are copies with an edit."""
    made: list[str] = []
    total = 0
    while total < size:
        kind = drawn.random()
        if kind < 0.04 and made:
            text = drawn.choice(made[-1000:])
            text = text if kind < 0.02 else f"{text}\n\n{drawn.choice(pieces)}"
        else:
            wanted = drawn.lognormvariate(math.log(_MEDIAN_BYTES), _SPREAD)
            parts: list[str] = []
            while sum(map(len, parts)) < wanted:
                parts.append(drawn.choice(pieces))
            text = "\n\n".join(parts)
        made.append(text)
        total += len(text.encode())
        yield text


def write_sources(directory: Path, size: int) -> None:
    """Write the three sources as JSON lines."""
    pieces = paragraphs()
    drawn = random.Random(0)
    for name, share in _SHARES.items():
        path = directory / "input" / name / "part-0.jsonl"
        path.parent.mkdir(parents=True)
        with open(path, "w", encoding="utf-8") as file:
            for i, text in enumerate(documents(pieces, int(size * share), drawn)):
                print(json.dumps({"id": f"{name}-{i}", "text": text}), file=file)


def change(directory: Path, every: int) -> None:
    """Append a sentence to each document whose number divides by `every`; 0 for one document."""
    for name in _SHARES if every else ["docs"]:
        path = directory / "input" / name / "part-0.jsonl"
        lines = path.read_text("utf-8").splitlines()
        for i in range(0, len(lines), every) if every else [len(lines) // 2]:
            row = json.loads(lines[i])
            row["text"] += f"\n\nThis sentence was added to document {i} of {name}."
            lines[i] = json.dumps(row)
        path.write_text("\n".join(lines) + "\n", "utf-8")


def measured(directory: Path, size: int, num_shards: int) -> dict[str, Cost]:
    """The cost of each stage of a new project; prints each stage when it ends."""
    project = Project(directory)
    write_sources(directory, size)
    costs: dict[str, Cost] = {}

    def add(stage: str, command: list[str]) -> None:
        costs[stage] = project.cost(command)
        print(f"  {stage}: {told(costs[stage])}", flush=True)

    add("init", [*_NMOE, "init", "input"])
    of_source = max(1, num_shards // len(_SHARES))
    text = project.file.read_text()
    project.file.write_text(re.sub(r"(?m)^num_shards = \d+", f"num_shards = {of_source}", text))
    add("imports", [*_NMOE, "--help"])
    for task in _TASKS:
        add(task, [*_NMOE, "run", task])
    add("all that is left", [*_NMOE, "run"])
    for name, command in _READERS.items():
        add(name, [*_NMOE, *command])
    add("nothing: nmoe run", [*_NMOE, "run"])
    for task in _TASKS:
        add(f"nothing: {task}", [*_NMOE, "run", task])
    add("nothing: pipeline", [*_JOB, "pipeline"])
    change(directory, 0)
    add("one document: nmoe run", [*_NMOE, "run"])
    change(directory, 100)
    for task in _TASKS:
        add(f"1 %: {task}", [*_NMOE, "run", task])
    return costs


def told(cost: Cost) -> str:
    """A cost in one cell."""
    return (
        f"{cost.cpu_s:.1f} s, {cost.peak_mb:.0f} MB, {cost.files} files {cost.written_mb:.1f} MB, "
        f"{cost.events} events {cost.log_mb:.2f} MB"
    )


def exponent(costs: list[Cost], sizes: list[float]) -> str:
    """The growth of processor time from the first to the last size: 1 is linear."""
    if len(sizes) < 2 or sizes[0] == sizes[-1]:
        return ""
    return f"{math.log(costs[-1].cpu_s / costs[0].cpu_s) / math.log(sizes[-1] / sizes[0]):.2f}"


def main() -> None:
    """Measure each size with the first number of shards, and the first size with the others."""
    parser = argparse.ArgumentParser(prog="benchmarks.growth", description=__doc__)
    parser.add_argument("--mb", type=float, nargs="+", default=[25, 100], help="bytes of text")
    parser.add_argument("--shards", type=int, nargs="+", default=[6, 99], help="of all sources")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    found: dict[str, dict[str, Cost]] = {}
    places = [(mb, arguments.shards[0]) for mb in arguments.mb]
    places += [(arguments.mb[0], count) for count in arguments.shards[1:]]
    out = arguments.out and arguments.out.absolute()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["PYTHONPYCACHEPREFIX"] = f"{temporary}/bytecode"
        for mb, count in places:
            name = f"{mb:g} MB, {count} shards"
            print(name, flush=True)
            directory = Path(temporary, name.replace(" ", ""))
            directory.mkdir()
            found[name] = measured(directory, int(mb * 1e6), count)
    if out:
        rows: dict[str, Any] = {
            name: {stage: cost._asdict() for stage, cost in costs.items()}
            for name, costs in found.items()
        }
        out.write_text(json.dumps(rows, indent=1) + "\n")
    table = []
    for stage in next(iter(found.values())):
        by_size = [costs[stage] for costs in found.values()][: len(arguments.mb)]
        cells = [told(costs[stage]) for costs in found.values()]
        table.append([stage, *cells, exponent(by_size, arguments.mb)])
    print_table(["stage", *found, "exponent"], table)


if __name__ == "__main__":
    main()
