"""Finds how much of each document earlier documents repeat: passages of many equal tokens.

A passage counts if at least `[duplicates] repeated_tokens` consecutive tokens are equal, as in Lee
et al. 2021 (arXiv 2107.06499); only documents that are kept count. Among these, the first in the
order of duplicates keeps its text: source priority, then most tokens, then ingest id. Passages of
licences do not count, unless `count_licences` is set: the words of a passage that are in known
licences are left out, and the others must still be long enough.

The suffixes of parts of the corpus are sorted into an unnamed temporary file, which takes four
bytes per token. Sorting takes 10 or 15 bytes of memory per token of a part, and what is found about
65 bytes per repeated token, up to four times as much if several earlier documents have it.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numba import typed

from loader.files.format import load_manifest
from nmoe_core.attributes.contamination import Evaluations, sets_of_words
from nmoe_core.attributes.copies.duplicates import PASSAGES, SCHEMA, Shard, by_shard
from nmoe_core.attributes.copies.windows import shared_windows
from nmoe_core.base.atomic import named_errors
from nmoe_core.config.tree import ShardPaths
from nmoe_core.shards.documents import ShardFile, require_undamaged, shard_files
from nmoe_core.shards.suffixes import parts, suffix_array
from nmoe_core.sources.storage import open_plain
from nmoe_core.text.documents import decode_documents
from nmoe_core.text.tokenizer import Tokenizer
from nmoe_core.text.transforms.words.hashes import utf8, words

_BATCH_TOKENS = 2**20
_PART = ("contained_in", "containment")


class PassageSettings(NamedTuple):
    """What counts as a repeated passage, and how much is sorted at once."""

    num_tokens: int
    """Least number of equal tokens."""
    part_tokens: int
    count_licences: bool


class Repeated(NamedTuple):
    """What earlier documents have of each document; counted over all shards."""

    share: np.ndarray
    """float64 `[documents]`: share of the document's tokens."""
    holder: np.ndarray
    """int64 `[documents]`: the document that has most of them; -1 if there is none."""
    holder_share: np.ndarray
    """float64 `[documents]`: share of the document's tokens that this one document has."""


class _Runs(NamedTuple):
    """Passages of documents, int64 each; `holder` is -1 for those that any document has."""

    document: np.ndarray
    start: np.ndarray
    end: np.ndarray
    holder: np.ndarray


def repeated_passages(
    shards: Sequence[ShardPaths],
    ranks: np.ndarray,
    tokenizer: Tokenizer,
    settings: PassageSettings,
    directory: Path,
) -> Repeated:
    """What earlier documents repeat of each document of the shards.

    ranks: int64 `[documents]`, the order of the documents that count; -1 for others. directory:
    where the temporary file is. Raises FormatError if a shard is damaged, or has too long a
    document (E-SEEN-SIZE), and ConfigError without the extra `seen` (E-CONFIG-EXTRA).
    """
    files = [file for shard in shards for file in _opened(shard)]
    found = _windows(files, ranks, tokenizer, settings, directory)
    runs = _runs(found, settings.num_tokens)
    sizes = runs.end - runs.start
    if not settings.count_licences:
        sizes = sizes - _licensed(files, runs, tokenizer)
    counted = np.where(sizes >= settings.num_tokens, sizes, 0)
    lengths = np.concatenate([np.zeros(0, np.int64), *(file.lengths() for file in files)])
    lengths = np.maximum(1, lengths - 1 - (tokenizer.bos_token_id is not None))
    is_any = runs.holder < 0
    total = np.bincount(runs.document[is_any], counted[is_any], len(ranks))
    holder, most = _largest(runs, counted, ranks)
    return Repeated(total / lengths, holder, most / lengths)


def without_passages(table: pa.Table | None) -> pa.Table | None:
    """A table of duplicates as the search by keys alone makes it."""
    if table is None:
        return None
    nothing = {name: pa.nulls(len(table), SCHEMA.field(name).type) for name in (*PASSAGES, *_PART)}
    return pa.table([nothing.get(name, table[name]) for name in SCHEMA.names], schema=SCHEMA)


