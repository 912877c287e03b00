"""The takedown record, `takedown/documents.jsonl`: curation excludes its documents.

A row names a document and the SHA-256 of its text. Curated shards exclude every document with one
of these texts, whatever its id, source or shard, including copies that arrive later. The grams of
each text are stored as hashes, so that its removal can be proved even when no shard holds the text
any more: grams of tokens in `grams.npy`, grams of letters in `letters.npy`. Grams are written
before the rows. Each row holds the number of its text's grams of tokens, and the last line holds
the number and the digest of all grams of letters. If grams are missing, an error is raised. Grams
without rows, which a killed writer left, are overwritten.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.format import Manifest
from nmoe_core.base.atomic import replacing, write_bytes, write_jsonl
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.jsonl import read_objects
from nmoe_core.config.tree import ShardPaths, Tree
from nmoe_core.curate.arrays import map_npy
from nmoe_core.curate.takedown.grams import GRAMS, grams_of
from nmoe_core.curate.takedown.letters import letter_grams
from nmoe_core.shards.documents import ingest_ids

TAKEN_DOWN = "takedown"
"""The reason that curation reports for documents that were taken down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A document that was taken down, with facts of the time of the takedown."""

    source: str
    split: str
    ingest_id: str
    doc_id: str
    text_sha256: str
    item: str
    """The item of the takedown list, with its prefix."""
    is_copy: bool
    """Whether the item does not name this document, but another document with the same text."""
    tokenizer: str
    """Fingerprint or name of the tokenizer that made the grams."""
    grams: int
    grams_sha256: str
    """Digest over the grams of the document's text."""
    at: str
    by: str = ""
    why: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the document; a second takedown of the document has the same key."""
        return self.source, self.split, self.ingest_id, self.text_sha256


@dataclass(frozen=True, slots=True)
class ShardTakedown:
    """The documents of a shard that curation must exclude."""

    gone: np.ndarray
    """bool `[N]`."""
    digest: str
    """Digest of the documents' numbers."""


def read_rows(tree: Tree) -> tuple[Row, ...]:
    """Read the rows of a run's record; empty without a record. Raises FormatError if a line is not
    a row (E-TAKEDOWN-RECORD)."""
    return _read_record(tree)[0]


def _read_record(tree: Tree) -> tuple[tuple[Row, ...], dict[str, Any]]:
    """The rows, and the last line of the file."""
    try:
        stat = tree.takedown.stat()
    except FileNotFoundError:
        return (), {}
    return _read(tree.takedown, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=4)
def _read(path: Path, _: tuple[int, ...]) -> tuple[tuple[Row, ...], dict[str, Any]]:
    kinds = {field.name: {"int": int, "bool": bool}.get(str(field.type), str) for field in _FIELDS}
    rows = []
    seal = {}
    for line, value in read_objects(path, lambda line, found: _refuse(path, line, found)):
        if "sha256" in value:
            seal = value
            continue
        if {key: type(item) for key, item in value.items()} != kinds:
            raise _refuse(path, line.number, f"keys {', '.join(value)}"[:200])
        rows.append(Row(**value))
    try:
        is_sealed = seal == _seal(rows, seal.get("letters"))
    except UnicodeEncodeError:  # a lone surrogate, which the writer never writes
        is_sealed = False
    if not is_sealed:
        raise _refuse(path, None, "rows that do not match the checksum in the last line")
    return tuple(rows), seal


def _seal(rows: Iterable[Row], letters: object) -> dict[str, Any]:
    """The last line of the file, a checksum over the rows. Without the checksum, a lost row would
    go unnoticed, and its document would return. `letters`: the number and the digest of the grams
    of letters; records of earlier versions have none."""
    seal = {"sha256": sha256_json([asdict(row) for row in rows])}
    return seal if letters is None else {**seal, "letters": letters}


_FIELDS = fields(Row)


def taken_down(tree: Tree) -> frozenset[str]:
    """The SHA-256 of each text that was taken down."""
    return frozenset(row.text_sha256 for row in read_rows(tree))


def load_takedown(shard: ShardPaths, manifest: Manifest) -> ShardTakedown | None:
    """The documents to exclude from the shard that `manifest` describes. None if the record names
    no document of the shard, so that a takedown does not make other shards stale. Raises as
    `read_rows` and `ingest_ids`."""
    texts = taken_down(shard.tree)
    if not texts:
        return None
    gone = np.array([digest in texts for _, digest in ingest_ids(manifest)], np.bool_)
    if not gone.any():
        return None
    return ShardTakedown(gone, sha256_json(np.flatnonzero(gone).tolist()))


def record_digest(tree: Tree, source: str) -> str | None:
    """Digest of the texts that were taken down from a source; None if no text was."""
    texts = sorted({row.text_sha256 for row in read_rows(tree) if row.source == source})
    return sha256_json(texts) if texts else None


