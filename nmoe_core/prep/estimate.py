"""What preparing a mixture will take, before anything is written: `nmoe prep-mixture --dry-run`.

Files are found and the first block of each source is tokenised here, which gives tokens per byte
and this machine's rate; a hub dataset is not asked, so a plan needs no network. Every figure is an
estimate except the quotas, and None where it would be a guess.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import os
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nmoe_core.base.errors import NmoeError
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan, prep_settings
from nmoe_core.prep.settings import PrepSettings
from nmoe_core.sources.open import open_reader
from nmoe_core.sources.records import BadRecord, Source
from nmoe_core.sources.split import SplitExpression, parse_split
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.tokenizer import Engine, load_tokenizer

# 4 bytes per token; index, lineage and manifests add about a twentieth at 600 tokens per document.
_DISK_BYTES_PER_TOKEN = 4.25
_SAMPLE_BYTES = 1_000_000
_MIN_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class SourceSample:
    """What the first block of a source shows."""

    tokens_per_record: float
    tokens_per_byte: float
    """Of the source as it is stored."""
    tokens_per_second: float
    """On one core of this machine."""


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """One split that would be prepared; None where a figure is not known."""

    source: str
    split: str
    kind: str
    reads: str
    quota_tokens: int | None
    tokens: int | None
    num_shards: int
    seconds: float | None
    disk_bytes: int | None
    output: Path
    exists: bool
    problem: NmoeError | None = None


def plan_prep(run: Run, jobs: Sequence[tuple[SourcePlan, str]]) -> list[PlannedSplit]:
    """The plan of each (source, split), in order; a problem of a source is in its plan."""
    return [_plan_split(run, source, split) for source, split in jobs]


def _plan_split(run: Run, source: SourcePlan, split: str) -> PlannedSplit:
    settings = prep_settings(run, source, split)
    output = run.tree.split(source.name, split)
    reads, tokens, seconds, problem = _reads(source), settings.max_tokens, None, None
    try:
        reader = open_reader(source.spec, run.base, split)
        if source.spec.kind == "huggingface":
            seconds = _seconds(tokens, _code_rate(settings), settings)
        else:
            sample = sample_source(reader, settings)
            tokens = _split_tokens(reader, source, split, sample)
            if settings.max_tokens is not None and tokens is not None:
                tokens = min(tokens, settings.max_tokens)
            seconds = _seconds(tokens, sample.tokens_per_second, settings)
            reads = f"{reads}, {(reader.size_bytes() or 0) / 1e6:,.1f} MB"
    except NmoeError as error:
        problem, tokens = error, None
    return PlannedSplit(
        source=source.name,
        split=split,
        kind=source.spec.kind,
        reads=reads,
        quota_tokens=settings.max_tokens,
        tokens=tokens,
        num_shards=settings.num_shards,
        seconds=seconds,
        disk_bytes=None if tokens is None else int(tokens * _DISK_BYTES_PER_TOKEN),
        output=output,
        exists=(output / "manifest.json").is_file(),
        problem=problem,
    )


def sample_source(reader: Source, settings: PrepSettings) -> SourceSample:
    """Read and tokenise up to about 1 MB of a source's first block; one core, a second or less."""
    tokenizer = load_tokenizer(settings.tokenizer, settings.engine)
    started = time.perf_counter()
    texts: list[str] = []
    num_records = num_chars = num_bytes = block_records = 0
    for block in islice(reader.blocks(), 1):
        block_records = max(block.end.row - block.start.row, 1)
        for record in block.records():
            num_records += 1
            if not isinstance(record, BadRecord):
                texts.append(record.text)
                num_chars += len(record.text)
            if num_chars >= _SAMPLE_BYTES:
                break
        num_bytes = block.size_bytes * num_records // block_records
    normalized, _ = normalize_batch(texts)
    num_tokens = len(tokenizer.encode_batch(normalized).ids) + len(texts)
    seconds = max(time.perf_counter() - started, _MIN_SECONDS)
    return SourceSample(
        tokens_per_record=num_tokens / max(num_records, 1),
        tokens_per_byte=num_tokens / max(num_bytes, 1),
        tokens_per_second=max(num_tokens / seconds, 1.0),
    )


def _split_tokens(
    reader: Source, source: SourcePlan, split: str, sample: SourceSample
) -> int | None:
    size_bytes = reader.size_bytes()
    if size_bytes is None:
        return None
    whole = size_bytes * sample.tokens_per_byte
    num_rows = round(whole / max(sample.tokens_per_record, 1e-9))
    taken = _expression(source, split)
    start, stop = (0, num_rows) if taken is None else taken.rows(max(num_rows, 100))
    num_taken = min(stop, num_rows) - min(start, num_rows)
    valid = _expression(source, "valid") if split == "train" else None
    if valid is not None and not source.spec.allow_overlap:
        first, last = valid.rows(max(num_rows, 100))
        num_taken -= max(0, min(last, stop) - max(first, start))
    return max(0, round(num_taken * sample.tokens_per_record))


def _expression(source: SourcePlan, split: str) -> SplitExpression | None:
    text = source.spec.split_expression(split)
    return None if text is None else parse_split(text)


def _code_rate(settings: PrepSettings) -> float:
    """Tokens a second on one core, on text that every machine has: this program's own language."""
    return _measured_rate(settings.tokenizer, settings.engine)


@functools.cache
def _measured_rate(tokenizer_name: str, engine: Engine) -> float:
    files = (argparse, difflib, inspect, typing)
    texts = [Path(str(file.__file__)).read_text(encoding="utf-8") for file in files]
    tokenizer = load_tokenizer(tokenizer_name, engine)
    started = time.perf_counter()
    num_tokens = len(tokenizer.encode_batch(normalize_batch(texts)[0]).ids)
    return num_tokens / max(time.perf_counter() - started, _MIN_SECONDS)


def _seconds(tokens: int | None, rate: float, settings: PrepSettings) -> float | None:
    if tokens is None:
        return None
    return tokens / (rate * min(settings.compute.workers, os.cpu_count() or 1))


def _reads(source: SourcePlan) -> str:
    spec = source.spec
    if spec.kind != "huggingface":
        return ", ".join(spec.paths)
    if spec.hf_dataset is None:
        return "nothing yet"
    parts = [spec.hf_dataset, spec.hf_subset, spec.hf_revision and f"@{spec.hf_revision}"]
    return " ".join(part for part in parts if part)
