"""Estimates tokens, time and disk space of a mixture: `nmoe prep-mixture --dry-run`.

The first block of each source is tokenised to measure tokens per byte and the speed of this
machine. Hub datasets are not contacted, so an estimate needs no network. Every figure except the
quotas is an estimate, and is None if the sample does not allow an estimate.
"""

import argparse
import difflib
import functools
import inspect
import os
import time
import typing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.files.format import MANIFEST_NAME
from nmoe_core.base.errors import NmoeError
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan, prep_settings
from nmoe_core.prep.settings import PrepSettings, shard_format
from nmoe_core.sources.file_sources import FilesBlock
from nmoe_core.sources.open import open_reader, split_rows
from nmoe_core.sources.records import BadRecord, Source
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.tokenizer import load_tokenizer

# bytes of index, lineage and manifests per token, at 600 tokens per document
_EXTRA_BYTES_PER_TOKEN = 0.25
_SAMPLE_BYTES = 1_000_000
_MIN_SECONDS = 1e-3


class _Sample(NamedTuple):
    """Statistics of the first block of a source."""

    tokens_per_record: float
    tokens_per_byte: float
    """Tokens per byte of the source as stored."""
    rate: float
    """Tokens per second on one core of this machine."""


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """Estimate for one split; a figure that is not known is None."""

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


def plan_split(run: Run, source: SourcePlan, split: str) -> PlannedSplit:
    """The estimate for one split; an error of its source becomes `problem`. Raises the
    TokenizerError of `shard_format`, since all sources share the tokenizer."""
    settings = prep_settings(run, source, split)
    spec = source.spec
    bytes_per_token = shard_format(settings).integers.itemsize + _EXTRA_BYTES_PER_TOKEN
    output = run.tree.split(source.name, split)
    reads = _reads(spec, split)
    tokens = settings.max_tokens
    seconds = None
    problem = None
    try:
        reader = open_reader(spec, run.base, split)
        if spec.kind == "huggingface":
            rate = _measured_rate(settings.chosen)
        else:
            sample = _sample_source(reader, settings)
            size_bytes = reader.size_bytes() or 0
            rate = sample.rate
            per_record = max(sample.tokens_per_record, 1e-9)
            num_rows = round(size_bytes * sample.tokens_per_byte / per_record)
            tokens = round(split_rows(spec, split, lambda: num_rows).count(num_rows) * per_record)
            if settings.max_tokens is not None:
                tokens = min(tokens, settings.max_tokens)
            reads = f"{reads}, {size_bytes / 1e6:,.1f} MB"
        if tokens is not None:
            seconds = tokens / (rate * min(settings.compute.workers, os.cpu_count() or 1))
    except NmoeError as error:
        problem = error
        tokens = None
    return PlannedSplit(
        source=source.name,
        split=split,
        kind=spec.kind,
        reads=reads,
        quota_tokens=settings.max_tokens,
        tokens=tokens,
        num_shards=settings.num_shards,
        seconds=seconds,
        disk_bytes=None if tokens is None else int(tokens * bytes_per_token),
        output=output,
        exists=(output / MANIFEST_NAME).is_file(),
        problem=problem,
    )


def _sample_source(reader: Source, settings: PrepSettings) -> _Sample:
    """Read and tokenise up to about 1 MB of a source's first block: at most a second on one
    core."""
    tokenizer = load_tokenizer(settings.chosen)
    started = time.perf_counter()
    texts: list[str] = []
    given: list[int] = []
    num_records = num_chars = num_bytes = 0
    for block in islice(reader.blocks(), 1):
        for record in block.records():
            num_records += 1
            if not isinstance(record, BadRecord):
                if record.tokens is not None:
                    given.append(len(record.tokens))
                    continue
                texts.append(record.text)
                num_chars += len(record.text)
            if num_chars >= _SAMPLE_BYTES:
                break
        num_bytes = block.size_bytes * num_records // max(block.end.row - block.start.row, 1)
        if isinstance(block, FilesBlock):  # one file per record, and files differ in size
            num_bytes = sum(file.size_bytes() for file in block.files[:num_records])
    lengths = np.array(given) if given else tokenizer.lengths(normalize_batch(texts)[0])
    whole = lengths[lengths >= settings.min_doc_tokens]
    if settings.long_documents == "cut":
        whole = np.minimum(whole, settings.max_doc_tokens)
    num_tokens = int(whole.sum()) + len(whole)
    seconds = max(time.perf_counter() - started, _MIN_SECONDS)
    return _Sample(
        tokens_per_record=num_tokens / max(num_records, 1),
        tokens_per_byte=num_tokens / max(num_bytes, 1),
        rate=max(num_tokens / seconds, 1.0),
    )


@functools.cache
def _measured_rate(chosen: TokenizerSettings) -> float:
    """Tokens per second on one core, measured on text that every machine has: Python's standard
    library."""
    files = (argparse, difflib, inspect, typing)
    texts = [Path(str(file.__file__)).read_text(encoding="utf-8") for file in files]
    tokenizer = load_tokenizer(chosen)
    started = time.perf_counter()
    num_tokens = len(tokenizer.encode_batch(normalize_batch(texts)[0]).ids)
    return num_tokens / max(time.perf_counter() - started, _MIN_SECONDS)


def _reads(spec: SourceSpec, split: str) -> str:
    if spec.kind != "huggingface":
        return ", ".join((split == "valid" and spec.valid_paths) or spec.paths)
    if spec.hf_dataset is None:
        return "nothing yet"
    parts = [spec.hf_dataset, spec.hf_subset, spec.hf_revision and f"@{spec.hf_revision}"]
    return " ".join(part for part in parts if part)
