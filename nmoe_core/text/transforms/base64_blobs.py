"""Replaces long runs of base64, such as images and fonts inside web pages and notebooks.

A run has only characters of base64 (of either alphabet), at least one digit, and letters of both
cases, so a long word or a line of dashes is none. `data:image/png;base64,` before a run belongs to
it, and so do line breaks inside it, as in PEM files and e-mail.
"""

import re

from nmoe_core.config.transforms import Base64Table
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.edits import Edit

_CHAR = "[A-Za-z0-9+/_-]"
_LINE = f"{_CHAR}{{60,}}"  # PEM has 64 characters a line, e-mail 76
# A last, shorter line is a whole number of groups of four, so most words are none.
_LAST_LINE = rf"\n(?:{_CHAR}{{4}})*(?:{_CHAR}{{2}}==|{_CHAR}{{3}}=|{_CHAR}{{4}})(?=\n|$)"
_RUN = re.compile(
    rf"(?:data:[\w.+/-]+(?:;[\w=.+-]+)*;base64,)?{_LINE}(?:(?:\n{_LINE})+(?:{_LAST_LINE})?)?={{0,2}}"
)


class Base64Blobs:
    """The transform `base64_blobs`."""

    def __init__(self, table: Base64Table) -> None:
        self._table = table

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The runs of each text that has any, by its number."""
        found = {}
        for i, text in enumerate(batch.texts):
            if len(text) >= self._table.min_chars and (runs := self._runs(text)):
                found[i] = runs
        return found

    def _runs(self, text: str) -> list[Edit]:
        runs = []
        for match in _RUN.finditer(text):
            run = match.group()
            if len(run) >= self._table.min_chars and _is_mixed(run):
                runs.append(Edit(match.start(), match.end(), "base64", self._table.replacement))
        return runs


def _is_mixed(run: str) -> bool:
    """Whether a run has digits, and letters of both cases."""
    return bool(re.search("[0-9]", run)) and not (run.islower() or run.isupper())
