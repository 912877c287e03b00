"""Removes copyright and licence notices from the comments at the start of source code.

Comments before the first code are read, in the usual languages. In each, paragraphs with the words
of a licence go, and lines with a copyright notice; the rest of a comment stays, and a comment with
nothing else in it goes as a whole. Only the first 32,768 characters of a text are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from nmoe_core.config.transforms import LicenceHeaderTable
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.edits import Edit

_MAX_CHARS = 2**15
_BLOCKS = (
    ("/*", "*/"),
    ("<!--", "-->"),
    ('"""', '"""'),
    ("'''", "'''"),
    ("(*", "*)"),
    ("{-", "-}"),
)
_DIRECTIVE = "!|include|define|undef|if|else|elif|endif|pragma|import|error|region"
_LINES = (
    re.compile(rf"[ \t]{{0,8}}#(?!{_DIRECTIVE})"),
    re.compile(r"[ \t]{0,8}(?://|;|%)"),
    re.compile(r"[ \t]{0,8}--(?!-$)", re.MULTILINE),
)
# Lines that may stand before a header.
_PROLOGUE = re.compile(
    r"#!.*|#.{0,9}(?:-\*-|coding[:=]|vim?:).*|<\?(?:php|xml.*)|<!DOCTYPE.*|[\"']use strict[\"'];?"
    r"|@charset.*|[ \t]+"
)
_MARKS = re.compile(r"[ \t]*(?:[*#;%!]+|//+[!/]*|--+)?[ \t]*")
_LICENCE = re.compile("licen[cs]e", re.IGNORECASE)
_MAX_BETWEEN = 8  # words of a paragraph that goes with the paragraphs of a licence around it
_SPDX = "SPDX-License-Identifier:"
_NOTICE = re.compile(
    r"copyright\s*(?:\(c\)|©|:|\d{4}|by\b|the\b|\w+ \d{4}|holder)|(?:\(c\)|©)\s*(?:copyright|\d{4})"
    r"|^[@:(]*copyright\b|^(?:original )?copyright \w|all rights reserved|spdx-"
    r"|^[@:]?licen[cs]e\s*:|^@licen[cs]e\b",
    re.IGNORECASE,
)
_TERMS = re.compile(
    r"licen[cs]ed (?:under|to (?:the|psf|you))|(?:released|distributed?|available|covered|provided)"
    r" (?:under|by) (?:the )?(?:terms|[\w.+\- ]{0,40}licen[cs]e)|permission is hereby granted"
    r"|permission is granted to|permission to use, |redistribution and use in"
    r"|redistributions? (?:in binary|of source)|without (?:even the implied |any )?warrant"
    r"|(?:provided|basis|on an) [\"'`]{0,2}as[ -]is|as[ -]is[\"'`]{1,2} (?:and|basis|without)"
    r"|general public licen[cs]e|/licenses/|governed by (?:an?|the) [\w\- ]{0,40}licen[cs]e"
    r"|(?:see|in|read) (?:the )?(?:accompanying )?(?:file )?[\"'`]{0,2}(?:licen[cs]e|copying)\b"
    r"|neither the names? of|free software[;:,]? |copyright notice|(?:in|into) the public domain"
    r"|may not use this (?:file|work|software)|provided by the (?:copyright|regents|author)"
    r"|liable for any|implied warrant|may not be removed or altered|must not be misrepresented"
    r"|must be plainly marked|subject to the following conditions|licen[cs]e information\b",
    re.IGNORECASE,
)


class _Line(NamedTuple):
    """A line of a comment: where it starts and ends, and where its content does."""

    start: int
    end: int
    first: int
    last: int


class _Comment(NamedTuple):
    start: int
    lines: list[_Line]
    is_block: bool


class LicenceHeader:
    """The transform `licence_header`."""

    def __init__(self, table: LicenceHeaderTable) -> None:
        self._keeps_spdx = table.keep_spdx

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The notices of each text that has any, by its number."""
        found = {i: [*self._of(text[:_MAX_CHARS])] for i, text in enumerate(batch.texts)}
        return {i: edits for i, edits in found.items() if edits}

    def _of(self, text: str) -> Iterator[Edit]:
        place = 0
        while (comment := _comment(text, place)) is not None:
            yield from self._notices(text, comment)
            place = _skipped(text, comment.lines[-1].end)

    def _notices(self, text: str, comment: _Comment) -> Iterator[Edit]:
        """Edits of one comment."""
        lines = comment.lines
        contents = [text[line.first : line.last] for line in lines]
        is_notice = _notices(contents)
        if self._keeps_spdx:
            is_notice = [one and _SPDX not in text for one, text in zip(is_notice, contents)]
        if not any(is_notice):
            return
        if not any(_has_words(one) for one, goes in zip(contents, is_notice) if not goes):
            yield Edit(comment.start, _skipped(text, lines[-1].end), "licence")
            return
        for goes, group in groupby(range(len(lines)), is_notice.__getitem__):
            if goes:
                numbers = [*group]
                yield _cut(comment, contents, numbers[0], numbers[-1])


def _cut(comment: _Comment, contents: Sequence[str], i: int, j: int) -> Edit:
    """An edit that takes some lines out of a comment, and the empty lines after them."""
    lines = comment.lines
    if j == len(lines) - 1:
        return Edit(lines[i - 1].end, lines[j].last, "licence")
    while j + 2 < len(lines) and not contents[j + 1]:
        j += 1
    is_at_opener = i == 0 and comment.is_block
    return Edit(lines[i].start, lines[j].end if is_at_opener else lines[j + 1].start, "licence")


def _notices(contents: Sequence[str]) -> list[bool]:
    """Which lines of a comment belong to a notice."""
    is_notice = [False] * len(contents)
    short: list[int] = []  # lines of short paragraphs since the last paragraph of a licence
    for has_words, group in groupby(range(len(contents)), lambda i: _has_words(contents[i])):
        numbers = [*group]
        if not has_words:
            continue
        notices = [i for i in numbers if _NOTICE.search(contents[i])]
        words = " ".join(contents[i] for i in numbers)
        if _TERMS.search(words):
            # A paragraph may begin with a line on the file, before the copyright.
            first = notices[0] if notices else numbers[0]
            before = " ".join(contents[i] for i in range(numbers[0], first))
            first = numbers[0] if _LICENCE.search(before) else first
            notices = [*short, *range(first, numbers[-1] + 1)]
        if notices:
            short = []
            for i in notices:
                is_notice[i] = True
        elif any(is_notice) and words.count(" ") < _MAX_BETWEEN:
            short += numbers
        else:
            short = []
    return is_notice


def _has_words(content: str) -> bool:
    return any(map(str.isalnum, content))


def _skipped(text: str, place: int) -> int:
    """The place after white space."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _comment(text: str, place: int) -> _Comment | None:
    """The comment at a place, after lines that may stand before it; None if there is
    code instead, or the text is cut within the comment."""
    while (found := _PROLOGUE.match(text, place)) and found.end() > place:
        place = _skipped(text, found.end())
    for opener, closer in _BLOCKS:
        if text.startswith(opener, place):
            end = text.find(closer, place + len(opener))
            if end < 0:
                return None
            lines = _block(text, place + len(opener), end, len(closer))
            return _Comment(place, lines, is_block=True)
    for line in _LINES:
        if line.match(text, place):
            return _Comment(place, _line_comment(text, place, line), is_block=False)
    return None


def _block(text: str, place: int, end: int, closer_chars: int) -> list[_Line]:
    """The lines of a block comment, between its opener and closer."""
    lines = []
    start = place
    while start <= end:
        stop = text.find("\n", start, end)
        stop = end if stop < 0 else stop
        found = _MARKS.match(text, start, stop)
        first = found.end() if found else start
        lines.append(_Line(start, stop, first, first + len(text[first:stop].rstrip())))
        start = stop + 1
    lines[-1] = lines[-1]._replace(end=end + closer_chars)
    return lines


def _line_comment(text: str, place: int, marker: re.Pattern[str]) -> list[_Line]:
    lines = []
    while marker.match(text, place):
        stop = text.find("\n", place)
        stop = len(text) if stop < 0 else stop
        found = _MARKS.match(text, place, stop)
        first = found.end() if found else place
        lines.append(_Line(place, stop, first, first + len(text[first:stop].rstrip())))
        place = stop + 1
    return lines
