"""The one reader of a shard's documents: ids, token spans, memory-mapped tokens, lineage, text.

`shard_files` opens whole files, `document_ids` reads only indexes, `DocumentReader` reads single
documents by id. Every span is checked against its manifest or its EOS before use, so the tasks
after prep either work on complete documents or raise an error. Tokens are memory-mapped, so memory
does not grow with the shard.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

import numpy as np
import orjson

from loader.files.format import Manifest, ShardEntry, check_digest, check_index, resolve_inside
from loader.files.regular import open_file, read_file
from loader.files.shard import IndexReader, open_shard
from nmoe_core.base.bucket.paths import bucket_of
from nmoe_core.base.docid import DocId, parse_doc_id
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import local_digest
from nmoe_core.shards.manifest import entry_row, named_files

_CHECKED_AT_ONCE = 4096  # documents; most pages of a shard have the end of one
_LINE = "one id and one text hash per line"


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One `.npy` file of a manifest with the spans of its documents."""

    source: str
    """Name of the source, which is the first directory of `rel`."""
    rel: str
    """Path relative to the data root, in POSIX form."""
    tokens: np.ndarray
    """uint32 or uint16 `[num_tokens]`, memory-mapped read-only."""
    spans: np.ndarray
    """int64 `[num_documents, 2]`: start and end of each document, including its EOS."""
    ids_path: Path | None
    """The `.ids.jsonl` file beside it; None in trees of other tools."""

    def doc_ids(self) -> Iterator[str]:
        """Document ids in index order."""
        for start, end in self.spans.tolist():
            # the same text as `DocId` makes, 3 times as fast
            yield f"{self.source}//{self.rel}#s={start}:e={end}"

    def ids(self) -> list[tuple[str, str]]:
        """Ingest id and text hash of each document, in index order.

        Directories that other tools wrote have neither: the ingest id is then the document id, and
        the hash is "". Raises FormatError if the ids file is missing or its rows do not match the
        documents (E-SHARD-IDS).
        """
        if self.ids_path is None:
            return [(doc_id, "") for doc_id in self.doc_ids()]
        return ids_of_file(self.ids_path, len(self.spans))

    def documents(self) -> Iterator[tuple[str, np.ndarray, tuple[str, str]]]:
        """Document id, tokens with BOS and EOS, and `ids` of each document, in index order."""
        for doc_id, span, ids in zip(self.doc_ids(), self.spans.tolist(), self.ids()):
            yield doc_id, self.tokens[slice(*span)], ids

    def lengths(self) -> np.ndarray:
        """Tokens of each document, including EOS: int64 `[num_documents]`."""
        return self.spans[:, 1] - self.spans[:, 0]

    def release(self) -> None:
        """Take the pages of tokens that were read out of this process's memory; they are mapped
        again when they are read."""
        mapped = getattr(self.tokens.base, "base", None)
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)


def shard_files(tree_root: Path, manifest: Manifest) -> list[ShardFile]:
    """Open all files of a manifest in document order: sorted by path, as in docid slices.

    `tree_root` is the directory that document ids are relative to. The manifest is of one shard or
    of a whole split. Raises FormatError if a file, index or count differs from the manifest
    (E-SHARD-..., E-INDEX-...), or a document does not end with the manifest's EOS token
    (E-SHARD-EOS).
    """
    return [open_entry(tree_root, manifest, entry) for entry in _in_order(manifest)]


def require_undamaged(manifest: Manifest) -> None:
    """Raise FormatError if a file differs from its manifest's checksum, before other files are made
    from it.

    Each process reads a file once, unless it changes. The error names the partition to make again
    (E-SHARD-CHECKSUM).
    """
    for entry in manifest.shards:
        named = named_files(entry_row(entry))
        for name, checksum in named.items():
            path = manifest.path.parent / name
            if checksum is None or not path.is_file():
                continue  # opening a missing file raises the error later
            found = local_digest(path)
            if found != checksum:
                raise FormatError(
                    "the shard is damaged",
                    where=path,
                    found=f"sha256 {found}",
                    expected=checksum,
                    do=f"make the partition again: {_rebuild(path)}; or restore the file",
                    code="E-SHARD-CHECKSUM",
                )


def _rebuild(path: Path) -> str:
    """The command that makes the shard of a file `.../{source}/{split}/shard_NNNN/...` again."""
    *_, tree, source, split, shard = path.parent.parts
    number = shard.removeprefix("shard_")
    if tree == "curated":
        return f"nmoe run curate --rebuild {source}/curated:{number}"
    task = "prep" if split == "train" else "prep_valid"
    kind = "shards" if split == "train" else "valid_shards"
    return f"nmoe run {task} --rebuild {source}/{kind}:{number}"


