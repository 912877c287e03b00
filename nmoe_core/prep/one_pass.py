"""One pass over a source: reads blocks in order and appends documents to the requested shards.

The state after each block is a few numbers, which the journal records: the start of the next block,
the length of every file, and the counts. A pass that resumes from such a state writes the same
bytes as an uninterrupted one. Memory: the blocks in flight.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.compute.api import Map
from nmoe_core.base.compute.pool import Worker
from nmoe_core.base.errors import SourceError
from nmoe_core.prep.incremental.append import Appender
from nmoe_core.prep.incremental.known_keys import keep_keys
from nmoe_core.prep.incremental.reuse import KnownDocuments
from nmoe_core.prep.incremental.shared_keys import KEYS_NAME, SHARED_NAME, find_shared
from nmoe_core.prep.incremental.tables import KNOWN_NAME, join_tables, old_shards, write_table
from nmoe_core.prep.journal import Journal
from nmoe_core.prep.pass_plan import PassPlan
from nmoe_core.prep.passthrough_columns import PassthroughColumns, StagedChanges, seal_columns
from nmoe_core.prep.progress import PrepProgress, Progress
from nmoe_core.prep.settings import PrepReport
from nmoe_core.prep.tokenize import BAD, OUTCOMES, TokenizedBlock, tokenize_block
from nmoe_core.shards.lines import LINES_NAME, StagedLines
from nmoe_core.shards.manifest import shard_dir_name
from nmoe_core.shards.shard_file import seal_file
from nmoe_core.shards.writer import ShardWriter
from nmoe_core.sources.records import START, Block, Position
from nmoe_core.text.normalise import NORMALIZER

_NUM_EXAMPLES = 3
# With fewer records than this, the share of bad records means little, so it is checked only at the
# end of a pass.
_MIN_JUDGED = 10_000


@dataclass
class Counts:
    """What the journal records of a pass apart from its shards: position, counts, examples of bad
    records."""

    is_complete: bool = False
    position: Position = START
    size_bytes: int = 0
    rows_read: int = 0
    total_tokens: int = 0
    num_text_bytes: int = 0
    num_replaced: int = 0
    num_emptied: int = 0
    num_further_parts: int = 0
    """Additional documents from records that were split."""
    bad_examples: list[str] = field(default_factory=list)
    notes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts of records that were left out by rule, by reason, and of files, by detected
    encoding."""


