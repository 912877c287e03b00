"""Removes lines by the rules of C4, FineWeb and RefinedWeb, by their start, and boilerplate.

Each rule gives a mask of the lines of a batch, and the first rule that holds for a line removes it.
Lines are searched for phrases only in texts that contain one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

from nmoe_core.config.transforms import LinesTable
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.corpus import Keys, SharedKeys
from nmoe_core.text.transforms.edits import Edit, edited
from nmoe_core.text.transforms.lines.cuts import cuts, joined, without_overlaps
from nmoe_core.text.transforms.lines.kernel import Lines, measure
from nmoe_core.text.transforms.lines.patterns import CITATION, COUNT, COUNTER, JAVASCRIPT, POLICY
from nmoe_core.text.transforms.search import column_of, matches

RULES = (
    *("c4_max_word_chars", "c4_end_punctuation", "c4_min_words", "c4_javascript", "c4_policy"),
    *("refinedweb_max_upper", "refinedweb_digits", "refinedweb_counter", "refinedweb_min_words"),
    *("bad_starts", "boilerplate_documents"),
)
"""Rules that remove lines, in order: a line is recorded with the first one that holds."""
_IN_LINES = "c4_citations", "refinedweb_starts", "refinedweb_ends", "refinedweb_anywhere"
_EVERY = RULES + _IN_LINES  # if a rule leaves nothing of a line, it removes the line
_KEPT = len(_EVERY)
_CITATION = re.compile(CITATION.replace(r"\p{Nd}", r"\d"))


class LineRules:
    """The transform `lines`; without `shared`, the rule about boilerplate does not apply."""

    def __init__(self, table: LinesTable, shared: SharedKeys | None = None) -> None:
        self._table = table
        self._shared = shared
        self._searches = _searches(table)
        self._short = _short_patterns(table)

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The removed lines and parts of lines of each text, by its number. Consecutive lines that
        one rule removes are one edit."""
        payloads, marks = self._without_citations(batch)
        lines = measure(payloads)
        rules, is_short = self._decided(batch, payloads, lines)
        inner: dict[int, list[Edit]] = {}
        for i, spans in marks.items():
            first, last = lines.bounds[i : i + 2].tolist()
            starts = lines.starts[first:last]
            starts += _chars_before(starts, spans)
            at = first + np.searchsorted(starts, spans[:, 0], "right") - 1
            rules[at[lines.solid[at] == 0]] = _EVERY.index("c4_citations")
            is_inner = (rules[at] == _KEPT) & ~is_short[at]
            places = spans[is_inner].tolist()
            inner[i] = [Edit(start, end, "c4_citations") for start, end in places]
        short = np.flatnonzero(is_short)
        columns = short, lines.texts_of(short), lines.starts[short]
        for number, i, start in zip(*(column.tolist() for column in columns)):
            text = batch.texts[int(i)]
            end = text.find("\n", start)
            line = text[start : end if end >= 0 else len(text)]
            parts = self._parts(line)
            if parts and _is_blank_without(line, parts):
                rules[number] = _EVERY.index(parts[0].rule)
            else:
                moved = (Edit(start + one.start, start + one.end, one.rule) for one in parts)
                inner.setdefault(i, []).extend(moved)
        found = dict(cuts(batch.texts, lines, *_removed(lines, rules)))
        for i in inner:
            if edits := joined(found.get(i, []), inner[i]):
                found[i] = edits
        return dict(sorted(found.items()))

    def keys(self, batch: Batch) -> Keys:
        """A key of each line, without its site."""
        lines = measure(self._without_citations(batch)[0])
        solid = np.flatnonzero(lines.solid)
        return Keys(lines.hashes[solid], lines.texts_of(solid))

    def salts(self, columns: Mapping[str, Sequence[str | None]]) -> np.ndarray:
        """uint64: the hash of each document's site."""
        assert self._table.site_column is not None
        sites = [_site(value) for value in columns[self._table.site_column]]
        return np.array([xxh3_64_intdigest(site.encode()) for site in sites], np.uint64)

    def _without_citations(self, batch: Batch) -> tuple[Sequence[bytes], dict[int, np.ndarray]]:
        """The texts in UTF-8 without marks of citations, with the same lines; and where each text
        that has any has its marks, int64 `[marks, 2]`, in characters."""
        marks: dict[int, np.ndarray] = {}
        if not self._table.c4_citations:
            return batch.payloads, marks
        payloads = list(batch.payloads)
        for i, text in enumerate(batch.texts):
            if "[" in text and (spans := [mark.span() for mark in _CITATION.finditer(text)]):
                marks[i] = np.array(spans, np.int64)
                payloads[i] = _CITATION.sub("", text).encode()
        return payloads, marks

    def _decided(
        self, batch: Batch, payloads: Sequence[bytes], lines: Lines
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each line the number of the rule that removes it, or `_KEPT`; and whether it is a
        short line that contains a phrase of `refinedweb_*`."""
        masks = self._measured(lines)
        masks |= self._found(payloads, lines)
        if self._shared is not None:
            shared = self._shared.find(self._with_sites(batch, lines))
            masks["boilerplate_documents"] = shared >= 0
        rules = np.full(len(lines.solid), _KEPT, np.uint8)
        for number, name in reversed([*enumerate(RULES)]):
            if name in masks:
                rules[masks[name]] = number
        rules[lines.solid == 0] = _KEPT
        is_short = masks.get("short", np.zeros(len(rules), np.bool_))
        is_short &= rules == _KEPT
        return rules, is_short

    def _measured(self, lines: Lines) -> dict[str, np.ndarray]:
        """Masks of the rules that need no phrases, as far as they are set."""
        table = self._table
        masks = {
            "c4_max_word_chars": lines.longest > table.c4_max_word_chars,
            "c4_end_punctuation": lines.ends == 0,
            "c4_min_words": lines.words < table.c4_min_words,
            "refinedweb_max_upper": lines.upper > table.refinedweb_max_upper * lines.chars,
            "refinedweb_digits": lines.digits == lines.solid,
            "refinedweb_min_words": lines.words < table.refinedweb_min_words,
        }
        return {name: mask for name, mask in masks.items() if getattr(table, name)}

    def _found(self, payloads: Sequence[bytes], lines: Lines) -> dict[str, np.ndarray]:
        """Masks of the rules that look for phrases."""
        masks = {name: np.zeros(len(lines.solid), np.bool_) for name in self._searches}
        if not masks:
            return masks
        column = column_of(payloads)
        anything = "|".join(one for one, _ in self._searches.values())
        has_any = matches(column, anything, ignore_case=True)
        texts = column.filter(pa.array(has_any))
        options = pc.SplitPatternOptions("\n")
        parts = pc.call_function("split_pattern", [texts], options).flatten()
        places = np.flatnonzero(np.repeat(has_any, np.diff(lines.bounds)))
        is_likely = {
            "refinedweb_counter": lines.digits > 0,
            "short": lines.words <= self._table.refinedweb_short_words,
        }
        for name, (_, pattern) in self._searches.items():
            likely = np.flatnonzero(is_likely.get(name, lines.solid > 0)[places])
            found = matches(parts.take(pa.array(likely)), pattern, ignore_case=True)
            masks[name][places[likely]] = found
        return masks

    def _with_sites(self, batch: Batch, lines: Lines) -> np.ndarray:
        """The hash of each line with that of its site."""
        if self._table.site_column is None:
            return lines.hashes
        return lines.hashes ^ np.repeat(self.salts(batch.columns), np.diff(lines.bounds))

    def _parts(self, line: str) -> list[Edit]:
        """The parts that a short line loses: its phrases, and marks of citations."""
        return without_overlaps(
            [Edit(*part.span(), name) for name, one in self._short for part in one.finditer(line)]
        )


def _is_blank_without(line: str, parts: Sequence[Edit]) -> bool:
    before = line[: parts[0].start]
    after = line[parts[-1].end :]
    is_blank = not (before.strip() or after.strip())  # nearly always, only one part is removed
    return is_blank and (len(parts) == 1 or not edited(line, parts).strip())


def _chars_before(starts: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """How many characters of `marks` are before each line of a text, int64: `starts` are the
    offsets of its lines without the marks."""
    ends = np.cumsum(marks[:, 1] - marks[:, 0])
    begins = marks[:, 0] - np.append(0, ends[:-1])  # in the text without them
    return np.append(0, ends)[np.searchsorted(begins, starts)]


def _removed(lines: Lines, rules: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The first and last line of each run of lines of a text that one rule removes, and the
    rule."""
    removed = np.flatnonzero(rules < _KEPT)
    is_first = np.diff(removed, prepend=-2) != 1
    is_first[1:] |= (np.diff(rules[removed]) != 0) | (np.diff(lines.texts_of(removed)) != 0)
    begins = np.flatnonzero(is_first)
    lasts = removed[np.append(begins[1:], len(removed))[: len(begins)] - 1]
    firsts = removed[begins]
    return firsts, lasts, [_EVERY[number] for number in rules[firsts].tolist()]


def _searches(table: LinesTable) -> dict[str, tuple[str, str]]:
    """For each rule that looks for phrases, a pattern that matches all texts with such lines, and
    the pattern of the lines."""
    starts = _any_of(table.bad_starts)
    short = _any_of([*table.refinedweb_starts, *table.refinedweb_ends, *table.refinedweb_anywhere])
    found = {
        "c4_javascript": table.c4_javascript and (JAVASCRIPT, JAVASCRIPT),
        "c4_policy": table.c4_policy and (POLICY, POLICY),
        "refinedweb_counter": table.refinedweb_counter and (COUNT, COUNTER),
        "bad_starts": starts and (rf"(?:^|\n)[\s\pZ]*{starts}", rf"^[\s\pZ]*{starts}"),
        "short": short and (short, short),
    }
    return {name: patterns for name, patterns in found.items() if patterns}


def _short_patterns(table: LinesTable) -> list[tuple[str, re.Pattern[str]]]:
    """Patterns of what short lines lose, by rule: marks of citations, and phrases of whole
    words."""
    starts, ends, anywhere = (
        _any_of(phrases)
        for phrases in (table.refinedweb_starts, table.refinedweb_ends, table.refinedweb_anywhere)
    )
    found = {
        "refinedweb_starts": starts and rf"^\s*{starts}(?!\w)",
        "refinedweb_ends": ends and rf"(?<!\w){ends}\W*$",
        "refinedweb_anywhere": anywhere and rf"(?<!\w){anywhere}(?!\w)",
    }
    marks = [("c4_citations", _CITATION)] if table.c4_citations else []
    return marks + [(name, re.compile(one, re.IGNORECASE)) for name, one in found.items() if one]


def _any_of(phrases: Sequence[str]) -> str:
    longest_first = sorted(phrases, key=lambda phrase: (-len(phrase), phrase))
    return f"(?:{'|'.join(map(re.escape, longest_first))})" if phrases else ""


def _site(value: object) -> str:
    """The host of a URL, or the text itself; empty for a value that is missing or no text."""
    url = value if isinstance(value, str) else ""
    try:
        return urlsplit(url).hostname or url.lower()
    except ValueError:  # not a URL
        return url.lower()
