"""Peers that name the language of texts, or judge them by rules, each in an environment of its own.

A script reads JSON lines with `text` and writes `seconds` of the processor and its `answers`.
"""

from __future__ import annotations

_HEAD = """
import json, sys, time
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
"""
_TAIL = """
ask(texts[0])
started = time.process_time()
answers = [ask(text) for text in texts]
seconds = time.process_time() - started
answers = further(answers) if "further" in globals() else answers
json.dump({"seconds": seconds, "answers": answers}, open(sys.argv[2], "w"))
"""
_LINGUA = """
from lingua import LanguageDetectorBuilder
detector = LanguageDetectorBuilder.from_all_languages().with_preloaded_language_models().build()
def ask(text):
    found = detector.detect_language_of(text)
    return found.iso_code_639_1.name.lower() if found else "und"
"""
_PY3LANGID = """
import py3langid
def ask(text):
    return py3langid.classify(text)[0]
"""
_LANGDETECT = """
import langdetect
langdetect.DetectorFactory.seed = 0
def ask(text):
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return "und"
"""
# Timed: the three filters as they are used. Then each rule alone, by a filter without the others,
# with the words of spaCy, to which a sign is a word, and with words between spaces.
_DATATROVE = """
from functools import lru_cache
from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.filters import gopher_quality_filter, gopher_repetition_filter
whole = [GopherQualityFilter(), GopherRepetitionFilter(), C4QualityFilter()]
def passes(one, text):
    found = one.filter(Document(text=text, id="0"))
    return bool(found[0] if isinstance(found, tuple) else found)
def ask(text):
    return [passes(one, text) for one in whole]
def quality(**rule):
    names = ("min_doc_words", "max_doc_words", "min_avg_word_length", "max_avg_word_length",
             "max_symbol_word_ratio", "max_bullet_lines_ratio", "max_ellipsis_lines_ratio",
             "max_non_alpha_words_ratio", "min_stop_words")
    return GopherQualityFilter(**{**dict.fromkeys(names), **rule})
def repetition(**rule):
    names = ("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac")
    none = {**dict.fromkeys(names), "top_n_grams": (), "dup_n_grams": ()}
    return GopherRepetitionFilter(**{**none, **rule})
def c4(**rule):
    none = {"min_num_sentences": -1, "filter_lorem_ipsum": False, "filter_curly_bracket": False}
    return C4QualityFilter(**{**none, **rule})
limits = dict(zip(range(2, 11), (0.20, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.10)))
alone = {
    "number of words": quality(min_doc_words=50, max_doc_words=100000),
    "length of words": quality(min_avg_word_length=3, max_avg_word_length=10),
    "hashes and ellipses": quality(max_symbol_word_ratio=0.1),
    "bullet lines": quality(max_bullet_lines_ratio=0.9),
    "ellipsis lines": quality(max_ellipsis_lines_ratio=0.3),
    "alphabetic words": quality(max_non_alpha_words_ratio=0.8),
    "stop words": quality(min_stop_words=2),
    "lines": repetition(dup_line_frac=0.3),
    "line characters": repetition(dup_line_char_frac=0.2),
    "paragraphs": repetition(dup_para_frac=0.3),
    "paragraph characters": repetition(dup_para_char_frac=0.2),
    **{f"{n}-grams": repetition(**{"top_n_grams" if n < 5 else "dup_n_grams": ((n, most),)})
       for n, most in limits.items()},
    "sentences": c4(min_num_sentences=5),
    "lorem ipsum": c4(filter_lorem_ipsum=True),
    "curly bracket": c4(filter_curly_bracket=True),
}
def further(_):
    modules = gopher_quality_filter, gopher_repetition_filter
    own = lru_cache(4)(modules[0].split_into_words)
    answers = [{} for _ in texts]
    for split, of in ((own, ""), (lambda text, language: text.split(), " by spaces")):
        for module in modules:
            module.split_into_words = split
        for answer, text in zip(answers, texts):
            for name, one in alone.items():
                answer[name + of] = passes(one, text)
    return answers
"""


def _script(own: str) -> str:
    return _HEAD + own + _TAIL


# Requirements and script of each.
LANGUAGE_PEERS = {
    "lingua": (("lingua-language-detector",), _script(_LINGUA)),
    "py3langid": (("py3langid",), _script(_PY3LANGID)),
    "langdetect": (("langdetect",), _script(_LANGDETECT)),
}
RULES_PEER = {"datatrove": (("datatrove[io,processing]", "spacy"), _script(_DATATROVE))}

_QUALITY = ("number of words", "length of words", "hashes and ellipses", "bullet lines")
_QUALITY += ("ellipsis lines", "alphabetic words", "stop words")
_PLACES = ((0,), (1,), (2, 3), (4,), (5,), (6,), (7,))
_REPETITION = ("lines", "line characters", "paragraphs", "paragraph characters")
_REPETITION += tuple(f"{n}-grams" for n in range(2, 11))
_C4 = ("sentences", "lorem ipsum", "curly bracket")
# The preset of each rule, and which of its clauses are the rule.
RULES = {
    **{name: ("gopher_quality", own) for name, own in zip(_QUALITY, _PLACES)},
    **{name: ("gopher_repetition", (i,)) for i, name in enumerate(_REPETITION)},
    **{name: ("c4", (i,)) for i, name in enumerate(_C4)},
}
