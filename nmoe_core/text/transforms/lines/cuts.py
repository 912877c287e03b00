"""Edits that remove lines and parts of lines from texts."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from nmoe_core.text.transforms.edits import Edit
from nmoe_core.text.transforms.lines.kernel import Lines


def cuts(
    texts: Sequence[str], lines: Lines, firsts: np.ndarray, lasts: np.ndarray, rules: Iterable[str]
) -> Iterator[tuple[int, list[Edit]]]:
    """Edits that remove lines, one for each run of them, by the number of the text.

    If a blank line or nothing is before removed lines, the blank lines after them are removed too,
    so that one separator stays; at the end of a text, the separator before them is removed.

    Args:
        texts: The texts.
        lines: Their lines.
        firsts: int64, ascending: the first line of each run.
        lasts: int64: its last line.
        rules: Its rule.
    """
    of_texts = lines.texts_of(firsts)
    text_ends = lines.bounds[of_texts + 1]
    # Runs that follow each other without a line between them are one group.
    is_first = (firsts == lines.bounds[of_texts]) | (firsts != np.append(-1, lasts[:-1] + 1))
    group = np.cumsum(is_first) - 1
    opens = firsts[is_first]
    is_at_start = opens == lines.bounds[of_texts[is_first]]
    is_after_blank = (is_at_start | (lines.solid[opens - 1] == 0))[group]
    is_solid = lines.solid > 0
    is_solid[firsts] = True  # a line of marks of citations alone counts as blank
    solid = np.append(np.flatnonzero(is_solid), len(is_solid))
    following = np.minimum(solid[np.searchsorted(solid, lasts + 1)], text_ends)
    stops = np.where(is_after_blank, following, lasts + 1)
    ends = np.append(lines.starts, 0)[stops]
    chars = np.array([len(text) for text in texts], np.int64)[of_texts]
    ends = np.where(stops == text_ends, chars, ends)
    edits = [*map(Edit, lines.starts[firsts].tolist(), ends.tolist(), rules)]
    bounds = np.flatnonzero(np.diff(of_texts, prepend=-1)).tolist()
    for first, last in zip(bounds, [*bounds[1:], len(edits)]):
        i = int(of_texts[first])
        of_text = edits[first:last]
        _cut_end(texts[i], of_text)
        yield i, of_text


def _cut_end(text: str, edits: list[Edit]) -> None:
    """If the last lines of a text are removed, remove the white space before them too."""
    run = len(edits) - 1
    if edits[run].end < len(text):
        return
    while run and edits[run - 1].end == edits[run].start:
        run -= 1
    start = len(text[: edits[run].start].rstrip())
    start = max(start, edits[run - 1].end if run else 0)
    edits[run] = Edit(start, edits[run].end, edits[run].rule)


def joined(whole: Sequence[Edit], inner: Sequence[Edit]) -> list[Edit]:
    """Edits that remove lines and edits inside other lines of a text, in order. White space before
    removed lines, at the end of a text, may be a part of both."""
    edits = sorted([*whole, *inner])
    for k in range(1, len(edits)):
        if edits[k].start < edits[k - 1].end:
            edits[k] = edits[k]._replace(start=edits[k - 1].end)
    return edits


def without_overlaps(edits: list[Edit]) -> list[Edit]:
    """Edits in order. Of edits that overlap, the first stays; of those with one start, the
    longest."""
    if len(edits) < 2:
        return edits
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda one: (one.start, -one.end)):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept
