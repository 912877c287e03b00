"""Prep: one pass over a source writes its token shards, with the same bytes for any worker count.

Blocks are read in order, tokenised by a bounded ordered pool, and appended by one writer, so order
and bytes do not depend on the number of workers. Shards are committed at the end of the pass. A
journal records the position of a pass: the next run resumes an interrupted pass and repeats at most
a few seconds of work. Memory: about `2 * workers` blocks of 2 MiB.
"""

import logging
import resource
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from loader.files.format import MANIFEST_NAME, load_manifest
from nmoe_core.base.atomic import LOCK_NAME, fsync_dir, output_lock, remove_dir
from nmoe_core.base.bucket.growing import sent_while_growing
from nmoe_core.base.compute.api import Map, open_pool
from nmoe_core.base.errors import ConfigError, FormatError, NmoeError, SourceError, TokenizerError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    keep_digests,
    recall_digests,
    recorded,
    sha256_json,
)
from nmoe_core.prep.incremental.existing import (
    clear_beside,
    directory_beside,
    refuse_changed,
    refuse_other_journal,
    retire_beside,
    swap_in,
)
from nmoe_core.prep.incremental.reuse import KnownDocuments
from nmoe_core.prep.incremental.shared_keys import SHARED_NAME
from nmoe_core.prep.incremental.tables import KNOWN_NAME
from nmoe_core.prep.journal import STAGING_NAME, Journal
from nmoe_core.prep.one_pass import Pass
from nmoe_core.prep.pass_plan import PassPlan
from nmoe_core.prep.progress import Progress
from nmoe_core.prep.settings import (
    PREP_CODE,
    PrepReport,
    PrepSettings,
    format_fingerprints,
    shard_format,
)
from nmoe_core.prep.tokenize import open_tokenizer
from nmoe_core.prep.versions import half_kept, keep_version
from nmoe_core.shards.manifest import (
    ShardFormat,
    combine_shards,
    commit_manifest,
    created_at,
    is_shard_current,
    shard_dir_name,
)
from nmoe_core.shards.shard_file import NPY_HEADER_BYTES, PART_SUFFIX
from nmoe_core.sources.records import Rows, Split
from nmoe_core.text.documents import share_table
from nmoe_core.text.tokenizer import load_tokenizer
from nmoe_core.text.transforms.chain import Chain

__all__ = ["Existing", "PrepReport", "PrepSettings", "prep_shards", "write_manifest"]

Existing = Literal["grow", "update", "remake"]
# Errors that may not occur again on a retry, so the work so far is kept.
_PASSING = ("E-WORKER-LOST", "E-SOURCE-NETWORK")
_LOG = logging.getLogger(__name__)
_INEXACT = ("E-TOKENIZER-DRIFT",)  # a fast engine differs from the reference tokenizer
_NAMED_FILES = 5
# If a worker reads at least about this much, the comparison with the reference is worth its time.
SAMPLED_BYTES = 10**9
_DIGESTS_NAME = "digests.json"  # digests of the source's files, beside the journal


def prep_shards(
    split: Split,
    settings: PrepSettings,
    split_dir: Path,
    buckets: Iterable[int] | None = None,
    existing: Existing = "update",
    progress: Progress | None = None,
) -> PrepReport:
    """Make the requested shards of a split, each with its manifest; up-to-date shards are not
    changed.

    Args:
        split: Rows to read.
        settings: Settings that determine the bytes.
        split_dir: `{data_root}/{source}/{split}`.
        buckets: Shards to make; None for all.
        existing: What to do if shards of other inputs exist (complete or not): `grow` accepts
            a changed source or a larger budget and refuses other settings; `update` accepts every
            change; `remake` starts over, even for up-to-date shards. If all shards of a split with
            a manifest are made, the split is replaced atomically.
        progress: Called after every block.

    Raises:
        SourceError: Too many records cannot be read (E-SOURCE-RECORD), the split has no document
            (E-SOURCE-EMPTY), or the source changed while it was read (E-SOURCE-CHANGED).
        FormatError: Shards of other settings exist and `existing` is `grow` (E-PREP-CHANGED).
        ConfigError: There are more shards than this process may open files.
        LockedError: Another process is writing this split.
    """
    split_dir = split_dir.resolve()  # if the directory is a link, its target is replaced
    for directory in (split_dir, directory_beside(split_dir)):
        recall_digests(directory / STAGING_NAME / _DIGESTS_NAME)
    # Both take long: opening the source, and loading the tokenizer.
    with ThreadPoolExecutor(1) as beside:
        revision = beside.submit(split.source.revision)
        fmt = shard_format(settings)
        fingerprints = shard_fingerprints(revision.result(), settings, fmt)
    asked = sorted(set(range(settings.num_shards) if buckets is None else buckets))
    if strange := set(asked) - set(range(settings.num_shards)):
        expected = f"0 to {settings.num_shards - 1}"
        raise ConfigError("shard number out of range", found=min(strange), expected=expected)
    dirs = {bucket: split_dir / shard_dir_name(bucket) for bucket in asked}
    clear_beside(split_dir)
    if existing == "grow":
        refuse_changed(dirs.values(), fingerprints, settings.identity())
    current: list[int] = []
    if existing != "remake":
        current = [b for b, path in dirs.items() if is_shard_current(path, fingerprints)]
    wanted = tuple(b for b in asked if b not in current)
    if not wanted:
        staging = Journal(split_dir)
        left = staging.directory, directory_beside(split_dir), *half_kept(split_dir)
        if len(asked) == settings.num_shards and any(path.exists() for path in left):
            with output_lock(split_dir):  # left by an earlier run
                staging.remove()
                retire_beside(split_dir)
                for path in half_kept(split_dir):
                    shutil.rmtree(path)
        return PrepReport(skipped=current)
    created_at()  # refuses an invalid SOURCE_DATE_EPOCH before the pass, not after it
    # Of each shard: tokens, index, ids, lines, dropped records, columns and changes, each once more
    # while it is flushed.
    per_shard = 10 + 2 * bool(settings.columns) + 2 * bool(settings.transforms)
    _allow_open_files(per_shard * len(wanted))
    plan = PassPlan(split, settings, fmt, split_dir, split_dir, wanted, fingerprints)
    if settings.max_tokens is not None and not plan.is_of_all_shards:
        plan = replace(plan, known_stop=_recorded_stop(plan))
    # A committed split stays readable: its new version is made beside it, then exchanged.
    if plan.is_of_all_shards and (split_dir / MANIFEST_NAME).exists():
        plan = replace(plan, split_dir=directory_beside(split_dir))
    try:
        report = _make(plan, existing, progress)
    except TokenizerError as error:
        if error.code not in _INEXACT or settings.engine == "reference":
            raise
        # The engine may also have differed on texts before the sampled text.
        _LOG.warning("[%s] %s; this pass starts again with the reference", error.code, error)
        exact = settings.model_copy(update={"engine": "reference", "reuse": False})
        return prep_shards(split, exact, split_dir, buckets, existing, progress)
    report.skipped = current
    return report


