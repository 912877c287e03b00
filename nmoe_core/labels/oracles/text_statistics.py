"""Statistics of a text that do not depend on its length.

Each statistic is computed on at most eight windows of 400 characters, spread evenly over the text,
and averaged over the windows in which it is defined. So short and long texts of one kind get
similar values, and at most 3,200 characters of a text are read. Shuffling the words of a text
changes six statistics: `overlap`, `repetition`, `indentation`, `nesting`, `depth`, `compression`.
"""

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterator

WINDOW_CHARS = 400
MAX_WINDOWS = 8
BLOCK_BYTES = 256
VARIETY_WORDS = 25
LONG_WORD_CHARS = 8
SHORT_WORD_CHARS = 3
PROSE_WORDS = 6
MIN_OTHER_WORDS = 3

# One ideograph or kana counts as a word: without spaces, a whole line would be one word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_]+")
_FIRST_IDEOGRAPH = "\u3040"
_SEGMENT_END = re.compile(r"(?<=[.!?:;。！？])\s+|\n+")
_SENTENCE_END = re.compile(r"[.!?]['\")\]]*[ \t]+(\S)")
_SEPARATOR = re.compile(r"[,;:](.|$)", re.DOTALL)
_BRACKET = re.compile(r"[()\[\]{}]")
_OPENER_OF = {")": "(", "]": "[", "}": "{"}
_GUIDANCE = frozenset(
    """
    because therefore however example examples note see use used uses using return returns when if
    must should can may default usage means such how why which what where this following required
    optional allows provides
    """.split()  # noqa: SIM905  (a list of 40 strings would take 40 lines)
)
# Words that are frequent in English prose, and rare in source code and names.
_ENGLISH = frozenset(
    """
    the of and to in is that for it with as are on be this not by or from if you we
    """.split()  # noqa: SIM905
)
_OTHERS = frozenset(
    """
    und ist nicht ein eine dem auf wird sich oder auch zu von sind werden durch
    une dans pour qui pas avec vous cette sont être du aux
    el los las por esta pero está como más gli che della dei nel questo sono è
    uma não das em mais você ao het een dat niet zijn voor aan van wordt deze
    się nie jest że oraz dla który och att det som på för inte till
    og er ikke af til med har ved bir bu için ile olarak daha çok olan veya
    yang dan untuk dengan pada tidak dari adalah dalam akan atau
    là và của các có được cho không một trong này với những bạn để khi
    je jako není jsou které nebo při jeho și în este care pentru din sau sunt
    """.split()  # noqa: SIM905
)


def measure(text: str) -> dict[str, float]:
    """The statistics of `text` by name; statistics that are undefined for it are omitted.

    All are shares in 0..1 except `segment_words` (words), `depth` (brackets) and `compression`,
    which may be more than 1.
    """
    totals: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for window in windows(text):
        for name, value in _window_statistics(window):
            totals[name] = totals.get(name, 0.0) + value
            counts[name] += 1
    return {name: total / counts[name] for name, total in totals.items()}


def latin_share(text: str) -> float:
    """Share of Latin letters among the letters of the windows; 1.0 without letters."""
    letters = [char for window in windows(text) for char in window if char.isalpha()]
    # Letters below U+0250 and from U+1E00 to U+1EFF are Latin; in between are IPA, Greek, Cyrillic
    # and others.
    num_latin = sum(char < "\u0250" or "\u1e00" <= char <= "\u1eff" for char in letters)
    return num_latin / len(letters) if letters else 1.0


def other_language_share(text: str) -> float:
    """Share of other languages' words among the frequent words in the windows; 0.0 if there are
    fewer than `MIN_OTHER_WORDS` words of other languages."""
    words = [word for window in windows(text) for word in _WORD.findall(window.lower())]
    others = sum(word in _OTHERS for word in words)
    english = sum(word in _ENGLISH for word in words)
    return others / (others + english) if others >= MIN_OTHER_WORDS else 0.0


