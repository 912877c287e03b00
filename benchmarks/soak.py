"""`python -m benchmarks.soak [--only NAME] [--scale F]`: long runs whose memory must stay flat.

Each case uses the product by its public names, in a process of its own, and samples it at twenty
equally spaced points: resident memory, open files and threads, those of child processes included.
The first fifth is the warm-up. The last fifth is held against the second, and the command exits
with 1 where it is over a bound. `--scale` shortens every case; below about a fiftieth, a leak is
smaller than the bound on memory, and below a fifth, `daemon` has no idle ticks and fails.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from nmoe_core.cli.output import print_table
from tests.project import json_lines, toml

CASES = {  # and their items at full scale
    "benchmarks.soak:loader": 1_000_000,  # batches
    "benchmarks.soak:loader_prefetch": 1_000_000,
    "benchmarks.soak:generator": 10_000,  # requests
    "benchmarks.soak:prep": 2_000_000_000,  # bytes of JSON lines
    "benchmarks.soak:labels": 100_000,  # replies
    "benchmarks.platform.ticks:daemon": 960,  # ticks of half a minute: eight hours
}
NUM_SAMPLES, FIFTH = 20, 4
Sample = dict[str, float]
# The growth that is let pass: a share, or an amount where that is more. A heap is never still: its
# free parts move with the order of the work. One handle or thread more after millions of items is
# one that was not given back. Numbers of rows stand in the cursor, which grow by a digit.
BOUNDS = {
    "rss_mb": (0.03, 8.0),
    "num_files": (0.0, 0.0),
    "num_threads": (0.0, 0.0),
    "cursor_bytes": (0.01, 64.0),
    "idle_bytes": (0.0, 0.0),
}


def main() -> None:
    """Run the cases and print the table; a process that is told a case runs that alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    cases = {case.partition(":")[2]: case for case in CASES}
    parser.add_argument("--only", choices=cases)
    parser.add_argument("--scale", type=float, default=1.0)
    options, rows, found = parser.parse_args(), [], dict[str, list[str]]()
    for name in [options.only] if options.only else cases:
        num_items = max(round(CASES[cases[name]] * options.scale), NUM_SAMPLES)
        samples = run(cases[name], num_items)
        found[name] = faults(samples)
        rows.append([name, f"{num_items:,}", *_cells(samples), "; ".join(found[name]) or "flat"])
    print_table(["case", "items", "minutes", "RSS MB", "files", "threads", "verdict"], rows)
    sys.exit(any(found.values()))


