"""The files of a grading: rows that grow while it runs, and the counts of its summary.

A partial file holds rows as they are computed, beside a note of what they are made from. After a
kill, its whole buffers are kept and the rest is cut off, since a buffer's documents are batched
together. It becomes `quality_scores.jsonl` by a rename, after which the summary is written.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from nmoe_core.atomic import failpoint, fsync_dir, write_json
from nmoe_core.fingerprint import Fingerprints, is_current
from nmoe_core.hydra.decide import DECISIONS
from nmoe_core.hydra.intervals import upper_bound

SCORES_NAME = "quality_scores.jsonl"
SUMMARY_NAME = "summary.json"
PARTIAL_NAME = ".quality_scores.partial.jsonl"
NOTE_NAME = ".quality_scores.partial.json"
Row = dict[str, Any]
Progress = Callable[[int, int | None], None]


class PartialRows:
    """Rows of an unfinished grading.

    Args:
        out_dir: Directory of the output; the caller holds its lock.
        fingerprints: What the rows are made from; rows made from anything else are cut off.
    """

    def __init__(self, out_dir: Path, fingerprints: Fingerprints) -> None:
        self._out_dir, self._fingerprints = out_dir, fingerprints
        self._path, self._note = out_dir / PARTIAL_NAME, out_dir / NOTE_NAME

    def resume(self, buffer_size: int, tally: Tally) -> int:
        """Cut the file to its whole buffers, count those into `tally`; return how many rows."""
        num_rows = num_bytes = 0
        if self._path.is_file() and is_current(self._note, self._fingerprints):
            for lines in _whole_buffers(self._path, buffer_size):
                tally.add(json.loads(line) for line in lines)
                num_rows += len(lines)
                num_bytes += sum(map(len, lines))
        else:
            self._path.unlink(missing_ok=True)
            write_json(self._note, {"fingerprints": self._fingerprints})
        self._path.touch()
        os.truncate(self._path, num_bytes)
        return num_rows

    def append(self, rows: Iterable[Row]) -> None:
        """Add the rows of a buffer and make them durable."""
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        with open(self._path, "ab") as file:
            file.write("".join(lines).encode())
            failpoint("write")
            file.flush()
            failpoint("fsync")
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Put the rows in the place of `quality_scores.jsonl`."""
        # Gone before its scores are replaced: a summary never speaks of another run's rows.
        (self._out_dir / SUMMARY_NAME).unlink(missing_ok=True)
        failpoint("rename")
        os.replace(self._path, self._out_dir / SCORES_NAME)
        fsync_dir(self._out_dir)
        self._note.unlink(missing_ok=True)


def _whole_buffers(path: Path, buffer_size: int) -> Iterator[list[bytes]]:
    with open(path, "rb") as file:
        while len(lines := list(islice(file, buffer_size))) == buffer_size:
            if not lines[-1].endswith(b"\n"):
                return
            yield lines


class Tally:
    """Counts over the rows of a grading.

    Args:
        tau_probe: The probe's threshold.
        tau_keep: Given where nothing leaves early: then it is counted which documents would have
            left although the judge keeps them.
    """

    def __init__(self, tau_probe: float, tau_keep: float | None) -> None:
        self._tau_probe, self._tau_keep = tau_probe, tau_keep
        self._decisions: dict[str, Counter[str]] = {}
        self._num_exits = self._would_exit = self._false_drops = 0
        self.failed: dict[str, str] = {}

    @property
    def total(self) -> int:
        """Rows so far."""
        return sum(counts.total() for counts in self._decisions.values())

    def add(self, rows: Iterable[Row]) -> None:
        """Count some rows."""
        for row in rows:
            self._decisions.setdefault(row["source"], Counter())[row["decision"]] += 1
            self._num_exits += row["early_exit"]
            if "failed" in row:
                self.failed[row["doc_id"]] = row["failed"]
            elif self._tau_keep is not None and row["q_probe"] < self._tau_probe:
                self._would_exit += 1
                self._false_drops += row["aggregated"] >= self._tau_keep

    def facts(self) -> dict[str, Any]:
        """The counts as `summary.json` holds them."""
        total = sum(self._decisions.values(), Counter[str]())
        facts: dict[str, Any] = {
            "total": self.total,
            **_by_decision(total),
            "per_source": {s: _by_decision(c) for s, c in sorted(self._decisions.items())},
            "early_exits": self._num_exits,
            "failed": len(self.failed),
        }
        if self._tau_keep is not None:
            rate = self._false_drops / self._would_exit if self._would_exit else None
            facts["probe_gate"] = {
                "would_exit": self._would_exit,
                "judge_keeps": self._false_drops,
                "false_drop_rate": rate,
                "false_drop_rate_upper95": upper_bound(self._false_drops, self._would_exit),
            }
        return facts


def _by_decision(decisions: Counter[str]) -> dict[str, int]:
    drop, band, keep = (decisions[decision] for decision in DECISIONS)
    return {"kept": keep, "dropped": drop, "band": band}
