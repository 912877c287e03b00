"""Computes statistics of a text that Gopher, C4, FineWeb and RefinedWeb compare with thresholds.

This module applies no rules: the rules are clauses in `presets.py`, with the languages they were
made for. Texts must be normalised by prep: line ends are LF, and both ends are stripped of white
space.

A word is a run of characters other than white space; each character of a script without spaces
(CJK, kana, Thai, Khmer, Burmese, ...) is a word. A symbol word has no letter, mark or digit. Blank
lines do not count as lines; paragraphs are separated by two or more line ends. A sentence ends with
one of Unicode's sentence terminals, or a Tibetan shad, before white space or the end of a line; in
scripts without spaces, after any terminal. A period does not end a sentence if the next letter of
the line is lower case ("e.g. so"; rule SB8 of Unicode's annex 29). Shares are relative to a
document's lines, paragraphs, words or characters, and 0 if the document has none of these. C4 and
RefinedWeb remove lines from texts; the shares that they would keep or remove are recorded here.
docs/signals.md compares each definition with its paper and with other tools.
"""

from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from nmoe_core.attributes.columns import COUNTS, FLAGS, SCHEMAS, SHARES
from nmoe_core.attributes.kernels.repetition import new_set, ngram_chars, repeated
from nmoe_core.attributes.minhash import batches
from nmoe_core.text.transforms.code_points import (
    CODE_BITS,
    CODE_MASK,
    PRIME,
    SEED,
    code_points,
    decode,
    mix,
)
from nmoe_core.text.transforms.lines.patterns import (
    CITATION,
    CLOSERS,
    COUNTER,
    JAVASCRIPT,
    LEAST_C4_WORDS,
    LEAST_REFINEDWEB_WORDS,
    LINE_ENDS,
    LONG_WORD_CHARS,
    POLICY,
    SENTENCE_ENDS,
    WIDE_SENTENCE_ENDS,
)
from nmoe_core.text.transforms.search import holders, matches
from nmoe_core.text.transforms.words.hashes import utf8, words

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
SHORT_LINE_CHARS = 30
SCHEMA = SCHEMAS["signals"]
_WORD, _ALONE, _UNSPACED, _SPACE, _ALPHA, _UPPER, _DIGIT = (1 << CODE_BITS + i for i in range(7))
_END = 1
_WIDE_END = 2
_CLOSER = 4
_LINE_END = 8
_LOWER = 16
_IS_POLICY = 1
_IS_COUNTER = 2
_NUM_COUNTS = len(COUNTS)
_C4_SENTENCES = COUNTS.index("n_c4_sentences")
_C4_LINES = SHARES.index("c4_lines")
_ENDS_SENTENCE = rf"(?:^|[{LINE_ENDS}])(?:{CITATION}|[\pZ\pC])*$"


def signals(texts: pa.Array) -> pa.Table:
    """The statistics of each text, with columns as in `SCHEMA`; about 40 MB/s on one core."""
    counts, shares = _numbers(texts)
    _leave_out_citations(texts, counts, shares)
    flags = [_holds("match_substring", texts, phrase) for phrase in FLAGS.values()]
    return pa.table([*map(pa.array, counts), *map(pa.array, shares), *flags], schema=SCHEMA)


def _leave_out_citations(texts: pa.Array, counts: np.ndarray, shares: np.ndarray) -> None:
    """Correct the columns of C4, which removes marks of citations before it looks at lines. They
    differ only by lines that end a sentence, or are blank, without their marks: only these few are
    measured again, with and without marks."""
    cited = holders(texts, CITATION)
    options = pc.SplitPatternOptions("\n")
    split = pc.call_function("split_pattern", [texts.take(pa.array(cited))], options)
    lines = split.flatten()
    marked = holders(lines, CITATION)
    marked = marked[matches(lines.take(pa.array(marked)), _ENDS_SENTENCE)]
    if not len(marked):
        return
    lines = lines.take(pa.array(marked))
    of_texts = cited[pc.call_function("list_parent_indices", [split]).to_numpy()[marked]]
    with_marks, are_c4 = _numbers(lines)
    remove = pc.ReplaceSubstringOptions(CITATION, "")
    without, are_c4_then = _numbers(pc.call_function("replace_substring_regex", [lines], remove))
    num_lines = counts[COUNTS.index("n_lines")].copy()
    c4_lines = np.rint(shares[_C4_LINES] * num_lines)
    np.add.at(counts[_C4_SENTENCES], of_texts, (without - with_marks)[_C4_SENTENCES])
    np.add.at(num_lines, of_texts, (without - with_marks)[COUNTS.index("n_lines")])
    np.add.at(c4_lines, of_texts, (are_c4_then - are_c4)[_C4_LINES])
    shares[_C4_LINES, of_texts] = (c4_lines / np.maximum(1, num_lines))[of_texts]


