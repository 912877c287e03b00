"""`python -m benchmarks.takedown`: `nmoe takedown` on a million documents, time by step.

Documents of 40 to 160 English-like words with ids and URLs are prepared by `nmoe prep-mixture` and
curated; all are kept, by grades that are written here. One list names a thousand of them by id or
URL, another has three patterns. Every command runs in a process of its own, as a user runs it.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from loader.files.format import load_manifest
from nmoe_core.base.docid import bucket_of
from nmoe_core.cli.output import print_table
from nmoe_core.tasks import curate
from tests.core.curate.corpus import Corpus
from tests.project import Source, write_project

_SHARDS, _WORDS, _RECORD = 16, 20_000, "run/takedown/documents.jsonl"


def main() -> None:
    """Make the run where there is none yet, and print the time of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, default=Path("build/bench/takedown"))
    options = parser.parse_args()
    count, directory = options.documents, options.directory / str(options.documents)
    if not (directory / "run/mixture/loader_plan.json").exists() or (directory / _RECORD).exists():
        shutil.rmtree(directory, ignore_errors=True)
        _make(directory, count)
    config, kinds = directory / "run.toml", _lists(directory, count)
    rows = [_timed(f"report, {kind}", [path, "--config", config]) for kind, path in kinds.items()]
    path = kinds["ids and URLs"]
    for step in ("--apply", "curate", "--verify", "--verify --raw"):
        if step == "curate":
            rows.append(_timed("curation of what changed", ["shards", "--config", config], step))
        else:
            rows.append(_timed(step, [path, "--config", config, *step.split()]))
    print_table(["step", "s", "processor s", "said"], rows)


def _make(directory: Path, count: int) -> None:
    """A run of `count` documents, curated, and its plan."""
    rng, letters = np.random.default_rng(0), "etaoinshrdlu"
    words = ["".join(rng.choice([*letters], rng.integers(2, 6))) for _ in range(_WORDS)]
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "web.jsonl", "wb") as file:
        for i in range(count):
            text = " ".join(map(words.__getitem__, rng.integers(0, _WORDS, rng.integers(40, 160))))
            row = {"id": f"d-{i}", "text": f"{text} n{i}.", "url": f"https://web.example/{i}"}
            file.write(orjson.dumps(row) + b"\n")
    source = Source(
        {"id": "web", "kind": "jsonl", "paths": ["web.jsonl"], "tokens_b": count * 1e-7}, {}
    )
    settings: dict[str, Any] = {
        "root": "run",
        "seq_len": 2048,
        "prep": {"num_shards": _SHARDS},
        "attributes": {"columns": ["url"]},
        "backbone": {"checkpoint": "run/backbone"},
        "curation": {"order": "golden", "num_topics": 6},
    }
    run = write_project(directory, [source], settings).run
    _nmoe("prep-mixture", "--config", run.path)
    (run.tree.root / "backbone").mkdir()
    size = load_manifest(run.tree.shard("web", 0).manifest).vocab_size
    table = rng.standard_normal((size, 16)).astype(np.float32)
    save_file({"embedding.weight": table}, run.tree.root / "backbone/model.safetensors")
    (run.tree.root / "backbone/config.json").write_text("{}")
    corpus = Corpus(run.tree.root, num_buckets=_SHARDS)
    for bucket in range(_SHARDS):
        corpus.grade(bucket, lambda i: "keep")
    _nmoe("curate", "shards", "--config", run.path)
    curate.make_plan(run, ["web"], [])


def _lists(directory: Path, count: int) -> dict[str, Path]:
    """A list of a thousand documents of one shard in four, and one of patterns."""
    ids = [i for i in range(count) if bucket_of(f"d-{i}", _SHARDS) % 4 == 0][: 10**5 : 100]
    lines = [(f"id:d-{i}", f"url:https://web.example/{i}")[i % 2] for i in ids]
    lists = {"ids and URLs": lines, "three patterns": [f"re: n{i}\\.$" for i in ids[:3]]}
    found = {}
    for number, (name, items) in enumerate(lists.items()):
        found[name] = directory / f"list-{number}.txt"
        found[name].write_text("\n".join(items))
    return found


def _timed(name: str, arguments: list[object], verb: str = "takedown") -> list[str]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    said = _nmoe(verb, *arguments, *(["--json"] if verb == "takedown" else []))
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    facts = json.loads(said) if verb == "takedown" else {}
    kept = {k: v for k, v in facts.items() if isinstance(v, bool | int)}
    row = [name, f"{wall:.1f}", f"{spent:.1f}", ", ".join(f"{k} {v}" for k, v in kept.items())]
    print(*row, flush=True)
    return row


def _nmoe(*arguments: object) -> str:
    command = [sys.executable, "-m", "nmoe_core", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode > 1:
        raise SystemExit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