def open_entry(tree_root: Path, manifest: Manifest, entry: ShardEntry) -> ShardFile:
    """Open one file of a manifest. Raises as `shard_files`."""
    npy = manifest.shard_path(entry)
    tokens = open_shard(npy, manifest.dtype)
    if len(tokens) != entry.num_tokens:
        raise FormatError(
            "shard differs from its manifest",
            where=npy,
            found=f"{len(tokens)} tokens",
            expected=f"{entry.num_tokens} tokens",
            do="run prep for this shard again",
            code="E-INDEX-FORMAT",
        )
    spans = document_spans(manifest, entry)
    rel = npy.relative_to(tree_root).as_posix()
    ids = entry.extra.get("ids_path")
    ids_path = resolve_inside(manifest.path.parent, ids) if isinstance(ids, str) else None
    file = ShardFile(rel.split("/")[0], rel, tokens, spans, ids_path)
    _check_eos(file, manifest.eos_token_id)
    return file


def document_spans(manifest: Manifest, entry: ShardEntry) -> np.ndarray:
    """Start and end of each document of a file, read from the file's index: int64 `[num_documents,
    2]`. Raises FormatError if the index is missing or malformed, or differs from the manifest
    (E-INDEX-...)."""
    path = manifest.index_path(entry)
    index = IndexReader(path)
    check_index(index, entry)
    if isinstance(digest := entry.extra.get("index_checksum"), str):
        check_digest(path, digest, "E-INDEX-CHECKSUM")
    return index.to_array().astype(np.int64)


def document_ids(tree_root: Path, manifest: Manifest) -> Iterator[DocId]:
    """Ids of all documents of a manifest, in the order of `shard_files`. Memory: one index. Raises
    FormatError as `document_spans`, and if a name cannot be part of a document id (E-DOCID)."""
    for entry in _in_order(manifest):
        rel = manifest.shard_path(entry).relative_to(tree_root).as_posix()
        source = rel.split("/")[0]
        parse_doc_id(str(DocId(source, rel, 0, 1)))
        for start, end in document_spans(manifest, entry).tolist():
            yield DocId(source, rel, start, end)


def ingest_ids(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Ingest id and text hash of each document, in the order of `shard_files`; yields nothing for
    directories that other tools wrote. Raises FormatError if an ids file is missing, malformed, or
    has other documents (E-SHARD-IDS)."""
    for entry in _in_order(manifest):
        name = entry.extra.get("ids_path")
        if isinstance(name, str):
            yield from ids_of_file(resolve_inside(manifest.path.parent, name), entry.num_documents)


def ingest_ids_at(manifest: Manifest, documents: np.ndarray) -> list[str]:
    """Ingest ids of some documents of a shard, given by ascending number in the order of
    `shard_files`; other lines are not parsed. Raises FormatError if an ids file is missing or
    malformed, or its rows do not match the documents (E-SHARD-IDS)."""
    found = list[str]()
    first = 0
    for entry in _in_order(manifest):
        start, stop = np.searchsorted(documents, [first, first + entry.num_documents])
        if start < stop:
            path = resolve_inside(manifest.path.parent, str(entry.extra.get("ids_path")))
            found += _ids_at(path, documents[start:stop] - first, entry.num_documents)
        first += entry.num_documents
    return found


def document_numbers(tree_root: Path, manifest: Manifest, documents: Sequence[DocId]) -> np.ndarray:
    """Numbers of documents of a shard, in the order of `shard_files`: int64 `[documents]`. Raises
    FormatError if a span is not a document of the shard (E-DOCID)."""
    starts: dict[str, tuple[int, np.ndarray]] = {}
    first = 0
    for entry in _in_order(manifest):
        rel = manifest.shard_path(entry).relative_to(tree_root).as_posix()
        starts[rel] = first, document_spans(manifest, entry)[:, 0]
        first += entry.num_documents
    found = np.empty(len(documents), np.int64)
    for i, one in enumerate(documents):
        first, begins = starts.get(one.rel, (0, np.empty(0, np.int64)))
        place = int(np.searchsorted(begins, one.start))
        if place == len(begins) or begins[place] != one.start:
            raise FormatError("the shard has no such document", where=str(one), code="E-DOCID")
        found[i] = first + place
    return found


def shard_paths(data_root: Path, doc_ids: Iterable[str]) -> list[Path]:
    """The shard files of documents, each once, to fetch them ahead; none below a local root. Raises
    FormatError if an id is malformed (E-DOCID)."""
    if bucket_of(data_root) is None:
        return []
    return [data_root / rel for rel in dict.fromkeys(parse_doc_id(one).rel for one in doc_ids)]


class DocumentReader:
    """Reads the tokens of documents by id below one data root; keeps the last shard open."""

    def __init__(self, data_root: Path) -> None:
        self.data_root = data_root
        self._open: tuple[str, np.ndarray] | None = None

    def tokens(self, doc_id: str | DocId, eos_token_id: int | None = None) -> np.ndarray:
        """Token ids of a document: uint32 `[length]`; a view if the shard has this type.

        If `eos_token_id` is given, the span must end with this token, which is not returned. Raises
        FormatError if the id is malformed or its span is not a document of the shard (E-DOCID), or
        it leads out of the data root (E-PATH-ESCAPE).
        """
        parsed = parse_doc_id(doc_id) if isinstance(doc_id, str) else doc_id
        if self._open is None or self._open[0] != parsed.rel:
            self._open = (parsed.rel, open_shard(resolve_inside(self.data_root, parsed.rel)))
        shard = self._open[1]
        if parsed.end > len(shard):
            raise FormatError(
                "document ends after the end of its shard",
                where=str(parsed),
                found=f"end {parsed.end}",
                expected=f"at most {len(shard)}",
                code="E-DOCID",
            )
        if eos_token_id is None:
            return shard[parsed.start : parsed.end].astype(np.uint32, copy=False)
        if shard[parsed.end - 1] != eos_token_id:
            raise FormatError(
                "document does not end with the EOS token",
                where=str(parsed),
                found=int(shard[parsed.end - 1]),
                expected=eos_token_id,
                code="E-DOCID",
            )
        return shard[parsed.start : parsed.end - 1].astype(np.uint32, copy=False)


class Decoder(Protocol):
    def decode(self, ids: np.ndarray) -> str: ...


class Text(NamedTuple):
    """The beginning of a document as text, and whether the document continues."""

    text: str
    is_truncated: bool


def beginning(tokens: np.ndarray, decoder: Decoder, max_tokens: int) -> Text:
    """The text of the first `max_tokens` tokens; an incomplete character at the end is left out."""
    is_truncated = len(tokens) > max_tokens
    text = decoder.decode(tokens[:max_tokens])
    return Text(text.rstrip("\ufffd") if is_truncated else text, is_truncated)


def _in_order(manifest: Manifest) -> list[ShardEntry]:
    return sorted(manifest.shards, key=lambda entry: PurePosixPath(entry.path).parts)


def ids_of_file(path: Path, num_documents: int) -> list[tuple[str, str]]:
    """Ingest id and text hash of each document of a file, in index order. Raises as `read_ids`, and
    FormatError if the number of rows differs (E-SHARD-IDS)."""
    ids = list(read_ids(path))
    if len(ids) != num_documents:
        raise _bad_ids(path, f"{len(ids)} rows", f"{num_documents} documents")
    return ids


def read_ids(path: Path) -> Iterator[tuple[str, str]]:
    """Ingest id and text hash of each line of an ids file. Raises FormatError if it is missing or
    malformed (E-SHARD-IDS)."""
    try:
        with open_file(path) as file:
            for line in file:
                row = orjson.loads(line)
                yield row["id"], row["text_sha256"]
    except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise _bad_ids(path, repr(error), _LINE) from None


def _ids_at(path: Path, rows: np.ndarray, num_rows: int) -> list[str]:
    try:
        text = read_file(path)
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        if len(ends) != num_rows:
            raise _bad_ids(path, f"{len(ends)} rows", f"{num_rows} documents")
        starts = np.append(0, ends[:-1] + 1)[rows]
        lines = zip(starts.tolist(), ends[rows].tolist())
        return [orjson.loads(text[start:end])["id"] for start, end in lines]
    except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise _bad_ids(path, repr(error), _LINE) from None


def _check_eos(file: ShardFile, eos_token_id: int) -> None:
    for first in range(0, len(file.spans), _CHECKED_AT_ONCE):
        spans = file.spans[first : first + _CHECKED_AT_ONCE]
        open_ended = np.flatnonzero(file.tokens[spans[:, 1] - 1] != eos_token_id)
        if len(open_ended):
            start, end = spans[open_ended[0]]
            raise FormatError(
                "document does not end with the EOS token",
                where=f"{file.rel}#s={start}:e={end}",
                found=int(file.tokens[end - 1]),
                expected=eos_token_id,
                do="run prep for this shard again",
                code="E-SHARD-EOS",
            )
        file.release()


def _bad_ids(path: Path, found: str, expected: str) -> FormatError:
    return FormatError(
        "ids do not belong to their shard",
        where=path,
        found=found,
        expected=expected,
        do="run prep for this shard again",
        code="E-SHARD-IDS",
    )
