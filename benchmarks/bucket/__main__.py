"""`python -m benchmarks.bucket`: each stage of a run in a bucket against the same on a local disk.

Both sides run the same commands over the same text, one after the other. The bucket is 30 ms and
100 MB/s away, and each of its stages begins with an empty local directory, as a new pod does;
with `--keep`, the local directory stays, as on a machine that makes all stages, and last each
command runs again with nothing to do. A round has a new root on each side.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bucket.server import Server, serving
from benchmarks.prep import measure
from benchmarks.prep.corpus import write_corpus
from benchmarks.rounds import ratios, spread
from nmoe_core.cli.output import print_table
from tests.project import Source, write_project

STAGES = (
    "prep-mixture",
    "hydra slices",
    "hydra oracle-label",
    "hydra merge-labels",
    "train student",
    "hydra calibrate",
    "hydra grade",
    "attributes",
    "curate shards",
)
_HEADS = (
    "stage",
    "s on a disk",
    "x in a bucket",
    "x of its cpu",
    "MB sent",
    "MB fetched",
    "requests",
    "again",
)
_LOGIN = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_SETTINGS: dict[str, Any] = {
    "oracle": {"max_doc_tokens": 256},
    "checks": {"min_spearman": -1.0, "min_val_documents": 3},
    "grading": {"grader": "student"},
    "attributes": {"use": ["signals"]},
    "curation": {"where": "n_words > 5", "num_topics": 16},
    "seq_len": 1024,
    "batch_size": 8,
}


class Cost(NamedTuple):
    """One command: its time, and what it asked of the bucket."""

    wall_s: float
    cpu_s: float
    sent_mb: float = 0.0
    fetched_mb: float = 0.0
    requests: int = 0


def write_side(directory: Path, corpus: Path, root: str, options: argparse.Namespace) -> Path:
    """A project over the corpus; returns its configuration."""
    table = {"id": "web", "kind": "jsonl", "paths": [str(corpus)], "valid_split": "train[:1%]"}
    settings = _SETTINGS | {
        "root": root,
        "prep": {"num_shards": options.shards, "max_tokens": "all", "workers": options.workers},
        "compute": {"workers": options.workers},
    }
    return write_project(directory, [Source(table, {})], settings).config


def cost(config: Path, stage: str, server: Server) -> Cost:
    """Run one stage."""
    server.counts.clear()
    done = measure.run([sys.executable, "-m", "nmoe_core", *stage.split(), "--config", config])
    counts = dict(server.counts)
    sent = counts.pop("received_bytes", 0)
    fetched = counts.pop("sent_bytes", 0)
    requests = sum(counts.values())
    return Cost(done.wall_s, done.cpu_s, sent / 1e6, fetched / 1e6, requests)


def one_round(
    number: int, directory: Path, corpus: Path, server: Server, options: argparse.Namespace
) -> dict[str, dict[str, Cost]]:
    """The costs of each stage on both sides, and of each command with nothing to do."""
    scratch = directory / "scratch"
    os.environ["NMOE_SCRATCH"] = str(scratch)
    local = write_side(directory / "disk", corpus, "out", options)
    remote = write_side(directory / "remote", corpus, f"s3://corpus/run{number}", options)
    sides = {"disk": local, "bucket": remote}
    found: dict[str, dict[str, Cost]] = {}
    for name in options.stages:
        found[name] = {}
        for side in sorted(sides, reverse=bool(number % 2)):
            if not options.keep:
                shutil.rmtree(scratch, ignore_errors=True)
            found[name][side] = cost(sides[side], name, server)
            print(f"  {name}, {side}: {told(found[name][side])}", flush=True)
    for name in options.stages if options.keep else ():
        found[name]["again"] = cost(remote, name, server)
        print(f"  {name}, again: {told(found[name]['again'])}", flush=True)
    return found


def told(one: Cost) -> str:
    """A cost in one cell."""
    text = f"{one.wall_s:.1f} s, cpu {one.cpu_s:.1f} s"
    if one.requests:
        text += f", sent {one.sent_mb:.1f} MB, fetched {one.fetched_mb:.1f} MB"
        text += f", {one.requests} requests"
    return text


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.bucket", description=__doc__)
    parser.add_argument("--mb", type=float, default=300, help="bytes of text")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mb-per-s", type=float, default=100)
    parser.add_argument("--rtt-ms", type=float, default=30)
    parser.add_argument("--keep", action="store_true", help="keep the local directory")
    parser.add_argument("--stages", nargs="+", default=STAGES, help="in their order")
    parser.add_argument("--corpora", type=Path, help="a directory of more text")
    parser.add_argument("--text", type=Path, default=Path("build/bench/bucket.jsonl"))
    options = parser.parse_args()
    text_bytes = write_corpus(options.text, int(options.mb * 1e6), options.corpora)
    print(f"{text_bytes / 1e6:.0f} MB of text", flush=True)
    rounds = []
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(options.mb_per_s, options.rtt_ms) as (server, port),
    ):
        os.environ.update(_LOGIN, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
        for number in range(options.rounds):
            below = Path(directory, str(number))
            rounds.append(one_round(number, below, options.text.absolute(), server, options))
            shutil.rmtree(below)
    print_table(_HEADS, [_row(name, [one[name] for one in rounds]) for name in options.stages])


def _row(name: str, rounds: list[dict[str, Cost]]) -> list[object]:
    """The row of a stage: ratios of rounds, and the bytes and requests of the last round."""
    disk = [one["disk"] for one in rounds]
    bucket = [one["bucket"] for one in rounds]
    last = bucket[-1]
    walls = ratios([one.wall_s for one in bucket], [one.wall_s for one in disk])
    cpus = ratios([one.cpu_s for one in bucket], [one.cpu_s for one in disk])
    seconds = spread([one.wall_s for one in disk], ".1f")
    again = rounds[-1]["again"].requests if "again" in rounds[-1] else ""
    moved = f"{last.sent_mb:.0f}", f"{last.fetched_mb:.0f}"
    return [name, seconds, spread(walls), spread(cpus), *moved, last.requests, again]


if __name__ == "__main__":
    main()
