"""What the sources of a new project hold, as far as each can be read in a few seconds.

Up to 64 MB of text of a source is read and up to 400 of its documents are tokenised; what goes on
beyond that is estimated by its size as stored. Every figure is None where it would be a guess.
"""

import importlib.util
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import NmoeError, SourceError
from nmoe_core.labels.oracles.heuristic import refusal
from nmoe_core.sources.open import open_reader
from nmoe_core.sources.records import BadRecord, Block, Source
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.tokenizer import load_tokenizer

TEXT_FIELDS = ("text", "content", "raw_content", "body", "document", "article", "markdown")
_MOST_CHARS = 64_000_000
_MOST_SAMPLED = 400
_TRIED = 50  # documents that show whether a field is the text
_LANGUAGE_CHARS = 4000


@dataclass
class Survey:
    """One source: `spec` names its field of text. `is_whole`: every document was counted."""

    spec: SourceSpec
    fields: list[str] = field(default_factory=list)
    files: int | None = None
    size_bytes: int | None = None
    documents: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    languages: dict[str, float] = field(default_factory=dict)
    labelled_share: float = 1.0
    """Share of documents to which the heuristic oracle gives scores."""
    is_whole: bool = False
    problem: NmoeError | None = None

    @property
    def judged(self) -> int:
        """Documents to which the heuristic oracle gives scores."""
        return round((self.documents or 0) * self.labelled_share)

    @property
    def facts(self) -> dict[str, Any]:
        """Everything as JSON values."""
        names = ("files", "size_bytes", "documents", "judged", "tokens", "seconds")
        names += ("fields", "is_whole")
        facts = {name: getattr(self, name) for name in names}
        shares = {name: round(share, 4) for name, share in self.languages.items()}
        problem = None if self.problem is None else self.problem.line()
        own = {"source": self.spec.id, "kind": self.spec.kind, "text_field": self.spec.text_field}
        return own | facts | {"languages": shares, "problem": problem}


def survey_all(specs: Sequence[SourceSpec], base: Path, workers: int) -> list[Survey]:
    """Look at sources; raises the first `problem` where none of them can be read."""
    found = [survey(spec, base, workers) for spec in specs]
    problems = [one.problem for one in found if one.problem is not None]
    if len(problems) == len(found):
        raise problems[0]
    return found


def survey(spec: SourceSpec, base: Path, workers: int) -> Survey:
    """Look at a source; why it cannot be read is the `problem`. Relative paths start at `base`;
    `workers` processes are to prepare it, for the estimate of time."""
    found = Survey(spec)
    try:
        spec = found.spec = with_text_field(spec, base)
        source = open_reader(spec, base, "train")
        found.fields = source.field_names()
        found.size_bytes = source.size_bytes()
        found.files = len(getattr(source, "files", ())) or None
        _read(found, source, workers)
    except NmoeError as error:
        found.problem = error
    return found


def with_text_field(spec: SourceSpec, base: Path) -> SourceSpec:
    """The source with the field that holds its text: one of the usual names, else the one with the
    longest texts. Raises SourceError where there is none (E-SOURCE-FIELD)."""
    if spec.kind == "files":
        return spec
    names = open_reader(spec, base, "train").field_names()
    lengths = {
        name: _mean_chars(spec.model_copy(update={"text_field": name}), base)
        for name in [name for name in TEXT_FIELDS if name in names] or names
    }
    if not any(lengths.values()):
        raise SourceError(
            "no field of text",
            where=spec.id,
            found=", ".join(names) or "no fields",
            do="set text_field of this source",
            code="E-SOURCE-FIELD",
        )
    best = max(lengths, key=lambda name: (lengths[name] > 0, name in TEXT_FIELDS, lengths[name]))
    return spec.model_copy(update={"text_field": best})


def _mean_chars(spec: SourceSpec, base: Path) -> float:
    """Mean length of the first texts of a field; 0 where most have none."""
    try:
        blocks = islice(open_reader(spec, base, "train").blocks(), 1)
        records = [record for block in blocks for record in islice(block.records(), _TRIED)]
    except SourceError:
        return 0.0
    lengths = [len(record.text) for record in records if not isinstance(record, BadRecord)]
    return sum(lengths) / len(lengths) if 2 * len(lengths) > len(records) else 0.0


def _read(found: Survey, source: Source, workers: int) -> None:
    """Count documents and characters, and tokenise a sample that is spread over what is read."""
    num_documents = num_chars = num_bytes = 0
    stride, sample = 1, []
    blocks = source.blocks()
    for block in blocks:
        for text in _texts(block):
            if num_documents % stride == 0:
                sample.append(text)
            num_documents += 1
            num_chars += len(text)
            if len(sample) > _MOST_SAMPLED:
                stride, sample = 2 * stride, sample[::2]
        num_bytes += block.size_bytes
        if num_chars >= _MOST_CHARS:
            break
    found.is_whole = next(blocks, None) is None
    if not num_documents:
        raise SourceError("no documents", where=found.spec.id, code="E-SOURCE-EMPTY")
    found.languages = _languages(sample)
    found.labelled_share = sum(refusal(text) is None for text in sample) / len(sample)
    tokens, seconds = _tokenised(sample)
    tokens_per_char = tokens / max(sum(map(len, sample)), 1)
    if not found.is_whole and not (found.size_bytes and num_bytes):
        return  # a stream does not say how much there is of it
    times = 1.0 if found.is_whole else float(found.size_bytes or 0) / num_bytes
    found.documents = round(num_documents * times)
    found.tokens = round(num_chars * tokens_per_char * times) + found.documents
    found.seconds = found.tokens * seconds / max(tokens, 1) / workers


def _texts(block: Block) -> Iterator[str]:
    return (record.text for record in block.records() if not isinstance(record, BadRecord))


def _tokenised(texts: list[str]) -> tuple[int, float]:
    """Number of tokens, and seconds of one core."""
    tokenizer = load_tokenizer()
    tokenizer.encode_batch(texts[:1])  # what is made at the first use
    started = time.process_time()
    num_tokens = len(tokenizer.encode_batch(normalize_batch(texts)[0]).ids)
    return num_tokens, time.process_time() - started


def _languages(texts: list[str]) -> dict[str, float]:
    """Share of documents by language, most first; none where the extra is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("eldc", "numba", "pyarrow")):
        return {}
    import pyarrow as pa

    from nmoe_core.attributes.language import language

    cut = [text[:_LANGUAGE_CHARS] for text in texts]
    names = language(pa.array(cut, pa.large_string())).column("lang")
    counts = Counter(names.to_pylist())
    return {name: count / len(texts) for name, count in counts.most_common()}
