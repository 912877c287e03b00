"""Oracle labels of one slice shard: `scores.jsonl`, appended record by record, `summary.json` last.

A killed run loses at most the record it was writing: the next one cuts the torn line and asks only
for documents that have no record, so the finished file has the bytes of an uninterrupted run.
Labels of another scorer or rubric are refused unless `replace`; when the slice, its documents or
the settings changed, labelling starts over. Memory does not grow with the documents' text.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import read_json_object
from nmoe_core.atomic import failpoint, output_lock, write_bytes, write_json
from nmoe_core.docid import DocumentReader
from nmoe_core.errors import LabelError
from nmoe_core.fingerprint import Fingerprints, is_current, recorded, sha256_file
from nmoe_core.hydra.document_texts import Decoder, DocumentTexts
from nmoe_core.hydra.label_files import (
    SCORES_NAME,
    SUMMARY_NAME,
    Record,
    coverage,
    latest,
    read_records,
    scorer_of,
)
from nmoe_core.hydra.oracle import Oracle, OracleResult
from nmoe_core.hydra.rubric import Rubric
from nmoe_core.hydra.scores import aggregate, as_vector, parse_scores
from nmoe_core.hydra.slices import data_digest, read_slice

LABEL_CODE = "labels/1"
STARTED_NAME = "started.json"
SNIPPET_CHARS = 256
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LabelReport:
    """Counts of one shard; `num_new` records were made now, `resumed_from` were there before."""

    total: int
    parsed: int
    num_new: int
    resumed_from: int

    @property
    def is_current(self) -> bool:
        """Whether this call found nothing to do."""
        return self.num_new == 0


def label_shard(
    slice_file: Path,
    data_root: Path,
    out_dir: Path,
    oracle: Oracle,
    tokenizer: Decoder,
    rubric: Rubric,
    max_doc_tokens: int,
    eos_token_id: int,
    *,
    replace: bool = False,
    retry_failed: int = 0,
    progress: Progress | None = None,
) -> LabelReport:
    """Label the documents of one slice file into `out_dir/scores.jsonl`.

    Args:
        slice_file: Rows of (document id, source).
        data_root: Directory that document ids are relative to.
        out_dir: Directory of this shard's labels.
        oracle: Scores texts.
        tokenizer: Decodes the shards' tokens.
        rubric: What the oracle was asked; its hash goes into every record.
        max_doc_tokens: Tokens of a document that the oracle sees, from its start.
        eos_token_id: Token that ends every document; the oracle never sees it.
        replace: Start over where another scorer's or rubric's labels lie.
        retry_failed: How many more times to ask about a document whose answer was not accepted.
        progress: Called with (documents done, documents in all) after each record.

    Raises:
        LabelError: The directory holds labels of another scorer or rubric (E-LABEL-MIXED), or of a
            broken file (E-LABEL-CORRUPT); the oracle gave too few or too many results
            (E-LABEL-ORACLE).
        FormatError: A document cannot be read.
    """
    rows = read_slice(slice_file)
    fingerprints = {
        "code": LABEL_CODE,
        "slice": sha256_file(slice_file),
        "data": data_digest(data_root, sorted({source for _, source in rows})),
        "tokenizer": tokenizer.fingerprint,
        "oracle": oracle.fingerprint,
        "rubric": rubric.hash,
        "max_doc_tokens": str(max_doc_tokens),
    }
    run = _LabelRun(out_dir, rows, fingerprints, oracle, rubric)
    if retry_failed == 0 and (report := run.finished()) is not None:
        return report
    with output_lock(out_dir):
        known = run.open_existing(replace)
        pending = _pending(rows, known, retry_failed)
        if not pending and (report := run.finished()) is not None:
            return report
        reader = DocumentReader(data_root)
        ids = [doc_id for doc_id, _ in pending]
        texts = DocumentTexts(reader, ids, tokenizer, max_doc_tokens, eos_token_id)
        run.append(pending, texts, progress)
        return run.finish(resumed_from=len(latest(known)), num_new=len(pending))


def _pending(
    rows: list[tuple[str, str]], known: list[Record], retry_failed: int
) -> list[tuple[str, str]]:
    parsed = {record["doc_id"] for record in known if record["ok"]}
    attempts = Counter(record["doc_id"] for record in known)
    return [
        (doc_id, source)
        for doc_id, source in rows
        if doc_id not in parsed and not 0 < attempts[doc_id] > retry_failed
    ]


@dataclass(frozen=True, slots=True)
class _LabelRun:
    """The files of one shard's labels and what they are made from."""

    out_dir: Path
    rows: list[tuple[str, str]]
    fingerprints: Fingerprints
    oracle: Oracle
    rubric: Rubric

    @property
    def scores(self) -> Path:
        return self.out_dir / SCORES_NAME

    @property
    def summary(self) -> Path:
        return self.out_dir / SUMMARY_NAME

    @property
    def started(self) -> Path:
        return self.out_dir / STARTED_NAME

    def finished(self) -> LabelReport | None:
        if not is_current(self.summary, self.fingerprints) or not self.scores.is_file():
            return None
        value = read_json_object(self.summary)
        return LabelReport(value["total"], value["parsed"], 0, value["total"])

    def open_existing(self, replace: bool) -> list[Record]:
        """Records that count, their torn tail cut off; the file is emptied when none can."""
        began = recorded(self.started)
        if began is None and not self.scores.exists():
            self._start_over()
            return []
        records, num_bytes = read_records(self.scores) if self.scores.exists() else ([], 0)
        if began == self.fingerprints and not self._foreign(records):
            if self.scores.exists():
                os.truncate(self.scores, num_bytes)
            return records
        has_other_scorer = began is None or any(
            began.get(key) != self.fingerprints[key] for key in ("oracle", "rubric")
        )
        if records and not replace and (has_other_scorer or self._foreign(records)):
            raise self._mixed(records[0])
        self._start_over()
        return []

    def _foreign(self, records: list[Record]) -> bool:
        return any(scorer_of(record) != self._scorer() for record in records)

    def _scorer(self) -> tuple[str, str, str]:
        return self.oracle.scorer_model, self.oracle.scorer_version, self.rubric.hash

    def _start_over(self) -> None:
        # The mark of the new run comes last: records are never taken for those of another run.
        self.summary.unlink(missing_ok=True)
        write_bytes(self.scores, b"")
        write_json(self.started, {"fingerprints": self.fingerprints})

    def _mixed(self, record: Record) -> LabelError:
        return LabelError(
            "labels of another scorer or rubric lie here",
            where=self.scores,
            found="/".join(scorer_of(record)),
            expected="/".join(self._scorer()),
            do="label into another directory, or set [oracle] replace = true to drop them",
            code="E-LABEL-MIXED",
        )

    def append(
        self, pending: list[tuple[str, str]], texts: DocumentTexts, progress: Progress | None
    ) -> None:
        """Ask the oracle and append one flushed record a document."""
        self.summary.unlink(missing_ok=True)
        results = self.oracle.label(texts) if pending else iter(())
        with open(self.scores, "ab", buffering=0) as file:
            for i, (doc_id, source) in enumerate(pending):
                result = next(results, None)
                if result is None:
                    raise self._wrong_count(f"{i} results", len(pending))
                record = self._record(doc_id, source, texts[i], result)
                failpoint("write")
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                if progress is not None:
                    progress(i + 1, len(pending))
            os.fsync(file.fileno())
        if next(results, None) is not None:
            raise self._wrong_count("more results", len(pending))

    def _wrong_count(self, found: str, expected: int) -> LabelError:
        return LabelError(
            "the oracle did not answer once for each text",
            where=self.oracle.scorer_model,
            found=found,
            expected=expected,
            code="E-LABEL-ORACLE",
        )

    def _record(self, doc_id: str, source: str, text: str, result: OracleResult) -> Record:
        record: Record = {
            "doc_id": doc_id,
            "source": source,
            "ok": result.scores is not None,
            "snippet": text[:SNIPPET_CHARS].replace("\n", " "),
        }
        if result.scores is None:
            record["raw"] = result.raw
        else:
            scores = parse_scores(result.scores)
            record["scores"] = scores
            record["aggregated"] = float(aggregate(np.asarray(as_vector(scores))))
        model, version, rubric_hash = self._scorer()
        return record | {
            "scorer_model": model,
            "scorer_version": version,
            "rubric_hash": rubric_hash,
            "finish_reason": result.finish_reason,
        }

    def finish(self, resumed_from: int, num_new: int) -> LabelReport:
        """Commit the summary over all records of the shard."""
        records = list(latest(read_records(self.scores)[0]).values())
        counts: dict[str, Any] = coverage(records)
        model, version, rubric_hash = self._scorer()
        facts = {
            "scorer_model": model,
            "scorer_version": version,
            "rubric_hash": rubric_hash,
            "resumed_from": resumed_from,
            "scores_sha256": sha256_file(self.scores),
            "fingerprints": self.fingerprints,
        }
        write_json(self.summary, counts | facts)
        return LabelReport(counts["total"], counts["parsed"], num_new, resumed_from)
