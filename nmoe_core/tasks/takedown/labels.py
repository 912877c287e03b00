"""The records of labels about documents that are taken down, and the removal of their texts."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loader.files.format import read_json_object
from nmoe_core.audit.takedown.find import Found
from nmoe_core.base.atomic import output_lock, replacing, write_bytes
from nmoe_core.config.tree import Tree
from nmoe_core.curate.takedown.record import Row
from nmoe_core.labels.label_files import SCORES_NAME, SUMMARY_NAME, merge_labels, write_summary
from nmoe_core.labels.oracle import Record, read_records
from nmoe_core.labels.slices import NUM_LABEL_SHARDS, SPLITS

_KNOWN_NAME = "known.jsonl"  # records beside the labels of a slice, for other slices
_FILES = (f"**/{SCORES_NAME}", f"**/{_KNOWN_NAME}", "merged/labels_*.jsonl")
_TEXT_FIELDS = ("snippet", "raw")  # they quote the document


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
            count = sum(map(self._is_of_these, read_records(path)))
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
                with replacing(path) if path in merged else output_lock(path.parent):
                    is_changed = self._erase(path)
            if is_changed:
                changed.append(path.relative_to(self._tree.labels).as_posix())
        return changed

    def _files(self) -> list[Path]:
        return [path for form in _FILES for path in sorted(self._tree.labels.glob(form))]

    def _is_of_these(self, record: Record) -> bool:
        return record.get("doc_id") in self._doc_ids or record.get("text_sha256") in self._texts

    def _is_labelled(self, split: str) -> bool:
        """Whether all shards of a split are finished, so that they can be merged."""
        shards = (self._tree.label_shard(split, i) for i in range(NUM_LABEL_SHARDS))
        return all((shard / SUMMARY_NAME).is_file() for shard in shards)

    def _erase(self, path: Path) -> bool:
        records = [*read_records(path)]
        chosen = [
            one for one in records if self._is_of_these(one) and any(map(one.get, _TEXT_FIELDS))
        ]
        for record in chosen:
            record.update((name, "") for name in _TEXT_FIELDS if name in record)
        if not chosen:
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
