"""JSON lines: the reader, the limit of a line's size, and the rules for texts and ids.

A line ends with LF. A byte order mark before the first line is skipped. A blank line is not a
record, but it counts in the line numbers. A line longer than `MAX_LINE_BYTES` is refused before the
rest of it is read. Lone surrogate escapes are accepted. Memory: one line.
"""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import orjson

from loader.files.nested import json_value
from loader.files.regular import open_file
from nmoe_core.base.append_log import Line

MAX_LINE_BYTES = 256 * 2**20
COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_MARKS = {
    # UTF-32 comes before UTF-16, whose mark is the start of UTF-32's mark
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
MARKED = ("utf-16", "utf-32")
"""Encodings that a byte order mark names."""
_MISSING = object()
Refuse = Callable[[int, str], Exception]
"""Creates the error for a line from its number (from 1) and the description of its fault."""


def is_plain_file(path: Path) -> bool:
    """Whether a file exists and is not compressed."""
    return path.suffix.lower() not in COMPRESSED and path.is_file()


def marked_encoding(payload: bytes | memoryview) -> str:
    """The encoding that a byte order mark at the start names; UTF-8 if the file has no mark."""
    head = bytes(payload[:4])
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8")


def not_utf8(error: UnicodeDecodeError) -> str:
    """Describe the first byte that is invalid in the encoding, with a guess at the true
    encoding."""
    guess = ""
    if error.encoding == "utf-8":
        with suppress(UnicodeDecodeError):
            error.object.decode("cp1252")
            guess = ", perhaps Windows-1252"
        if b"\0" in error.object:
            guess = ", perhaps UTF-16 without a byte order mark, or not text"
    return f"not {error.encoding.upper()} at byte {error.start}{guess}"


def read_lines(path: Path, refuse: Refuse, digest: Any = None) -> Iterator[Line]:
    """Every line of a plain file; see `lines_of`."""
    with open_file(path) as file:
        yield from lines_of(file, refuse, digest)


def lines_of(file: IO[bytes], refuse: Refuse, digest: Any = None) -> Iterator[Line]:
    """Every line of an open file, also blank lines; the last line may lack its newline.

    `refuse` makes the error to raise for a line that is too long; `digest`, a hash of `hashlib`, is
    updated with the bytes of the file.
    """
    offset = number = 0
    while payload := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(payload) > MAX_LINE_BYTES:
            raise refuse(number, f"more than {MAX_LINE_BYTES} bytes")
        if digest is not None:
            digest.update(payload)
        end = offset + len(payload)
        if number == 1:
            payload = payload.removeprefix(codecs.BOM_UTF8)
        yield Line(number, end - len(payload), payload)
        offset = end


def read_objects(
    path: Path, refuse: Refuse, digest: Any = None
) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Every line that is not blank, with its JSON object. Takes the arguments of `read_lines`."""
    for line in read_lines(path, refuse, digest):
        if line.payload.isspace() or not line.payload:
            continue
        try:
            value = parse_object(line.payload)
        except ValueError as error:
            raise refuse(line.number, str(error)) from None
        yield line, value


def parse_object(payload: bytes) -> dict[str, Any]:
    """The JSON object of a line; a ValueError describes a bad line."""
    return as_object(parse_json(payload)[0])


def parse_json(payload: bytes | memoryview, *, replace: bool = False) -> tuple[Any, bool]:
    """The JSON value of a line, and whether bytes that are not UTF-8 were replaced. Raises
    ValueError if the line is not JSON, or nested too deep."""
    try:
        return orjson.loads(payload), False
    except orjson.JSONDecodeError:  # orjson also refuses lone surrogate escapes, which json accepts
        payload = bytes(payload)
    is_replaced = False
    try:
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            if not replace:
                raise
            text = payload.decode("utf-8", "replace")
            is_replaced = True
        return json_value(text), is_replaced
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: {not_utf8(error)}") from None
    except ValueError as error:
        is_wide = b"\0" in payload[:4]
        hint = ", perhaps UTF-16 without a byte order mark" if is_wide else ""
        raise ValueError(f"not JSON: {error}{hint}") from None


def as_object(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object; else ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    return value


def value_of(row: Mapping[str, Any], field: str, default: Any = None) -> Any:
    """The value of a field: the key with this name or, if it does not exist, the nested keys that
    dots separate."""
    if field in row:
        return row[field]
    value: Any = row
    for key in field.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def text_of(row: Mapping[str, Any], field: str) -> str:
    """The text of a record; null means an empty text. Raises ValueError with a description if the
    record is bad."""
    value = value_of(row, field, _MISSING)
    if isinstance(value, str):
        return value
    if value is _MISSING:
        raise ValueError(f"field {field!r} is missing{_fields_of(row)}")
    if value is not None:
        raise ValueError(f"field {field!r} is {type(value).__name__}, not text")
    return ""


def _fields_of(row: Mapping[str, Any]) -> str:
    """The names of a record's first fields, for a message."""
    names = [repr(key[:40]) for key in [*row][:8]]
    return f" among {', '.join(names)}{', ...' if len(row) > 8 else ''}" if names else ""


def id_of(
    row: Mapping[str, Any], field: str | None, default: str, unnamed: Sequence[str] = ("id",)
) -> str:
    """The id of a record. Raises ValueError with a description if the record is bad. If `field` is
    given, the record must have this field. If not, the keys `unnamed` are tried in order; if no key
    has an id, the id is `default`, the record's position in the source.
    """
    if field is not None:
        if (value := value_of(row, field)) is None:
            raise ValueError(f"field {field!r} is missing")
        return checked_id(value, field, default)
    for key in unnamed:
        if row.get(key) not in (None, ""):
            return checked_id(row[key], key, default)
    return encodable(default)


def checked_id(value: Any, field: str, default: str) -> str:
    """An id as text; the default if the id is None or "". Raises ValueError unless the value is
    text or a whole number: a float or a list can be written in more than one way.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        kind = type(value).__name__
        raise ValueError(f"field {field!r} is {kind}, not text or a whole number")
    return encodable(default if value in (None, "") else str(value))


def encodable(text: str) -> str:
    """The text with lone surrogates escaped, so that UTF-8 can encode it and ids stay distinct."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
