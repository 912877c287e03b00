"""Prep: one pass over a source fills its token shards, with the same bytes for any worker count.

Blocks are read in order, tokenised by a bounded ordered pool, and appended by one writer, so order
and bytes do not depend on workers. Shards are committed whole at the end of the pass. A journal
keeps the place of a pass: one that was ended, however it was, is gone on with by the next run, and
at most a few seconds of work are done again. Memory: about `2 * workers` blocks of 2 MiB.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from loader.files.format import MANIFEST_NAME, load_manifest
from nmoe_core.base.atomic import LOCK_NAME, fsync_dir, output_lock
from nmoe_core.base.errors import ConfigError, FormatError, NmoeError, SourceError
from nmoe_core.base.fingerprint import Fingerprints, recorded
from nmoe_core.compute.api import Pool, open_pool
from nmoe_core.prep.journal import STAGING_NAME, Journal
from nmoe_core.prep.one_pass import Pass, PassPlan
from nmoe_core.prep.progress import Progress
from nmoe_core.prep.settings import PrepReport, PrepSettings, prep_fingerprints, shard_format
from nmoe_core.prep.swap import clear_beside, directory_beside, retire_beside, swap_in
from nmoe_core.prep.tokenize import TokenizeSettings, open_tokenizer
from nmoe_core.shards.manifest import (
    ShardFormat,
    combine_shards,
    commit_manifest,
    created_at,
    is_shard_current,
    shard_dir_name,
)
from nmoe_core.sources.digests import keep_digests, recall_digests
from nmoe_core.sources.records import Rows, Source

__all__ = ["Existing", "PrepReport", "PrepSettings", "prep_shards", "write_manifest"]

Existing = Literal["refuse", "update", "remake"]
# Errors that the next run may well not meet: what was done so far is kept for it.
_PASSING = ("E-WORKER-LOST", "E-SOURCE-NETWORK")
_DIGESTS_NAME = "digests.json"  # of the source's files, beside the journal


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
        existing: What to do with shards, whole or half done, made from other inputs: refuse to
            touch them, or update them; `remake` starts over and makes current ones again too,
            and a split that has a manifest is then replaced whole, in one step.
        progress: Called after every block.

    Raises:
        SourceError: Too many records cannot be read (E-SOURCE-RECORD), or the split has no
            document (E-SOURCE-EMPTY). It changed while it was read (E-SOURCE-CHANGED).
        FormatError: Shards of other inputs are there and `existing` is `refuse` (E-PREP-CHANGED).
        ConfigError: More shards than this machine may have open files.
        LockedError: Another process is writing this split.
    """
    split_dir = split_dir.resolve()  # a link stays: what it leads to is replaced
    recall_digests(split_dir / STAGING_NAME / _DIGESTS_NAME)
    with ThreadPoolExecutor(1) as beside:  # reading the source takes as long as the tokenizer
        revision = beside.submit(source.revision)
        fmt = shard_format(settings)
        fingerprints = prep_fingerprints(revision.result(), settings, fmt)
    asked = _checked_buckets(buckets, settings.num_shards)
    dirs = {bucket: split_dir / shard_dir_name(bucket) for bucket in asked}
    clear_beside(split_dir)
    journal = Journal(split_dir)
    if existing == "refuse":
        _refuse_changed(dirs.values(), fingerprints)
    current: set[int] = set()
    if existing != "remake":
        current = {b for b, path in dirs.items() if is_shard_current(path, fingerprints)}
    report = PrepReport(skipped=sorted(current))
    wanted = tuple(sorted(set(asked) - current))
    if not wanted:
        if len(asked) == settings.num_shards and journal.directory.exists():
            with output_lock(split_dir):  # its writer was ended after the last shard
                journal.remove()
        return report
    created_at()  # refuses a bad SOURCE_DATE_EPOCH before the pass, not after it
    _allow_open_files(6 * len(wanted))
    # A partial pass under a budget stops where the whole pass stopped, if that is on record.
    stop = None
    if settings.max_tokens is not None and len(wanted) < settings.num_shards:
        stop = _recorded_stop(split_dir, settings.num_shards, fingerprints)
    is_whole = existing == "remake" and len(wanted) == settings.num_shards
    is_swapped = is_whole and (split_dir / MANIFEST_NAME).exists()
    target = directory_beside(split_dir) if is_swapped else split_dir
    journal = Journal(target)
    plan = PassPlan(source, rows, settings, target, wanted, fingerprints, stop)
    if existing == "refuse":
        _refuse_other_journal(journal, plan.identity())
    new_dirs = [path for path in (split_dir, *split_dir.parents) if not path.exists()]
    # Workers start before the lock is taken, which would be theirs too, and outlive this process.
    open_worker = partial(open_tokenizer, _worker_settings(plan))
    with (
        open_pool(settings.compute, open_worker) as pool,
        output_lock(split_dir),
    ):
        try:
            if existing == "remake":
                journal.remove()
            entry = _matching(journal.read(), plan)
            if entry is None:
                journal.remove()
            _run(plan, fmt, journal, entry, pool, report, progress)
            if is_swapped:
                _commit_manifest(settings, fmt, target)
                swap_in(split_dir)
        except BaseException:
            if is_swapped:  # the next run with --force would start over anyway
                retire_beside(split_dir)
            _remove_empty(new_dirs)
            raise
    report.made = list(wanted)
    return report


