"""Finds all occurrences of a sentence in indexed tokens, in every tokenisation.

A sentence inside a text may be tokenised differently from the sentence alone: its first and last
word may share a token with the text around them. So the search does not encode the sentence. Choose
a byte position `p`. Then each occurrence either is inside a single token, or has a token that
spells byte `p - 1` of the sentence. The search looks up every token of the vocabulary that fits one
of these cases in the suffix array. Then the search compares the neighbouring tokens with the rest
of the sentence. Following tokens narrow the range of suffixes; if the range is short, they are read
instead. Preceding tokens are always read. The result is exactly all occurrences in the bytes that
the tokens spell. The search uses the `p` whose tokens are the rarest in the first part, so that it
reads few positions.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from nmoe_core.audit.seen.index_files import Part
from nmoe_core.audit.seen.spellings import Spellings

_MAX_ANCHOR = 48  # bytes
# The number of values of `p` to compare, and below it the number of tokens to sample from the part.
_CHOICES = 12
_SAMPLE = 8192
_MAX_TOKENS = 1000  # limit of tokens per `p`, unless every `p` has more
# The number of positions that can be read in the time of one search, and below it in the time that
# the search takes per id.
_READ_AT_ONCE = 8000
_READ_PER_ID = 40


_Span: TypeAlias = tuple[int, int]
"""Bytes `[start, stop)` of the sentence."""
_Places: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Start and end of the tokens of each occurrence, end exclusive: int64 `[n]` each."""


class _Token(NamedTuple):
    """A token that spells the sentence's bytes `[start, end)`. If start is 0, the token may begin
    before the sentence; if end is the sentence's size, the token may continue after the
    sentence."""

    start: int
    id: int
    end: int