def with_passages(
    shards: Sequence[Shard], tables: Sequence[pa.Table], repeated: Repeated, contained: float | None
) -> list[pa.Table]:
    """The tables of duplicates with what earlier documents repeat of each kept one. If `contained`
    is given, a document of which another has so large a share is contained in it."""
    names = _names(shards, repeated.holder)
    limit = np.inf if contained is None else contained
    is_part = repeated.holder_share >= limit
    numbers = np.arange(len(is_part))
    is_kept = np.concatenate([np.zeros(0, bool), *(t["is_survivor"].to_numpy() for t in tables)])
    columns = {
        "repeated_share": pa.array(repeated.share, pa.float32(), mask=~is_kept),
        "repeated_of": names,
        "repeated_of_share": pa.array(
            repeated.holder_share, pa.float32(), mask=repeated.holder < 0
        ),
        "contained_in": names.take(pa.array(numbers, mask=~is_part)),
        "containment": pa.array(repeated.holder_share, pa.float32(), mask=~is_part),
    }
    found = []
    first = 0
    for table in tables:
        rows = slice(first, first + len(table))
        own = {name: values[rows] for name, values in columns.items()}
        values = [own.get(name, table[name]) for name in SCHEMA.names]
        found.append(pa.table(values, schema=SCHEMA))
        first += len(table)
    return found


def _names(shards: Sequence[Shard], documents: np.ndarray) -> pa.Array:
    """`{source}//{ingest id}` of documents; null for -1."""
    unique = np.unique(documents[documents >= 0])
    names = [
        f"{shard.source}//{name}"
        for shard, rows in by_shard(shards, unique)
        for name in shard.ingest_ids(rows)
    ]
    places = pa.array(np.searchsorted(unique, documents), mask=documents < 0)
    return pa.array(names, pa.string()).take(places)


def _opened(shard: ShardPaths) -> list[ShardFile]:
    manifest = load_manifest(shard.manifest)
    require_undamaged(manifest)
    return shard_files(shard.tree.data, manifest)


def _windows(
    files: Sequence[ShardFile],
    ranks: np.ndarray,
    tokenizer: Tokenizer,
    settings: PassageSettings,
    directory: Path,
) -> np.ndarray:
    """Windows that earlier documents have, see `shared_windows`."""
    tokens = []
    starts = []
    firsts = []
    bounds = [0]
    first = 0
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=directory) as stream:
        for file in files:
            for start, end in parts(file.spans, settings.part_tokens):
                part = np.asarray(file.tokens[start:end])
                with named_errors(directory):
                    stream.write(suffix_array(part).data.cast("B"))
                begins = file.spans[:, 0]
                of_part = begins[(begins >= start) & (begins < end)]
                tokens.append(part)
                starts.append(np.append(of_part, end) - start)
                firsts.append(first)
                bounds.append(bounds[-1] + len(part))
                first += len(of_part)
            file.release()
        if not tokens:
            return np.zeros((0, 3), np.int64)
        stream.flush()
        suffixes = np.asarray(np.memmap(stream, "<u4", "r"))
        sorted_parts = [suffixes[a:b] for a, b in pairwise(bounds)]
        arrays = tokens, sorted_parts, starts
        lists = tuple(typed.List(one) for one in arrays)  # pyright: ignore[reportCallIssue]
        bos = tokenizer.bos_token_id
        marks = np.array([tokenizer.eos_token_id, -1 if bos is None else bos])
        return shared_windows(lists, np.array(firsts), ranks, settings.num_tokens, marks)