def write_manifest(settings: PrepSettings, split_dir: Path) -> tuple[dict[str, Any], bool]:
    """Combine the shard manifests of a split; return the manifest and whether it changed.

    Shards that an earlier run with more shards made are removed: no manifest names them any more.
    """
    split_dir = split_dir.resolve()
    with output_lock(split_dir):  # which clears what a writer killed just here had left
        committed = _commit_manifest(settings, shard_format(settings), split_dir)
        for shard_dir in sorted(split_dir.glob("shard_[0-9]*")):
            number = shard_dir.name.removeprefix("shard_")
            is_surplus = number.isdecimal() and int(number) >= settings.num_shards
            if is_surplus and recorded(shard_dir / MANIFEST_NAME) is not None:
                shutil.rmtree(shard_dir)
    return committed


def _commit_manifest(
    settings: PrepSettings, fmt: ShardFormat, directory: Path
) -> tuple[dict[str, Any], bool]:
    source_info = {"source": settings.name, "assignment": "md5"}
    manifest = combine_shards(directory, fmt, settings.num_shards, source_info)
    return commit_manifest(directory / MANIFEST_NAME, manifest)


def _run(
    plan: PassPlan,
    fmt: ShardFormat,
    journal: Journal,
    entry: dict[str, Any] | None,
    pool: Pool,
    report: PrepReport,
    progress: Progress | None,
) -> None:
    try:
        work = Pass(plan, fmt, journal, entry)
    except FormatError:  # the disk has lost what the journal names: only work is lost by that
        journal.remove()
        work = Pass(plan, fmt, journal, None)
    try:
        keep_digests(journal.directory / _DIGESTS_NAME, plan.source.local_files())
        work.read(pool, progress)
        work.report(report)
        if report.num_documents == 0 and len(plan.wanted) == plan.settings.num_shards:
            raise SourceError(
                "source has no document",
                where=plan.settings.name,
                found=f"{sum(report.outcomes.values())} records, none kept",
                do="check text_field, the paths and min_doc_tokens",
                code="E-SOURCE-EMPTY",
            )
        with ThreadPoolExecutor(1) as beside:
            revision = beside.submit(plan.source.revision)
            work.seal(pool)
            _require_unchanged(plan, revision.result())
        if journal.is_written:
            journal.commit(work.entry, work.flush)
        # No published manifest may name bytes that are being replaced.
        (plan.split_dir / MANIFEST_NAME).unlink(missing_ok=True)
        fsync_dir(plan.split_dir)
        work.commit()
    except BaseException as error:
        work.leave()
        is_lasting = isinstance(error, NmoeError) and error.code not in _PASSING
        if is_lasting or not journal.is_written:
            journal.remove()
        raise
    journal.remove()


def _matching(entry: dict[str, Any] | None, plan: PassPlan) -> dict[str, Any] | None:
    """The journal's state, if this pass can go on from it."""
    if entry is None or any(entry.get(key) != value for key, value in plan.identity().items()):
        return None
    if {str(bucket) for bucket in plan.wanted} - entry["shards"].keys():
        return None
    counts_enough = plan.budget is None or entry["counts_all"] or entry["is_complete"]
    return entry if counts_enough else None


def _refuse_other_journal(journal: Journal, identity: dict[str, Any]) -> None:
    entry = journal.read()
    if entry is None:
        return
    for key, value in identity.items():
        there = entry.get(key)
        if there == value:
            continue
        if isinstance(there, dict) and isinstance(value, dict):
            names = {**value, **there}
            key = next(name for name in names if there.get(name) != value.get(name))
            if key == "settings":  # the next comparison names the setting itself
                continue
            there, value = there.get(key), value.get(key)
        raise FormatError(
            f"a half-done output was made from another {key}",
            where=journal.directory,
            found=there,
            expected=value,
            do="go on with the inputs it was begun with, or use --force to start over",
            code="E-PREP-CHANGED",
        )


def _require_unchanged(plan: PassPlan, revision: str) -> None:
    if revision != plan.fingerprints["source"]:
        raise SourceError(
            "source changed while it was read",
            where=plan.settings.name,
            found=revision,
            expected=plan.fingerprints["source"],
            do="run prep again when it is at rest",
            code="E-SOURCE-CHANGED",
        )


def _worker_settings(plan: PassPlan) -> TokenizeSettings:
    settings = plan.settings
    return TokenizeSettings(
        tokenizer=settings.tokenizer,
        engine=settings.engine,
        eos_token_id=settings.vocabulary.eos_token_id,
        num_shards=settings.num_shards,
        min_doc_tokens=settings.min_doc_tokens,
        max_doc_tokens=settings.max_doc_tokens,
        rows=plan.rows,
        buckets=frozenset(plan.wanted),
        count_all=plan.budget is not None,
    )


def _recorded_stop(split_dir: Path, num_shards: int, fingerprints: Fingerprints) -> int | None:
    for bucket in range(num_shards):
        path = split_dir / shard_dir_name(bucket) / MANIFEST_NAME
        if recorded(path) == fingerprints:
            return int(load_manifest(path).extra["source_info"]["rows_read"])
    return None


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


def _remove_empty(new_dirs: list[Path]) -> None:
    """Take back the directories that a run made and then put nothing in, innermost first."""
    with suppress(OSError):  # a directory with something in it stays
        for directory in new_dirs:
            (directory / LOCK_NAME).unlink(missing_ok=True)
            directory.rmdir()
