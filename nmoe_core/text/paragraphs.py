"""Splits a long text into parts of about equal length, at the ends of paragraphs."""

import unicodedata

# Text after which a cut may be made, best first: the end of a paragraph, a line, a sentence, a
# word.
_ENDS = (("\n\n",), ("\n",), (". ", "! ", "? ", "。", "！", "？", "।"), (" ",))
_REACH = 4


def split_text(text: str, num_parts: int) -> list[str]:
    """At most `num_parts` parts of a text, without the white space at their ends.

    The ideal position of a cut makes equal parts. The cut is at the last end of a paragraph within
    a quarter of a part before the ideal position. If no paragraph ends there, the cut is at the end
    of a line, else of a sentence, else of a word. If none of these is found, the cut is at the
    ideal position, but not before a combining mark.

    >>> split_text("One thing here.\\n\\nAnother one. And more.", 2)
    ['One thing here.', 'Another one. And more.']
    """
    parts = []
    start = 0
    for remaining in range(num_parts, 1, -1):
        length = (len(text) - start) // remaining
        cut = _cut(text, start + length - length // _REACH, start + length)
        parts.append(text[start:cut].strip())
        start = cut
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _cut(text: str, first: int, last: int) -> int:
    """The best position to cut between `first` and `last`."""
    for ends in _ENDS:
        found = max(_after(text, end, first, last) for end in ends)
        if found >= 0:
            return found
    while last > first and unicodedata.combining(text[last]):
        last -= 1
    return last


def _after(text: str, end: str, first: int, last: int) -> int:
    """The position after the last `end` in this range; -1 if there is none."""
    place = text.rfind(end, first, last)
    return place if place < 0 else place + len(end)
