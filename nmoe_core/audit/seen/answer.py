"""Finds the occurrences of a sentence in the documents of a run, and the steps that read them.

The answer is exact: it holds all occurrences in the decoded texts of all curated shards. A row
reads an occurrence if the row's inputs include a token of the occurrence. The text of each listed
occurrence is decoded and checked again.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from loader.errors import StateError
from loader.files.format import load_manifest
from loader.plan.file import load_plan
from loader.rows.origins import Place, origins, readings
from loader.rows.stream import Stream
from nmoe_core.audit.seen.index_files import open_index
from nmoe_core.audit.seen.places import Occurrence, Spans, occurrences
from nmoe_core.audit.seen.search import Sentence
from nmoe_core.audit.seen.spellings import Spellings
from nmoe_core.base.errors import ConfigError, FormatError, TokenizerError
from nmoe_core.base.fingerprint import keep_digests, read_sealed, recall_digests
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.lineage import read_lineage
from nmoe_core.prep.mixture import run_sources
from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer

MIN_BYTES = 4
MAX_READINGS = 8
_AROUND_TOKENS = 24
_AROUND_CHARS = 60
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """A row of a step that reads tokens of the sentence; `is_whole` means that it reads all tokens
    of the sentence."""

    step: int
    row: int
    window: int
    """Number of the row's window in its source."""
    tokens: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Hit:
    """An occurrence of the sentence: its document in the data tree, and the rows that read it."""

    source: str
    doc_id: str
    ingest_id: str
    position: int
    """Number of tokens of the document before the occurrence."""
    tokens: int
    """Number of tokens of the occurrence, including tokens that also spell text around it."""
    before: str
    after: str
    readings: list[Reading] | None
    """The first rows that read the occurrence; None if there is no plan."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The occurrences of a sentence, and the steps of a run that read it.

    is_read, first_step: over all occurrences of the sentence, not only the listed hits; None if
    there is no plan. steps: number of the plan's steps that were searched.
    """

    sentence: str
    occurrences: int
    documents: int
    is_read: bool | None
    first_step: int | None
    steps: int | None
    hits: list[Hit]


class Index:
    """The open indexes of all curated shards of a run. Raises as `open_index`."""

    def __init__(self, run: Run) -> None:
        self.tokenizer = load_tokenizer(run.tokenizer)
        recall_digests(run.tree.seen_digests)
        names = [source.name for source in run_sources(run)]
        count = run.config.prep.num_shards
        shards = [shard for name in names for shard in run.tree.shards(name, count)]
        self.parts = [part for shard in shards for part in open_index(shard, self.tokenizer)]
        _keep(run.tree.seen_digests, {part.path for part in self.parts})

    def find(self, text: str) -> list[Spans]:
        """Occurrences of a normalised text, by shard and token. Raises as `checked`."""
        sentence = Sentence(_spellings(self.tokenizer), checked(text, self.tokenizer))
        return [Spans(part, part.start + sentence.find(part)) for part in self.parts]


def answer(run: Run, text: str, limit: int = 10, before_step: int | None = None) -> Answer:
    """Search for a text, which is normalised like documents. At most `limit` hits are listed. Only
    steps of the plan before `before_step` count, by default all.

    Raises:
        FormatError: As `open_index`; the plan reads files that have no index (E-SEEN-MISSING), or a
            text differs from its index (E-SEEN-CHANGED).
        ConfigError, TokenizerError: As `checked`.
        StateError: The step is out of range, or there is no plan (E-SEEK).
        PlanError: The data differ from the plan (E-PLAN-DATA).
    """
    sentence = normalize_text(text)
    index = Index(run)
    found = index.find(sentence)
    first_found = occurrences(found, limit)
    hits = _Hits(sentence, index.tokenizer)
    counts = sum(len(own.tokens) for own in found), sum(own.num_documents for own in found)
    plan = load_plan(run.tree.plan) if run.tree.plan.is_file() else None
    if plan is None:
        if before_step is not None:
            what = "the run has no plan, so --step has no effect"
            do = "omit --step"
            raise StateError(what, where=run.tree.plan, found=before_step, do=do, code="E-SEEK")
        return Answer(sentence, *counts, None, None, None, list(map(hits.of, first_found)))
    with closing(Stream(plan, "train")) as stream:
        steps = stream.num_sequences // plan.batch_size
        if before_step is not None and not 0 <= before_step <= steps:
            known = f"0 to {steps}"
            raise StateError(
                "step is out of range", found=before_step, expected=known, code="E-SEEK"
            )
        steps = steps if before_step is None else before_step
        _check_indexed(stream, index)
        names = stream.sources_of_files()
        read = [(names[own.part.token_file], own) for own in found if own.part.token_file in names]
        places = [place for name, own in read for place in own.places(name)]
        stop = steps * plan.batch_size
        first = next(readings(stream, places, stop), None) if places else None
        listed = []
        for one in first_found:
            path = one.part.token_file
            place = Place(names.get(path, ""), path, one.start, one.end)
            numbers = readings(stream, [place], stop) if path in names else ()
            rows = [
                _reading(stream, n, plan.batch_size, place) for n in islice(numbers, MAX_READINGS)
            ]
            listed.append(hits.of(one, rows))
    first_step = None if first is None else first // plan.batch_size
    return Answer(sentence, *counts, first is not None, first_step, steps, listed)