def run(case: str, num_items: int) -> list[Sample]:
    """The samples of a case, `module:function`, in a process of its own."""
    command = [sys.executable, "-c", "from benchmarks import soak; soak.run_here()"]
    samples = []
    with subprocess.Popen(
        [*command, case, str(num_items)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            samples.append(json.loads(line))
            print(case.partition(":")[2], line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{case} ended with {process.returncode}")
    return samples


def run_here() -> None:
    """Run the case that the command line names."""
    module, _, function = sys.argv[1].partition(":")
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        num_items = int(sys.argv[2])
        getattr(importlib.import_module(module), function)(Watch(num_items), Path(directory))


def faults(samples: list[Sample]) -> list[str]:
    """What grew after the warm-up, in words; a case that was sampled too seldom proves nothing."""
    if len(samples) != NUM_SAMPLES + 1:
        return [f"{len(samples) - 1} samples in place of {NUM_SAMPLES}"]
    found = []
    for name, (share, amount) in BOUNDS.items():
        early, late = (_level(samples, name, fifth) for fifth in (1, 4))
        if late - early > max(share * early, amount):
            found.append(f"{name} grew from {early:g} to {late:g}")
    return found


def _level(samples: list[Sample], name: str, fifth: int) -> float:
    """A figure in a fifth of the samples; the one at the start belongs to none. Of files and
    threads the fewest count: some are there while something is written, and given back."""
    first = 1 + fifth * FIFTH
    figures = [sample.get(name, 0) for sample in samples[first : first + FIFTH]]
    return median(figures) if name == "rss_mb" else min(figures)


def _cells(samples: list[Sample]) -> list[str]:
    """Minutes, and each figure at the start, after the warm-up and at the end."""
    columns = []
    for name in ("rss_mb", "num_files", "num_threads"):
        figures = samples[0][name], _level(samples, name, 1), _level(samples, name, 4)
        columns.append(", ".join(f"{figure:.0f}" for figure in figures))
    return [f"{(samples[-1]['seconds'] - samples[0]['seconds']) / 60:.1f}", *columns]


class Watch:
    """Prints a sample before the first item, and in the middle of each twentieth of the items: at
    the end, threads and connections are gone whose growth would then be hidden."""

    def __init__(self, num_items: int) -> None:
        import psutil

        self.num_items, self._next = num_items, 0
        self._process, self._started = psutil.Process(), time.perf_counter()
        self.more: Sample = {}  # figures of a case's own

    def at(self, done: int) -> None:
        """Say how many items are done."""
        halves = 2 * NUM_SAMPLES * done // self.num_items  # of a twentieth
        if halves < 2 * self._next - 1:
            return
        self._next = (halves + 1) // 2 + 1
        processes = [self._process, *self._process.children(recursive=True)]
        sample = {
            "items": done,
            "seconds": round(time.perf_counter() - self._started, 1),
            "rss_mb": round(sum(p.memory_info().rss for p in processes) / 2**20, 1),
            "num_files": sum(p.num_fds() for p in processes),
            "num_threads": sum(p.num_threads() for p in processes),
        }
        print(json.dumps(sample | self.more), flush=True)


def loader(watch: Watch, directory: Path, prefetch: int = 0) -> None:
    """Batches of three sources in many files, epoch after epoch, each shuffled anew; a state every
    thousand."""
    from loader import open_loader
    from tests.core.small_gradings import random_documents, write_source

    tables = []
    for seed, name in enumerate(("code", "docs", "web")):
        write_source(directory, name, random_documents(seed, 4000 * (seed + 1)), num_shards=4)
        tables.append({"path": name, "weight": 1.0 + seed})
    settings = {"batch_size": 2, "seq_len": 32, "steps": watch.num_items}
    settings |= {"shuffle": True, "on_exhaust": "wrap", "data": {"datasets": tables}}
    (directory / "run.toml").write_text(toml(settings))
    with open_loader(directory / "run.toml", rank=0, world_size=1, prefetch=prefetch) as opened:
        watch.at(0)
        for done, _ in enumerate(opened, 1):
            if done % 1000 == 0:
                json.dumps(opened.state_dict())
            watch.at(done)


def loader_prefetch(watch: Watch, directory: Path) -> None:
    """As `loader`, read ahead by a thread."""
    loader(watch, directory, prefetch=4)


def generator(watch: Watch, directory: Path) -> None:
    """Requests of all lengths in calls of a hundred, some with one of twelve shared beginnings."""
    from nmoe_core.engine import BatchedGenerator, Request, Sampling, make_tiny_checkpoint

    make_tiny_checkpoint(directory, num_layers=2, vocab_size=512)
    generator, rng, done = BatchedGenerator(directory, max_seq_len=256), random.Random(0), 0
    watch.at(0)

    def request(number: int) -> Request:
        beginning = random.Random(number % 12).choices(range(512), k=64 * (number % 2))
        prompt = beginning + rng.choices(range(512), k=rng.randint(1, 150))
        sampling = Sampling(0.8 * (number % 3), seed=number)
        return Request(prompt, rng.randint(1, 16), sampling, frozenset({number % 512}))

    while done < watch.num_items:
        for _ in generator.complete(map(request, range(done, done + 100))):
            watch.at(done := done + 1)


def prep(watch: Watch, directory: Path) -> None:
    """Text with many words that come once, so that a memory of words would show."""
    from nmoe_core.prep.pipeline import JSONLSource, ParallelPrepPipeline, PrepConfig

    path = directory / "text.jsonl"
    with open(path, "w", encoding="ascii") as file:
        for text in _texts(2000):
            if file.write(json_lines([{"text": text}])) and file.tell() >= watch.num_items:
                break
    watch.num_items = path.stat().st_size
    config = PrepConfig(output_dir=directory / "out", dataset_name="text", num_workers=2)
    watch.at(0)
    pipeline = ParallelPrepPipeline(
        JSONLSource(path), config, progress=lambda state: watch.at(state.size_bytes)
    )
    pipeline.run()


def _texts(max_words: int) -> Iterator[str]:
    """Texts without end; one word in twelve was never there before."""
    rng, letters = random.Random(0), string.ascii_lowercase
    known = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(20_000)]
    for number in itertools.count():
        words = rng.choices(known, k=rng.randint(max_words // 10, max_words))
        words[::12] = [f"{rng.choice(known)}{number:x}{i:x}" for i in range(len(words[::12]))]
        yield " ".join(words)


def labels(watch: Watch, directory: Path) -> None:
    """Replies of a server on loopback, which now and then cannot be read or end the connection."""
    from nmoe_core.config.quality import HttpOracleTable
    from nmoe_core.config.rubric import Rubric
    from nmoe_core.labels.documents import JsonlTexts, jsonl_documents
    from nmoe_core.labels.label import label_shard
    from nmoe_core.labels.oracles.http import HttpOracle
    from nmoe_core.text.tokenizer import load_tokenizer
    from tests.core.labels.oracles.loopback import Client, Loopback
    from tests.core.labels.oracles.server import GOOD, MODEL, completion
    from tests.core.small_gradings import RUBRIC

    async def talk(client: Client) -> None:
        for number in range(500):
            await client.request()
            body = completion(GOOD if number % 50 else "I cannot say.").body
            await client.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    path, server = directory / "web.jsonl", Loopback(talk)
    with open(path, "w", encoding="ascii") as file:
        for text in itertools.islice(_texts(50), watch.num_items):
            file.write(json_lines([{"text": text}]))
    tokenizer = load_tokenizer("o200k_harmony")
    tokenizer.reference.row("")  # samples are compared with it, from some seconds on
    documents = jsonl_documents(JsonlTexts(path), tokenizer, 512)
    table = HttpOracleTable(base_url=server.url, model=MODEL, concurrency=8)
    watch.at(0)
    oracle, out = HttpOracle(table, Rubric.load(RUBRIC)), directory / "labels"
    label_shard(documents, out, oracle, progress=lambda done, _: watch.at(done))
    server.close()


if __name__ == "__main__":
    main()
