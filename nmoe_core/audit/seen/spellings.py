"""Finds tokens of a vocabulary by the bytes of text that they spell."""

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Mapping


class Spellings:
    """The spelling of each id. The methods find the ids whose spelling equals, begins with, ends
    with or contains a text.

    Built once per vocabulary, in about 0.3 s for 200,000 tokens. BOS and EOS have an empty
    spelling, so that no match crosses the end of a document.
    """

    def __init__(
        self, spelled: Mapping[int, bytes], size: int, without: Container[int | None]
    ) -> None:
        self.of = [b""] * max([size, *(i + 1 for i in spelled)])
        self.ids: dict[bytes, list[int]] = {}
        for i, text in spelled.items():
            if text and i not in without:
                self.of[i] = text
                self.ids.setdefault(text, []).append(i)
        self.longest = max(map(len, self.ids), default=0)
        self._sorted = sorted(self.ids)
        self._reversed = sorted(text[::-1] for text in self.ids)
        self._joined = b"".join(self._sorted)
        self._ends: list[int] = []
        end = 0
        for text in self._sorted:
            end += len(text)
            self._ends.append(end)

    def beginning(self, text: bytes) -> range:
        """Positions, in sorted order, of the spellings that begin with a text."""
        return _beginning(self._sorted, text)

    def ending(self, text: bytes) -> range:
        """Positions, in the order of reversed spellings, of the spellings that end with a text."""
        return _beginning(self._reversed, text[::-1])

    def ids_beginning(self, numbers: range) -> Iterator[int]:
        """The ids at positions of `beginning`."""
        return (i for number in numbers for i in self.ids[self._sorted[number]])

    def ids_ending(self, numbers: range) -> Iterator[int]:
        """The ids at positions of `ending`."""
        return (i for number in numbers for i in self.ids[self._reversed[number][::-1]])

    def some_begins(self, text: bytes) -> bool:
        """Whether a spelling begins with a text."""
        at = bisect_left(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)

    def holding(self, text: bytes) -> dict[int, int]:
        """For each id whose spelling contains a text, the number of occurrences of the text in the
        spelling."""
        found: dict[int, int] = {}
        at = self._joined.find(text)
        while at >= 0:
            number = bisect_right(self._ends, at)
            if at + len(text) <= self._ends[number]:
                for i in self.ids[self._sorted[number]]:
                    found[i] = found.get(i, 0) + 1
            at = self._joined.find(text, at + 1)
        return found


def _beginning(texts: list[bytes], text: bytes) -> range:
    first = bisect_left(texts, text)
    n = len(text)
    return range(first, bisect_right(texts, text, first, key=lambda s: s[:n]))
