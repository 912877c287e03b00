"""The list of a takedown: a text file with one item per line; a prefix gives the kind of the item.

`id:` is a document id or an ingest id, `url:` a value of the passthrough column `url`, `sha256:`
the hash of a normalised text, and `re:` a regular expression of RE2, which takes linear time. If a
line has no prefix, its kind is guessed from its form; if several kinds are possible, or none, an
error is raised.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loader.files.regular import read_file
from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import ConfigError, FormatError, one_line

if TYPE_CHECKING:
    import pyarrow as pa

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORMS = {
    "id": re.compile(r"[^/#]+//[^#]+#s=\d+:e=\d+"),
    "url": re.compile(r"https?://\S+"),
    "sha256": _SHA256,
}
_KINDS = (*_FORMS, "re")


class Item(NamedTuple):
    """One line of the list."""

    kind: str
    """One of `id`, `url`, `sha256` and `re`."""
    value: str
    line: int
    """The number of the line, from 1."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"


def read_items(path: Path) -> list[Item]:
    """Read the items of a list, without duplicates; blank lines are skipped. Raises FormatError if
    the list has no item, or a line is not an item (E-TAKEDOWN-ITEM)."""
    found: dict[tuple[str, str], Item] = {}
    for number, payload in enumerate(read_file(path).splitlines(), 1):
        if payload.strip():
            try:
                item = _item(payload.decode().removeprefix("\ufeff"), number)
            except ValueError as error:
                raise _refuse(f"{path}: line {number}", one_line(error)) from None
            found.setdefault(item[:2], item)
    if not found:
        raise _refuse(path, "a file without items")
    return list(found.values())


def _item(text: str, line: int) -> Item:
    """The item of a line. Raises ValueError, with the reason, if it is not an item."""
    kind, separator, value = text.partition(":")
    if kind.strip() not in _KINDS or not separator:
        text = text.strip()
        kinds = [name for name, form in _FORMS.items() if form.fullmatch(text)]
        if len(kinds) != 1:
            what = " or ".join(kinds) or "a document id, a URL or a hash"
            raise ValueError(f"{text[:80]!r}, which {'may be' if kinds else 'is not'} {what}")
        kind = kinds[0]
        value = text
    kind, value = kind.strip(), value if kind.strip() == "re" else value.strip()
    if not value:
        raise ValueError(f"{kind}: has no value")
    if kind == "sha256" and not _SHA256.fullmatch(value := value.lower()):
        raise ValueError(f"{value[:80]!r}, which is not 64 hexadecimal digits")
    if kind == "id" and "#s=" in value:
        parse_doc_id(value)
    if kind == "re":
        _check_pattern(value)
    return Item(kind, value, line)


def _check_pattern(pattern: str) -> None:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ConfigError(
            "items of kind re: need the package `pyarrow`",
            do="pip install 'nmoe-data[attributes]'",
            code="E-CONFIG-EXTRA",
        ) from error
    if contains(pa.array([""]), pattern)[0].as_py():
        raise ValueError(f"re:{pattern[:80]}, which matches every text")


def contains(texts: pa.Array, pattern: str) -> pa.BooleanArray:
    """Whether each text has a match of an RE2 pattern. Raises ValueError if the pattern is
    invalid."""
    import pyarrow.compute as pc

    options = pc.MatchSubstringOptions(pattern)
    return pc.call_function("match_substring_regex", [texts], options)


def _refuse(where: object, found: str) -> FormatError:
    return FormatError(
        "invalid takedown item",
        where=where,
        found=found,
        expected="id:, url:, sha256: or re:, followed by a value",
        do="begin the line with the prefix of its kind",
        code="E-TAKEDOWN-ITEM",
    )
