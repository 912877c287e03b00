"""Finds earlier answers of an oracle by the SHA-256 of the text that it read.

If documents are added or the tokenizer changes, a document's id changes, but its text does not. So
the label of its text may be in any label shard of the run. If a shard drops labels, they are stored
in a second file beside the shard's labels, where other shards find them. Memory: 300 bytes per
label, no texts.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple

from loader.files.nested import json_value
from loader.files.regular import open_file
from nmoe_core.base.append_log import Line, whole_lines
from nmoe_core.base.atomic import atomic_file
from nmoe_core.base.fingerprint import recorded
from nmoe_core.labels.label_files import SCORES_NAME, STARTED_NAME
from nmoe_core.labels.oracle import Oracle, Record, is_server_failure, scorer_of

KNOWN_NAME = "known.jsonl"


class _Place(NamedTuple):
    """The place of a record in its file, and the fields that decide between two records of the same
    text."""

    file: IO[bytes]
    offset: int
    size: int
    is_ok: bool
    attempts: int


def sha256_of(text: str) -> str:
    """The SHA-256 of a text, the key of its records."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


class KnownAnswers(ExitStack):
    """The answers of one oracle and rubric in directories of labels; the files stay open.

    Records of earlier versions lack the hash of their text and are not found.
    """

    def __init__(self, directories: Iterable[Path], oracle: Oracle) -> None:
        super().__init__()
        self._oracle = oracle
        self._places: dict[tuple[bytes, bool], _Place] = {}
        self.new_tokens: list[int] = []
        """The number of tokens of each answer, if its record has it."""
        for directory in directories:
            if is_of_oracle(directory, oracle):
                # A shard writes the second file before it drops records from the first.
                for name in (SCORES_NAME, KNOWN_NAME):
                    self._read(directory / name)

    def __len__(self) -> int:
        return len(self._places)

    def find(self, text_sha256: str, is_cut: bool) -> Record | None:
        """The record of a text, usually of another document with the same text. `is_cut` says
        whether the text is only the beginning of the document."""
        key = bytes.fromhex(text_sha256)
        place = None
        # A record of a cut text is marked as cut, so it cannot be used for a whole document with
        # this text.
        for is_truncated in (False, True) if is_cut else (False,):
            place = place or self._places.get((key, is_truncated))
        if place is None:
            return None
        place.file.seek(place.offset)
        try:
            record = json_value(place.file.read(place.size))
        except ValueError:  # another process has rewritten the file
            return None
        is_of_text = isinstance(record, dict) and record.get("text_sha256") == text_sha256
        return record | {"truncated": record["truncated"] or is_cut} if is_of_text else None

    def _read(self, path: Path) -> None:
        if not path.is_file():
            return
        file = self.enter_context(open_file(path))
        for line, record in _records(file, self._oracle):
            key = bytes.fromhex(record["text_sha256"]), bool(record["truncated"])
            outcome = record["ok"], record["attempts"]
            if isinstance(num_new := record.get("num_new_tokens"), int):
                self.new_tokens.append(num_new)
            if key not in self._places or outcome > self._places[key][3:]:
                self._places[key] = _Place(file, line.offset, len(line.payload), *outcome)


def _records(file: IO[bytes], oracle: Oracle) -> Iterator[tuple[Line, Record]]:
    """Yield the oracle's records that hold the hash of their text, except server failures.

    Other lines are skipped: another process may be rewriting the file, and damaged lines are
    refused when their shard is labelled.
    """
    for line in whole_lines(file):
        try:
            record = json_value(line.payload)
            if scorer_of(record) == oracle.scorer and _is_known(record):
                yield line, record
        except (ValueError, KeyError, AttributeError, TypeError):
            continue


def _is_known(record: Record) -> bool:
    values = record["ok"], record["truncated"], record["attempts"]
    is_digest = len(bytes.fromhex(record["text_sha256"])) == 32
    has_types = is_digest and tuple(map(type, values)) == (bool, bool, int)
    return has_types and not is_server_failure(record)


def is_of_oracle(directory: Path, oracle: Oracle) -> bool:
    """Whether this oracle made the labels of a directory, with the same rubric."""
    began = recorded(directory / STARTED_NAME) or {}
    asked = oracle.fingerprint, oracle.scorer.rubric_hash
    return (began.get("oracle"), began.get("rubric")) == asked


def keep_answers(directory: Path, oracle: Oracle) -> None:
    """Before a directory drops its labels, store them where other shards find them. Labels of
    another oracle are not stored."""
    path = directory / KNOWN_NAME
    if not is_of_oracle(directory, oracle):
        path.unlink(missing_ok=True)
        return
    kept: dict[tuple[str, bool], tuple[bool, bytes]] = {}
    for name in (KNOWN_NAME, SCORES_NAME):
        if not (directory / name).is_file():
            continue
        with open_file(directory / name) as file:
            for line, record in _records(file, oracle):
                key = record["text_sha256"], record["truncated"]
                if record["ok"] or not kept.get(key, (False,))[0]:
                    kept[key] = record["ok"], line.payload
    with atomic_file(path) as file:
        file.writelines(payload for _, payload in kept.values())
