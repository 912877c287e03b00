"""A file that is one JSON array, or one JSON object: its items, one after the other.

Brackets and texts are followed only to find where an item ends, so memory is one item, up to the
limit of a record. The item's own bytes are then parsed as a line of JSON lines is.
"""

import io
import re
from collections.abc import Iterator

from nmoe_core.base.errors import SourceError

_PIECE_CHARS = 2**16
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_NEXT = re.compile(r'["\[\]{},]')
# The rest of a text, up to its quote or to the end of what is held; no part is tried twice.
_TEXT = re.compile(r'(?:[^"\\\r\n]++|\\[^\r\n])*+')
_ENDS = {ord("\n"): " ", ord("\r"): " "}


class _Items:
    """The text of a file that is not used yet; places are counted from its start."""

    def __init__(self, text: io.TextIOBase, limit: int, where: str) -> None:
        self._text = text
        self._limit = limit
        self._where = where
        self._held = ""
        self._start = 0
        self._offset = 0  # characters of the file before `_held`

    def more(self) -> bool:
        """Hold more of the file; False at its end. Raises SourceError if an item is longer than
        the limit (E-SOURCE-RECORD)."""
        self._held = self._held[self._start :]
        self._offset += self._start
        self._start = 0
        if len(self._held) > self._limit:
            raise SourceError(
                "an item of a JSON array is longer than the limit of this source",
                where=f"{self._where}: character {self._offset}",
                expected=f"at most {self._limit // 2**20} MiB",
                do="split or remove it, or raise max_record_mb of this source",
                code="E-SOURCE-RECORD",
            )
        piece = self._text.read(max(_PIECE_CHARS, len(self._held)))
        self._held += piece
        return bool(piece)

    def take(self, count: int) -> str:
        """Take characters from the start."""
        taken = self._held[self._start : self._start + count]
        self._start += count
        return taken

    def next_char(self) -> str:
        """The next character that is not white space; "" at the end of the file."""
        while True:
            if found := _NOT_SPACE.search(self._held, self._start):
                self._start = found.start()
                return found[0]
            self._start = len(self._held)
            if not self.more():
                return ""

    def rest_of_line(self) -> str:
        """Take the characters up to a line end."""
        while (end := self._held.find("\n", self._start)) < 0 and self.more():
            pass
        return self.take(end - self._start if end >= 0 else len(self._held))

    def wrong(self, what: str) -> SourceError:
        """The error for a file that is not JSON."""
        return SourceError(
            f"not JSON: {what}",
            where=f"{self._where}: character {self._offset + self._start}",
            found=repr(self._held[self._start :][:20]),
            do="correct the file, or leave it out with `exclude`",
            code="E-SOURCE-TORN",
        )

    def item(self) -> str:
        """Take the item at the start: up to a comma or bracket that is not its own."""
        depth = 0
        at = 0
        while True:
            found = _NEXT.search(self._held, self._start + at)
            if found is None:
                at = len(self._held) - self._start
                if not self.more():
                    raise self.wrong("the file ends inside of a value")
                continue
            mark = found[0]
            at = found.start() - self._start
            if depth == 0 and mark in ",]}":
                return self.take(at)
            at += 1
            if mark == '"':
                at = self._text_end(at)
            elif mark != ",":
                depth += 1 if mark in "[{" else -1
            if depth == 0 and mark in "]}":
                return self.take(at)

    def _text_end(self, at: int) -> int:
        """The place after the quote that ends a text which is open at `at`."""
        while True:
            found = _TEXT.match(self._held, self._start + at)
            at = (found.end() if found else 0) - self._start
            rest = self._held[self._start + at :][:2]
            if rest[:1] == '"':
                return at + 1
            if rest[:1] in ("\r", "\n") or len(rest) == 2:
                raise self.wrong("a text has a line end")
            if not self.more():
                raise self.wrong("the file ends inside of a text")


def json_items(text: io.TextIOBase, limit: int, where: str) -> Iterator[str]:
    """The items of a JSON array, or one JSON object, as lines of JSON.

    What follows the array or object is passed on as lines, each of which may be a record.

    Raises:
        SourceError: An item is longer than `limit` characters (E-SOURCE-RECORD), or the file is
            not JSON or ends early (E-SOURCE-TORN).
    """
    items = _Items(text, limit, where)
    if items.next_char() == "[":
        items.take(1)
        yield from _of_array(items)
    else:
        yield _line(items)
    while items.next_char():
        yield items.rest_of_line() + "\n"


def _of_array(items: _Items) -> Iterator[str]:
    if items.next_char() == "]":
        items.take(1)
        return
    mark = ","
    while mark != "]":
        if items.next_char() in (",", "]", "}", ""):
            raise items.wrong("an item is missing")
        yield _line(items)
        mark = items.next_char()
        if mark not in (",", "]"):
            raise items.wrong("no comma or bracket after an item")
        items.take(1)


def _line(items: _Items) -> str:
    """The next item, as a line."""
    return items.item().translate(_ENDS) + "\n"
