"""Surveys the sources of a new project in a few seconds per source.

Reads up to 64 MB of a source's text and tokenizes up to 400 documents; the rest is estimated from
the size of the files. A figure that cannot be estimated is None.
"""

import importlib.util
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import NmoeError, SourceError
from nmoe_core.base.jsonl import encodable
from nmoe_core.cli.project.fields import by_delimiter, by_text_field, no_text, with_text_field
from nmoe_core.cli.project.patterns import with_paths
from nmoe_core.labels.oracles.heuristic import refusal
from nmoe_core.sources.discover import InputFile, Inputs
from nmoe_core.sources.file_sources import FileSource, FilesSource
from nmoe_core.sources.formats import EXPECTED
from nmoe_core.sources.open import open_reader
from nmoe_core.sources.records import BadRecord, Block, Source
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.sources.storage import SourceFile
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.tokenizer import load_tokenizer

_MOST_CHARS = 64_000_000
_MOST_RECORDS = 1_000_000  # of few characters or none
_MOST_SAMPLED = 400
_LANGUAGE_CHARS = 4000


@dataclass
class Survey:
    """One surveyed source: `spec` names its text field; `is_whole`: whether every document was
    counted, not only a sample."""

    spec: SourceSpec
    fields: list[str] = field(default_factory=list)
    files: int | None = None
    size_bytes: int | None = None
    documents: int | None = None
    unreadable: int = 0
    """Number of records without readable text; `first_unreadable` is an example."""
    first_unreadable: str | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    """Records that were read and are left out by rule, by reason."""
    tokens: int | None = None
    seconds: float | None = None
    languages: dict[str, float] = field(default_factory=dict)
    labelled_share: float = 1.0
    """Share of documents that the heuristic oracle can score."""
    is_whole: bool = False
    problem: NmoeError | None = None

    @property
    def judged(self) -> int:
        """Number of documents that the heuristic oracle can score."""
        return round((self.documents or 0) * self.labelled_share)

    @property
    def facts(self) -> dict[str, Any]:
        """All fields as JSON values."""
        names = ("files", "size_bytes", "documents", "unreadable", "first_unreadable")
        names += ("judged", "tokens", "seconds")
        names += ("fields", "is_whole")
        facts = {name: getattr(self, name) for name in names}
        shares = {name: round(share, 4) for name, share in self.languages.items()}
        problem = None if self.problem is None else self.problem.line()
        own = {"source": self.spec.id, "kind": self.spec.kind, "text_field": self.spec.text_field}
        own |= {"skipped": dict(self.skipped.most_common())}
        return own | facts | {"languages": shares, "problem": problem}


def survey_all(inputs: Inputs, base: Path, workers: int) -> list[Survey]:
    """Survey the sources of `inputs`, and leave out the files that cannot be read. Relative paths
    start at `base`; `workers` is the number of prep processes, for the time estimate."""
    found: list[Survey] = []
    for spec in inputs.specs:
        ours = [file for file in inputs.files if file.source == spec.id]
        if not ours or spec.kind == "huggingface":
            found.append(_survey(spec, [], base, workers))
            continue
        forms = list(by_delimiter(spec, inputs.files))
        parts = [part for form in forms for part in by_text_field(form, inputs.files, base)]
        found += [_survey(part, inputs.files, base, workers) for part in parts]
        if not parts:
            where = ours[0].name if len(ours) == 1 else f"{ours[0].name} and {len(ours) - 1} more"
            found.append(Survey(spec, problem=no_text(ours[0].reason, where)))
    return found


def require_text(named: str, inputs: Inputs, found: Sequence[Survey]) -> None:
    """If no source can be read, raise the first `problem`, or SourceError (E-SOURCE-NOTFOUND)."""
    problems = [one.problem for one in found if one.problem is not None]
    if problems and len(problems) == len(found):
        raise problems[0]
    if not found:
        seen = "; ".join(f"{file.name}: {file.reason}" for file in inputs.files[:3])
        raise SourceError(
            "no text to train on",
            where=named,
            found=seen or "no file",
            expected=EXPECTED,
            code="E-SOURCE-NOTFOUND",
        )


