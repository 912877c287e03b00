"""The script that asks datatrove for its decision of each rule, run in datatrove's environment.

It reads JSON lines with `text`, `solid` (lines of white space emptied), `plain` (lines without
white space at their ends, blank ones left out), `words` and `letters` (the words as nmoe splits
them, and their letters only), `spread` (spaces around each character that is a word), and the
number of `sentences` of lines. For each rule it writes a list of decisions: that of datatrove, then
those of the same filter after one definition after another is replaced by nmoe's.
"""

from __future__ import annotations

SCRIPT = r"""
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.filters import c4_filters as c4_module, fineweb_quality_filter as fw_module
from datatrove.pipeline.filters import gopher_quality_filter as q_module
from datatrove.pipeline.filters import gopher_repetition_filter as r_module
from datatrove.utils.text import split_into_sentences, split_into_words

rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
settings = json.load(open(sys.argv[3], encoding="utf-8"))
ends = tuple(settings["ends"])
own_ends = c4_module.END_PUNCTUATION

def off(names, **rule):
    return {**dict.fromkeys(names), **rule}

QUALITY = ("min_doc_words", "max_doc_words", "min_avg_word_length", "max_avg_word_length",
           "max_symbol_word_ratio", "max_bullet_lines_ratio", "max_ellipsis_lines_ratio",
           "max_non_alpha_words_ratio", "min_stop_words")
REPETITION = ("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac")

def quality(**rule):
    return GopherQualityFilter(**off(QUALITY, **rule))

def repetition(**rule):
    none = {"top_n_grams": (), "dup_n_grams": ()}
    return GopherRepetitionFilter(**{**off(REPETITION), **none, **rule})

def fineweb(**rule):
    none = {"line_punct_thr": -1, "short_line_thr": 2, "char_duplicates_ratio": 2}
    none |= {"new_line_ratio": 1e9}
    return FineWebQualityFilter(**{**none, **rule})

def c4(**rule):
    none = {"min_num_sentences": -1, "filter_lorem_ipsum": False, "filter_curly_bracket": False}
    return C4QualityFilter(**{**none, **rule})

def passes(one, text, words=None, end_marks=None, sentences=None):
    '''The decision of a filter, with other words, ends of lines and sentences than its own.'''
    split = (lambda text, language: words) if words is not None else own_words
    for module in (q_module, r_module, fw_module):
        module.split_into_words = split
    c4_module.END_PUNCTUATION = end_marks or own_ends
    c4_module.split_into_sentences = sentences or split_into_sentences
    try:
        found = one.filter(Document(text=text, id="0"))
    except (ZeroDivisionError, ValueError):  # no words or lines
        return False
    return bool(found[0] if isinstance(found, tuple) else found)

seen = {}
def own_words(text, language):
    if text not in seen:
        seen.clear()
        seen[text] = split_into_words(text, language)
    return seen[text]

def spaced(one):
    return lambda row: passes(one, row["text"], row["words"])
def lettered(one):
    return lambda row: passes(one, row["text"], row["letters"])
def lowered(one):
    return lambda row: passes(one, row["text"], [word.lower() for word in row["letters"]])
def at(key, one):
    return lambda row: passes(one, row[key])

limits = dict(zip(range(2, 11), (0.20, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.10)))
WORDS = "words between spaces"
PLAIN = "without punctuation"
BLANK = "blank lines"
rules = {}
def add(name, one, *views):
    rules[name] = [("datatrove", at("text", one)), *((why, make(one)) for why, make in views)]

add("gopher_quality.n_words", quality(min_doc_words=50, max_doc_words=100000),
    (WORDS, spaced), (PLAIN, lettered))
add("gopher_quality.mean_word_chars", quality(min_avg_word_length=3, max_avg_word_length=10),
    (WORDS, spaced), (PLAIN, lettered))
add("gopher_quality.hashes_per_word", quality(max_symbol_word_ratio=0.1), (WORDS, spaced))
add("gopher_quality.bullet_lines", quality(max_bullet_lines_ratio=0.9),
    (BLANK, lambda one: at("plain", one)))
add("gopher_quality.ellipsis_lines", quality(max_ellipsis_lines_ratio=0.3),
    (BLANK, lambda one: at("plain", one)))
add("gopher_quality.alphabetic_words", quality(max_non_alpha_words_ratio=0.8), (WORDS, spaced))
add("gopher_quality.n_stop_words", quality(min_stop_words=2), (WORDS, spaced), (PLAIN, lettered),
    ("without case", lowered))
add("gopher_repetition.dup_lines", repetition(dup_line_frac=.3),
    (BLANK, lambda one: at("solid", one)))
add("gopher_repetition.dup_line_chars", repetition(dup_line_char_frac=.2),
    (BLANK, lambda one: at("solid", one)))
add("gopher_repetition.dup_paragraphs", repetition(dup_para_frac=.3))
add("gopher_repetition.dup_paragraph_chars", repetition(dup_para_char_frac=.2))
for n, limit in limits.items():
    kind = "top" if n < 5 else "dup"
    one = repetition(**{kind + "_n_grams": ((n, limit),)})
    add(f"gopher_repetition.{kind}_{n}gram_chars", one, (WORDS, spaced))
def quoted(one):
    return at("text", fineweb(line_punct_thr=.12, stop_chars=ends))
def ended(one):
    return at("plain", fineweb(line_punct_thr=.12, stop_chars=ends))
def strictly(key, limit):
    def make(one):
        return at("text", fineweb(**{key: limit}))
    return make
add("fineweb.ended_lines", fineweb(line_punct_thr=.12), ("marks of ends", quoted),
    ("white space after the end", ended),
    ("exactly at the limit",
     lambda one: at("plain", fineweb(line_punct_thr=.12 + 1e-7, stop_chars=ends))))
add("fineweb.short_lines", fineweb(short_line_thr=.67),
    ("exactly at the limit", strictly("short_line_thr", .67 - 1e-7)))
add("fineweb.dup_line_chars", fineweb(char_duplicates_ratio=.01),
    ("exactly at the limit", strictly("char_duplicates_ratio", .01 - 1e-9)))
add("fineweb.n_newlines", fineweb(new_line_ratio=.3), (WORDS, spaced))

def sentences_of(row):
    return lambda line, language: [""] * row["sentences"].get(line, 1)
def marked(one):
    return lambda row: passes(one, row["text"], end_marks=ends)
def counted(one, key="text"):
    return lambda row: passes(one, row[key], end_marks=ends, sentences=sentences_of(row))
numbers = {"min_num_sentences": 3, "min_words_per_line": 5}
def authors(one):
    return at("text", c4(**numbers))
add("c4.n_c4_sentences", c4(min_num_sentences=5, min_words_per_line=3),
    ("numbers of the authors", authors),
    ("marks of ends", lambda one: marked(c4(**numbers))),
    ("ends of sentences", lambda one: counted(c4(**numbers))),
    ("words of scripts without spaces", lambda one: counted(c4(**numbers), "spread")))
add("c4.has_lorem_ipsum", c4(filter_lorem_ipsum=True),
    ("anywhere", lambda one: lambda row: "lorem ipsum" not in row["text"].lower()))
add("c4.has_curly_bracket", c4(filter_curly_bracket=True),
    ("anywhere", lambda one: lambda row: "{" not in row["text"]))

def kept(row, **keys):
    one = c4(**keys)
    document = Document(text=row["text"], id="0")
    one.filter(document)
    return document.text.split("\n") if document.text else []

def all_readings(row):
    '''Shares of characters in repeated n-grams if the first occurrence counts, too.'''
    words, found = row["words"], []
    for n in range(5, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        known, twice = set(), set()
        for gram in grams:
            (twice if gram in known else known).add(gram)
        covered = {k for i, gram in enumerate(grams) if gram in twice for k in range(i, i + n)}
        found.append(sum(len(words[k]) for k in covered) / max(1, len(row["text"])) <= limits[n])
    return found

started = time.process_time()
whole = [GopherQualityFilter(), GopherRepetitionFilter(), FineWebQualityFilter(),
         C4QualityFilter(min_num_sentences=5)]
for row in rows:
    row["whole"] = [passes(one, row["text"]) for one in whole]
seconds = time.process_time() - started
answers = []
for row in rows:
    c4_module.END_PUNCTUATION = own_ends
    c4_module.split_into_sentences = split_into_sentences
    answers.append({
        "rules": {name: [decide(row) for _, decide in views] for name, views in rules.items()},
        "whole": row["whole"],
        "lines": {"c4": kept(row, min_words_per_line=5),
                  "fineweb": kept(row, filter_no_terminal_punct=False)},
        "readings": all_readings(row),
    })
reasons = {name: [why for why, _ in views] for name, views in rules.items()}
json.dump({"seconds": seconds, "answers": answers, "reasons": reasons}, open(sys.argv[2], "w"))
"""
