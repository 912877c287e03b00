"""The definitions of `signals` after datatrove's filters, written as plainly as possible."""

import re
from collections import Counter
from unicodedata import category, name

from nmoe_core.attributes import signals as names
from tests.core.attributes.naive import SOUTH_EAST

_UNSPACED = (
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
) + "".join(
    char
    for char in map(chr, range(0x20000))
    if name(char, "").startswith(SOUTH_EAST) and category(char)[0] in "LMN"
)
WORDS = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_ENDS = names.SENTENCE_ENDS + names.WIDE_SENTENCE_ENDS
_SENTENCE = re.compile(
    f"[{names.SENTENCE_ENDS}][{re.escape(names.CLOSERS)}]*(?=\\s|$)|[{names.WIDE_SENTENCE_ENDS}]"
)
_CITATION = re.compile(names.CITATION.replace(r"\p{Nd}", r"\d"))
_COUNTER = re.compile(names.COUNTER.replace(r"[^\pL\pN_]", r"\W"), re.IGNORECASE)
_POLICY = re.compile(f"{names.JAVASCRIPT}|{names.POLICY}", re.IGNORECASE)


def signals(text: str) -> dict[str, float]:
    """The numbers of one text without white space at its ends."""
    words = WORDS.findall(text)
    solid = [word for word in words if letters(word)]
    lines = [line for line in text.split("\n") if line.strip()]
    paragraphs = [part for part in re.split(r"\n{2,}", text) if part]
    without = [line for line in _CITATION.sub("", text).split("\n") if line.strip()]
    kept = [line for line in without if is_c4(line)]
    cut = [line for line in lines if is_cut(line)]
    found = {
        "n_chars": len(text),
        "n_words": len(solid),
        "n_symbol_words": len(words) - len(solid),
        "n_stop_words": len({letters(word).lower() for word in words} & set(names.STOP_WORDS)),
        "n_lines": len(lines),
        "n_newlines": text.count("\n"),
        "n_paragraphs": len(paragraphs),
        "n_sentences": sum(map(sentences, lines)),
        "n_c4_sentences": sum(max(1, sentences(line)) for line in kept),
        "mean_word_chars": share(sum(len(letters(word)) for word in solid), solid),
        "hashes_per_word": share(text.count("#"), words),
        "ellipses_per_word": share(text.count("...") + text.count("…"), words),
        "alphabetic_words": share(sum(any(map(str.isalpha, word)) for word in words), words),
        "bullet_lines": share(sum(line.lstrip().startswith(("•", "-")) for line in lines), lines),
        "ellipsis_lines": share(sum(line.rstrip().endswith(("...", "…")) for line in lines), lines),
        "ended_lines": share(sum(line.rstrip()[-1] in names.LINE_ENDS for line in lines), lines),
        "short_lines": share(sum(len(line) <= 30 for line in lines), lines),
        "c4_lines": share(len(kept), without),
        "refinedweb_cut_words": share(sum(len(WORDS.findall(line)) for line in cut), words),
        "dup_lines": share(len(repeats(lines)), lines),
        "dup_line_chars": share(len("".join(repeats(lines))), text),
        "dup_paragraphs": share(len(repeats(paragraphs)), paragraphs),
        "dup_paragraph_chars": share(len("".join(repeats(paragraphs))), text),
        "has_lorem_ipsum": "lorem ipsum" in text.lower(),
        "has_curly_bracket": "{" in text,
    }
    for n in range(2, 11):
        name, chars = (
            (f"top_{n}gram_chars", top(words, n))
            if n < 5
            else (f"dup_{n}gram_chars", duplicated(words, n))
        )
        found[name] = share(chars, text)
    return found


def share(part: float, whole: object) -> float:
    """A part of a number of elements, 0 of none."""
    return part / max(1, len(whole))  # pyright: ignore[reportArgumentType]


def letters(word: str) -> str:
    """Letters, marks and digits of a word."""
    return "".join(char for char in word if char == "_" or category(char)[0] in "LMN")


def sentences(line: str) -> int:
    """Number of ends of sentences in a line."""
    count = 0
    for end in _SENTENCE.finditer(line):
        rest = line[end.end() :]
        following = next((char for char in rest if char.isalpha() or char in _ENDS), "")
        count += end[0][0] != "." or not following.islower()
    return count


def is_c4(line: str) -> bool:
    """Whether C4 keeps a line."""
    words, line = WORDS.findall(line), line.strip()
    return (
        line[-1] in names.LINE_ENDS
        and not line.endswith("...")
        and len(words) >= 5
        and max(map(len, words)) <= 1000
        and not _POLICY.search(line)
    )


def is_cut(line: str) -> bool:
    """Whether RefinedWeb cuts a line."""
    return bool(
        sum(map(str.isupper, line)) > len(line) / 2
        or re.fullmatch(r"\d+", "".join(line.split()))
        or len(WORDS.findall(line)) < 2
        or _COUNTER.search(line)
    )


def repeats(elements: list[str]) -> list[str]:
    """Elements that occurred before."""
    return [element for i, element in enumerate(elements) if element in set(elements[:i])]


def top(words: list[str], n: int) -> int:
    """Characters of the most frequent n-gram, times its count."""
    grams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    return sum(len(gram) * count for gram, count in grams.most_common(1))


def duplicated(words: list[str], n: int) -> int:
    """Characters of n-grams that occurred before, without overlap."""
    seen, chars, i = set(), 0, 0
    while i < len(words) - n + 1:
        gram = tuple(words[i : i + n])
        chars += len("".join(gram)) * (gram in seen)
        i += n if gram in seen else 1
        seen.add(gram)
    return chars