def _survey(spec: SourceSpec, inputs: Sequence[InputFile], base: Path, workers: int) -> Survey:
    """Survey a source; a read error becomes the survey's `problem`."""
    found = Survey(spec)
    ours = {f.path: f for f in inputs if f.source == spec.id and f.use == "train"}
    try:
        found.spec = with_paths(spec, inputs, base) if ours else with_text_field(spec, base)
        source = _opened(found.spec, base, ours)
        found.size_bytes = source.size_bytes()
        _read(found, source, ours, workers)
        if any(file.use == "left out" for file in ours.values()) and spec.kind != "files":
            found.spec = with_paths(spec, inputs, base)
            source = _opened(found.spec, base, ours)
        found.fields = [name for name in source.field_names() if encodable(name) == name]
        found.size_bytes = source.size_bytes()
        found.files = len(getattr(source, "files", ())) or None
    except NmoeError as error:
        found.problem = error
        for file in ours.values():
            if file.use != "left out":
                file.leave_out(str(error))
    else:
        if found.unreadable > spec.max_bad_share * (found.unreadable + (found.documents or 0)):
            found.spec = found.spec.model_copy(update={"on_error": "skip"})
    return found


def _opened(spec: SourceSpec, base: Path, ours: Mapping[Path, InputFile]) -> Source:
    if ours and not spec.paths:
        raise no_text(next(iter(ours.values())).reason, spec.id)
    return open_reader(spec, base, "train")


def _read(found: Survey, source: Source, ours: Mapping[Path, InputFile], workers: int) -> None:
    """Count documents and characters, and tokenize a sample from all parts of the text read."""
    num_documents = num_chars = num_bytes = 0
    stride = 1
    sample = []
    blocks = _blocks(source, ours)
    for block in blocks:
        for record in block.records():
            if isinstance(record, BadRecord) and record.is_skipped:
                found.skipped[record.reason] += 1
                continue
            if isinstance(record, BadRecord):
                found.unreadable += 1
                found.first_unreadable = found.first_unreadable or str(record)
                if isinstance(source, FilesSource):
                    _leave_out(ours, source.files[record.row], record.reason)
                continue
            if num_documents % stride == 0:
                sample.append(record.text)
            num_documents += 1
            num_chars += len(record.text)
            if len(sample) > _MOST_SAMPLED:
                stride = 2 * stride
                sample = sample[::2]
        num_bytes += block.size_bytes
        num_records = num_documents + found.unreadable + found.skipped.total()
        if num_chars >= _MOST_CHARS or num_records >= _MOST_RECORDS:
            break
    found.is_whole = next(blocks, None) is None
    if not num_documents:
        reasons = (file.reason for file in ours.values() if file.reason)
        reason = found.first_unreadable or next(reasons, None)
        raise SourceError("no documents", where=found.spec.id, found=reason, code="E-SOURCE-EMPTY")
    sample_chars = sum(map(len, sample))
    sample = normalize_batch(sample)[0]  # the encoding also removes lone surrogates
    tokens, seconds = _tokenised(sample)
    tokens_per_char = tokens / max(sample_chars, 1)
    found.languages = _languages(sample)
    found.labelled_share = sum(refusal(text) is None for text in sample) / len(sample)
    if not found.is_whole and not (found.size_bytes and num_bytes):
        return  # the size of a stream is not known
    times = 1.0 if found.is_whole else float(found.size_bytes or 0) / num_bytes
    found.documents = round(num_documents * times)
    found.tokens = round(num_chars * tokens_per_char * times) + found.documents
    found.seconds = found.tokens * seconds / max(tokens, 1) / workers


def _blocks(source: Source, ours: Mapping[Path, InputFile]) -> Iterator[Block]:
    """Yield the blocks of a source; files with a read error are left out."""
    if not ours or not isinstance(source, FileSource) or isinstance(source, FilesSource):
        yield from source.blocks()
        return
    for file, blocks in source.each_file():
        try:
            yield from blocks
        except (SourceError, OSError) as error:
            _leave_out(ours, file, str(error).removeprefix(f"{file.where}: "))


def _leave_out(ours: Mapping[Path, InputFile], file: SourceFile, reason: str) -> None:
    if (input_file := ours.get(Path(os.path.abspath(file.path)))) is not None:
        input_file.leave_out(reason)


def _tokenised(texts: list[str]) -> tuple[int, float]:
    """The number of tokens of a sample, and the seconds that one core needs for it."""
    tokenizer = load_tokenizer()
    tokenizer.lengths(texts[:1])  # the first call initialises; do not time it
    started = time.process_time()
    num_tokens = int(tokenizer.lengths(normalize_batch(texts)[0]).sum())
    return num_tokens, time.process_time() - started


def _languages(texts: list[str]) -> dict[str, float]:
    """Share of documents per language, largest first; empty if the language extra is not
    installed."""
    if any(importlib.util.find_spec(name) is None for name in ("eldc", "numba", "pyarrow")):
        return {}
    import pyarrow as pa

    from nmoe_core.attributes.language import language

    cut = [text[:_LANGUAGE_CHARS] for text in texts]
    names = language(pa.array(cut, pa.large_string())).column("lang")
    counts = Counter(names.to_pylist())
    return {name: count / len(texts) for name, count in counts.most_common()}
