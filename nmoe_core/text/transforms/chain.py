"""Applies the transforms of a source, one after the other, and records each change."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.compute.garbage import gc_paused
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.functions import package_versions
from nmoe_core.config.transforms import TransformTable
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.transforms.batch import Batch, Transform
from nmoe_core.text.transforms.corpus import Keys, SharedKeys, table_path
from nmoe_core.text.transforms.edits import Change, Edit, edited, edits_between

NORMALISED = "normalise"
"""Name of the last step, which normalises changed texts again."""


class Kind(NamedTuple):
    """A kind of transform. Its module is imported when a transform is opened, since some modules
    import compilers."""

    code: str
    """Version of its code: another version may give other texts."""
    module: str
    name: str
    """Name of its class in `nmoe_core.text.transforms`."""

    def open(self, table: TransformTable, *shared: SharedKeys) -> Transform:
        """A transform with these settings, and the keys that documents share if it needs them.
        Raises ConfigError if a package is not installed."""
        try:
            module = import_module(f"nmoe_core.text.transforms.{self.module}")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"transforms of kind {table.kind} need a package that is not installed",
                found=str(error.name),
                do="pip install 'nmoe-data[attributes]'",
            ) from error
        return getattr(module, self.name)(table, *shared)


KINDS = {
    "base64_blobs": Kind("base64_blobs/1", "base64_blobs", "Base64Blobs"),
    "fix_text": Kind("fix_text/1", "fix_text", "FixText"),
    "licence_header": Kind("licence_header/1", "licence_header", "LicenceHeader"),
    "redact": Kind("redact/1", "personal.redact", "Redact"),
    "lines": Kind("lines/1", "lines.rules", "LineRules"),
    "paragraphs": Kind("paragraphs/1", "paragraphs", "Paragraphs"),
    "passages": Kind("passages/1", "words.passages", "Passages"),
    "function": Kind("function/1", "function", "OwnTransform"),
}


class Changed(NamedTuple):
    """What the transforms did to one document."""

    original_sha256: bytes
    """SHA-256 of the normalised text before all transforms."""
    chars_removed: int
    """Characters of the text before, minus characters of the text after; negative if it grew."""
    changes: list[Change]


def transforms_of(tables: Sequence[TransformTable], source: str) -> tuple[TransformTable, ...]:
    """The transforms of a source, in order."""
    return tuple(one for one in tables if one.sources is None or source in one.sources)


def require_known_sources(
    tables: Sequence[TransformTable], sources: Sequence[str], where: object
) -> None:
    """Raise ConfigError if a transform names a source that the mixture does not have."""
    for number, table in enumerate(tables):
        unknown = sorted(set(table.sources or ()) - set(sources))
        if unknown:
            raise ConfigError(
                f"transforms.{number} ({table.kind}) names an unknown source",
                where=where,
                found=unknown[0],
                expected=", ".join(sources),
            )


def require_columns(tables: Sequence[TransformTable], columns: Sequence[str], source: str) -> None:
    """Raise ConfigError if a transform reads a column that the source does not keep."""
    for table in tables:
        if missing := sorted(set(table.reads_columns) - set(columns)):
            raise ConfigError(
                f"a transform of kind {table.kind} reads a column that is not kept",
                where=source,
                found=missing[0],
                expected=", ".join(columns) or "no columns",
                do="add it to the columns of [attributes] or of the source",
            )


def identity(tables: Sequence[TransformTable]) -> list[dict[str, Any]]:
    """The settings and code versions of transforms, and of the packages that they use: equal values
    mean equal texts. Raises ConfigError if a package is not installed."""
    return [
        {"code": KINDS[table.kind].code, **_packages(table), **table.identity()} for table in tables
    ]


def _packages(table: TransformTable) -> dict[str, Any]:
    user = f"the transform `{table.kind}`"
    versions = package_versions(table.libraries, user, "pip install 'nmoe-data[transforms]'")
    return {"packages": versions} if versions else {}


class Chain:
    """The transforms of one source, opened once per worker."""

    def __init__(self, tables: Sequence[TransformTable], shared: Path | None = None) -> None:
        """`shared` has the tables of transforms that read the corpus. Without it, these transforms
        change only what depends on one document."""
        self._tables = tables
        self._transforms: list[Any] = []
        for step, table in enumerate(tables):
            keys = []
            if shared is not None and table.reads_corpus:
                keys = [SharedKeys(table_path(shared, step))]
            self._transforms.append(KINDS[table.kind].open(table, *keys))
        self.columns = sorted({name for table in tables for name in table.reads_columns})
        """Columns of the documents that the transforms read."""
        of_one = (table for table in tables if not table.reads_corpus)
        self.key_columns = sorted({name for table in of_one for name in table.reads_columns})
        """Columns of a record that decide how its own text is changed."""

    def apply(self, batch: Batch) -> tuple[list[str], list[bytes], dict[int, Changed]]:
        """The texts after all transforms, normalised, as text and as UTF-8; and what was done to
        those that changed, by their number."""
        with gc_paused():  # which would look at all edits again and again
            return self._apply(batch)

    def _apply(self, batch: Batch) -> tuple[list[str], list[bytes], dict[int, Changed]]:
        texts, payloads, changes = self._through(batch, len(self._transforms))
        self._normalise(texts, payloads, changes)
        same = [i for i in changes if payloads[i] == batch.payloads[i]]
        for i in same:  # the edits cancel each other
            del changes[i]
        return texts, payloads, {i: _changed(batch, texts, i, changes[i]) for i in sorted(changes)}

    def keys(self, batch: Batch, step: int) -> Keys:
        """The keys of a transform that reads the corpus, of the texts after those before it."""
        texts, payloads, _ = self._through(batch, step)
        keys: Keys = self._transforms[step].keys(batch._replace(texts=texts, payloads=payloads))
        return keys

    def salts(
        self, columns: Mapping[str, Sequence[str | None]], count: int, step: int
    ) -> np.ndarray:
        """uint64 `[count]`: keys of documents with different values are never equal. `columns` are
        the values of `count` documents in the columns that transforms read."""
        is_read = bool(self._tables[step].reads_columns)
        return self._transforms[step].salts(columns) if is_read else np.zeros(count, np.uint64)

    def _through(
        self, batch: Batch, stop: int
    ) -> tuple[list[str], list[bytes], dict[int, list[Change]]]:
        """The texts after the first transforms, and the changes of each changed text."""
        texts = list(batch.texts)
        payloads = list(batch.payloads)
        changes: dict[int, list[Change]] = {}
        for step, (table, transform) in enumerate(zip(self._tables[:stop], self._transforms)):
            found = transform.edits(batch._replace(texts=texts, payloads=payloads))
            for i, edits in found.items():
                recorded = _changes(step, table.kind, texts[i], edits, table.keep_removed)
                changes.setdefault(i, []).extend(recorded)
                texts[i] = edited(texts[i], edits)
            if step + 1 < len(self._transforms):  # after the last one, texts are normalised again
                for i in found:
                    payloads[i] = texts[i].encode()
        return texts, payloads, changes

    def _normalise(
        self, texts: list[str], payloads: list[bytes], changes: Mapping[int, list[Change]]
    ) -> None:
        """Normalise the changed texts: an edit may leave white space at an end, or put a letter
        beside a mark."""
        places = list(changes)
        normal, encoded = normalize_batch([texts[i] for i in places])
        step = len(self._tables)
        keeps = all(table.keep_removed for table in self._tables)
        for i, text, payload in zip(places, normal, encoded):
            edits = edits_between(texts[i], text, NORMALISED)
            changes[i].extend(_changes(step, NORMALISED, texts[i], edits, keeps))
            texts[i] = text
            payloads[i] = payload


def _changes(
    step: int, name: str, text: str, edits: Sequence[Edit], keep_removed: bool
) -> list[Change]:
    return [
        Change(step, name, rule, start, end, text[start:end] if keep_removed else None, replacement)
        for start, end, rule, replacement in edits
    ]


def _changed(batch: Batch, texts: Sequence[str], i: int, changes: list[Change]) -> Changed:
    sha256 = hashlib.sha256(batch.payloads[i]).digest()
    return Changed(sha256, len(batch.texts[i]) - len(texts[i]), changes)