def _numbers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """`COUNTS` of each text, int64 `[num_counts, N]`, and `SHARES`, float32 `[num_shares, N]`."""
    counts = np.zeros((len(COUNTS), len(texts)), np.int64)
    shares = np.zeros((len(SHARES), len(texts)), np.float32)
    for start, stop in batches(texts):
        batch = texts.slice(start, stop - start)
        payload, offsets = utf8(batch)
        # Computed outside `_measure`: inside, numba would take seconds longer to compile.
        most = int(np.diff(offsets).max(initial=0)) + 1
        marks = _line_marks(batch)
        found = (counts[:, start:], shares[:, start:])
        _measure(payload, offsets, most, marks, _tables(), *found)
    return counts, shares


def _line_marks(texts: pa.Array) -> np.ndarray:
    """Flags of each line of each text, including blank lines: uint8."""
    parts = pc.call_function("split_pattern", [texts], pc.SplitPatternOptions("\n"))
    is_policy, is_counter = (
        _holds("match_substring_regex", parts.flatten(), pattern).to_numpy(zero_copy_only=False)
        for pattern in (f"{JAVASCRIPT}|{POLICY}", COUNTER)
    )
    return is_policy * np.uint8(_IS_POLICY) + is_counter * np.uint8(_IS_COUNTER)


def _holds(function: str, texts: pa.Array, pattern: str) -> pa.Array:
    return pc.call_function(function, [texts], pc.MatchSubstringOptions(pattern, ignore_case=True))


@cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table of code points, the kinds of punctuation and of letters in the basic plane, and the
    hashes of stop words."""
    kinds = np.zeros(2**16, np.uint8)
    classes = zip((SENTENCE_ENDS, WIDE_SENTENCE_ENDS, CLOSERS, LINE_ENDS), (1, 2, 4, 8))
    for chars, bit in classes:
        kinds[[ord(char) for char in chars]] |= bit
    table = code_points()
    lower = table & CODE_MASK
    lower = lower[lower != np.arange(len(table))]
    kinds[lower[lower < len(kinds)]] |= _LOWER
    return table, kinds, words(pa.array(STOP_WORDS)).hashes


@njit(cache=True)
def _measure(payload, offsets, most, marks, tables, counts, shares):
    table, kinds, stop_words = tables
    word_hashes = np.empty(most, np.uint64)
    word_ends = np.zeros(most + 1, np.int64)
    line_hashes = np.empty(most, np.uint64)
    line_chars = np.empty(most, np.int64)
    block_hashes = np.empty(most, np.uint64)
    block_chars = np.empty(most, np.int64)
    seen = new_set(most)
    line = 0
    for text in range(len(offsets) - 1):
        i = offsets[text]
        end = offsets[text + 1]
        chars = num_words = num_lines = num_blocks = num_newlines = 0
        num_symbols = num_alphabetic = letters_sum = num_hashes = num_ellipses = 0
        num_sentences = c4_sentences = stop_bits = 0
        bullets = ellipsis_ends = ended = short = c4_lines = cut_words = 0
        # of the word
        word = SEED
        word_chars = 0
        lower = SEED
        letters = 0
        has_alpha = False
        was_alone = False
        # of the line
        line_hash = SEED
        line_size = 0
        solid = 0
        upper = 0
        digits = 0
        line_words = 0
        first = 0
        last = 0
        dots = 0
        tail = 0
        has_long = False
        sentences = 0
        is_ended = False
        is_period = False
        is_pending = False  # a period and a space: the next letter decides
        # of the paragraph
        block = SEED
        block_size = 0
        newlines = 0
        while i <= end and end > offsets[text]:
            if i < end:
                code, i = decode(payload, i)
                chars += 1
            else:  # the end of the text also ends a line
                code = np.uint32(10)
                i = end + 1
            entry = table[code]
            is_space = entry & _SPACE != 0
            if word_chars and (is_space or was_alone or entry & _UNSPACED):
                word_hashes[num_words] = mix(word)
                word_ends[num_words + 1] = word_ends[num_words] + word_chars
                num_words += 1
                line_words += 1
                has_long |= word_chars > LONG_WORD_CHARS
                num_symbols += letters == 0
                letters_sum += letters
                num_alphabetic += has_alpha
                if 1 < letters < 5:
                    lower = mix(lower)
                    for k in range(len(stop_words)):
                        if lower == stop_words[k]:
                            stop_bits |= 1 << k
                word = SEED
                word_chars = 0
                lower = SEED
                letters = 0
                has_alpha = False
            if code == 10:
                if is_ended or is_pending:
                    sentences += 1
                if solid:
                    line_hashes[num_lines] = mix(line_hash)
                    line_chars[num_lines] = line_size
                    num_lines += 1
                    is_end = last < 65536 and kinds[last] & _LINE_END != 0
                    bullets += first == 0x2022 or first == 45
                    ellipsis_ends += tail >= 3
                    ended += is_end
                    short += line_size <= SHORT_LINE_CHARS
                    if (
                        is_end
                        and tail < 3
                        and line_words >= LEAST_C4_WORDS
                        and not has_long
                        and not marks[line] & _IS_POLICY
                    ):
                        c4_lines += 1
                        c4_sentences += max(1, sentences)
                    if (
                        2 * upper > line_size
                        or digits == solid
                        or line_words < LEAST_REFINEDWEB_WORDS
                        or marks[line] & _IS_COUNTER
                    ):
                        cut_words += line_words
                num_sentences += sentences
                line_hash = SEED
                line_size = 0
                solid = 0
                upper = 0
                digits = 0
                line_words = 0
                first = 0
                last = 0
                tail = 0
                has_long = False
                sentences = 0
                is_ended = False
                is_pending = False
                num_ellipses += dots // 3
                dots = 0
                line += 1
                newlines += 1
                num_newlines += i <= end
                continue
            line_size += 1
            line_hash = (line_hash ^ np.uint64(code)) * PRIME
            if newlines:
                if newlines > 1 and block_size:
                    block_hashes[num_blocks] = mix(block)
                    block_chars[num_blocks] = block_size
                    num_blocks += 1
                    block = SEED
                    block_size = 0
                elif block_size:
                    block = (block ^ np.uint64(10)) * PRIME
                    block_size += 1
                newlines = 0
            block = (block ^ np.uint64(code)) * PRIME
            block_size += 1
            if code == 46:
                dots += 1
            else:
                num_ellipses += dots // 3
                dots = 0
            if is_space:
                if is_ended and is_period:
                    is_pending = True
                elif is_ended:
                    sentences += 1
                is_ended = False
                continue
            kind = kinds[code] if code < 65536 else 0
            if is_pending and (entry & _ALPHA or kind & (_END | _WIDE_END)):
                sentences += not kind & _LOWER
                is_pending = False
            if kind & _WIDE_END:
                sentences += 1
                is_ended = False
            elif kind & _END:
                is_ended = True
                is_period = code == 46
            elif not kind & _CLOSER:
                is_ended = False
            num_hashes += code == 35
            num_ellipses += code == 0x2026
            tail = 3 if code == 0x2026 else dots
            if solid == 0:
                first = np.int64(code)
            last = np.int64(code)
            solid += 1
            upper += entry & _UPPER != 0
            digits += entry & _DIGIT != 0
            word = (word ^ np.uint64(code)) * PRIME
            word_chars += 1
            if entry & _WORD:
                lower = (lower ^ np.uint64(entry & CODE_MASK)) * PRIME
                letters += 1
                has_alpha |= entry & _ALPHA != 0
            was_alone = entry & _UNSPACED != 0
        if block_size:
            block_hashes[num_blocks] = mix(block)
            block_chars[num_blocks] = block_size
            num_blocks += 1
        if end == offsets[text]:
            line += 1  # an empty text has one blank line
        stops = 0
        for k in range(len(stop_words)):
            stops += stop_bits >> k & 1
        found = (
            chars,
            num_words - num_symbols,
            num_symbols,
            stops,
            num_lines,
            num_newlines,
            num_blocks,
            num_sentences,
            c4_sentences,
        )
        for k in range(_NUM_COUNTS):
            counts[k, text] = found[k]
        repeats = repeated(seen, line_hashes[:num_lines], line_chars) + repeated(
            seen, block_hashes[:num_blocks], block_chars
        )
        each = (
            letters_sum / max(1, num_words - num_symbols),
            num_hashes / max(1, num_words),
            num_ellipses / max(1, num_words),
            num_alphabetic / max(1, num_words),
            bullets / max(1, num_lines),
            ellipsis_ends / max(1, num_lines),
            ended / max(1, num_lines),
            short / max(1, num_lines),
            c4_lines / max(1, num_lines),
            cut_words / max(1, num_words),
            repeats[0] / max(1, num_lines),
            repeats[1] / max(1, chars),
            repeats[2] / max(1, num_blocks),
            repeats[3] / max(1, chars),
        )
        for k in range(len(each)):
            shares[k, text] = each[k]
        grams = ngram_chars(seen, word_hashes[:num_words], word_ends)
        for k in range(len(grams)):
            shares[len(each) + k, text] = grams[k] / max(1, chars)