def add_rows(
    tree: Tree,
    rows: Iterable[Mapping[str, Any]],
    tokens: Mapping[str, np.ndarray],
    decode: Callable[[np.ndarray], str],
) -> list[Row]:
    """Add the documents that the record lacks, and the grams of letters that it lacks; return the
    added rows.

    Args:
        tree: Tree of the run.
        rows: Fields of `Row`, without the fields about grams.
        tokens: Token ids of each text, without BOS and EOS, by its SHA-256.
        decode: Makes the text from token ids.

    Raises:
        FormatError: The record is damaged (E-TAKEDOWN-RECORD).
        LockedError: Another process is writing the record.
    """
    with replacing(tree.takedown, tree.takedown_grams, tree.takedown_letters):
        known = read_rows(tree)
        grams = read_grams(tree, known)
        letters = read_letters(tree)
        digests = _digests(known)
        keys = {row.key for row in known}
        added = []
        parts = [grams]
        numbers = {text: number for number, text in enumerate(digests)}
        with_letters = set(letters["text"].tolist())
        letter_parts = [letters]
        for value in rows:
            text = value["text_sha256"]
            if text not in digests:
                part = grams_of(tokens[text], len(digests))
                parts.append(part)
                digests[text] = len(part), _digest(part)
            number = numbers.setdefault(text, len(numbers))
            if number not in with_letters:
                with_letters.add(number)
                letter_parts.append(letter_grams(decode(tokens[text]), number))
            count, digest = digests[text]
            row = Row(**value, grams=count, grams_sha256=digest)
            if row.key not in keys:
                keys.add(row.key)
                added.append(row)
        letters = np.concatenate(letter_parts)
        if added or len(letters) > len(letter_parts[0]):
            _write_grams(tree.takedown_grams, np.concatenate(parts))
            _write_grams(tree.takedown_letters, letters)
            whole = (*known, *added)
            seal = _seal(whole, [len(letters), _digest(letters)])
            write_jsonl(tree.takedown, [*(asdict(row) for row in whole), seal])
    return added


def _write_grams(path: Path, grams: np.ndarray) -> None:
    payload = io.BytesIO()
    np.save(payload, grams)
    write_bytes(path, payload.getvalue())


def read_grams(tree: Tree, rows: Iterable[Row]) -> np.ndarray:
    """Read the grams of the rows' texts, dtype `GRAMS`; texts are numbered in the order of `rows`.
    Raises FormatError if grams are missing or damaged (E-TAKEDOWN-RECORD)."""
    digests = _digests(rows)
    if not digests:
        return np.empty(0, GRAMS)
    grams = _map_grams(tree.takedown_grams)
    grams = grams[grams["text"] < len(digests)]
    places = np.searchsorted(grams["text"], np.arange(len(digests) + 1))
    for number, (text, expected) in enumerate(digests.items()):
        part = grams[places[number] : places[number + 1]]
        if (len(part), _digest(part)) != expected:
            found = f"grams of text {text} that differ from its row"
            raise _refuse(tree.takedown_grams, None, found)
    return grams


def read_letters(tree: Tree) -> np.ndarray:
    """Read the grams of letters of the record's texts, dtype `GRAMS`, with the numbers of
    `read_grams`; a text has none if it is too short, or recorded by an earlier version. Raises as
    `read_grams`."""
    letters = _read_record(tree)[1].get("letters")
    if letters is None:
        return np.empty(0, GRAMS)
    is_count = isinstance(letters, list) and letters and type(letters[0]) is int
    grams = _map_grams(tree.takedown_letters)[: letters[0] if is_count else 0]
    if [len(grams), _digest(grams)] != letters:
        raise _refuse(tree.takedown_letters, None, "grams that differ from the record")
    return grams


def _map_grams(path: Path) -> np.ndarray:
    try:
        grams = map_npy(path)
    except (OSError, ValueError) as error:
        raise _refuse(path, None, str(error)) from None
    if grams.dtype != GRAMS or grams.ndim != 1:
        raise _refuse(path, None, f"{grams.ndim} axes of {grams.dtype}"[:200])
    return grams


def _digests(rows: Iterable[Row]) -> dict[str, tuple[int, str]]:
    """The number and the digest of the grams of each text, in the order of rows."""
    return {row.text_sha256: (row.grams, row.grams_sha256) for row in rows}


def _digest(grams: np.ndarray) -> str:
    return hashlib.sha256(grams.tobytes()).hexdigest()


def _refuse(path: Path, line: int | None, found: str) -> FormatError:
    return FormatError(
        "not a takedown record",
        where=path if line is None else f"{path}: line {line}",
        found=found,
        do="restore takedown/, or remove it and apply the list again",
        code="E-TAKEDOWN-RECORD",
    )
