"""Edits of a text: spans that are replaced, how they are applied and how they are undone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

# Two texts are compared line by line if the number of pairs of lines is below this limit; the
# comparison takes quadratic time.
_MAX_LINE_PAIRS = 10**6


class Edit(NamedTuple):
    """A span of a text that is replaced. Offsets count characters."""

    start: int
    end: int
    rule: str
    """Name of the rule that asked for it, for example `email`."""
    replacement: str = ""


class Change(NamedTuple):
    """An edit as it is recorded; its offsets refer to the text that its transform was given."""

    step: int
    """Number of the transform among those of the source, from 0."""
    transform: str
    rule: str
    start: int
    end: int
    removed: str | None
    """The text of the span; None if it was not kept."""
    replacement: str


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text after its edits, which are sorted and do not overlap."""
    parts = []
    last = 0
    for edit in edits:
        parts.append(text[last : edit.start])
        parts.append(edit.replacement)
        last = edit.end
    parts.append(text[last:])
    return "".join(parts)


def original(text: str, changes: Sequence[Change]) -> str | None:
    """The text before its changes, in the order in which they were recorded; None if a removed
    text was not kept."""
    if any(change.removed is None for change in changes):
        return None
    steps = [list(group) for _, group in groupby(changes, attrgetter("step"))]
    for of_step in reversed(steps):
        text = _undone(text, of_step)
    return text


def edits_between(before: str, after: str, rule: str) -> list[Edit]:
    """Edits that turn one text into the other: one for each group of lines that differs, without
    the characters that both groups start or end with."""
    if before == after:
        return []
    if before.rstrip() == after:
        return [Edit(len(after), len(before), rule)]
    if before.lstrip() == after:
        return [Edit(0, len(before) - len(after), rule)]
    old = before.splitlines(keepends=True)
    new = after.splitlines(keepends=True)
    first = _num_equal(old, new)
    last = _num_equal(old[first:][::-1], new[first:][::-1])
    starts = [sum(map(len, old[:first]))]
    old = old[first : len(old) - last]
    new = new[first : len(new) - last]
    if len(old) * len(new) > _MAX_LINE_PAIRS:
        return [_narrowed("".join(old), "".join(new), starts[0], rule)]
    for line in old:
        starts.append(starts[-1] + len(line))
    found = []
    for tag, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            found.append(_narrowed("".join(old[i:j]), "".join(new[k:m]), starts[i], rule))
    return found


def _num_equal(one: Sequence[str], other: Sequence[str]) -> int:
    """Number of lines that both start with."""
    pairs = enumerate(zip(one, other))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _undone(text: str, changes: Sequence[Change]) -> str:
    parts = []
    last = 0
    moved = 0  # characters that the changes so far added to the text
    for change in changes:
        start = change.start + moved
        parts.append(text[last:start])
        parts.append(change.removed or "")
        last = start + len(change.replacement)
        moved += len(change.replacement) - (change.end - change.start)
    parts.append(text[last:])
    return "".join(parts)


def _narrowed(before: str, after: str, offset: int, rule: str) -> Edit:
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    replacement = after[start : len(after) - end]
    return Edit(offset + start, offset + len(before) - end, rule, replacement)


def _common(one: str, other: str) -> int:
    """Number of characters that both texts start with, by halving: comparing slices is fast."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