class Pass:
    """A pass over a source; `entry` is the state in the journal from which to resume."""

    def __init__(self, plan: PassPlan, journal: Journal, entry: dict[str, Any] | None) -> None:
        self.plan = plan
        self.journal = journal
        self.counts = Counts()
        self.documents_tokenized = 0
        self.documents_reused = 0
        self.totals = np.zeros(len(OUTCOMES), np.int64)
        # The last row is for records that could not be read: their bucket is -1.
        self.outcomes = np.zeros((plan.settings.num_shards + 1, len(OUTCOMES)), np.int64)
        # Per shard: records that were split, and their parts after the first.
        self.splits = np.zeros((plan.settings.num_shards + 1, 2), np.int64)
        if entry is not None:
            recorded = [one.name for one in fields(Counts) if one.name in entry]
            self.counts = Counts(**{name: entry[name] for name in recorded})
            self.counts.position = Position(*entry["position"])
            self.totals[:] = entry["totals"]
            for bucket, counts in entry["outcomes"].items():
                self.outcomes[int(bucket)] = counts
                self.splits[int(bucket)] = entry["splits"][bucket]
        self.resumed_bytes = self.counts.size_bytes
        self.writers: dict[int, ShardWriter] = {}
        state = None if entry is None else entry.get("columns")
        self.columns = PassthroughColumns(plan.split.source, journal.directory, plan.wanted, state)
        sizes = dict.fromkeys(plan.wanted if plan.settings.transforms else (), 0)
        if entry is not None and "changes" in entry:
            sizes = {bucket: entry["changes"][str(bucket)] for bucket in sizes}
        self.changes = StagedChanges(journal.directory, sizes)
        self.lines = StagedLines(journal.directory / "lines", {}, {})
        self._checksums: dict[int, list[str]] = {}
        self._columns_info: dict[int, dict[str, Any]] = {}
        try:
            for bucket in plan.wanted:
                name = shard_dir_name(bucket)
                size = plan.settings.tokens_per_shard
                final = plan.split_dir / name
                staged = journal.directory / name
                state = None if entry is None else entry["shards"][str(bucket)]
                self.writers[bucket] = ShardWriter(final, plan.fmt, size, staged, state)
            there = {} if entry is None else entry.get("dropped", {})
            dropped = {bucket: there.get(str(bucket), 0) for bucket in plan.wanted}
            self.lines = StagedLines(self.lines.directory, self._num_documents(), dropped)
            known = KnownDocuments(journal.directory / KNOWN_NAME)
            files = self.lines, self.columns, self.changes
            self.appender = Appender(self.writers, *files, known)
        except BaseException:
            self.suspend()
            raise
        journal.is_written = entry is not None

    def read(self, pool: Map, progress: Progress | None) -> None:
        """Read the source to its end, or until the budget is used."""
        started = time.monotonic()
        total_bytes = self.plan.split.source.size_bytes() if progress is not None else None
        if not self.counts.is_complete:
            self._find_shared(pool)
            self._find_known(pool)
        blocks = pool(tokenize_block, self._blocks())
        for block in blocks:
            self._append(block)
            self._judge_bad(at_end=False)
            if progress is not None:
                progress(self._progress(total_bytes, time.monotonic() - started))
            if self.counts.is_complete:
                blocks.close()  # workers read ahead
                break
            self.journal.commit_if_due(self.entry, self.flush)
        self.appender.append_all()
        self.counts.is_complete = True
        self._judge_bad(at_end=True)
        if self.plan.settings.needs_columns:
            self.columns.require_all()

    def _find_shared(self, pool: Map) -> None:
        """Find what documents share, if a transform asks for it. The journal is committed, so that
        a later run does not do this again."""
        directory = self.journal.directory / SHARED_NAME
        if self.plan.settings.reads_corpus and find_shared(self.plan, directory, pool):
            self.journal.commit(self.entry, self.flush)

    def _find_known(self, pool: Map) -> None:
        """Write the tables of the documents that the split already has."""
        plan = self.plan
        tables = self.journal.directory / KNOWN_NAME
        tables.mkdir(parents=True, exist_ok=True)
        for path in tables.iterdir():  # an interrupted run may have left tables
            path.unlink()
        shards = []
        if plan.settings.reuse and not plan.is_staged_apart:
            reading = plan.split.source.reading
            shards = old_shards(plan.old_dir, tables, plan.settings, plan.fmt, reading)
        # Documents of other shards are tokenised only to count them for a budget.
        if not plan.is_of_all_shards and plan.budget is None:
            made = {shard_dir_name(bucket) for bucket in plan.wanted}
            shards = [shard for shard in shards if shard.table.stem in made]
        if shards:
            join_tables(tables, shards, list(pool(write_table, shards)))

    def seal(self, pool: Map) -> None:
        """Finish the files and fsync them, in the pool if its workers can read them."""
        if self.plan.is_staged_apart:
            pool = Worker(lambda: None).map
        paths = {bucket: writer.close() for bucket, writer in self.writers.items()}
        self._checksums = dict(zip(paths, pool(_seal, paths.values())))
        jobs = self.columns.jobs(self.plan.rel, paths, self.changes)
        self._columns_info = dict(zip(paths, pool(seal_columns, jobs)))

    def commit(self) -> None:
        """Move the sealed shards to their final paths, one by one."""
        self.lines.suspend()
        for bucket, checksums in self._checksums.items():
            old_dir = self.plan.old_dir / shard_dir_name(bucket)
            writer = self.writers[bucket]
            marks = [self.plan.split.source.reading.digest, *checksums]
            writer.add_file(LINES_NAME, self.lines.sealed(bucket, marks))
            writer.commit(checksums, self.plan.fingerprints, self._source_info(bucket), old_dir)
        keep_keys(self.journal.directory / SHARED_NAME / KEYS_NAME, self.plan.split_dir)

    def entry(self) -> dict[str, Any]:
        """The state to record in the journal."""
        return {
            **self.plan.identity(),
            "counts_all": self.plan.budget is not None,
            **asdict(self.counts),
            "totals": self.totals.tolist(),
            "outcomes": {str(b): self.outcomes[b].tolist() for b in self.plan.wanted},
            "splits": {str(b): self.splits[b].tolist() for b in self.plan.wanted},
            "shards": {str(bucket): writer.state for bucket, writer in self.writers.items()},
            "dropped": {str(bucket): n for bucket, n in self.lines.num_dropped.items()},
            **({"columns": self.columns.state} if self.plan.settings.columns else {}),
            **({"changes": self.changes.state} if self.plan.settings.transforms else {}),
        }

    def suspend(self) -> None:
        """Close all files and keep them for the next run."""
        for writer in self.writers.values():
            writer.suspend()
        self.columns.suspend()
        self.changes.suspend()
        self.lines.suspend()

    def report(self) -> PrepReport:
        """Summary of the pass."""
        return PrepReport(
            num_documents=self.appender.num_documents,
            num_tokens=self.appender.num_tokens,
            num_text_bytes=self.counts.num_text_bytes,
            documents_tokenized=self.documents_tokenized,
            documents_reused=self.documents_reused,
            num_replaced=self.counts.num_replaced,
            notes=self.counts.notes,
            outcomes=Counter({name: n for name, n in zip(OUTCOMES, self.totals.tolist()) if n}),
            bad_examples=self.counts.bad_examples,
            made=list(self.plan.wanted),
        )

    def _num_records(self) -> int:
        """Number of records read so far."""
        return int(self.totals.sum()) - self.counts.num_further_parts

    def _num_documents(self) -> dict[int, int]:
        """Number of documents of each shard so far."""
        return {b: sum(n for _, n, _ in writer.state) for b, writer in self.writers.items()}

    def _blocks(self) -> Iterator[Block]:
        if self.counts.is_complete:
            return
        stop = self.plan.rows.stop
        for block in self.plan.split.source.blocks(self.counts.position):
            if stop is not None and block.start.row >= stop:
                return
            yield block

    def _append(self, block: TokenizedBlock) -> None:
        counts = self.counts
        columns = block.columns
        stop = len(block.columns.rows)
        if self.plan.budget is not None:
            ends = counts.total_tokens + np.cumsum(columns.num_tokens)
            # The document that reaches the budget is still stored, as a whole.
            stop = min(stop, int(np.searchsorted(ends, self.plan.budget)) + 1)
            counts.is_complete = stop > 0 and bool(ends[stop - 1] >= self.plan.budget)
            if stop:  # a pass ends between two records, so a record keeps all its parts
                stop = int(np.searchsorted(columns.rows, columns.rows[stop - 1], side="right"))
        if stop:
            self.columns.see(block.kept, block.end.row)
        self.appender.add(block, stop)
        outcomes = columns.outcomes[:stop]
        buckets = columns.buckets[:stop]
        parts = columns.parts[:stop]
        # `+=` would count an index that occurs several times only once.
        np.add.at(self.outcomes, (buckets, outcomes), 1)
        np.add.at(self.splits, (buckets[parts > 0], (parts[parts > 0] > 1).astype(np.int64)), 1)
        self.totals += np.bincount(outcomes, minlength=len(OUTCOMES))
        counts.total_tokens += int(columns.num_tokens[:stop].sum())
        if stop:
            counts.rows_read = max(counts.rows_read, int(columns.rows[stop - 1]) + 1)
        for note in block.notes:
            if note.row < counts.rows_read:
                of_name = counts.notes.setdefault(note.what, {})
                of_name[note.name] = of_name.get(note.name, 0) + 1
        counts.num_text_bytes += block.num_text_bytes
        counts.num_emptied += int(np.count_nonzero(columns.are_emptied[:stop]))
        counts.num_further_parts += int(np.count_nonzero(parts > 1))
        counts.num_replaced += int(np.count_nonzero(columns.are_replaced[:stop]))
        self.documents_tokenized += block.num_tokenized
        self.documents_reused += block.num_known
        num_bad = int(np.count_nonzero(outcomes == BAD))
        counts.bad_examples += block.bad[: min(num_bad, _NUM_EXAMPLES - len(counts.bad_examples))]
        counts.size_bytes += block.size_bytes
        counts.position = block.end

    def _judge_bad(self, at_end: bool) -> None:
        settings = self.plan.settings
        num_bad = int(self.totals[BAD])
        num_records = self._num_records()
        if settings.on_error != "fail" or num_bad <= settings.max_bad_share * num_records:
            return
        if at_end or num_records >= _MIN_JUDGED:
            raise SourceError(
                f"{num_bad} of {num_records} records cannot be read",
                where="; ".join(self.counts.bad_examples),
                expected=f"at most {settings.max_bad_share:.3%}".replace("%", " %"),
                do='fix the records, or set on_error = "skip" or max_bad_share for this source',
                code="E-SOURCE-RECORD",
            )

    def flush(self) -> list[int]:
        """Flush all files to the operating system; return duplicate descriptors of them."""
        self.appender.append_all()
        files = [file for writer in self.writers.values() for file in writer.flush()]
        return files + self.columns.flush() + self.changes.flush() + self.lines.flush()

    def _progress(self, total_bytes: int | None, seconds: float) -> PrepProgress:
        return PrepProgress(
            documents=self.appender.num_documents,
            tokens=self.appender.num_tokens,
            size_bytes=self.counts.size_bytes,
            total_bytes=total_bytes,
            seconds=seconds,
            resumed_bytes=self.resumed_bytes,
            max_tokens=self.plan.budget,
        )

    def _source_info(self, bucket: int) -> dict[str, Any]:
        counts = dict(zip(OUTCOMES, self.outcomes[bucket].tolist()))
        return {
            "source": self.plan.settings.name,
            "assignment": "md5",
            **self.plan.split.source.provenance(),
            "normalizer": NORMALIZER,
            "rows_read": self.counts.rows_read,
            "records_read": self._num_records(),
            "bad_records": int(self.totals[BAD]),
            "replaced_records": self.counts.num_replaced,
            **({"emptied_records": self.counts.num_emptied} if self.changes.sizes else {}),
            "empty_documents": counts["empty"],
            "filtered_documents": counts["filtered"],
            "truncated_documents": counts["truncated"],
            "split_records": int(self.splits[bucket, 0]),
            "further_parts": int(self.splits[bucket, 1]),
            **{what: dict(sorted(n.items())) for what, n in self.counts.notes.items()},
            **self._columns_info.get(bucket, {}),
            "settings": self.plan.settings.identity(),
        }


def _seal(worker: object, paths: Sequence[Path]) -> list[str]:
    return [seal_file(path) for path in paths]
