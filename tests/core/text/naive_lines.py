"""The rules of the transform `lines`, written as plainly as possible, one line at a time."""

import re

from nmoe_core.config.transforms import LinesTable
from nmoe_core.text.transforms.lines.patterns import COUNTER, LINE_ENDS
from tests.core.attributes.naive_signals import WORDS

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_COUNTER = re.compile(COUNTER.replace(r"[^\pL\pN_]", r"\W"), re.IGNORECASE)
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies")
_POLICIES += ("use cookies",)


def without_citations(line: str, table: LinesTable) -> str:
    return _CITATION.sub("", line) if table.c4_citations else line


def rule_of(line: str, table: LinesTable) -> str | None:
    """The first rule that removes a line; None if it stays, perhaps shorter."""
    line = without_citations(line, table)
    words = WORDS.findall(line)
    solid = line.strip()
    if not solid:
        return None
    lower = line.lower()
    if table.c4_max_word_chars and any(len(word) > table.c4_max_word_chars for word in words):
        return "c4_max_word_chars"
    is_ellipsis = solid.endswith(("...", "…"))
    if table.c4_end_punctuation and (solid[-1] not in LINE_ENDS or is_ellipsis):
        return "c4_end_punctuation"
    if len(words) < table.c4_min_words:
        return "c4_min_words"
    if table.c4_javascript and "javascript" in lower:
        return "c4_javascript"
    if table.c4_policy and any(phrase in lower for phrase in _POLICIES):
        return "c4_policy"
    upper = sum(char.isupper() for char in line)
    if table.refinedweb_max_upper and upper > table.refinedweb_max_upper * len(line):
        return "refinedweb_max_upper"
    if table.refinedweb_digits and all(char.isdigit() for word in words for char in word):
        return "refinedweb_digits"
    if table.refinedweb_counter and _COUNTER.search(line):
        return "refinedweb_counter"
    if len(words) < table.refinedweb_min_words:
        return "refinedweb_min_words"
    if any(lower.lstrip().startswith(start.lower()) for start in table.bad_starts):
        return "bad_starts"
    return None


def shortened(line: str, table: LinesTable) -> str:
    """A line that stays, without citations and the phrases of short lines."""
    words = WORDS.findall(without_citations(line, table))
    spans = []
    if table.c4_citations:
        spans += [match.span() for match in _CITATION.finditer(line)]
    if len(words) <= table.refinedweb_short_words:
        spans += _phrases(line, table)
    kept = ""
    last = 0
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= last:
            kept += line[last:start]
            last = end
    return kept + line[last:]


def _phrases(line: str, table: LinesTable) -> list[tuple[int, int]]:
    lower = line.lower()
    found = []
    margin = len(line) - len(line.lstrip())
    for phrase in sorted(table.refinedweb_starts, key=len, reverse=True):
        if lower.startswith(phrase.lower(), margin) and not _is_word(line, margin + len(phrase)):
            found.append((0, margin + len(phrase)))
            break
    rest = re.sub(r"\W+$", "", line)
    for phrase in sorted(table.refinedweb_ends, key=len, reverse=True):
        start = len(rest) - len(phrase)
        if rest.lower().endswith(phrase.lower()) and not _is_word(line, start - 1):
            found.append((start, len(line)))
            break
    for phrase in table.refinedweb_anywhere:
        start = lower.find(phrase.lower())
        while start >= 0:
            end = start + len(phrase)
            if not _is_word(line, start - 1) and not _is_word(line, end):
                found.append((start, end))
            start = lower.find(phrase.lower(), start + 1)
    return found


def _is_word(line: str, place: int) -> bool:
    """Whether a place in the line has a letter, mark of a number or `_`."""
    return 0 <= place < len(line) and re.match(r"\w", line[place]) is not None
