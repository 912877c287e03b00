"""Edits that remove lines and parts of lines from a text."""

import re
from collections.abc import Iterable

from nmoe_core.text.transforms.edits import Edit

Span = tuple[int, int, str]
"""Lines to remove: the start of the first, the end of the last with its line end, and the rule."""
_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)+")


def cuts(text: str, removed: Iterable[Span]) -> list[Edit]:
    """Edits that remove lines, given in order.

    If a blank line or nothing is before removed lines, the blank lines after them are removed too,
    so that one separator stays; at the end of a text, the separator before them is removed.
    """
    edits: list[Edit] = []
    run = 0  # number of the first edit of these consecutive lines
    run_end = -1
    is_after_blank = False
    for start, end, rule in removed:
        if start != run_end:
            run = len(edits)
            is_after_blank = _is_after_blank(text, start)
        if (
            is_after_blank
            and text[end : end + 1].isspace()
            and (blank := _BLANK_LINES.match(text, end))
        ):
            end = blank.end()
        edits.append(Edit(start, end, rule))
        run_end = end
    if run_end == len(text):
        first = edits[run]
        start = len(text[: first.start].rstrip())
        edits[run] = first._replace(start=max(start, edits[run - 1].end if run else 0))
    return edits


def _is_after_blank(text: str, start: int) -> bool:
    """Whether the line at `start` is the first, or follows a blank line."""
    if start < 2 or text[start - 2] == "\n":
        return True
    if not text[start - 2].isspace():
        return False
    return not text[text.rfind("\n", 0, start - 1) + 1 : start].strip()


def with_inner(edits: list[Edit], inner: Iterable[Edit]) -> list[Edit]:
    """The edits of whole lines with those of parts of lines that do not overlap earlier ones."""
    inner = list(inner)
    if not inner:
        return edits
    merged: list[Edit] = []
    for edit in sorted([*edits, *inner], key=lambda one: (one.start, -one.end)):
        if not merged or edit.start >= merged[-1].end:
            merged.append(edit)
    return merged
