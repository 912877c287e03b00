"""Finds the documents of a takedown list in the data tree and in the curated tree.

Two passes read the ids of all shards on disk, including sources that were removed from the mixture.
The first pass finds the texts of the listed documents; the second pass finds every document with
one of these texts. Texts are decoded only for items of kind `re:`. Memory: the ids of one file and
a batch of texts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from loader.rows.origins import Place
from nmoe_core.audit.takedown.items import Item, contains
from nmoe_core.base.bucket.paths import bucket_of
from nmoe_core.base.docid import DocId, parse_doc_id
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.tree import Tree
from nmoe_core.shards.documents import ShardFile, shard_files
from nmoe_core.shards.manifest import SHARD_DIR, column_files, documents_digest

_URL = "url"
_BATCH_DOCUMENTS = 2**15


@dataclass(frozen=True, slots=True)
class Found:
    """A document to take down."""

    items: tuple[Item, ...]
    """The items that name a document with this text."""
    is_copy: bool
    """True if no item names this document, but an item names another document with its text."""
    tree: str
    """`data` or `curated`."""
    source: str
    split: str
    shard: str
    path: Path
    """The token file."""
    doc_id: str
    ingest_id: str
    text_sha256: str
    tokens: np.ndarray
    """The mapped tokens, without BOS and EOS."""
    tokenizer: str

    @property
    def place(self) -> Place:
        """Token offsets of the document in the token file, with the EOS."""
        doc_id = parse_doc_id(self.doc_id)
        return Place(self.source, self.path, doc_id.start, doc_id.end)


def files_below(root: Path) -> list[Path]:
    """All files below a root, sorted by path, including files in hidden directories and behind
    links. Raises OSError if a directory cannot be read."""
    if bucket_of(root) is not None:
        return sorted(path for path in root.rglob("*") if path.is_file())
    found = os.walk(root, onerror=_unreadable, followlinks=True)
    return sorted(Path(directory, name) for directory, _, names in found for name in names)


def _unreadable(error: OSError) -> None:
    raise error


def shards_below(root: Path, *, with_versions: bool = False) -> Iterator[Manifest]:
    """The manifests of all shards below a root, sorted by path. `with_versions` adds the manifests
    of earlier versions of splits, which are in hidden directories."""
    for path in files_below(root) if root.exists() else ():
        parts = path.parent.relative_to(root).parts
        is_hidden = any(part.startswith(".") for part in parts)
        is_shard = path.name == MANIFEST_NAME and parts and SHARD_DIR.fullmatch(parts[-1])
        if is_shard and (with_versions or not is_hidden):
            yield load_manifest(path)


def find(tree: Tree, items: Sequence[Item], tokenizer: TokenizerSettings) -> list[Found]:
    """Every document that an item names, and every other document with the same text, sorted by
    tree and path.

    Raises:
        ConfigError: An item is a URL, but a shard of the data tree has no column `url`
            (E-TAKEDOWN-URL).
        FormatError: A shard is broken, or has no hashes of texts (E-SHARD-IDS).
    """
    texts: dict[str, dict[Item, None]] = {}
    named: set[tuple[str, ...]] = set()
    matcher = _Matcher(items, tokenizer)
    for root, manifest, files in _opened(tree):
        if root == tree.curated and _repeats_parent(tree, manifest):
            continue
        for source, ids, item in matcher.named(manifest, files, is_data=root == tree.data):
            named.add((source, *ids))
            texts.setdefault(ids[1], {})[item] = None
    found = []
    for root, manifest, files in _opened(tree) if texts else ():
        bos = manifest.extra.get("bos_token_id")
        of = str(manifest.extra.get("tokenizer_fingerprint") or manifest.tokenizer)
        for file in files:
            where = root.name, file.source, file.rel.split("/")[1], manifest.path.parent.name
            ids = file.ids()
            for i in [i for i, (_, text) in enumerate(ids) if text in texts]:
                start, end = file.spans[i].tolist()
                ingest_id, text = ids[i]
                is_named = (file.source, ingest_id, text) in named
                doc_id = str(DocId(file.source, file.rel, start, end))
                begin = start + (bos is not None and file.tokens[start] == bos)
                one = root / file.rel, doc_id, ingest_id, text
                tokens = file.tokens[begin : end - 1]
                found.append(Found(tuple(texts[text]), not is_named, *where, *one, tokens, of))
    return found


def _repeats_parent(tree: Tree, manifest: Manifest) -> bool:
    """Whether every document of a curated shard is also in the current data shard."""
    info = manifest.extra.get("source_info", {})
    parent = tree.data / manifest.path.relative_to(tree.curated)
    is_made_of_it = parent.is_file() and info.get("parent") == documents_digest(
        load_manifest(parent)
    )
    return is_made_of_it and not info.get("frozen_documents")


def _opened(tree: Tree) -> Iterator[tuple[Path, Manifest, list[ShardFile]]]:
    for root in (tree.data, tree.curated):
        for manifest in shards_below(root):
            files = shard_files(root, manifest)
            if any(file.ids_path is None for file in files):
                raise FormatError(
                    "the shard has no text hashes, which a takedown needs",
                    where=manifest.path,
                    do="prepare the source with `nmoe prep`",
                    code="E-SHARD-IDS",
                )
            yield root, manifest, files


class _Matcher:
    """Matches the documents of a shard with the items, by kind."""

    def __init__(self, items: Iterable[Item], tokenizer: TokenizerSettings) -> None:
        self._tokenizer = tokenizer
        self._by: dict[str, dict[str, Item]] = {kind: {} for kind in ("id", "sha256", "url", "re")}
        self._doc_ids: dict[str, list[tuple[DocId, Item]]] = {}
        for item in items:
            self._by[item.kind][item.value] = item
            if item.kind == "id" and "#s=" in item.value:
                doc_id = parse_doc_id(item.value)
                self._doc_ids.setdefault(doc_id.rel, []).append((doc_id, item))

    def named(
        self, manifest: Manifest, files: Sequence[ShardFile], *, is_data: bool
    ) -> Iterator[tuple[str, tuple[str, str], Item]]:
        """Yield the source, (ingest id, text hash) and item of each matching document."""
        ids = self._by["id"]
        hashes = self._by["sha256"]
        first = 0
        urls = self._urls(manifest, is_data) if self._by["url"] else {}
        for file in files:
            matched = self._matched(file) if self._by["re"] else {}
            for doc_id, item in self._doc_ids.get(file.rel, ()) if is_data else ():
                i = int(np.searchsorted(file.spans[:, 0], doc_id.start))
                if i < len(file.spans) and file.spans[i].tolist() == [doc_id.start, doc_id.end]:
                    matched.setdefault(i, []).append(item)
            rows = file.ids()
            chosen = {i for i, (own, text) in enumerate(rows) if own in ids or text in hashes}
            here = urls.keys() & range(first, first + len(rows))
            chosen.update(matched, (number - first for number in here))
            for i in sorted(chosen):
                ingest_id, text = rows[i]
                found = ids.get(ingest_id), hashes.get(text), urls.get(first + i)
                for item in (*found, *matched.get(i, ())):
                    if item is not None:
                        yield file.source, (ingest_id, text), item
            first += len(file.spans)

    def _urls(self, manifest: Manifest, is_data: bool) -> dict[int, Item]:
        """The documents of the shard whose URL (column `url`) is on the list, by document
        number."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from nmoe_core.shards.attribute_file import read_attribute, read_footer

        paths = [path for path in column_files(manifest) if _URL in read_footer(path).schema.names]
        if not paths:
            if is_data and manifest.total_documents:
                raise no_urls(manifest.path)
            return {}
        column = read_attribute(paths[0], [_URL]).column(_URL).cast(pa.string())
        wanted = pa.array([*self._by["url"]], pa.string())
        numbers = np.flatnonzero(
            pc.call_function("is_in", [column], pc.SetLookupOptions(value_set=wanted)).to_numpy()
        )
        values = column.take(pa.array(numbers)).to_pylist()
        return {int(n): self._by["url"][value] for n, value in zip(numbers, values)}

    def _matched(self, file: ShardFile) -> dict[int, list[Item]]:
        """For each document of a file, by number, the patterns that match its text."""
        from nmoe_core.text.documents import decode_documents
        from nmoe_core.text.tokenizer import load_tokenizer

        found: dict[int, list[Item]] = {}
        for first in range(0, len(file.spans), _BATCH_DOCUMENTS):
            spans = file.spans[first : first + _BATCH_DOCUMENTS]
            texts = decode_documents(load_tokenizer(self._tokenizer), file.tokens, spans)
            for pattern, item in self._by["re"].items():
                is_found = contains(texts, pattern).to_numpy(zero_copy_only=False)
                for i in np.flatnonzero(is_found).tolist():
                    found.setdefault(first + i, []).append(item)
        return found


def no_urls(where: object) -> ConfigError:
    """The error for a list with URLs if the documents have no column `url`."""
    return ConfigError(
        "documents cannot be found by URL without a passthrough column `url`",
        where=where,
        do='add "url" to [attributes] columns and prepare the sources again, or list ids',
        code="E-TAKEDOWN-URL",
    )