def shard_fingerprints(revision: str, settings: PrepSettings, fmt: ShardFormat) -> Fingerprints:
    """Fingerprints of the shards that a pass over this revision of a source makes."""
    return {
        "source": revision,
        "settings": sha256_json(settings.identity()),
        **format_fingerprints(settings, fmt),
        "code": PREP_CODE,
    }


def _make(plan: PassPlan, existing: Existing, progress: Progress | None) -> PrepReport:
    """Run a pass that writes in the split's directory or beside it, then move the shards to their
    final paths."""
    if plan.is_staged_apart and plan.settings.reads_corpus:
        # Each worker reads what documents share, so all must be on this machine.
        here = plan.settings.compute.model_copy(update={"backend": "pool"})
        plan = replace(plan, settings=plan.settings.model_copy(update={"compute": here}))
    journal = Journal(plan.split_dir)
    split_dir = plan.old_dir
    is_swapped = plan.split_dir != split_dir
    if existing == "grow" and not is_swapped:
        refuse_other_journal(journal, plan.identity())
    new_dirs = [path for path in (split_dir, *split_dir.parents) if not path.exists()]
    buckets = frozenset(plan.wanted)
    count_all = plan.budget is not None
    # Another machine may have tables of an earlier pass there, whose numbers mean other documents.
    known = None if plan.is_staged_apart else KnownDocuments(journal.directory / KNOWN_NAME)
    shared = journal.directory / SHARED_NAME
    open_worker = partial(
        open_tokenizer, plan.settings, plan.rows, buckets, count_all, known, shared
    )
    # Loaded before the workers fork, so that they share its memory.
    if plan.split.source.reading.tokens is None:
        load_tokenizer(plan.settings.chosen).load(with_reference=_is_long(plan))
    else:
        share_table(load_tokenizer(plan.settings.chosen).reference)
    if plan.settings.columns or plan.settings.transforms:
        import nmoe_core.shards.columns  # noqa: F401  (forked workers share it)
    Chain(plan.settings.transforms)  # so do they its modules; a missing package is found here
    # Workers start before the lock is taken: they would inherit it and may outlive this process.
    with open_pool(plan.settings.compute, open_worker) as pool, output_lock(split_dir):
        try:
            if is_swapped:
                Journal(split_dir).remove()
            else:
                retire_beside(split_dir)
            if existing == "remake":
                journal.remove()
            report = _run(plan, journal, pool, progress)
            if is_swapped:
                _commit_manifest(plan.settings, plan.fmt, plan.split_dir)
                keep_version(split_dir, plan.split_dir, plan.settings.keep_versions)
                swap_in(split_dir)
            return report
        except BaseException:
            if is_swapped and (existing == "remake" or not journal.directory.exists()):
                retire_beside(split_dir)
            _remove_empty(new_dirs)
            raise


def _is_long(plan: PassPlan) -> bool:
    """Whether the pass is long enough that each worker will load the reference tokenizer to compare
    samples."""
    size_bytes = plan.split.source.size_bytes()
    return size_bytes is not None and size_bytes >= SAMPLED_BYTES * plan.settings.compute.workers


