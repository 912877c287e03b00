"""Prep from JSON lines to verified shards, against one core that only parses and tokenises."""

from __future__ import annotations

import json
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tiktoken

from nmoe_core.prep.run import PrepSettings, prep_shards, write_manifest
from nmoe_core.prep.tokenizer import ensure_vocabulary, load_tokenizer
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Rows

TEXT_BYTES = 24_000_000
Row = tuple[str, str, Callable[[], float], Callable[[], float]]


def rows(directory: Path) -> Iterator[Row]:
    """Two rows: two workers with each engine."""
    path, size_bytes = _corpus(directory)
    load_tokenizer()

    def raw() -> float:
        encode = tiktoken.get_encoding("o200k_harmony").encode_ordinary
        started = time.perf_counter()
        with open(path, encoding="utf-8") as file:
            for line in file:
                encode(json.loads(line)["text"])
        return size_bytes / (time.perf_counter() - started)

    def ours(engine: str) -> Callable[[], float]:
        def run() -> float:
            out = directory / "out"
            shutil.rmtree(out, ignore_errors=True)
            settings = PrepSettings(name="bench", num_shards=16, workers=2, engine=engine)  # pyright: ignore[reportArgumentType]
            source = JsonlSource("bench", find_files([path.name], directory))
            started = time.perf_counter()
            prep_shards(source, Rows(), settings, out)
            write_manifest(settings, out)
            return size_bytes / (time.perf_counter() - started)

        return run

    ensure_vocabulary()
    for engine in ("quicktok", "tiktoken"):
        yield f"prep, 2 workers, {engine}", "raw tiktoken on one core", ours(engine), raw


def _corpus(directory: Path) -> tuple[Path, int]:
    """Standard-library sources as JSON lines."""
    path, size_bytes = directory / "bench.jsonl", 0
    with open(path, "w", encoding="utf-8") as out:
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            out.write(json.dumps({"text": text}) + "\n")
            size_bytes += len(text.encode())
            if size_bytes > TEXT_BYTES:
                break
    return path, size_bytes
