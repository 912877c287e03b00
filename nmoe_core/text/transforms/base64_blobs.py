"""Replaces long runs of base64, such as images and fonts inside web pages and notebooks.

A run has characters of one alphabet of base64 (with + and /, or with - and _) whose classes change
as those of encoded bytes do, so a path, a list of words, a hash, digits and DNA are none. A run may
go over lines of 60 characters or more, as in PEM files and e-mail, also if the line breaks are
escaped, as in JSON. `data:image/png;base64,` before a run belongs to it, and is proof enough.
"""

import re
from collections.abc import Sequence

import pyarrow as pa

from nmoe_core.config.transforms import Base64Table
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.edits import Edit
from nmoe_core.text.transforms.randomness import class_changes
from nmoe_core.text.transforms.search import column_of, holders, spans_of

_LEAST_LINE = 60  # PEM has 64 characters a line, e-mail 76
_BREAK = r"(?:\n[ \t]{0,40}|(?:\\r)?\\n)"
_DATA = re.compile(r"data:[\w.+/-]{0,80}(?:;[\w=.+-]{1,80}){0,4};base64,")
_HEX = re.compile(r"(?:[0-9a-f]++|[0-9A-F]++)")
_BLANK = re.compile(r"\\r\\n|\\n|\s")


def _run(char: str) -> str:
    """The pattern of a run of characters of one class. All repeats are possessive or short, so its
    time is linear."""
    line = rf"{char}{{{_LEAST_LINE},}}+(?![A-Za-z0-9+/_-])"
    # A last, shorter line is a whole number of groups of four, so most words are none.
    group = f"{char}{{4}}"
    last = rf"(?:{group}){{0,19}}(?:{char}{{2}}==|{char}{{3}}=|{group})(?=[\n\"'`<\\]|\Z)"
    return rf"{line}(?:(?:{_BREAK}{line})++(?:{_BREAK}{last})?)?={{0,2}}"


_STANDARD = "[A-Za-z0-9+/]"
_FOR_URLS = "[A-Za-z0-9_-]"
_RUN = re.compile(
    rf"(?:{_DATA.pattern}|(?<![A-Za-z0-9+/_\\-])|(?<=\\n))"
    rf"(?:{_run(_STANDARD)}|{_run(_FOR_URLS)})"
)
_HINT = f"{_STANDARD}{{{_LEAST_LINE}}}|{_FOR_URLS}{{{_LEAST_LINE}}}"
_LINE = f"(?:{_DATA.pattern})?(?:{_STANDARD}{{{_LEAST_LINE},}}|{_FOR_URLS}{{{_LEAST_LINE},}})"


class Base64Blobs:
    """The transform `base64_blobs`."""

    def __init__(self, table: Base64Table) -> None:
        self._table = table

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The runs of each text that has any, by its number."""
        long = [i for i, text in enumerate(batch.texts) if len(text) >= self._table.min_chars]
        texts = column_of([batch.payloads[i] for i in long])
        rows = holders(texts, _HINT)
        found = {}
        for k, lines in zip(rows.tolist(), spans_of(texts.take(pa.array(rows)), _LINE)):
            if runs := self._runs(batch.texts[long[int(k)]], lines):
                found[long[k]] = runs
        return found

    def _runs(self, text: str, lines: Sequence[tuple[int, int]]) -> list[Edit]:
        runs = []
        last = 0
        for start, _ in lines:
            if start < last:
                continue
            # If a line begins after an escaped line break, RE2 takes the n of the break with it.
            match = _RUN.match(text, start) or _RUN.match(text, start + 1)
            if match is None:
                continue
            last = match.end()
            run = match.group()
            rule = self._rule(run) if len(run) >= self._table.min_chars else None
            if rule is not None:
                runs.append(Edit(match.start(), match.end(), rule, self._table.replacement))
        return runs

    def _rule(self, run: str) -> str | None:
        """`base64` or `hex`; None if the run is neither."""
        if _DATA.match(run):
            return "base64"
        chars = _BLANK.sub("", run)
        is_encoded = class_changes(chars) >= 0.2
        if _HEX.fullmatch(chars):
            return "hex" if self._table.hex and is_encoded else None
        has_cases = not (chars.islower() or chars.isupper())
        separators = sum(map(chars.count, "+/-_"))  # a thirty-second of encoded bytes
        is_encoded &= has_cases and separators <= 0.1 * len(chars)
        return "base64" if is_encoded and re.search("[0-9]", chars) else None