def windows(text: str) -> list[str]:
    """The windows of `text`, each of `WINDOW_CHARS` characters; a short text is one window."""
    if not text.strip():
        return []
    num_windows = min(MAX_WINDOWS, -(-len(text) // WINDOW_CHARS))
    if num_windows == 1:
        return [text]
    last = len(text) - WINDOW_CHARS
    starts = [last * i // (num_windows - 1) for i in range(num_windows)]
    return [text[start : start + WINDOW_CHARS] for start in starts]


def _window_statistics(window: str) -> Iterator[tuple[str, float]]:
    words = [word.lower() for word in _WORD.findall(window)]
    yield from _word_statistics(words)
    yield from _segment_statistics(window)
    yield from _line_statistics([line for line in window.split("\n") if line.strip()])
    yield from _punctuation_statistics(window)
    yield from _bracket_statistics(window)
    num_visible = sum(map(len, window.split()))
    if num_visible:
        yield "symbols", 1 - sum(map(len, words)) / num_visible
        # Collapse white space, so that indents do not count. Cut to a fixed size, because a longer
        # block compresses better.
        block = " ".join(window.split()).encode("utf-8", "replace")[:BLOCK_BYTES]
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        yield "compression", len(deflate.compress(block) + deflate.flush()) / len(block)


def _word_statistics(words: list[str]) -> Iterator[tuple[str, float]]:
    # Exclude ideographs, which have no meaningful length.
    spelled = [len(word) for word in words if word < _FIRST_IDEOGRAPH]
    if spelled:
        yield "guidance", sum(word in _GUIDANCE for word in words) / len(spelled)
        yield "short_words", sum(n <= SHORT_WORD_CHARS for n in spelled) / len(spelled)
        yield "long_words", sum(n >= LONG_WORD_CHARS for n in spelled) / len(spelled)
    # Use runs of a fixed number of words, because the share of distinct words falls with length.
    starts = range(0, len(words) - VARIETY_WORDS + 1, VARIETY_WORDS)
    if starts:
        distinct = sum(len(set(words[i : i + VARIETY_WORDS])) for i in starts)
        yield "variety", distinct / (VARIETY_WORDS * len(starts))


def _segment_statistics(window: str) -> Iterator[tuple[str, float]]:
    segments = [_WORD.findall(part.lower()) for part in _SEGMENT_END.split(window)]
    sets = [set(segment) for segment in segments if segment]
    if not sets:
        return
    yield "segment_words", sum(map(len, segments)) / len(sets)
    shared = [len(a & b) / min(len(a), len(b)) for a, b in itertools.pairwise(sets)]
    if shared:
        yield "overlap", sum(shared) / len(shared)


def _line_statistics(lines: list[str]) -> Iterator[tuple[str, float]]:
    if not lines:
        return
    num_chars = sum(map(len, lines))
    yield "prose", sum(len(line) for line in lines if _is_prose(line)) / num_chars
    if len(lines) > 1:
        firsts = [line.split(None, 1)[0] for line in lines]
        shapes = [re.sub(r"\w+", "w", line) for line in lines]
        pairs = itertools.pairwise(zip(firsts, shapes))
        alike = sum(a[0] == b[0] or a[1] == b[1] for a, b in pairs)
        yield "repetition", alike / (len(lines) - 1)
        yield "indentation", _indentation(lines)


def _is_prose(line: str) -> bool:
    words = _WORD.findall(line)
    return len(words) >= PROSE_WORDS and sum(map(len, words)) > 0.75 * sum(map(len, line.split()))


def _indentation(lines: list[str]) -> float:
    """Share of pairs of lines of which the second keeps the indentation, increases it, or returns
    to an open level."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    open_levels = [indents[0]]
    num_consistent = 0
    for indent in indents[1:]:
        while open_levels and open_levels[-1] > indent:
            open_levels.pop()
        # A level below all open levels was opened before the window.
        is_known = not open_levels or open_levels[-1] == indent
        num_inward = indent - open_levels[-1] if open_levels else 0
        num_consistent += is_known or num_inward in (2, 4, 8)
        if not is_known or not open_levels:
            open_levels.append(indent)
    return num_consistent / (len(lines) - 1)


def _punctuation_statistics(window: str) -> Iterator[tuple[str, float]]:
    starts = _SENTENCE_END.findall(window)
    if starts:
        yield "sentence_form", sum(not start.islower() for start in starts) / len(starts)
    after = _SEPARATOR.findall(window)
    if after:
        yield "spacing", sum(not char or char.isspace() for char in after) / len(after)


def _bracket_statistics(window: str) -> Iterator[tuple[str, float]]:
    """Share of brackets that are matched, and the mean depth of the matched brackets.

    A window may cut through brackets. So closing brackets before the first opening bracket, and
    brackets that are open at the end, are not counted.
    """
    open_brackets: list[str] = []
    num_matched = num_crossed = total_depth = 0
    for bracket in _BRACKET.findall(window):
        if bracket not in _OPENER_OF:
            open_brackets.append(bracket)
        elif open_brackets and open_brackets[-1] == _OPENER_OF[bracket]:
            total_depth += len(open_brackets)
            num_matched += 1
            open_brackets.pop()
        elif open_brackets:
            num_crossed += 1
    if num_matched + num_crossed:
        yield "nesting", num_matched / (num_matched + num_crossed)
    yield "depth", total_depth / num_matched if num_matched else 0.0