class Sentence:
    """A text to search for, at least one byte long; `find` returns its occurrences in a part."""

    def __init__(self, spellings: Spellings, text: bytes) -> None:
        self._spellings = spellings
        self._text = text
        self._of = spellings.of
        self._inside = spellings.holding(text)
        self._known: dict[int, list[tuple[int, list[int]]]] = {}
        longest = spellings.longest
        size = len(text)
        self._heads = {e: spellings.ending(text[:e]) for e in range(1, min(size, longest + 1))}
        first = max(1, size - longest)
        self._tails = {k: spellings.beginning(text[k:]) for k in range(first, size)}
        self._after = dict[int, dict[int, int]]()
        self._before = dict[int, dict[int, int]]()
        self._crossing: list[_Token] | None = None

    def find(self, part: Part) -> np.ndarray:
        """Start and end of the tokens that spell each occurrence, ascending: int64 `[n, 2]`, end
        exclusive. A sentence that occurs twice in the same tokens is listed twice."""
        if self._crossing is None:
            self._crossing = self._rarest(part)
        suffixes = np.asarray(part.suffixes)
        size = len(self._text)
        found = [np.empty((0, 2), np.int64)]
        ids = [*self._inside, *(token.id for token in self._crossing)]
        ranges = _narrow(part, 0, len(suffixes), 0, ids)
        for (low, high), count in zip(ranges, self._inside.values()):
            at = np.repeat(suffixes[low:high].astype(np.int64), count)
            found.append(np.stack([at, at + 1], axis=1))
        spelled = defaultdict[_Span, list[_Places]](list)
        for (low, high), token in zip(ranges[len(self._inside) :], self._crossing):
            waiting = [(low, high, 1, token.end)] if low < high else []
            while waiting:
                low, high, depth, place = waiting.pop()
                tails = len(self._tails.get(place, ()))
                if place >= size or high - low <= _READ_AT_ONCE + _READ_PER_ID * tails:
                    at = suffixes[low:high].astype(np.int64)
                    spelled[token.start, place].append((at, at + depth))
                    continue
                following = self._following(place)
                more = _narrow(part, low, high, depth, list(following))
                ends = zip(more, following.values())
                waiting += [(a, b, depth + 1, end) for (a, b), end in ends if a < b]
        every = np.concatenate([*found, *self._read(part, spelled)])
        return every[np.lexsort(every.T[::-1])]

    def _rarest(self, part: Part) -> list[_Token]:
        """The tokens that can spell byte `p - 1` but not the complete sentence, for the best
        `p`."""
        stride = len(part.suffixes) // _SAMPLE + 1
        sample = np.asarray(part.tokens)[np.asarray(part.suffixes)[::stride]]  # ascending ids
        best = list[_Token]()
        least = None
        last = min(len(self._text) - 1, _MAX_ANCHOR)
        heads = list(accumulate(len(self._heads.get(e, ())) for e in range(1, len(self._text))))
        tails = list(accumulate(len(self._tails.get(k, ())) for k in range(last)))
        sizes = {
            p: heads[-1] - heads[p - 1] + len(self._heads.get(p, ())) + tails[p - 1]
            for p in range(1, last + 1)
        }
        few = max(_MAX_TOKENS, min(sizes.values(), default=0))
        for p in sorted(sizes, key=sizes.__getitem__)[:_CHOICES]:
            if sizes[p] > few:
                break
            tokens = self._crossing_at(p)
            ids = np.array([token.id for token in tokens], sample.dtype)
            common = np.searchsorted(sample, ids, "right") - np.searchsorted(sample, ids, "left")
            cost = stride * int(common.sum()) + _READ_PER_ID * len(tokens)
            if least is None or cost < least:
                best = tokens
                least = cost
        return best

    def _crossing_at(self, p: int) -> list[_Token]:
        size = len(self._text)
        spellings = self._spellings
        heads = {e: spellings.ids_ending(n) for e, n in self._heads.items() if e >= p}
        tails = {k: spellings.ids_beginning(n) for k, n in self._tails.items() if k < p}
        found = [_Token(0, i, e) for e, ids in heads.items() for i in ids]
        found += [_Token(k, i, size) for k, ids in tails.items() for i in ids]
        for start in range(1, p):
            for end, ids in self._next(start):
                found += [_Token(start, i, end) for i in ids if p <= end < size]
        return found

    def _following(self, place: int) -> dict[int, int]:
        """The ids that can continue the sentence from byte `place`, each with the byte where the
        id's text ends."""
        if place not in self._after:
            size = len(self._text)
            tails = self._tails.get(place, range(0))
            found = {i: end for end, ids in self._next(place) for i in ids}
            found |= dict.fromkeys(self._spellings.ids_beginning(tails), size)
            self._after[place] = found
        return self._after[place]

    def _preceding(self, place: int) -> dict[int, int]:
        """The ids whose text can end before byte `place` of the sentence, each with the byte where
        its text starts."""
        if place not in self._before:
            text = self._text
            spellings = self._spellings
            heads = self._heads.get(place, range(0))
            found = dict.fromkeys(spellings.ids_ending(heads), 0)
            for start in range(max(1, place - spellings.longest), place):
                found |= dict.fromkeys(spellings.ids.get(text[start:place], ()), start)
            self._before[place] = found
        return self._before[place]

    def _reached(self, place: int, ids: np.ndarray, is_next: bool) -> np.ndarray:
        """For each id: if `is_next`, the byte of the sentence where the id's text ends, given that
        it starts at `place`; else the byte where the text starts, given that it ends at `place`; -1
        if the text does not match the sentence. If the vocabulary has more candidates than there
        are ids, as for a single letter, each id is compared directly."""
        cut = (self._tails if is_next else self._heads).get(place, ())
        if len(cut) < len(ids):
            known = self._following(place) if is_next else self._preceding(place)
        else:
            reach = self._stop if is_next else self._start
            known = {i: reach(place, i) for i in set(ids.tolist())}
        return _looked_up(known, ids, len(self._of))

    def _stop(self, place: int, i: int) -> int:
        text = self._text
        spelled = self._of[i]
        if spelled and text.startswith(spelled, place):
            return place + len(spelled)
        return len(text) if spelled.startswith(text[place:]) else -1

    def _start(self, place: int, i: int) -> int:
        text = self._text
        spelled = self._of[i]
        if spelled and text.endswith(spelled, 0, place):
            return place - len(spelled)
        return 0 if spelled.endswith(text[:place]) else -1

    def _next(self, place: int) -> list[tuple[int, list[int]]]:
        """The ids whose text matches the sentence from byte `place` on, grouped by the byte where
        the text ends."""
        if place not in self._known:
            found = []
            text = self._text
            spellings = self._spellings
            for end in range(place + 1, len(text) + 1):
                piece = text[place:end]
                if not spellings.some_begins(piece):
                    break
                if piece in spellings.ids:
                    found.append((end, spellings.ids[piece]))
            self._known[place] = found
        return self._known[place]

    def _read(self, part: Part, spelled: defaultdict[_Span, list[_Places]]) -> Iterator[np.ndarray]:
        """Extend each span of matched bytes to the complete sentence by reading neighbouring
        tokens, and yield the occurrences. If spans become equal, they are extended together. The
        EOS of a document spells no text and is the last token of a part, so no token beyond a
        document is read."""
        tokens = np.asarray(part.tokens)
        size = len(self._text)
        # Spans are extended forward to the end of the sentence, then backward.
        waiting = [(stop, -start) for start, stop in spelled]
        heapq.heapify(waiting)
        while waiting:
            stop, start = heapq.heappop(waiting)
            own = spelled.pop((-start, stop))
            start, first, end = -start, *map(np.concatenate, zip(*own))
            if stop >= size and start == 0:
                yield np.stack([first, end], axis=1)
                continue
            is_next = stop < size
            ids = tokens[end if is_next else first - 1]
            places = self._reached(stop if is_next else start, ids, is_next)
            for place in np.unique(places[places >= 0]).tolist():
                own = places == place
                if is_next:
                    span = (start, place)
                    grown = (first[own], end[own] + 1)
                else:
                    span = (place, stop)
                    grown = (first[own] - 1, end[own])
                if span not in spelled:
                    heapq.heappush(waiting, (span[1], -span[0]))
                spelled[span].append(grown)


def _looked_up(known: Mapping[int, int], ids: np.ndarray, num_ids: int) -> np.ndarray:
    """The value of each id, or -1 if `known` lacks the id; uses a table of all ids if this is
    faster."""
    if len(ids) < _READ_AT_ONCE:
        return np.array([known.get(i, -1) for i in ids.tolist()], np.int64)
    table = np.full(num_ids, -1)
    table[list(known)] = list(known.values())
    return table[ids]


def _narrow(part: Part, low: int, high: int, depth: int, ids: Sequence[int]) -> list[list[int]]:
    """For each id, find the range of suffixes whose next token is this id, among the suffixes
    `[low, high)`, whose first `depth` tokens are equal. All ids are searched together, so each step
    of the binary search is a few numpy calls."""
    tokens = np.asarray(part.tokens)
    suffixes = np.asarray(part.suffixes)
    wanted = np.array(ids, np.int64)
    # For each id, find its first position, and the first position after its last.
    wanted = np.concatenate([wanted, wanted + 1])
    first = np.full(len(wanted), low)
    end = np.full(len(wanted), high)
    for _ in range((high - low).bit_length()):
        middle = (first + end) // 2
        at = suffixes[np.minimum(middle, high - 1)].astype(np.int64) + depth
        is_before = (tokens[at] < wanted) & (first < end)
        first = np.where(is_before, middle + 1, first)
        end = np.where(is_before, end, middle)
    return first.reshape(2, -1).T.tolist()
