"""The walk over a project in which everything is current: `python -m benchmarks.platform.walk`.

A project of one source and one shard, without labels, is made by `nmoe run`. Then the files of many
sources and shards are simulated: copies of the files of that shard, whose manifests name the inputs
of the larger project. What a walk remembers of such a project is written without looking at the
copies; those after the first shard are empty if they are not JSON, as a walk that remembers opens
no file of them. Processor seconds of `nmoe run` with nothing to do: imports, configuration, walk.
`--before` also measures a walk that remembers nothing, of whole copies.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from benchmarks.prep import measure
from loader.files.checksummed_json import sealed
from nmoe_core.base.atomic import json_bytes
from nmoe_core.cli.output import print_table
from nmoe_core.cli.project.write_docstrings import write_docstrings
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.differences import Look
from nmoe_core.tasks.graph.prepared import SplitLooks
from nmoe_core.tasks.graph.states import Graph
from nmoe_core.tasks.graph.walk import walk

_NMOE = [sys.executable, "-m", "nmoe_core"]
_DOCUMENTS = 600
_SETTLED_S = 3.0


def write_project(directory: Path, num_sources: int, num_shards: int) -> Path:
    """Write a project with equal sources; return its configuration."""
    source = directory / "input" / "source00"
    source.mkdir(parents=True)
    write_docstrings(directory / "all.jsonl")
    rows = (directory / "all.jsonl").read_text().splitlines(keepends=True)[:_DOCUMENTS]
    (source / "part-0.jsonl").write_text("".join(rows))
    subprocess.run([*_NMOE, "init", "input"], cwd=directory, check=True, capture_output=True)
    config = directory / "nmoe.toml"
    text = re.sub(r"(?m)^num_shards = \d+", f"num_shards = {num_shards}", config.read_text())
    text = text.replace('grader = "student"', 'grader = "none"')  # labels would be of all sources
    text = text.replace(" and decision in ('keep', 'band')", "")
    head, name, rest = text.partition("[[mixtures.own.sources]]")
    block, end, rest = rest.partition("\n\n")
    for i in range(1, num_sources):
        other = directory / "input" / f"source{i:02d}"
        shutil.copytree(source, other)
        end += name + block.replace("source00", other.name) + "\n\n"
    config.write_text(head + name + block + end + rest)
    return config


def simulate(made: Run, run: Run, is_whole: bool) -> None:
    """Write the files of all shards of `run` as copies of the files of the only shard of `made`;
    without `is_whole`, only JSON files and those of the first shard of a source have content."""
    shutil.copytree(made.tree.root, run.tree.root, dirs_exist_ok=True)
    shard = made.tree.shard("source00", 0)
    for source in run_sources(run):
        now = SplitLooks(run, source, "train").reads.made_with()[0]
        copies = [
            (place, {file.name: file.read_bytes() for file in place.iterdir()})
            for place in _places(shard)
        ]
        manifest = json.loads(copies[0][1]["manifest.json"]) | {"fingerprints": now}
        copies[0][1]["manifest.json"] = json_bytes(sealed(manifest))
        for bucket in range(run.config.prep.num_shards):
            copy = run.tree.shard(source.name, bucket)
            for place, (_, files) in zip(_places(copy), copies, strict=True):
                _write(place, files if is_whole or bucket == 0 else _without_rows(files))


def _without_rows(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: text if name.endswith(".json") else b"" for name, text in files.items()}


def _places(shard: ShardPaths) -> list[Path]:
    attributes = shard.selection.parent
    return [shard.directory, shard.graded, shard.with_topics, attributes, shard.curated]


def _write(place: Path, files: Mapping[str, bytes]) -> None:
    os.makedirs(place, exist_ok=True)
    for name, payload in files.items():
        with open(f"{place}/{name}", "wb") as file:
            file.write(payload)


def remember(run: Run) -> int:
    """Write what a walk would remember if all outputs were current; return their number."""
    add = Graph.add

    def unchanged(graph, key, task, inputs, look, partition="", reads=None) -> None:
        if reads is not None:
            graph.add_remembered(key, task, (), (), reads)
        add(graph, key, task, inputs, lambda: Look({}, {}), partition)

    with patch.object(Graph, "add", unchanged):
        graph = walk(run, run_sources(run))
        graph.remember()
    return len(graph.states)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.platform.walk", description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["3x4", "50x100", "50x1000"])
    parser.add_argument("--before", action="store_true", help="also without what is remembered")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        made = write_project(Path(temporary) / "made", 1, 1)
        subprocess.run([*_NMOE, "run"], cwd=made.parent, check=True)
        for size in arguments.sizes:
            num_sources, num_shards = map(int, size.split("x"))
            config = write_project(Path(temporary) / size, num_sources, num_shards)
            run = Run(config)
            simulate(Run(made), run, arguments.before)
            time.sleep(_SETTLED_S)
            before = _cost([*_NMOE, "plan", "--config", str(config)]) if arguments.before else None
            outputs = remember(run)
            rows.append([size, outputs, before, _cost([*_NMOE, "run", "--config", str(config)])])
    print_table(["sources x shards", "outputs", "without memory, s", "nmoe run, s"], rows)


def _cost(command: list[str]) -> float:
    return round(measure.run([*command]).cpu_s, 2)


if __name__ == "__main__":
    main()
