"""Repairs text that was decoded with a wrong encoding, and HTML entities, by the library ftfy.

RE2 searches all texts at once for what ftfy's own heuristic finds bad; Python would take a hundred
times longer. In texts that have it, lines are repaired one by one, as ftfy does it. ftfy's other
repairs (ligatures, wide letters, quotation marks, control characters) are off, since they change
text that is right. A line is read once for entities and once for its encoding: ftfy's own loop may
take quadratic time.
"""

import re
from collections.abc import Iterator, Sequence

from ftfy import TextFixerConfig, fix_encoding
from ftfy.badness import BADNESS_RE
from ftfy.fixes import unescape_html

from nmoe_core.config.transforms import FixTextTable
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.edits import Edit, edits_between
from nmoe_core.text.transforms.search import column_of, holders

_ENTITY = "&#?[0-9A-Za-z]{1,24};"
_OPTIONS = TextFixerConfig(
    restore_byte_a0=True,
    replace_lossy_sequences=True,
    decode_inconsistent_utf8=True,
    fix_c1_controls=False,
    explain=False,
)
_MAX_LINE_CHARS = 10**6  # ftfy takes longer lines in such pieces too


class FixText:
    """The transform `fix_text`."""

    def __init__(self, table: FixTextTable) -> None:
        self._table = table

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The repairs of each text that has any, by its number: one per line at most."""
        payloads = batch.payloads
        plain = [i for i in range(len(payloads)) if b"&" in payloads[i] and b"<" not in payloads[i]]
        wide = [i for i, text in enumerate(batch.texts) if len(payloads[i]) != len(text)]
        with_entities = _held(payloads, plain, _ENTITY) if self._table.entities else set()
        bad = _held(payloads, wide, _BAD) if self._table.mojibake else set()
        found = {}
        for i in sorted(with_entities | bad):
            if edits := [*self._of_lines(batch.texts[i], i in with_entities, i in bad)]:
                found[i] = edits
        return found

    def _of_lines(self, text: str, has_entities: bool, is_bad: bool) -> Iterator[Edit]:
        start = 0
        while start < len(text):
            end = text.find("\n", start, start + _MAX_LINE_CHARS) + 1
            end = end or min(start + _MAX_LINE_CHARS, len(text))
            line = text[start:end]
            fixed = unescape_html(line) if has_entities and "&" in line else line
            rule = "entity" if fixed != line else "mojibake"
            if self._table.mojibake and (is_bad or fixed != line):
                fixed = fix_encoding(fixed, _OPTIONS)
            for edit in edits_between(line, fixed, rule):
                yield edit._replace(start=edit.start + start, end=edit.end + start)
            start = end


def _held(payloads: Sequence[bytes], some: Sequence[int], regex: str) -> set[int]:
    """Which of some texts have a match."""
    return {some[k] for k in holders(column_of([payloads[i] for i in some]), regex).tolist()}


def _for_re2(pattern: str) -> str:
    """A verbose pattern without look-around, for RE2. Its `\\w` and `\\s` are ASCII, so they
    stand for all other characters too: it matches at least what the given pattern matches."""
    parts = []
    is_class = False
    for token in re.findall(r"\\.|#[^\n]*|\s+|.", pattern, re.DOTALL):
        if not is_class and (token.isspace() or token[0] == "#"):
            continue
        if token in ("\\w", "\\s"):
            token += r"\x{80}-\x{10FFFF}"
            token = token if is_class else f"[{token}]"
        parts.append(token)
        is_class = token == "[" or (is_class and token != "]")
    return "(?m)" + "".join(parts)


_BAD = _for_re2(BADNESS_RE.pattern)
