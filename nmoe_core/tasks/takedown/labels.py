"""The records of labels about documents that are taken down, and the removal of their texts."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from loader.files.format import read_json_object
from loader.files.regular import open_file
from nmoe_core.audit.takedown.find import Found
from nmoe_core.base.append_log import AppendLog, whole_lines
from nmoe_core.base.atomic import output_lock, replacing, write_bytes
from nmoe_core.base.jsonl import parse_object
from nmoe_core.config.tree import Tree
from nmoe_core.curate.takedown.record import Row
from nmoe_core.labels.answers import ANSWERS_NAME, KNOWN_NAME
from nmoe_core.labels.label_files import SCORES_NAME, SUMMARY_NAME, merge_labels, write_summary
from nmoe_core.labels.oracle import Record, read_records
from nmoe_core.labels.slices import NUM_LABEL_SHARDS, SPLITS

# The ledger comes last: its lines have no document id, but the hash of the text that records name.
_FILES = (
    *(f"**/{SCORES_NAME}", f"**/{KNOWN_NAME}", "merged/labels_*.jsonl"),
    f"{ANSWERS_NAME}/*.jsonl",
)
_TEXT_FIELDS = ("snippet", "raw", "reason", "body")  # they quote the document


class LabelsOf:
    """The label records of documents. Records are matched by the hash of the text and by id,
    because the hash of a label covers the text that the oracle read, which may be cut. The takedown
    record has both, so the records are found even if all shards have dropped the document."""

    def __init__(self, tree: Tree, documents: Iterable[Found | Row]) -> None:
        known = [*documents]
        self._tree = tree
        self._texts = {one.text_sha256 for one in known}
        self._doc_ids = {one.doc_id for one in known}

    def counts(self) -> dict[str, Any]:
        """`labels`: the number of these records by file; `labelled`: the records that heads learned
        from."""
        merged = {self._tree.merged_labels(split) for split in SPLITS}
        labels = {}
        labelled = 0
        for path in self._files():
            count = sum(map(self._is_of_these, self._read(path)))
            labelled += count if path in merged else 0
            if count:
                labels[path.relative_to(self._tree.labels).as_posix()] = count
        return {"labels": labels, "labelled": labelled}

    def erase(self) -> list[str]:
        """Erase the texts in these records; return the changed files. Finished labels are merged
        again. Raises LockedError if a process is writing labels."""
        merged = {self._tree.merged_labels(split): split for split in SPLITS}
        changed = []
        for path in self._files():
            if path in merged and self._is_labelled(merged[path]):
                is_changed = merge_labels(self._tree, merged[path]).facts["changed"]
            else:
                with self._writing(path):
                    is_changed = self._erase(path)
            if is_changed:
                changed.append(path.relative_to(self._tree.labels).as_posix())
        return changed

    def _files(self) -> list[Path]:
        return [path for form in _FILES for path in sorted(self._tree.labels.glob(form))]

    def _is_answers(self, path: Path) -> bool:
        return path.parent == self._tree.answers

    def _read(self, path: Path) -> Iterator[Record]:
        if not self._is_answers(path):
            yield from read_records(path)
            return
        with open_file(path) as file:
            for line in whole_lines(file):
                yield parse_object(line.payload)

    def _writing(self, path: Path) -> AbstractContextManager[object]:
        """The lock of the writers of a file."""
        if self._is_answers(path):
            return AppendLog(path)
        is_merged = path.parent == self._tree.merged_labels("val").parent
        return replacing(path) if is_merged else output_lock(path.parent)

    def _is_of_these(self, record: Record) -> bool:
        text = record.get("text_sha256")
        is_one = record.get("doc_id") in self._doc_ids or text in self._texts
        if is_one and text:
            self._texts.add(text)
        return is_one

    def _is_labelled(self, split: str) -> bool:
        """Whether all shards of a split are finished, so that they can be merged."""
        shards = (self._tree.label_shard(split, i) for i in range(NUM_LABEL_SHARDS))
        return all((shard / SUMMARY_NAME).is_file() for shard in shards)

    def _erase(self, path: Path) -> bool:
        records = [*self._read(path)]
        is_changed = False
        for record in filter(self._is_of_these, records):
            # A line of the ledger may hold a label of an earlier version.
            for holder in (record, record.get("label", {})):
                is_changed |= any(map(holder.get, _TEXT_FIELDS))
                holder.update((name, "") for name in _TEXT_FIELDS if name in holder)
        if not is_changed:
            return False
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        payload = "".join(lines).encode("utf-8", "replace")
        summary = path.with_name(SUMMARY_NAME)
        if path.name == SCORES_NAME and summary.is_file():
            # First the summary: after a kill, the text is still there and is erased again.
            digest = hashlib.sha256(payload).hexdigest()
            write_summary(summary, read_json_object(summary) | {"scores_sha256": digest})
        write_bytes(path, payload)
        return True
