"""The documents of a committed manifest, file by file: ids, token spans and mapped tokens.

Every span is checked against its file and its EOS before anything reads it, so the stages after
prep work on whole documents or refuse. Tokens are mapped, not read: memory does not grow with the
shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import orjson

from loader.files.format import (
    MANIFEST_NAME,
    IndexReader,
    Manifest,
    ShardEntry,
    load_manifest,
    open_shard,
    resolve_inside,
)
from nmoe_core.base.docid import DocId
from nmoe_core.base.errors import FormatError
from nmoe_core.shards.manifest import shard_dir_name


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One `.npy` file of a manifest with the spans of its documents.

    Attributes:
        source: First directory of `rel`.
        rel: POSIX path relative to the data root.
        tokens: uint32 `[num_tokens]`, mapped read-only.
        spans: int64 `[num_documents, 2]`: start and end of each document, its EOS inside.
        ids_path: The `.ids.jsonl` beside it; None in trees of other tools.
    """

    source: str
    rel: str
    tokens: np.ndarray
    spans: np.ndarray
    ids_path: Path | None

    def doc_ids(self) -> Iterator[str]:
        """Document ids in index order."""
        for start, end in self.spans.tolist():
            yield str(DocId(self.source, self.rel, start, end))

    def ids(self) -> list[tuple[str, str]]:
        """Ingest id and text hash of each document, in index order.

        Trees of other tools have neither: the document id stands for the first, "" for the second.

        Raises:
            FormatError: The ids file is missing or has other rows than documents (E-SHARD-IDS).
        """
        if self.ids_path is None:
            return [(doc_id, "") for doc_id in self.doc_ids()]
        try:
            with open(self.ids_path, "rb") as file:
                rows = [orjson.loads(line) for line in file]
            ids = [(row["id"], row["text_sha256"]) for row in rows]
        except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise _bad_ids(self.ids_path, repr(error), "an id and a text hash a line") from None
        if len(ids) != len(self.spans):
            raise _bad_ids(self.ids_path, f"{len(ids)} rows", f"{len(self.spans)} documents")
        return ids

    def documents(self) -> Iterator[tuple[str, np.ndarray, tuple[str, str]]]:
        """Document id, tokens with EOS, and `ids` of each document, in index order."""
        for doc_id, span, ids in zip(self.doc_ids(), self.spans.tolist(), self.ids()):
            yield doc_id, self.tokens[slice(*span)], ids

    def lengths(self) -> np.ndarray:
        """Tokens of each document, EOS included: int64 `[num_documents]`."""
        return self.spans[:, 1] - self.spans[:, 0]


def shard_manifest(tree_root: Path, source: str, bucket: int) -> Manifest:
    """The committed manifest of one training shard.

    Raises:
        FormatError: It is missing or malformed (E-MANIFEST-...).
    """
    return load_manifest(tree_root / source / "train" / shard_dir_name(bucket) / MANIFEST_NAME)


def shard_files(tree_root: Path, manifest: Manifest) -> list[ShardFile]:
    """Open all files of a manifest in document order: files by path, as docid slices have them.

    Args:
        tree_root: Directory that document ids are relative to; it holds the manifest.
        manifest: Of one shard directory, or of a whole split.

    Raises:
        FormatError: A file, index or count is not what the manifest says (E-SHARD-..., E-INDEX-...)
            or a document does not end with the manifest's EOS token (E-SHARD-EOS).
    """
    entries = sorted(manifest.shards, key=lambda entry: PurePosixPath(entry.path).parts)
    return [open_entry(tree_root, manifest, entry) for entry in entries]


def open_entry(tree_root: Path, manifest: Manifest, entry: ShardEntry) -> ShardFile:
    """Open one file of a manifest; raises as `shard_files` does."""
    npy = manifest.shard_path(entry)
    tokens = open_shard(npy)
    spans = IndexReader(manifest.index_path(entry)).to_array().astype(np.int64)
    covered = int(spans[-1, 1]) if len(spans) else 0
    expected = (entry.num_documents, entry.num_tokens, entry.num_tokens)
    if (len(spans), covered, len(tokens)) != expected:
        raise FormatError(
            "index or shard is not what the manifest says",
            where=manifest.index_path(entry),
            found=f"{len(spans)} documents, {covered} tokens of {len(tokens)}",
            expected=f"{entry.num_documents} documents, {entry.num_tokens} tokens",
            code="E-INDEX-FORMAT",
        )
    rel = npy.relative_to(tree_root).as_posix()
    _check_eos(rel, tokens, spans, manifest.eos_token_id)
    ids = entry.extra.get("ids_path")
    ids_path = resolve_inside(manifest.path.parent, ids) if isinstance(ids, str) else None
    return ShardFile(rel.split("/")[0], rel, tokens, spans, ids_path)


def _check_eos(rel: str, tokens: np.ndarray, spans: np.ndarray, eos_token_id: int) -> None:
    open_ended = np.flatnonzero(tokens[spans[:, 1] - 1] != eos_token_id)
    if len(open_ended):
        start, end = spans[open_ended[0]]
        raise FormatError(
            "document does not end with the EOS token",
            where=f"{rel}#s={start}:e={end}",
            found=int(tokens[end - 1]),
            expected=eos_token_id,
            do="run prep for this shard again",
            code="E-SHARD-EOS",
        )


def _bad_ids(path: Path, found: str, expected: str) -> FormatError:
    return FormatError(
        "ids do not belong to their shard",
        where=path,
        found=found,
        expected=expected,
        do="run prep for this shard again",
        code="E-SHARD-IDS",
    )
