"""Proves that the shards have no 50-gram of the texts that were taken down.

Every token file below a root is hashed, compared with its manifest and scanned. If a document with
one of these texts has a hit, the document remains. Any other hit is a passage that another document
shares with the text. Files that no manifest names are not scanned, so the proof fails if there are
such files. Files of other places are searched by their bytes, see `search`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.format import Manifest, check_digest
from nmoe_core.audit.takedown.find import files_below, shards_below
from nmoe_core.audit.takedown.places import Place, search_places
from nmoe_core.audit.takedown.search import FileSearch
from nmoe_core.base.atomic import replacing
from nmoe_core.base.errors import CurationError, FormatError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.run import Run
from nmoe_core.curate.takedown.grams import GRAM_TOKENS, GramIndex, distinct
from nmoe_core.curate.takedown.letters import PASSAGE_LETTERS, letters_of
from nmoe_core.curate.takedown.record import Row, read_grams, read_letters, read_rows
from nmoe_core.shards.documents import ShardFile, shard_files
from nmoe_core.text.documents import decode_documents
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

_BATCH_DOCUMENTS = 2**12
PROOF_FORMAT = "nmoe-takedown-proof/1"


def prove(
    run: Run,
    roots: Sequence[Path],
    unrecorded: Sequence[str],
    elsewhere: Mapping[str, Any],
    *,
    allow_shared: bool,
    also: Sequence[Place] = (),
) -> dict[str, Any]:
    """Scan all shards below the roots for the grams of the run's record; returns the proof.

    The field `holds` says whether the proof holds for the `roots` and the `searched` places only.
    The proof lists documents that are `unrecorded` or `remaining`, documents with `shared`
    passages, `unnamed` files, and the digests of `scanned` files. The files of the places `also`
    are searched too (see `search_places`); `too_short` are the texts that are not searched for by
    their letters. It also contains `elsewhere`: facts about other places, which are not searched.

    Raises:
        CurationError: A root has no shards (E-TAKEDOWN-LEFT).
        FormatError: The record is missing or damaged (E-TAKEDOWN-RECORD), was made with another
            tokenizer than the shards (E-TAKEDOWN-TOKENIZER), or a shard is broken.
    """
    tree = run.tree
    if not read_rows(tree):
        raise FormatError(
            "the takedown record is empty",
            where=tree.takedown,
            do="first apply the takedown list with --apply",
            code="E-TAKEDOWN-RECORD",
        )
    # Another takedown must not extend the record during the scan.
    with replacing(tree.takedown, tree.takedown_grams, tree.takedown_letters):
        rows = read_rows(tree)
        letters = read_letters(tree)
        search = _Search(rows, read_grams(tree, rows), letters, run.tokenizer if also else None)
        record = sha256_file(tree.takedown)
        record_grams = sha256_file(tree.takedown_grams)
    scanned = []
    unnamed = []
    every: set[Path] = set()
    for root in roots:
        named: set[Path] = set()
        before = len(scanned)
        for manifest in shards_below(root, with_versions=True):
            named.update(map(manifest.shard_path, manifest.shards))
            scanned.append(search.scan(root, manifest))
        if len(scanned) == before:
            raise CurationError(
                "the root has no shards",
                where=root,
                do="curate the run first, or pass the root of the run",
                code="E-TAKEDOWN-LEFT",
            )
        every |= named
        unnamed += [str(p) for p in files_below(root) if ".npy" in p.name and p not in named]
    files = FileSearch(search.index, search.letters)
    others = search_places(also, files, search.name_of, every)
    is_bad = unrecorded or search.remaining or unnamed or others["found"]
    is_bad = is_bad or (search.shared and not allow_shared)
    without_letters = set(range(len(search.items))) - set(letters["text"].tolist())
    return {
        "format": PROOF_FORMAT,
        "holds": not is_bad,
        "allow_shared": allow_shared,
        "roots": [str(root) for root in roots],
        **elsewhere,
        **others,
        "gram_tokens": GRAM_TOKENS,
        "record": record,
        "record_grams": record_grams,
        "passage_letters": PASSAGE_LETTERS,
        "too_short": [search.name_of(number) for number in sorted(without_letters)],
        "texts": len(search.items),
        "grams": len(search.index.grams),
        "documents": sum(part["documents"] for part in scanned),
        "tokens": sum(part["tokens"] for part in scanned),
        "unrecorded": list(unrecorded),
        "remaining": search.remaining,
        "shared": sorted(search.shared, key=lambda one: (-one["grams"], one["doc_id"])),
        "unnamed": unnamed,
        "scanned": scanned,
    }


class _Search:
    """Searches for the grams of all texts, and collects the documents that contain any of these
    grams."""

    def __init__(
        self,
        rows: Iterable[Row],
        grams: np.ndarray,
        letters: np.ndarray,
        tokenizer: TokenizerSettings | None,
    ) -> None:
        """`tokenizer`: to search decoded documents by their letters too."""
        self._tokenizer = tokenizer
        self.letters = GramIndex(distinct(letters))
        self.items: dict[str, str] = {}
        for row in rows:
            self.items.setdefault(row.text_sha256, row.item)
        self._tokenizers = {row.tokenizer for row in rows}
        self._texts = list(self.items)
        self.index = GramIndex(distinct(grams))
        # Numbers of the texts of each gram, sorted by the digest of the gram.
        order = np.argsort(digests := np.ascontiguousarray(grams["sha256"]).view("S32"))
        self._digests = digests[order]
        self._owners = grams["text"][order]
        self.remaining: list[dict[str, Any]] = []
        self.shared: list[dict[str, Any]] = []

    def scan(self, root: Path, manifest: Manifest) -> dict[str, Any]:
        """Scan a shard; returns the files with their digests."""
        found = str(manifest.extra.get("tokenizer_fingerprint") or manifest.tokenizer)
        if manifest.shards and self._tokenizers != {found}:
            raise FormatError(
                "the takedown record belongs to another tokenizer",
                where=manifest.path,
                found=found,
                expected=", ".join(sorted(self._tokenizers)),
                do="remove takedown/ and apply the list again",
                code="E-TAKEDOWN-TOKENIZER",
            )
        files = {}
        for file in shard_files(root, manifest):
            path = root / file.rel
            entry = next(one for one in manifest.shards if manifest.shard_path(one) == path)
            check_digest(path, entry.checksum, "E-SHARD-CHECKSUM")
            files[file.rel] = entry.checksum
            self._scan(root, file)
        where = manifest.path.relative_to(root.parent).as_posix()
        counts = {"documents": manifest.total_documents, "tokens": manifest.total_tokens}
        digest = manifest.content_digest()
        return {"manifest": where, "content_hash": digest, **counts, "files": files}

    def _scan(self, root: Path, file: ShardFile) -> None:
        held: dict[int, set[int]] = {}
        for gram, positions in self.index.hits(file.tokens):
            documents = np.searchsorted(file.spans[:, 0], positions, side="right") - 1
            for document in np.unique(documents).tolist():
                held.setdefault(document, set()).add(gram)
        ids = file.ids() if held else []
        names = list(file.doc_ids()) if held else []
        for document, grams in sorted(held.items()):
            ingest_id, text = ids[document]
            where = {"tree": root.name, "doc_id": names[document], "ingest_id": ingest_id}
            if text in self.items:
                self.remaining.append({**where, "item": self.items[text]})
            else:
                self.shared.append({**where, "grams": len(grams), **self._most_shared(grams)})
        if self._tokenizer is not None and len(self.letters.grams):
            self._scan_letters(root, file, held.keys(), load_tokenizer(self._tokenizer))

    def _scan_letters(
        self, root: Path, file: ShardFile, known: Collection[int], tokenizer: Tokenizer
    ) -> None:
        """Find further documents by their letters, in which the text has other tokens."""
        for first in range(0, len(file.spans), _BATCH_DOCUMENTS):
            spans = file.spans[first : first + _BATCH_DOCUMENTS]
            texts = decode_documents(tokenizer, file.tokens, spans).to_pylist()
            if not any(self.letters.hits(letters_of("".join(texts)))):
                continue
            for document, text in enumerate(texts, first):
                found = Counter(
                    int(self.letters.grams["text"][hit.gram])
                    for hit in self.letters.hits(letters_of(text))
                )
                if found and document not in known:
                    [(most, grams)] = found.most_common(1)
                    where = {"tree": root.name, "doc_id": [*file.doc_ids()][document]}
                    where["ingest_id"] = file.ids()[document][0]
                    counts = {"grams": grams, "texts": len(found)}
                    self.shared.append({**where, **counts, **self.name_of(most)})

    def _most_shared(self, grams: Iterable[int]) -> Mapping[str, Any]:
        """The text that shares the most grams with a document, and the number of texts that share
        at least one gram."""
        counts = Counter(text for gram in grams for text in self._owners_of(gram))
        (most, _), *_ = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return {"texts": len(counts), **self.name_of(most)}

    def name_of(self, number: int) -> dict[str, str]:
        """The digest and the item of a text, by its number."""
        text = self._texts[number]
        return {"text_sha256": text, "item": self.items[text]}

    def _owners_of(self, gram: int) -> Iterator[int]:
        digest = self.index.grams["sha256"][gram].tobytes()
        low, high = (
            np.searchsorted(self._digests, np.bytes_(digest), side) for side in ("left", "right")
        )
        yield from self._owners[low:high].tolist()
