"""Finds the field that holds the text of records, by the names and values of fields."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from nmoe_core.base.errors import SourceError
from nmoe_core.base.jsonl import encodable, marked_encoding
from nmoe_core.sources.discover import InputFile, new_id
from nmoe_core.sources.formats import suffixes
from nmoe_core.sources.open import file_source, open_reader
from nmoe_core.sources.records import SAMPLED_RECORDS, BadRecord, Sample, Source
from nmoe_core.sources.spec import KINDS_OF, SourceSpec
from nmoe_core.sources.storage import TORN, SourceFile, decompressed

TEXT_FIELDS = ("text", "content", "raw_content", "body", "document", "article", "markdown")
_CHATS = ("messages", "conversations", "conversation")
_CHAT_TEMPLATE = "chatml"
_WITHOUT_TEXT_FIELD = ("files", "html", "warc", "wet")
_DELIMITERS = ",;\t|"
_MOST_CHARS = 10_000  # per sampled text
_MOST_SAMPLES = 5_000  # per source
_LEAST_SAMPLES = 5  # per file
_LEAST_BYTES = 20  # mean bytes of a text in a field without a usual name
_HEAD_BYTES = 2**16
_MOST_NAME_CHARS = 64  # a longer name is a data row of a CSV file without a header


def with_text_field(spec: SourceSpec, base: Path) -> SourceSpec:
    """Set `text_field` of a source. Raises SourceError if no field holds text (E-SOURCE-FIELD)."""
    if spec.kind in _WITHOUT_TEXT_FIELD:
        return spec
    samples = list(_cut(open_reader(spec, base, "train"), SAMPLED_RECORDS))
    if (name := text_field(samples)) is None:
        raise no_text(_why_none(samples), spec.id)
    return spec.model_copy(update={"text_field": name})


def no_text(reason: str, where: object) -> SourceError:
    """The error of a source without readable text."""
    do = "name other files, or set text_field of this source"
    return SourceError(reason, where=where, do=do, code="E-SOURCE-FIELD")


def by_delimiter(spec: SourceSpec, inputs: Sequence[InputFile]) -> Iterator[SourceSpec]:
    """Split a source of tables into one source per delimiter of the header."""
    ours = [file for file in inputs if file.source == spec.id and file.use != "left out"]
    found: dict[str | None, list[InputFile]] = {}
    for file in ours if spec.kind == "csv" else ():
        found.setdefault(_delimiter(file), []).append(file)
    if not found:
        yield spec
    taken = {file.source for file in inputs if file.source is not None} - {spec.id}
    for delimiter, files in found.items():
        named = new_id(spec.id, spec.kind, taken)
        taken.add(named)
        for file in files:
            file.source = named
        form = {} if delimiter is None else {"csv_delimiter": delimiter}
        yield spec.model_copy(update={"id": named, **form})


def _delimiter(file: InputFile) -> str | None:
    """The character that separates the names in the header; None if the kind assumes it."""
    source = SourceFile(file.path, file.name)
    head = b""
    with suppress(*TORN), source.open() as stored:
        head = decompressed(stored, source.suffix)(_HEAD_BYTES)
    header = head.decode(marked_encoding(head), "replace").partition("\n")[0]
    most = max(_DELIMITERS, key=header.count)
    assumed = "\t" if suffixes(file.name)[0].lower() == ".tsv" else ","
    return None if most == assumed or most not in header else most


def by_text_field(
    spec: SourceSpec, inputs: Sequence[InputFile], base: Path
) -> Iterator[SourceSpec]:
    """Split a source into one source per text field, if its files differ in this field. Files
    without a text field, and files that cannot be read, are left out."""
    ours = [f for f in inputs if f.source == spec.id and f.use in ("train", "valid")]
    if spec.kind in _WITHOUT_TEXT_FIELD:
        for file in ours if spec.kind in ("files", "html") else ():
            if file.size_bytes > spec.reading.max_record_bytes:
                file.leave_out(f"a text of more than {spec.max_record_mb} MiB")
        if any(file.use == "train" for file in ours):
            yield spec
        return
    most = max(_LEAST_SAMPLES, min(SAMPLED_RECORDS, _MOST_SAMPLES // len(ours)))
    samples = {file.name: _file_samples(spec, file, most) for file in ours}
    rest = [file for file in ours if file.use != "left out"]
    is_first = True
    taken = {file.source for file in inputs if file.source is not None} - {spec.id}
    while rest:
        trained = [sample for f in rest if f.use == "train" for sample in samples[f.name]]
        is_object = len(trained) == 1 and rest[0].name.lower().endswith(".json")
        name = text_field(trained, is_named=is_object)
        keys = {}
        if name is None and spec.kind in KINDS_OF["chat_template"] and not is_object:
            name = _chat_field(trained)
            keys = {"chat_template": _CHAT_TEMPLATE}
        if name is None:
            reason = _why_none(trained) if trained else "its fields differ from all training files"
            for file in rest:
                file.leave_out("one JSON object instead of records" if is_object else reason)
            return
        ours = [f for f in rest if any(name in sample for sample in samples[f.name])]
        named = new_id(spec.id if is_first else f"{spec.id}_{name}", spec.kind, taken)
        is_first = False
        taken.add(named)
        for file in ours:
            file.source = named
        yield spec.model_copy(update={"id": named, "text_field": name, **keys})
        rest = [file for file in rest if file not in ours]


def _file_samples(spec: SourceSpec, file: InputFile, most: int) -> list[Sample]:
    """The first records of a file; a file without records is left out."""
    source = file_source(spec, [SourceFile(file.path, file.name)])
    try:
        if found := list(_cut(source, most)):
            return found
        records = (record for block in source.blocks() for record in block.records())
        bad = next((record for record in records if isinstance(record, BadRecord)), None)
        file.leave_out("no records" if bad is None else f"no readable record: {bad.reason}")
    except (SourceError, OSError) as error:
        file.leave_out(str(error).removeprefix(f"{source.files[0].where}: "))
    return []


def _cut(source: Source, most: int) -> Iterator[Sample]:
    """Yield the first samples, with long texts cut, because one text may be as long as a file."""
    for sample in islice(source.samples(), most * (len(getattr(source, "files", ())) or 1)):
        # A configuration cannot name a field with a lone surrogate.
        names = (name for name in sample if encodable(name) == name)
        yield {name: encodable((sample[name] or "")[:_MOST_CHARS]) for name in names}


def text_field(samples: Sequence[Sample], *, is_named: bool = False) -> str | None:
    """The field with most text, among fields with a usual name; if there are none, among fields
    that hold sentences; else None. `is_named`: accept only fields with a usual name."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    texts = {name: [t for s in samples if (t := s.get(name)) and t.strip()] for name in names}
    usual = [name for name in names if name.rpartition(".")[2].lower() in TEXT_FIELDS]
    wordy = [name for name in names if _has_words(texts[name])]
    free = [n for n in wordy if _is_prose(n, texts[n], len(samples)) and not is_named]
    if not usual and any(name in _CHATS for name in names):
        return None
    for pool in ([name for name in usual if name in wordy], free, usual):
        if found := [name for name in pool if texts[name]]:
            return max(found, key=lambda name: ("." not in name, sum(map(len, texts[name]))))
    # later records may have texts in this field
    return next((name for name in usual if "." not in name), None)


def _has_words(texts: Sequence[str]) -> bool:
    """Whether most texts are longer than a word, path or code. Spaces alone do not decide, since
    some languages have none."""
    words = sum(len(text.split()) > 1 or not text.isascii() for text in texts)
    return 2 * words > len(texts)


def _is_prose(name: str, texts: Sequence[str], num_records: int) -> bool:
    """Whether most records have a text in the field that is long enough and unique."""
    return (
        len(name) <= _MOST_NAME_CHARS
        and 2 * len(texts) > num_records
        and 2 * len(set(texts)) > len(texts)
        and sum(len(text.encode()) for text in texts) >= _LEAST_BYTES * len(texts)
    )


def _chat_field(samples: Sequence[Sample]) -> str | None:
    """A field with a name of chats, if a record has it."""
    return next((name for sample in samples for name in sample if name in _CHATS), None)


def _why_none(samples: Sequence[Sample]) -> str:
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    if chat := next((name for name in names if name in _CHATS), None):
        return f"no text field, but chats in {chat!r}: write each as one text"
    return f"no text field; found {', '.join(names)[:200] or 'no fields'}"
