"""All places of a sentence in indexed tokens, whatever tokens spell it there.

The ids that a tokenizer gives a sentence alone are seldom those that spell it inside a text: its
first and last word may share a token with what stands around it. So no ids are guessed. Any
spelling in a text begins a token at some place of the sentence: at one of the few places where a
token may begin on or after `p`. From each of these every token of the vocabulary that goes on with
the sentence is looked up among the suffixes, token by token; ranges soon become empty, or so small
that each of their places is read. What stands before is read backwards. Nothing is missed and
nothing else is found, by the bytes that tokens stand for; `p` is where the fewest places have to be
tried, which in a text of words is the end of one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from nmoe_core.seen.files import Part
from nmoe_core.seen.spellings import Spellings

_FEW = 16  # places that are read at once rather than told apart by one token more
_MAX_ANCHOR = 48  # bytes


class Sentence:
    """A text to look for, at least one byte; `find` gives its places in a part of an index."""

    def __init__(self, spellings: Spellings, text: bytes) -> None:
        self._spellings, self._text = spellings, text
        self._of, self._known = spellings.of, dict[int, list[tuple[int, list[int]]]]()
        self._inside = spellings.holding(text)
        # Places of a last token that begins with the rest of the sentence.
        first = max(1, len(text) - spellings.longest)
        ends = ((k, spellings.beginning(text[k:])) for k in range(first, len(text)))
        self._tails = {k: numbers for k, numbers in ends if numbers}
        self._from, self._starts = self._fewest_starts()

    def find(self, part: Part) -> list[tuple[int, int]]:
        """First token, and the one after the last, of those that spell each occurrence, ascending.
        A sentence that stands twice in the same tokens is there twice."""
        found = []
        for token, count in self._inside.items():
            low, high = _narrow(part, 0, len(part.suffixes), 0, token)
            found += [(at, at + 1) for at in part.suffixes[low:high] for _ in range(count)]
        waiting = [(start, start, 0, len(part.suffixes), 0) for start in self._starts]
        while waiting:
            start, place, low, high, depth = waiting.pop()
            tails = self._tails.get(place, range(0))
            if high - low <= max(_FEW, len(tails)):
                found += self._read(part, part.suffixes[low:high], start, place, depth)
                continue
            for token in self._spellings.ids_at(tails):
                a, b = _narrow(part, low, high, depth, token)
                found += self._read(part, part.suffixes[a:b], start, place, depth)
            for after, tokens in self._next(place):
                for token in tokens if after < len(self._text) else ():
                    a, b = _narrow(part, low, high, depth, token)
                    if a < b:
                        waiting.append((start, after, a, b, depth + 1))
        return sorted(found)

    def _read(
        self, part: Part, places: memoryview, start: int, place: int, depth: int
    ) -> Iterator[tuple[int, int]]:
        """The occurrences among places that have `depth` tokens which spell the sentence from
        `start` to `place`."""
        for at in places:
            end = self._read_on(part, at + depth, place)
            first = self._read_back(part, at, start) if end else -1
            if first >= 0:
                yield first, end

    def _read_on(self, part: Part, at: int, place: int) -> int:
        """The token after those that spell the rest of the sentence; 0 where others follow."""
        text, of = self._text, self._of
        while place < len(text):
            spelled = of[part.tokens[at]]
            if not spelled or not text.startswith(spelled[: len(text) - place], place):
                return 0
            place += len(spelled)
            at += 1
        return at

    def _read_back(self, part: Part, at: int, place: int) -> int:
        """The first of the tokens before `at` that spell the beginning; -1 where others stand."""
        text, of = self._text, self._of
        while place > 0:
            at -= 1
            spelled = of[part.tokens[at]] if at >= 0 else b""
            if not spelled or not text.endswith(spelled[-place:], 0, place):
                return -1
            place -= len(spelled)
            if place >= self._from:  # that token begins first, and is a start of its own
                return -1
        return at

    def _next(self, place: int) -> list[tuple[int, list[int]]]:
        """The tokens that the sentence goes on with at a place, by the place where they end."""
        if place not in self._known:
            found, text, spellings = [], self._text, self._spellings
            for end in range(place + 1, len(text) + 1):
                piece = text[place:end]
                if not spellings.some_begins(piece):
                    break
                if piece in spellings.ids:
                    found.append((end, spellings.ids[piece]))
            self._known[place] = found
        return self._known[place]

    def _fewest_starts(self) -> tuple[int, list[int]]:
        """A place `p` and those from `p` on where the first token from `p` on may begin, without
        the sentence's start and end; of all `p` the one that has the fewest.

        No token that begins before `p` may reach the sentence's end, or else begin none after it.
        """
        size = len(self._text)
        last = min([size - 1, _MAX_ANCHOR, max(1, size // 2), *self._tails])
        starts = {p: {p} for p in range(1, last + 1)}
        for end in range(2, min(size, self._spellings.longest)):
            if self._spellings.some_ends(self._text[:end]):
                for p in range(1, min(end, last + 1)):
                    starts[p].add(end)
        for begin in range(last):
            for end, _ in self._next(begin):
                for p in range(begin + 1, min(end, last + 1)):
                    starts[p] |= {end} - {size}
        return min(
            ((p, sorted(places)) for p, places in starts.items()),
            key=lambda found: len(found[1]),
            default=(0, []),
        )


def _narrow(part: Part, low: int, high: int, depth: int, token: int) -> tuple[int, int]:
    """Of the suffixes `[low, high)`, alike in `depth` tokens, the range that goes on with one."""
    tokens, suffixes = part.tokens, part.suffixes

    def following(at: int) -> int:
        return tokens[at + depth]

    low = bisect_left(suffixes, token, low, high, key=following)
    if low == high or tokens[suffixes[low] + depth] != token:
        return low, low
    return low, bisect_right(suffixes, token, low, high, key=following)
