"""Prep: one pass over a source fills its token shards, with the same bytes for any worker count.

Blocks are read in order, tokenised by a bounded ordered pool, and appended by one writer, so order
and bytes do not depend on workers. Shards are committed whole at the end of the pass; a killed run
leaves the shards it had committed, and the next run makes the rest. Memory: `2 * workers` blocks.
"""

from __future__ import annotations

import resource
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from loader.format import MANIFEST_NAME, load_manifest
from nmoe_core.atomic import LOCK_NAME, fsync_dir, output_lock
from nmoe_core.compute import map_shards
from nmoe_core.errors import ConfigError, FormatError, SourceError, TokenizerError
from nmoe_core.fingerprint import Fingerprints, recorded, sha256_json
from nmoe_core.prep.text import NORMALIZER
from nmoe_core.prep.tokenize import (
    TokenizedBlock,
    TokenizeSettings,
    start_worker,
    tokenize_block,
)
from nmoe_core.prep.tokenizer import DEFAULT_TOKENIZER, Engine, load_tokenizer
from nmoe_core.shards.manifest import (
    ShardFormat,
    combine_shards,
    commit_manifest,
    created_at,
    is_shard_current,
    shard_dir_name,
)
from nmoe_core.shards.writer import DEFAULT_TOKENS_PER_SHARD, ShardWriter
from nmoe_core.sources.records import Block, OnError, Rows, Source