def checked(text: str, tokenizer: Tokenizer) -> bytes:
    """The UTF-8 bytes of the text to search for. Raises ConfigError if there are fewer than
    `MIN_BYTES` bytes (E-SEEN-SHORT), and TokenizerError if decoding the text's tokens does not give
    the text, so that documents hold it in another form (E-SEEN-TEXT)."""
    payload = text.encode()
    if len(payload) < MIN_BYTES:
        found = f"{len(payload)} bytes of UTF-8"
        expected = f"at least {MIN_BYTES}"
        what = f"{text!r} is too short to search for"
        raise ConfigError(what, found=found, expected=expected, code="E-SEEN-SHORT")
    ids = tokenizer.rows([text])[0]
    spelled = _spellings(tokenizer).of
    decoded = tokenizer.decode(ids)
    if text not in decoded or payload not in b"".join(spelled[i] for i in ids.tolist()):
        raise TokenizerError(
            "the tokenizer changes this text, so documents contain it in another form",
            where=tokenizer.name,
            found=repr(decoded[:200]),
            expected=repr(text[:200]),
            do="search for a part of the text without the characters that the tokenizer changes",
            code="E-SEEN-TEXT",
        )
    return payload


class _Hits:
    """Collects the facts about occurrences; reads the ids and lineage of each file once."""

    def __init__(self, sentence: str, tokenizer: Tokenizer) -> None:
        self._sentence = sentence
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[list[str], list[tuple[str, str]]]] = {}

    def of(self, one: Occurrence, rows: list[Reading] | None = None) -> Hit:
        file = one.part.file
        start, end = one.part.file.spans[one.document].tolist()
        near = slice(max(start, one.start - _AROUND_TOKENS), min(end - 1, one.end + _AROUND_TOKENS))
        text = self._tokenizer.decode(file.tokens[near])
        at = self._tokenizer.decode(file.tokens[near.start : one.end]).rfind(self._sentence)
        if at < 0:
            raise FormatError(
                "the text does not match its index",
                where=f"{file.rel}#s={one.start}:e={one.end}",
                found=repr(text[:200]),
                expected=repr(self._sentence[:200]),
                do="run `nmoe verify --deep` on the curated manifest, then `nmoe seen --index`",
                code="E-SEEN-CHANGED",
            )
        if file.rel not in self._known:
            self._known[file.rel] = _parents(one.part.shard, one.part.token_file), file.ids()
        parents, ids = self._known[file.rel]
        return Hit(
            source=file.source,
            doc_id=parents[one.document],
            ingest_id=ids[one.document][0],
            position=one.start - start,
            tokens=one.end - one.start,
            before=text[:at].lstrip("\ufffd")[-_AROUND_CHARS:],
            after=text[at + len(self._sentence) :].rstrip("\ufffd")[:_AROUND_CHARS],
            readings=rows,
        )


def _parents(shard: ShardPaths, path: Path) -> list[str]:
    """Document ids in the data tree of the documents of a curated token file."""
    manifest = load_manifest(shard.curated_manifest)
    first = 0
    for entry in sorted(manifest.shards, key=manifest.shard_path):
        if manifest.shard_path(entry) == path:
            with closing(read_lineage(manifest)) as rows:
                own = islice(rows, first, first + entry.num_documents)
                return [row["parent_doc_id"] for row in own]
        first += entry.num_documents
    raise KeyError(path)


def _reading(stream: Stream, n: int, batch_size: int, place: Place) -> Reading:
    row = origins(stream, n)
    tokens = 0
    for part in row.documents:
        if part.path == place.path:
            tokens += max(0, min(part.stop, place.end) - max(part.first, place.start))
    is_whole = tokens >= place.end - place.start
    return Reading(*divmod(n, batch_size), row.window, tokens, is_whole)


def _check_indexed(stream: Stream, index: Index) -> None:
    """Raise FormatError if the plan reads documents that have no index."""
    known = {part.token_file for part in index.parts}
    if others := sorted(set(stream.files.paths()) - known):
        raise FormatError(
            "the plan reads files that are not curated shards of this run, so they have no index",
            where=others[0],
            found=f"{len(others)} files",
            do="use the run of this plan",
            code="E-SEEN-MISSING",
        )


def _keep(path: Path, files: set[Path]) -> None:
    """Store file digests for the next command. If they cannot be stored, the next command hashes
    the files again."""
    if set(read_sealed(path) or {}) != {str(file.absolute()) for file in files}:
        try:
            keep_digests(path, files)
        except OSError as error:
            _LOG.warning(
                "%s cannot be written, so files are hashed at each search: %s", path, error.strerror
            )


@lru_cache(maxsize=2)
def _spellings(tokenizer: Tokenizer) -> Spellings:
    ends = tokenizer.eos_token_id, tokenizer.bos_token_id
    return Spellings(tokenizer.reference.spellings(), tokenizer.vocab_size, ends)