def _runs(found: np.ndarray, size: int) -> _Runs:
    """Join windows that overlap or touch: once per document and holder, once per document."""
    parts = []
    for holders in (found[:, 2], np.full(len(found), -1)):
        order = np.lexsort((found[:, 1], holders, found[:, 0]))
        document = found[order, 0]
        place = found[order, 1]
        holder = holders[order]
        is_first = np.ones(len(found), np.bool_)
        is_first[1:] = (np.diff(document) != 0) | (np.diff(holder) != 0) | (np.diff(place) > size)
        begins = np.flatnonzero(is_first)
        lasts = np.append(begins[1:], len(found))[: len(begins)] - 1
        parts.append((document[begins], place[begins], place[lasts] + size, holder[begins]))
    return _Runs(*map(np.concatenate, zip(*parts)))


def _largest(runs: _Runs, counted: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The document that has most tokens of each document, or -1, and their number; on a tie, the
    first."""
    own = np.flatnonzero((runs.holder >= 0) & (counted > 0))
    pairs = np.stack([runs.document[own], runs.holder[own]])
    pairs, numbers = np.unique(pairs, axis=1, return_inverse=True)
    sums = np.bincount(numbers, counted[own], pairs.shape[1]).astype(np.int64)
    order = np.lexsort((ranks[pairs[1]], -sums, pairs[0]))
    document, at = np.unique(pairs[0][order], return_index=True)
    holder = np.full(len(ranks), -1)
    most = np.zeros(len(ranks), np.int64)
    holder[document] = pairs[1][order][at]
    most[document] = sums[order][at]
    return holder, most


def _licensed(files: Sequence[ShardFile], runs: _Runs, tokenizer: Tokenizer) -> np.ndarray:
    """Number of tokens of each passage that known licences have."""
    spans = np.stack([runs.document, runs.start, runs.end], axis=1)
    spans, numbers = np.unique(spans, axis=0, return_inverse=True)
    spelled = tokenizer.reference.spellings()
    token_bytes = np.zeros(max(spelled) + 1, np.int64)
    token_bytes[list(spelled)] = [len(one) for one in spelled.values()]
    counts = [np.zeros(0, np.int64)]
    first = 0
    for file in files:
        stop = first + len(file.spans)
        of_file = spans[slice(*np.searchsorted(spans[:, 0], (first, stop)))]
        of_tokens = of_file[:, 1:] + file.spans[of_file[:, 0] - first, :1]
        for some in _batches(of_tokens):
            # `decode_documents` leaves out the last token, which is EOS in a document.
            texts = decode_documents(tokenizer, file.tokens, some + np.array([0, 1]))
            sizes = [token_bytes[file.tokens[start:end]] for start, end in some.tolist()]
            counts.append(_tokens_of_licences(texts, sizes))
        first = stop
        file.release()
    return np.concatenate(counts)[numbers.ravel()]


def _tokens_of_licences(texts: pa.Array, sizes: Sequence[np.ndarray]) -> np.ndarray:
    """Number of tokens that end in a word of a licence, or after it and before the next word;
    `sizes` are the bytes of the tokens of each text."""
    payload, offsets = utf8(texts)
    starts = np.empty(len(payload), np.int64)
    found = words(texts, starts)
    is_known = np.append(sets_of_words(found, licences()) >= 0, False)
    counts = []
    for text, of_text in enumerate(sizes):
        first, last = found.bounds[text : text + 2]
        ends = offsets[text] + np.cumsum(of_text)
        words_at = first - 1 + np.searchsorted(starts[first:last], ends)
        words_at[words_at < first] = -1  # a token before all words
        counts.append(np.count_nonzero(is_known[words_at]))
    return np.array(counts, np.int64)


def _batches(spans: np.ndarray) -> Iterator[np.ndarray]:
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    cuts = np.searchsorted(
        ends, np.arange(_BATCH_TOKENS, ends[-1] if len(ends) else 0, _BATCH_TOKENS)
    )
    return (part for part in np.split(spans, np.unique(cuts)) if len(part))


@cache
def licences() -> Evaluations:
    """The texts of common licences, and the notices that files refer to them with."""
    with open_plain(Path(__file__).with_name("licences.jsonl.gz")) as stream:
        texts = [orjson.loads(line)["text"] for line in stream]
    return Evaluations.of({"licences": texts})