PREP_CODE = "prep/1"
Existing = Literal["refuse", "update", "remake"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PrepSettings:
    """Everything besides the source that decides the bytes of its shards; and `workers`, `engine`.

    `max_tokens` counts EOS tokens too; prep stops after the document that reaches it.
    """

    name: str
    version: str = "v1"
    tokenizer: str = DEFAULT_TOKENIZER
    num_shards: int = 64
    tokens_per_shard: int = DEFAULT_TOKENS_PER_SHARD
    min_doc_tokens: int = 10
    max_doc_tokens: int = 1_000_000
    max_tokens: int | None = None
    on_error: OnError = "fail"
    reading_digest: str = ""
    vocab_size: int | None = None
    eos_token_id: int | None = None
    workers: int = 1
    engine: Engine = "quicktok"

    def digest(self) -> str:
        """Digest of what reaches the bytes: settings, normaliser, Unicode tables.

        Workers and engine do not; the two ids are checked against the tokenizer's.
        """
        settings = asdict(self)
        for key in ("workers", "engine", "vocab_size", "eos_token_id"):
            del settings[key]
        versions = {"normalizer": NORMALIZER, "unicode": unicodedata.unidata_version}
        return sha256_json(settings | versions)


@dataclass(slots=True)
class PrepReport:
    """What one pass did."""

    num_documents: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0
    documents_tokenized: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    made: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def shard_format(settings: PrepSettings) -> ShardFormat:
    """Tokenizer facts of a source's manifests.

    Raises:
        TokenizerError: The configured vocabulary size or EOS id is not the tokenizer's
            (E-TOKENIZER-DRIFT).
    """
    tokenizer = load_tokenizer(settings.tokenizer, settings.engine)
    for name in ("vocab_size", "eos_token_id"):
        asked, actual = getattr(settings, name), getattr(tokenizer, name)
        if asked is not None and asked != actual:
            raise TokenizerError(
                f"{name} is not that of {settings.tokenizer}",
                found=asked,
                expected=actual,
                code="E-TOKENIZER-DRIFT",
            )
    return ShardFormat(
        dataset=settings.name,
        version=settings.version,
        tokenizer=settings.tokenizer,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )


def prep_shards(
    source: Source,
    rows: Rows,
    settings: PrepSettings,
    split_dir: Path,
    buckets: Iterable[int] | None = None,
    existing: Existing = "update",
    progress: Progress | None = None,
) -> PrepReport:
    """Make the asked-for shards of a split, each with its manifest; leave current ones alone.

    Args:
        source: What to read.
        rows: Rows of the source that belong to the split.
        settings: What decides the bytes.
        split_dir: `{data_root}/{source}/{split}`.
        buckets: Shards to make; all when None.
        existing: What to do with shards made from other inputs: refuse to touch them, or update
            them; `remake` makes current ones again too.
        progress: Called with (documents, tokens) after every block.

    Raises:
        SourceError: A record cannot be read, or the split has no document (E-SOURCE-EMPTY).
            It changed while it was read (E-SOURCE-CHANGED).
        FormatError: Shards of other inputs are there and `existing` is `refuse` (E-PREP-CHANGED).
        ConfigError: More shards than this machine may have open files.
        LockedError: Another process is writing this split.
    """
    fmt = shard_format(settings)
    fingerprints = _fingerprints(source, settings, fmt)
    asked = _checked_buckets(buckets, settings.num_shards)
    dirs = {bucket: split_dir / shard_dir_name(bucket) for bucket in asked}
    if existing == "refuse":
        _refuse_changed(dirs.values(), fingerprints)
    current: set[int] = set()
    if existing != "remake":
        current = {b for b, path in dirs.items() if is_shard_current(path, fingerprints)}
    report = PrepReport(skipped=sorted(current))
    wanted = sorted(set(asked) - current)
    if not wanted:
        return report
    created_at()  # refuses a bad SOURCE_DATE_EPOCH before the pass, not after it
    _allow_open_files(2 * len(wanted))
    new_dirs = [path for path in (split_dir, *split_dir.parents) if not path.exists()]
    with output_lock(split_dir):
        try:
            job = _Job(source, rows, settings, split_dir, wanted, fingerprints)
            job.run(fmt, report, progress)
        except BaseException:
            _remove_empty(new_dirs)
            raise
    report.made = wanted
    return report


def write_manifest(settings: PrepSettings, split_dir: Path) -> tuple[dict[str, Any], bool]:
    """Combine the shard manifests of a split; return the manifest and whether it changed.

    Shards that an earlier run with more shards made are removed: no manifest names them any more.
    """
    fmt = shard_format(settings)
    source_info = {"source": settings.name, "assignment": "md5"}
    manifest = combine_shards(split_dir, fmt, settings.num_shards, source_info)
    with output_lock(split_dir):  # which clears what a writer killed just here had left
        committed = commit_manifest(split_dir / MANIFEST_NAME, manifest)
        for shard_dir in sorted(split_dir.glob("shard_[0-9]*")):
            number = shard_dir.name.removeprefix("shard_")
            is_surplus = number.isdecimal() and int(number) >= settings.num_shards
            if is_surplus and recorded(shard_dir / MANIFEST_NAME) is not None:
                shutil.rmtree(shard_dir)
    return committed


def _fingerprints(source: Source, settings: PrepSettings, fmt: ShardFormat) -> Fingerprints:
    return {
        "source": source.revision(),
        "settings": settings.digest(),
        "tokenizer": fmt.tokenizer_fingerprint,
        "code": PREP_CODE,
    }


def _refuse_changed(shard_dirs: Iterable[Path], fingerprints: Fingerprints) -> None:
    for shard_dir in shard_dirs:
        there = recorded(shard_dir / MANIFEST_NAME)
        if there == fingerprints or not shard_dir.is_dir() or not any(shard_dir.iterdir()):
            continue
        what, found, expected = "shard was not made by prep", None, None
        if there is not None:
            differing = (
                k for k in {**fingerprints, **there} if there.get(k) != fingerprints.get(k)
            )
            key = next(differing)
            what = f"shard was made from another {key}"
            found, expected = there.get(key), fingerprints.get(key)
        raise FormatError(
            what,
            where=shard_dir,
            found=found,
            expected=expected,
            do="use --force to replace it, or another output directory",
            code="E-PREP-CHANGED",
        )


def _allow_open_files(num_files: int) -> None:
    """Raise this process's limit of open files to what the shards need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_files + 256
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard not in (resource.RLIM_INFINITY, -1) and hard < needed:
        raise ConfigError(
            "too many shards for this machine's limit of open files",
            found=f"{needed} files needed, {hard} allowed",
            do="lower num_shards, or raise the limit (ulimit -n)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _checked_buckets(buckets: Iterable[int] | None, num_shards: int) -> list[int]:
    asked = sorted(set(range(num_shards) if buckets is None else buckets))
    for bucket in asked:
        if not 0 <= bucket < num_shards:
            raise ConfigError("no such shard", found=bucket, expected=f"0 to {num_shards - 1}")
    return asked


class _Job:
    """One pass over a source."""

    def __init__(
        self,
        source: Source,
        rows: Rows,
        settings: PrepSettings,
        split_dir: Path,
        wanted: list[int],
        fingerprints: Fingerprints,
    ) -> None:
        self.source, self.settings, self.split_dir = source, settings, split_dir
        self.wanted, self.fingerprints = wanted, fingerprints
        # A partial pass under a budget stops where the whole pass stopped, if that is on record.
        known_stop = self._recorded_stop() if len(wanted) < settings.num_shards else None
        self.budget = settings.max_tokens if known_stop is None else None
        self.rows = rows if known_stop is None else Rows(rows.start, known_stop, rows.excluded)
        self.rows_read = known_stop or 0
        self.outcomes: dict[int, Counter[str]] = {bucket: Counter() for bucket in (-1, *wanted)}

    def run(self, fmt: ShardFormat, report: PrepReport, progress: Progress | None) -> None:
        size = self.settings.tokens_per_shard
        writers = {
            b: ShardWriter(self.split_dir / shard_dir_name(b), fmt, size) for b in self.wanted
        }
        try:
            self._fill(writers, report, progress)
            if report.num_documents == 0 and len(self.wanted) == self.settings.num_shards:
                raise SourceError(
                    "source has no document",
                    where=self.settings.name,
                    found=f"{sum(report.outcomes.values())} records, none kept",
                    do="check text_field, the paths and min_doc_tokens",
                    code="E-SOURCE-EMPTY",
                )
            self._require_unchanged()
            # No published manifest may name bytes that are being replaced.
            (self.split_dir / MANIFEST_NAME).unlink(missing_ok=True)
            fsync_dir(self.split_dir)
            for bucket, writer in writers.items():
                writer.finish(self.fingerprints, self._source_info(bucket))
        finally:
            for writer in writers.values():
                writer.abandon()

    def _require_unchanged(self) -> None:
        revision = self.source.revision()
        if revision != self.fingerprints["source"]:
            raise SourceError(
                "source changed while it was read",
                where=self.settings.name,
                found=revision,
                expected=self.fingerprints["source"],
                do="run prep again when it is at rest",
                code="E-SOURCE-CHANGED",
            )

    def _fill(
        self, writers: dict[int, ShardWriter], report: PrepReport, progress: Progress | None
    ) -> None:
        settings = self._worker_settings()
        backend = "pool" if self.settings.workers > 1 else "inline"
        blocks = map_shards(
            tokenize_block,
            takewhile(self._is_needed, self.source.blocks()),
            backend=backend,
            workers=self.settings.workers,
            initializer=start_worker,
            initargs=(settings,),
        )
        total_tokens = 0
        for block in blocks:
            report.documents_tokenized += block.num_tokenized
            report.num_text_bytes += block.num_text_bytes
            total_tokens = self._append(block, writers, report, total_tokens)
            if progress is not None:
                progress(report.num_documents, report.num_tokens)
            if self.budget is not None and total_tokens >= self.budget:
                blocks.close()
                return

    def _is_needed(self, block: Block) -> bool:
        return self.rows.stop is None or block.first_row < self.rows.stop

    def _append(
        self,
        block: TokenizedBlock,
        writers: dict[int, ShardWriter],
        report: PrepReport,
        total_tokens: int,
    ) -> int:
        for record in block.records:
            self.rows_read = max(self.rows_read, record.row + 1)
            report.outcomes[record.outcome] += 1
            if record.bucket in self.outcomes:
                self.outcomes[record.bucket][record.outcome] += 1
            if not len(record.tokens):
                continue
            total_tokens += len(record.tokens) + 1
            if record.bucket in writers:
                writer = writers[record.bucket]
                writer.add_document(record.tokens, record.ingest_id, record.text_sha256)
                report.num_documents += 1
                report.num_tokens += len(record.tokens) + 1
            if self.budget is not None and total_tokens >= self.budget:
                break
        return total_tokens

    def _worker_settings(self) -> TokenizeSettings:
        return TokenizeSettings(
            tokenizer=self.settings.tokenizer,
            engine=self.settings.engine,
            num_shards=self.settings.num_shards,
            min_doc_tokens=self.settings.min_doc_tokens,
            max_doc_tokens=self.settings.max_doc_tokens,
            on_error=self.settings.on_error,
            rows=self.rows,
            buckets=frozenset(self.wanted),
            count_all=self.budget is not None,
        )

    def _source_info(self, bucket: int) -> dict[str, Any]:
        counts = self.outcomes[bucket]
        return {
            "source": self.settings.name,
            "assignment": "md5",
            "normalizer": NORMALIZER,
            "rows_read": self.rows_read,
            "bad_records": self.outcomes[-1]["bad"],
            "empty_documents": counts["empty"],
            "filtered_documents": counts["filtered"],
            "truncated_documents": counts["truncated"],
        }

    def _recorded_stop(self) -> int | None:
        if self.settings.max_tokens is None:
            return None
        for bucket in range(self.settings.num_shards):
            path = self.split_dir / shard_dir_name(bucket) / MANIFEST_NAME
            if recorded(path) == self.fingerprints:
                return int(load_manifest(path).extra["source_info"]["rows_read"])
        return None


def _remove_empty(new_dirs: list[Path]) -> None:
    """Take back the directories that a run made and then put nothing in, innermost first."""
    with suppress(OSError):  # a directory with something in it stays
        for directory in new_dirs:
            (directory / LOCK_NAME).unlink(missing_ok=True)
            directory.rmdir()