def write_manifest(settings: PrepSettings, split_dir: Path) -> tuple[dict[str, Any], bool]:
    """Combine the shard manifests of a split; return the manifest and whether it changed.

    Shards of an earlier run with more shards are removed: the new manifest does not list them.
    """
    split_dir = split_dir.resolve()
    with output_lock(split_dir):  # the lock also removes the files of a killed writer
        committed = _commit_manifest(settings, shard_format(settings), split_dir)
        for shard_dir in sorted(split_dir.glob("shard_[0-9]*")):
            number = shard_dir.name.removeprefix("shard_")
            is_surplus = number.isdecimal() and int(number) >= settings.num_shards
            if is_surplus and recorded(shard_dir / MANIFEST_NAME) is not None:
                remove_dir(shard_dir)
    return committed


def combined_manifest(settings: PrepSettings, fmt: ShardFormat, directory: Path) -> dict[str, Any]:
    """The manifest over all shards of a split. Raises as `combine_shards`."""
    source_info = {"source": settings.name, "assignment": "md5"}
    return combine_shards(directory, fmt, settings.num_shards, source_info)


def _commit_manifest(
    settings: PrepSettings, fmt: ShardFormat, directory: Path
) -> tuple[dict[str, Any], bool]:
    manifest = combined_manifest(settings, fmt, directory)
    return commit_manifest(directory / MANIFEST_NAME, manifest)


def _run(plan: PassPlan, journal: Journal, pool: Map, progress: Progress | None) -> PrepReport:
    source = plan.split.source
    work = None
    entry = journal.read()
    if entry is not None and plan.can_go_on_from(entry):
        with suppress(FormatError):  # start over if the disk lost files that the journal names
            work = Pass(plan, journal, entry)
    if work is None:
        journal.remove()
        work = Pass(plan, journal, None)
    try:
        keep_digests(journal.directory / _DIGESTS_NAME, source.local_files())
        # The files of a later version may be equal to those that the bucket has.
        staged = None if (plan.old_dir / MANIFEST_NAME).exists() else journal.directory
        with sent_while_growing(staged, plan.old_dir, PART_SUFFIX, NPY_HEADER_BYTES):
            work.read(pool, progress)
            report = work.report()
            _require_documents(plan, report)
            _seal(plan, work, pool)
        # A run that is killed during the commit below resumes here; a short pass, which never wrote
        # a journal, is cheaper to repeat.
        if journal.is_written:
            journal.commit(work.entry, work.flush)
        # A published manifest must not list files that are being replaced.
        (plan.split_dir / MANIFEST_NAME).unlink(missing_ok=True)
        fsync_dir(plan.split_dir)
        work.commit()
    except BaseException as error:
        work.suspend()
        # A run that resumes here would only meet a lasting error again.
        is_lasting = isinstance(error, NmoeError) and error.code not in _PASSING
        if is_lasting or not journal.is_written:
            journal.remove()
        raise
    journal.remove()
    return report


def _require_documents(plan: PassPlan, report: PrepReport) -> None:
    """Raise SourceError if a whole split has no document (E-SOURCE-EMPTY)."""
    if report.num_documents or not plan.is_of_all_shards:
        return
    num_records = sum(report.outcomes.values())
    is_slice = not num_records and plan.split.rows != Rows()
    raise SourceError(
        "source has no document",
        where=plan.settings.name,
        found=f"{num_records} records, 0 documents",
        do="check the bounds of the slice (split)"
        if is_slice
        else "check text_field, the paths and min_doc_tokens",
        code="E-SOURCE-EMPTY",
    )


def _seal(plan: PassPlan, work: Pass, pool: Map) -> None:
    """Seal the shards; meanwhile, check that the source is still the one that was read. Raises
    SourceError if it is not (E-SOURCE-CHANGED)."""
    source = plan.split.source
    with ThreadPoolExecutor(1) as beside:
        revision = beside.submit(source.revision)
        work.seal(pool)
        if revision.result() != plan.fingerprints["source"]:
            raise SourceError(
                "source changed while it was read",
                where=plan.settings.name,
                found=", ".join(source.changed[:_NAMED_FILES]) or revision.result(),
                expected=None if source.changed else plan.fingerprints["source"],
                do="run prep again once the source has stopped changing",
                code="E-SOURCE-CHANGED",
            )


def _recorded_stop(plan: PassPlan) -> int | None:
    """The row at which the last complete pass stopped. A pass with a budget over only some of the
    shards must stop at the same row."""
    for bucket in range(plan.settings.num_shards):
        path = plan.split_dir / shard_dir_name(bucket) / MANIFEST_NAME
        if recorded(path) == plan.fingerprints:
            return int(load_manifest(path).extra["source_info"]["rows_read"])
    return None


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


def _remove_empty(new_dirs: list[Path]) -> None:
    """Remove empty directories that a run created, innermost first."""
    with suppress(OSError):  # a directory that is not empty stays
        for directory in new_dirs:
            (directory / LOCK_NAME).unlink(missing_ok=True)
            directory.rmdir()
